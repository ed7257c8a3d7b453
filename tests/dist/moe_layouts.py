"""Layouts of a mixture of experts on real ranks, and which tokens and weights each rank has.

dense    rank = d * tp + t                  sequences of d; under sequence parallel T / tp of t
expert   rank = (edp * EP + ep) * ETP + etp
"""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.model.moe.dispatcher import MoeAxes
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.param_sharding import Cut
from tests.dist.moe_reference import BATCH, TIME


@dataclass(frozen=True)
class Layout:
    """Degrees; `sp` is sequence parallel."""

    ep: int = 1
    etp: int = 1
    edp: int = 1
    tp: int = 1
    sp: bool = False

    @property
    def world_size(self) -> int:
        """Ranks of both meshes."""
        return self.edp * self.ep * self.etp

    @property
    def dp(self) -> int:
        """Ranks over which dense gradients are averaged."""
        return self.world_size // self.tp

    @property
    def name(self) -> str:
        """For a test's id."""
        text = f"ep{self.ep}-etp{self.etp}"
        text += f"-edp{self.edp}" * (self.edp > 1)
        return text + (f"-tp{self.tp}" + "-sp" * self.sp) * (self.tp > 1)

    def tokens(self, rank: int) -> torch.Tensor:
        """Numbers of a rank's tokens, int64 [B, T] of the global [BATCH, TIME]."""
        numbers = torch.arange(BATCH * TIME).view(BATCH, TIME)
        mine = numbers.chunk(self.dp)[rank // self.tp]
        return mine.chunk(self.tp, 1)[rank % self.tp] if self.sp else mine

    def sources(self) -> list[list[int]]:
        """Tokens of each etp group in its order."""
        groups = []
        for first in range(0, self.world_size, self.etp):
            ranks = range(first, first + (1 if self.shares_tokens else self.etp))
            groups.append([n for rank in ranks for n in self.tokens(rank).flatten().tolist()])
        return groups

    @property
    def shares_tokens(self) -> bool:
        """Whether ranks of an etp group have the same tokens."""
        return self.tp > 1 and not self.sp


def axis(mesh: DeviceMesh, name: str) -> Axis:
    """One axis of a mesh."""
    return Axis(name, mesh[name].size(), mesh[name].get_local_rank(), mesh[name].get_group())


def make_axes(layout: Layout) -> MoeAxes:
    """The axes on the ranks of the default group."""
    expert = init_device_mesh(
        "cpu", (layout.edp, layout.ep, layout.etp), mesh_dim_names=("edp", "ep", "etp")
    )
    dense = init_device_mesh("cpu", (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    dp, tp = axis(dense, "dp"), axis(dense, "tp")
    return MoeAxes(
        ep=axis(expert, "ep"),
        etp=axis(expert, "etp"),
        tp=tp,
        tokens=(dp, tp) if layout.sp else (dp,),
        num_averaged=layout.dp,
        sequence_parallel=layout.sp,
    )


def whole_shape(part: torch.Tensor, cuts: tuple[Cut, ...]) -> list[int]:
    """Shape of the global tensor of a part."""
    shape = list(part.shape)
    for cut in cuts:
        shape[cut.dim] *= cut.axis_size
    return shape
