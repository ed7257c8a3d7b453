"""Axes of one rank, which no process group stands behind."""

from typing import Any, cast

import pytest
import torch.distributed as dist

from fsdp_core.config.parallel import AXES
from fsdp_core.parallel.mesh import Axes, Axis

NO_GROUP = cast("dist.ProcessGroup", None)


def axis(name: str, size: int = 1) -> Axis:
    """The first rank of an axis, which nobody may talk over."""
    return Axis(name, size, 0, NO_GROUP)


@pytest.fixture
def alone() -> Axes:
    """A single rank."""
    nobody = cast("Any", None)
    return Axes(**{name: axis(name) for name in AXES}, dense_mesh=nobody, expert_mesh=nobody)
