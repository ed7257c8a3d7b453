"""A small net for tests of sharding on one rank, and what plain torch makes of it."""

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.fsdp import FSDPModule, fully_shard
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.row_sharded import RowSharded

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Net(nn.Module):
    """Two inner units and parameters of the root's own, a bias and a 0-d one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return cast("torch.Tensor", self.head(x) * self.gain)


def build(seed: int = 0) -> Net:
    """The net with random weights."""
    torch.manual_seed(seed)
    return Net()


def shard(net: Net, mesh: DeviceMesh, **options: Any) -> FSDPModule:
    """Wrap the blocks, then the root."""
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return cast("FSDPModule", fully_shard(net, mesh=mesh, **options))


def run(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Forward and backward of a simple loss."""
    loss = cast("torch.Tensor", net(x)).square().sum()
    loss.backward()
    return loss.detach()


def batch(number: int) -> torch.Tensor:
    """Input of one backward pass: [4, 6]."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def local(tensor: Any) -> torch.Tensor:
    """This rank's rows of a tensor at rest; on one rank all of it."""
    assert isinstance(tensor, RowSharded)
    rows: torch.Tensor = tensor.to_local()
    return rows


def group_named(root: FSDPModule, name: str) -> ParamGroup:
    """The parameter group of one unit."""
    return next(group for group in root.fsdp_groups if group.name == name)


def assert_grads(root: FSDPModule, plain: nn.Module) -> None:
    """Every gradient at rest, None included, has the bits of plain torch's."""
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for group in root.fsdp_groups:
        for name, parameter in zip(group.names, group.sharded, strict=True):
            wanted = expected.pop(name)
            if wanted is None:
                assert parameter.grad is None, name
            else:
                assert parameter.grad is not None, name
                assert torch.equal(local(parameter.grad), wanted), name
    assert expected == {}
