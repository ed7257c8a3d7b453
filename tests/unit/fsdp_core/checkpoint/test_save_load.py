"""Saves of one process: what they take."""

from pathlib import Path
from typing import Any

import pytest

from fsdp_core.checkpoint import save
from tests.unit.fsdp_core.checkpoint.small_models import model_of, names


@pytest.mark.parametrize("step", [-1, True, 1.0])
def test_a_step_out_of_range_is_refused(tmp_path: Path, step: Any) -> None:
    """A step counts from 0."""
    with pytest.raises(ValueError, match="Expected a step of 0 or more"):
        save(tmp_path, step, model_of())
    assert names(tmp_path) == []
