"""The axes of a layout as one rank sees them.

    dense     (pp, dp_outer, dp, cp, tp)    tp fastest
    expert    (pp, edp, ep, etp)            etp fastest, over the same ranks

`fsdp_core.mesh.build_axes` makes them, `fsdp_core.layouts` has the arithmetic.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def world_timeout() -> timedelta:
    """How long operations of the default group may take; groups beside it must be told so too."""
    world = dist.group.WORLD
    assert world is not None
    (first, *_) = world._device_types
    timeout = world._get_backend(first).options._timeout
    assert isinstance(timeout, timedelta)
    return timeout


@dataclass(frozen=True)
class Axis:
    """One parallel axis as this rank sees it; size 1 goes through the same code as any other.

    Attributes:
        name: "tp", "cp", "pp", "dp", "dp_outer", "ep", "etp" or "edp".
        size: number of ranks along the axis.
        rank: this rank's coordinate on it.
        group: the ranks along the axis, in the order of their coordinates; a group of one where
            `size` is 1.
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Itself: a copy of a module talks to the same ranks over the same group."""
        return self


@dataclass(frozen=True)
class Axes:
    """All axes of a layout.

    Attributes:
        dense_mesh: what FSDP shards dense parameters over: dp and cp as one axis, and dp_outer as
            a second, outer one where it is larger than 1.
        expert_mesh: the same for the parameters of experts: edp.
        sequence_parallel: activations between tensor-parallel regions are cut along the sequence.
    """

    tp: Axis
    cp: Axis
    pp: Axis
    dp: Axis
    dp_outer: Axis
    ep: Axis
    etp: Axis
    edp: Axis
    dense_mesh: DeviceMesh
    expert_mesh: DeviceMesh
    sequence_parallel: bool
