"""Axes of one rank, which no process group stands behind."""

from typing import cast

import pytest
import torch.distributed as dist

from fsdp_core.model.moe.dispatcher import MoeAxes
from fsdp_core.parallel.mesh import Axis

NO_GROUP = cast("dist.ProcessGroup", None)


def axis(name: str, size: int = 1) -> Axis:
    """The first rank of an axis, which nobody may talk over."""
    return Axis(name, size, 0, NO_GROUP)


@pytest.fixture
def alone() -> MoeAxes:
    """A single rank."""
    return MoeAxes(
        ep=axis("ep"),
        etp=axis("etp"),
        tp=axis("tp"),
        tokens=(axis("dp"),),
        num_averaged=1,
        sequence_parallel=False,
    )
