"""`RowSharded` over ranks: together they hold one process's tensor, bit for bit."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

from fsdp_core.fsdp.layout import RowSpec
from fsdp_core.fsdp.norms import PendingNorm
from fsdp_core.fsdp.row_sharded import RowSharded
from tests.dist.rank_pool import RankPool
from tests.support.tensors import same_bits

# name: shape of the mesh, axes that cut, coarsest first
MESHES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": ((1,), (0,)),
    "two": ((2,), (0,)),
    "three": ((3,), (0,)),
    "four": ((4,), (0,)),
    "replicas of two": ((2, 2), (1,)),
    "outer axis": ((2, 2), (0,)),
    "inner then outer": ((2, 2), (1, 0)),
    "outer then inner": ((2, 2), (0, 1)),
    "whole": ((2,), ()),
}
SHAPES: list[tuple[int, ...]] = [(7, 3), (5,), (), (1, 4), (2, 3, 2, 2), (0, 3), (3, 0)]


def world_of(name: str) -> int:
    return math.prod(MESHES[name][0])


def cuts(rows: int, num_shards: int) -> Iterator[tuple[int, ...]]:
    """Bounds: like even ones but for the remainder, most rows first, all on the last."""
    yield tuple(rows * s // num_shards for s in range(num_shards + 1))
    most = rows - rows // 4
    yield (0, *([most] * (num_shards - 1)), rows) if num_shards > 1 else (0, rows)
    yield (0,) * num_shards + (rows,)


def layouts(name: str) -> Callable[[tuple[int, ...]], list[RowSpec]]:
    """A function from a parameter's shape to its layouts over the mesh `name`, one a way to cut."""
    mesh_shape, axes = MESHES[name]
    mesh = init_device_mesh("cpu", mesh_shape)
    num_shards = math.prod(mesh_shape[axis] for axis in axes)

    def specs(shape: tuple[int, ...]) -> list[RowSpec]:
        rows = shape[0] if shape else 1
        return [RowSpec(mesh, torch.Size(shape), bounds, axes) for bounds in cuts(rows, num_shards)]

    return specs


def reference(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """The whole tensor, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sharded(full: torch.Tensor, spec: RowSpec) -> RowSharded:
    """This rank's rows of `full`, inside a larger buffer as at rest."""
    own = spec.own_rows(full)
    flat = torch.zeros(own.numel() + 5, dtype=full.dtype)
    local = flat[3 : 3 + own.numel()].view(own.shape)
    local.copy_(own)
    return RowSharded.make(local, spec)


def gathers_whole(name: str) -> None:
    """Whatever the cut, gathering restores the tensor's bits on every rank."""
    specs = layouts(name)
    for shape in SHAPES:
        for spec in specs(shape):
            for dtype in (torch.float32, torch.bool):
                full = (reference(shape) * 3).to(dtype)
                if dtype == torch.float32 and full.numel() > 1:
                    full.view(-1)[:2] = torch.tensor([-0.0, float("nan")])
                tensor = sharded(full, spec)
                assert same_bits(tensor.full_tensor(), full), (spec, dtype)
                everywhere = tensor.redistribute(placements=[Replicate()] * spec.mesh.ndim)
                assert type(everywhere) is DTensor
                assert same_bits(everywhere.to_local(), full), (spec, dtype)


def backpropagates(name: str) -> None:
    """A penalty computed from gathered rows reaches each rank's rows, once."""
    specs = layouts(name)
    full = reference((7, 3))
    for spec in specs((7, 3)):
        for loss in (lambda t: t.full_tensor(), lambda t: (t * 2.0).full_tensor() / 2.0):
            parameter: Any = nn.Parameter(sharded(full, spec))
            loss(parameter).pow(2).sum().backward()
            assert isinstance(parameter.grad, RowSharded)
            assert same_bits(parameter.grad.full_tensor(), full * 2)


# --- initialisation ---------------------------------------------------------------------------

INITS: dict[str, Any] = {
    "normal": lambda t: nn.init.normal_(t, 1.0, 2.0),
    "uniform": lambda t: nn.init.uniform_(t, -1.0, 3.0),
    "trunc_normal": lambda t: nn.init.trunc_normal_(t, std=0.5),
    "trunc_normal far": lambda t: nn.init.trunc_normal_(t, mean=2.0, std=3.0, a=-1.0, b=1.0),
    "kaiming_uniform": lambda t: nn.init.kaiming_uniform_(t, a=5**0.5),
    "kaiming_normal": nn.init.kaiming_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "constant": lambda t: nn.init.constant_(t, 3.0),
    "exponential": lambda t: t.detach().exponential_(),
    "bernoulli": lambda t: t.detach().bernoulli_(0.3),
    "random": lambda t: t.detach().random_(0, 100),
    "log_normal": lambda t: t.detach().log_normal_(),
    "noise": lambda t: t.detach().copy_(torch.randn_like(t) + torch.rand_like(t)),
}


def initialises(name: str) -> None:
    """nn.init gives the bits, and leaves the generator in the state, of an unsharded tensor."""
    specs = layouts(name)
    for kind, init in INITS.items():
        for spec in specs((7, 3)):
            alone = nn.Parameter(torch.zeros(7, 3))
            torch.manual_seed(5)
            init(alone)
            state = torch.get_rng_state()
            parameter: Any = nn.Parameter(sharded(torch.zeros(7, 3), spec))
            torch.manual_seed(5)
            init(parameter)
            assert same_bits(parameter.full_tensor(), alone), (kind, spec)
            assert torch.equal(torch.get_rng_state(), state), (kind, spec)


# --- arithmetic -------------------------------------------------------------------------------


def mixes_with_whole_tensors(name: str) -> None:
    """A plain or DTensor argument of the global shape acts on each row as it would unsharded."""
    specs = layouts(name)
    for shape in SHAPES:
        full, other = reference(shape), reference(shape, seed=1)
        for spec in specs(shape):
            tensor: Any = sharded(torch.zeros(shape), spec)
            tensor.copy_(full)
            assert same_bits(tensor.full_tensor(), full)
            tensor.mul_(other).add_(torch.tensor(0.5), alpha=2).clamp_(min=-0.2)
            expected = full.mul(other).add(torch.tensor(0.5), alpha=2).clamp(min=-0.2)
            assert same_bits(tensor.full_tensor(), expected), spec
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            if shape and full.numel():
                tensor.copy_(distribute_tensor(full, mesh, [Shard(len(shape) - 1)]))
                assert same_bits(tensor.full_tensor(), full), spec


def agrees_on_verdicts(name: str) -> None:
    """One NaN, or one difference, in one row is found on every rank, also without rows there."""
    specs = layouts(name)
    for spec in specs((7, 3)):
        for row in range(7):
            full = torch.ones(7, 3)
            full[row, 1] = float("nan")
            tensor = sharded(full, spec)
            assert bool(torch.isnan(tensor).any())
            assert not bool(torch.isfinite(tensor).all())
            other = torch.ones(7, 3)
            other[row, 1] = 2.0
            assert not torch.equal(sharded(torch.ones(7, 3), spec), sharded(other, spec))
            assert not torch.equal(sharded(torch.ones(7, 3), spec), other)
        clean = sharded(torch.ones(7, 3), spec)
        assert not bool(torch.isnan(clean).any())
        assert bool(torch.isfinite(clean).all())
        assert torch.equal(clean, torch.ones(7, 3))


# --- norms ------------------------------------------------------------------------------------


def norms_match(name: str) -> None:
    """The full value of sums and p-norms counts each row once."""
    specs = layouts(name)
    # Integers: sums and maxima are exact in any order. A p-norm takes a root and a power a rank, of
    # one rounding each, relative 2^-24: well under 1e-6.
    for shape in SHAPES:
        full = (reference(shape) * 4).round()
        for spec in specs(shape):
            tensor: Any = sharded(full, spec)
            assert tensor.sum().full_tensor().item() == full.sum().item()
            for order in (1.0, 2.0, 3.0, 0.0, math.inf):
                if not full.numel() and order == math.inf:
                    continue
                expected = torch.linalg.vector_norm(full, order).item()
                rel = 0 if order in (0.0, math.inf) else 1e-6
                norms = [
                    tensor.norm(order),
                    torch.linalg.vector_norm(tensor, order),
                    *torch._foreach_norm([tensor, tensor], order),
                ]
                for norm in norms:
                    assert type(norm) is PendingNorm
                    assert norm.shape == ()
                    got = norm.full_tensor().item()
                    assert got == pytest.approx(expected, rel=rel, abs=0), (spec, order)


WHOLE: dict[str, Callable[[Any], Any]] = {
    "mean": lambda t: t.mean(),
    "std": lambda t: t.std(),
    "largest": lambda t: t.abs().max(),
    "sums of columns": lambda t: t.sum(0),
    "norms of rows": lambda t: torch.linalg.vector_norm(t, 2.0, tuple(range(1, t.ndim))),
    "norm, its dims kept": lambda t: torch.linalg.vector_norm(t, 2.0, None, keepdim=True),
    "order -1": lambda t: t.norm(-1),
    "two in one": lambda t: torch.cat([t, t]),
    "sorted": lambda t: torch.sort(t, 0),
    "maxima of a list": lambda t: torch._foreach_max([t, t]),
    "beside a plain one": lambda t: torch.maximum(t, torch.ones(t.shape)),
}


def computes_with_whole_tensors(name: str) -> None:
    """What needs other ranks' rows has the bits of one process, on every rank."""
    for shape in ((7, 3), (2, 3, 2, 2), (1, 4)):
        full = reference(shape)
        for spec, compute in itertools.product(layouts(name)(shape), WHOLE.values()):
            found = tree_leaves(compute(sharded(full, spec)))
            for got, due in zip(found, tree_leaves(compute(full)), strict=True):
                assert same_bits(got.full_tensor(), due)


LAYOUTS: dict[Callable[[str], None], list[str]] = {
    gathers_whole: list(MESHES),
    backpropagates: ["three", "inner then outer"],
    initialises: ["one", "three", "inner then outer"],
    mixes_with_whole_tensors: ["two", "three", "replicas of two", "inner then outer"],
    agrees_on_verdicts: ["three", "replicas of two", "inner then outer"],
    computes_with_whole_tensors: ["one", "three", "inner then outer"],
    norms_match: list(MESHES),
}


@pytest.mark.parametrize(
    ("program", "name"), [(program, name) for program, names in LAYOUTS.items() for name in names]
)
def test_rows(warm_ranks: RankPool, program: Callable[[str], None], name: str) -> None:
    """See each program."""
    warm_ranks.run(program, name, world_size=world_of(name))
