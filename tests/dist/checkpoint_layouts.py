"""Models and optimizers to save and load: layouts, and values that a loaded one is compared with.

`fill` gives every tensor values of its own name, so that each rank knows what its rows should be
wherever they were saved, and no rank has to ask another.
"""

import zlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.fsdp import FSDPModule, fully_shard
from fsdp_core.fsdp.row_sharded import RowSharded
from tests.dist.fsdp_models import WIDTH, Net, loss_of, rows
from tests.dist.fsdp_sides import same_bits

PARAMS = "optim_grads_params"
LAYOUTS: dict[str, tuple[tuple[int, ...], Any]] = {
    "plain": ((1,), None),
    "no_shard": ((2,), "no_shard"),
    "optim": ((3,), "optim"),
    "optim_grads": ((2,), "optim_grads"),
    "params": ((3,), PARAMS),
    "alone": ((1,), PARAMS),
    "hsdp": ((2, 2), ("no_shard", PARAMS)),
    "hfsdp": ((2, 2), ("optim", PARAMS)),
    "one unit": ((2,), PARAMS),
    "more units": ((2,), PARAMS),
}
OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


def world_of(layout: str) -> int:
    shape = LAYOUTS[layout][0]
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


class Odd(Net):
    """Beside what divides badly: a 0-d and a frozen parameter, shared weights, a buffer."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(2, WIDTH), requires_grad=False)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.embed.weight
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, 3]."""
        self.seen += 1
        features = self.features(self.again(x) + (self.frozen @ x.mT).sum()) * self.scale
        out: torch.Tensor = self.head(features)
        return out


def build(
    layout: str, optimizer: str = "AdamW", seed: int = 3, factory: Callable[[], nn.Module] = Odd
) -> tuple[Any, torch.optim.Optimizer]:
    """A model in a layout, and its optimizer in groups: matrices, and all else."""
    shape, strategy = LAYOUTS[layout]
    torch.manual_seed(seed)
    model: Any = factory()
    if strategy is not None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
        if layout == "more units":
            for block in model.blocks:
                fully_shard(block.up, mesh=mesh, strategy=strategy)
        if layout != "one unit":
            for block in model.blocks:
                fully_shard(block, mesh=mesh, strategy=strategy)
        fully_shard(model, mesh=mesh, strategy=strategy)
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = ([p for p in trained if (p.dim() == 2) == is_2d] for is_2d in (True, False))
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.3, "note": (1, "b")}]
    made = OPTIMIZERS[optimizer](groups)
    return model, made


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps of training; every step and rank has data of its own."""
    for step in steps:
        loss_of(model(rows(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- this rank's part -------------------------------------------------------------------------


def local(tensor: Any) -> torch.Tensor:
    """The rows that this rank has: the very memory."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, RowSharded) else cast("torch.Tensor", plain)


def tensors(model: Any, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Weights, buffers and states by name, as far as this rank has rows of their parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    # Adagrad makes states for parameters without rows as well, and does not go on with them.
    weights = {name: p for name, p in model.named_parameters() if local(p).numel()}
    states = {} if optimizer is None else optimizer.state
    found = weights | dict(model.named_buffers())
    for name, parameter in weights.items():
        found |= {f"{name}.{key}": v for key, v in states.get(parameter, {}).items()}
    assert found
    return dict(sorted(found.items()))


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Hyperparameters, tensors in memory of their own."""
    return [
        {k: v.clone() if torch.is_tensor(v) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def snapshot(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of all that this rank has: weights, buffers, states and hyperparameters."""
    copies: dict[str, Any] = {n: local(t).clone() for n, t in tensors(model, optimizer).items()}
    return copies | {"groups": groups_of(optimizer)}


# --- known values -----------------------------------------------------------------------------


def known_rows(name: str, tensor: Any, seed: int) -> torch.Tensor:
    """Values of this rank's rows, by the tensor's name and their place in it."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    full = (torch.rand(tensor.shape, generator=generator) * 1000).to(tensor.dtype)
    return tensor.row_spec.own_rows(full) if isinstance(tensor, RowSharded) else full


def fill(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Give every tensor and some hyperparameters known values."""
    for name, tensor in tensors(model, optimizer).items():
        local(tensor).copy_(known_rows(name, tensor, seed))
    for number, group in enumerate(optimizer.param_groups):
        group.update(_known_group(number, seed))


def _known_group(number: int, seed: int) -> dict[str, Any]:
    return {"lr": 1 / (3 + seed), "weight_decay": 0.1 * number, "mine": (number, [seed, "b"])}


def misses(model: Any, optimizer: torch.optim.Optimizer, kind: str, seed: int) -> list[str]:
    """What this rank should have after a load of what `fill` left with this seed, and has not."""
    found = tensors(model, optimizer)
    trained = {n for n, p in model.named_parameters() if n in found and p.requires_grad}
    expected = {f"{name}.{key}" for name in trained for key in _state_keys(kind)}
    wrong = sorted((expected | set(tensors(model))) ^ set(found))
    wrong += [
        f"group {i}"
        for i, group in enumerate(groups_of(optimizer))
        if not (_known_group(i, seed).items() <= group.items())
    ]
    return wrong + unlike(found, seed)


def unlike(found: dict[str, Any], seed: int) -> list[str]:
    """Names of tensors whose rows on this rank are not the known ones, bit for bit."""
    return [n for n, t in found.items() if not same_bits(known_rows(n, t, seed), local(t))]


def _state_keys(kind: str) -> list[str]:
    """What an optimizer of a kind keeps of a parameter."""
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = OPTIMIZERS[kind]([{"params": [parameter]}])
    optimizer.step()
    return list(optimizer.state[parameter])
