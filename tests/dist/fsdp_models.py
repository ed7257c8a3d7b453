"""Tiny models for sharding: odd sizes, so that no parameter divides evenly over two ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from tests.dist.fsdp_sides import Api

WIDTH, ROWS = 5, 4


class Block(nn.Module):
    """A residual block of two Linears; `checkpointed` recomputes its inside."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, width + 2)
        self.down = nn.Linear(width + 2, width)
        self.checkpointed: bool | None = None
        """Recompute the inside, reentrant or not; None: keep it."""

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        branch: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] -> [rows, width]."""
        if self.checkpointed is None:
            return x + self.inside(x)
        branch: torch.Tensor = checkpoint(self.inside, x, use_reentrant=self.checkpointed)
        return x + branch


class Net(nn.Module):
    """Embed, blocks, head; the root's own parameters are those of embed and head."""

    def __init__(self, num_blocks: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 3)
        self.checkpointed: bool | None = None
        """Recompute each block, reentrant or not; None: keep them."""
        self.skipped: set[int] = set()
        self.times: dict[int, int] = {}

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, width]: all but the head."""
        h: torch.Tensor = self.embed(x)
        for index, block in enumerate(self.blocks):
            if index in self.skipped:
                continue
            for _ in range(self.times.get(index, 1)):
                if self.checkpointed is None:
                    h = block(h)
                else:
                    h = checkpoint(block, h, use_reentrant=self.checkpointed)
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, 3]."""
        out: torch.Tensor = self.head(self.features(x))
        return out


def net(num_blocks: int = 2, width: int = WIDTH) -> Net:
    """The model, the same bits on every rank and side."""
    state = torch.get_rng_state()
    torch.manual_seed(7)
    model = Net(num_blocks, width)
    torch.set_rng_state(state)
    return model


def shard(api: Api, model: Net, mesh: DeviceMesh, **options: Any) -> Net:
    """Each block a unit, and the root."""
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh, **options)
    api.fully_shard(model, mesh=mesh, **options)
    return model


def rows(step: int, rank: int | None = None, num: int = ROWS) -> torch.Tensor:
    """A rank's input of a step, [num, WIDTH]; by default this rank's."""
    seed = 1000 * step + (dist.get_rank() if rank is None else rank)
    return torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(out: torch.Tensor) -> torch.Tensor:
    """A loss that depends on every output, float32."""
    return out.float().square().mean()
