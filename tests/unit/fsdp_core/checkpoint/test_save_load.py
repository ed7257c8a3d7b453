"""Saves of one process: what they take, and asynchronous ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_core.checkpoint import CheckpointError, latest, load, save, save_async
from fsdp_core.checkpoint.files import StepWriter
from tests.unit.fsdp_core.checkpoint.small_models import bits, model_of, names, trained


@pytest.mark.parametrize("options", [{"step": -1}, {"step": True}, {"step": 1.0}, {"keep": 0}])
def test_arguments_out_of_range_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """A step counts from 0, and at least one checkpoint is kept."""
    step = options.pop("step", 1)
    with pytest.raises(ValueError, match="Expected"):
        save(tmp_path, step, model_of(), **options)
    assert names(tmp_path) == []


def test_an_asynchronous_save_holds_what_was_there(tmp_path: Path) -> None:
    """Weights and states that change right after the call are saved as they were."""
    model, optimizer = trained()
    expected = bits(model, optimizer)
    pending = save_async(tmp_path, 1, model, optimizer)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
        for states in optimizer.state.values():
            states["exp_avg"].zero_()
            states["step"].zero_()
    assert pending.wait() == tmp_path / "step-00000001"
    load(tmp_path, model, optimizer)
    assert bits(model, optimizer) == expected


def test_a_failure_that_nobody_waited_for_is_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An asynchronous save that failed is not forgotten; told once, saves go on."""

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StepWriter, "write_data", fail)
        save_async(tmp_path, 1, model_of())
        with pytest.raises(CheckpointError, match=r"Saving step 1 .*No space left on device"):
            save(tmp_path, 2, model_of())
    assert latest(tmp_path) is None
    save(tmp_path, 2, model_of())
    assert names(tmp_path) == ["step-00000002"]
