"""One program, several sides: torch's FSDP2, ours, and gradients averaged by hand.

A program is `program(api, mesh, **options)`: it wraps a model with `api.fully_shard`, runs it and
returns plain values (tensors, numbers, strings, in dicts and lists). The sides differ in `api`
alone, as a user's program would differ in its import. `plain` leaves the model whole on every rank
and its gradients are averaged axis by axis of the mesh, so two ranks an axis give the same bits as
a reduce-scatter: a sum of two numbers has no order, and halving is exact.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.support.tensors import own_rows, same_bits

MODULES = {"torch": "torch.distributed.fsdp", "ours": "fsdp_core.fsdp"}


class PlainModule:
    """The methods of an FSDP module on a module that is whole everywhere: they do nothing."""

    def unshard(self, async_op: bool = False) -> "PlainModule | None":
        return self if async_op else None

    def wait(self) -> None:
        pass

    def reshard(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("set_"):
            return lambda *args, **kwargs: None
        return super().__getattr__(name)  # type: ignore[misc]


@dataclass(frozen=True)
class PlainPolicy:
    """Stands for a policy: the plain side computes in the dtype that the model has."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


def plain_fully_shard(module: Any, **options: Any) -> Any:
    """Give each module the methods of an FSDP module; `options` mean nothing here."""
    del options
    for each in module if isinstance(module, list) else [module]:
        each.__class__ = type(f"FSDP{type(each).__name__}", (PlainModule, type(each)), {})
    return module


@dataclass(frozen=True)
class Api:
    """What a program takes from its side."""

    name: str
    fully_shard: Callable[..., Any]
    FSDPModule: type
    MixedPrecisionPolicy: Callable[..., Any]
    register_fsdp_forward_method: Callable[[nn.Module, str], None]


def average(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Average over all ranks of the mesh, innermost axis first, in place."""
    for axis in reversed(range(mesh.ndim)):
        dist.all_reduce(tensor, group=mesh.get_group(axis))
    tensor.div_(mesh.size())


def api_of(side: str) -> Api:
    """The side by name: `plain`, `torch` or `ours`."""
    if side == "plain":
        return Api(side, plain_fully_shard, PlainModule, PlainPolicy, lambda module, name: None)
    module = importlib.import_module(MODULES[side])
    names = ("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "register_fsdp_forward_method")
    return Api(side, *(getattr(module, name) for name in names))


def run_sides(
    module: str, program: str, sides: Sequence[str], shape: Sequence[int], options: dict[str, Any]
) -> dict[str, Any]:
    """Run one program on each side in turn; a side that raises answers with what it raised."""
    function = getattr(importlib.import_module(module), program)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    answers = {}
    for side in sides:
        torch.manual_seed(dist.get_rank())  # ranks differ, as in a user's program
        try:
            answers[side] = plain_values(function(api_of(side), mesh, **options))
        except Exception as error:  # noqa: BLE001  (a raise is an answer: the other sides go on)
            answers[side] = {"raised": f"{type(error).__name__}: {error}"}
    return answers


def plain_values(value: Any) -> Any:
    """The same value of tensors that own their memory, so that pickling one sends no more."""
    if isinstance(value, dict):
        return {key: plain_values(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(v) for v in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def is_piece(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for one of which this rank has some rows."""
    return hasattr(tensor, "to_local")


def whole(
    tensors: dict[str, torch.Tensor | None], mesh: DeviceMesh
) -> dict[str, torch.Tensor | None]:
    """Full values out of all ranks' rows; None where no rank has an element. Collective.

    Needs nothing of a side but that pieces are whole rows in rank order, so a gradient that is
    missing on a rank without rows is no obstacle.
    """
    # On the CPU: what is gathered as an object else comes on the GPU of its rank.
    mine = {
        name: (tuple(t.shape), own_rows(t).to("cpu", copy=True)) if t is not None else None
        for name, t in tensors.items()
    }
    world: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(world, mine)
    ranks = mesh.mesh[tuple(mesh.get_coordinate() or ())[:-1]].tolist()
    return {name: _join([world[rank][name] for rank in ranks]) for name in mine}


def _join(pieces: list[tuple[tuple[int, ...], torch.Tensor] | None]) -> torch.Tensor | None:
    found = [piece for piece in pieces if piece is not None and piece[1].numel()]
    for shape, tensor in found:
        if tensor.shape == shape:
            return tensor  # a plain tensor, or a rank that has every row
    return torch.cat([tensor for _, tensor in found]) if found else None


def gradients(model: nn.Module, mesh: DeviceMesh) -> dict[str, torch.Tensor | None]:
    return whole({name: p.grad for name, p in model.named_parameters()}, mesh)


def weights(model: nn.Module, mesh: DeviceMesh) -> dict[str, torch.Tensor | None]:
    return whole(dict(model.named_parameters()), mesh)


def differences(
    expected: Any,
    got: Any,
    path: str = "",
    same: Callable[[torch.Tensor, torch.Tensor], bool] | None = None,
) -> list[str]:
    """Where two results differ; tensors by `same`, which is by default every bit."""
    descend = partial(differences, same=same)
    if isinstance(expected, dict) and isinstance(got, dict):
        found = [f"{path}: keys {list(expected)}, got {list(got)}"] if [*expected] != [*got] else []
        for key in expected.keys() & got.keys():
            found += descend(expected[key], got[key], f"{path}.{key}")
        return sorted(found)
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        pairs = enumerate(zip(expected, got, strict=True))
        return [line for i, (a, b) in pairs for line in descend(a, b, f"{path}[{i}]")]
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        if expected.dtype == got.dtype and expected.shape == got.shape:
            if (same or same_bits)(expected, got):
                return []
            far = (expected.double() - got.double()).abs().max().item()
            return [f"{path}: values differ by up to {far:.3g}"]
        return [
            f"{path}: expected {expected.dtype} {tuple(expected.shape)}, "
            f"got {got.dtype} {tuple(got.shape)}"
        ]
    return [] if expected == got else [f"{path}: expected {expected!r}, got {got!r}"]


def within(bound: float) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    return lambda a, b: bool(((a.double() - b.double()).abs() <= bound).all())


# ---- tiny models of odd sizes, so that no parameter divides evenly over two ranks

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
