"""Collectives with gradients over ranks: exact values there and back, and what they refuse.

Values are small integers, so sums are exact in every dtype and every bit is due.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fsdp_core.parallel import mesh as collectives
from fsdp_core.parallel.mesh import Axis
from tests.dist.rank_pool import RankPool
from tests.dist.tensor_parallel_programs import whole_axis

Ranks = list[torch.Tensor]
SHAPE = (4, 8, 2)


def numbers(name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Integers in -4..4 that differ by rank."""
    generator = torch.Generator().manual_seed(len(name) * 100 + rank)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def total(parts: Ranks) -> torch.Tensor:
    return torch.stack(parts).sum(0)


@dataclass(frozen=True)
class Collective:
    """A function, and what each rank's result and gradient are, out of every rank's input."""

    call: Callable[[torch.Tensor, Axis], torch.Tensor]
    forward: Callable[[Ranks, int], torch.Tensor]
    backward: Callable[[Ranks, int], torch.Tensor]
    replicated: bool = False


def chunk(x: torch.Tensor, ranks: int, dim: int, rank: int) -> torch.Tensor:
    return x.chunk(ranks, dim)[rank]


def along(dim: int) -> dict[str, Collective]:
    """The collectives that cut or join a dim."""
    return {
        f"gather_from {dim}": Collective(
            lambda x, axis: collectives.gather_from(x, axis, dim),
            lambda xs, rank: torch.cat(xs, dim),
            lambda gs, rank: chunk(total(gs), len(gs), dim, rank),
        ),
        f"reduce_scatter_to {dim}": Collective(
            lambda x, axis: collectives.reduce_scatter_to(x, axis, dim),
            lambda xs, rank: chunk(total(xs), len(xs), dim, rank),
            lambda gs, rank: torch.cat(gs, dim),
        ),
    }


def exchanged(xs: Ranks, rank: int) -> torch.Tensor:
    return torch.cat([x.chunk(len(xs))[rank] for x in xs])


COLLECTIVES = {
    "copy_to": Collective(
        collectives.copy_to, lambda xs, rank: xs[0], lambda gs, rank: total(gs), replicated=True
    ),
    "reduce_from": Collective(
        collectives.reduce_from, lambda xs, rank: total(xs), lambda gs, rank: gs[rank]
    ),
    "all_to_all": Collective(collectives.all_to_all, exchanged, exchanged),
    **along(0),
    **along(1),
    **along(-2),
}


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if "-2" not in name])
def test_one_rank_needs_no_communication(name: str) -> None:
    """On an axis of one rank the input comes back, and its group is never asked."""
    x = torch.ones(2, 3, requires_grad=True)
    assert COLLECTIVES[name].call(x, Axis("tp", 1, 0, cast("dist.ProcessGroup", None))) is x


def there_and_back(name: str, dtype: torch.dtype) -> list[bool]:
    """Whether result and gradient have the bits due; inputs and gradients are not contiguous."""
    axis, case = whole_axis(), COLLECTIVES[name]
    xs = [numbers("x", r * (not case.replicated), SHAPE, dtype) for r in range(axis.size)]
    x = xs[axis.rank].mT.contiguous().mT.requires_grad_()
    out = case.call(x, axis)
    due = case.forward(xs, axis.rank)
    gs = [numbers("grad", r, tuple(due.shape), dtype) for r in range(axis.size)]
    out.backward(gs[axis.rank].mT.contiguous().mT)
    assert x.grad is not None
    grad = case.backward(gs, axis.rank)
    return [out.dtype == x.grad.dtype == dtype, torch.equal(out, due), torch.equal(x.grad, grad)]


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(
    ("world_size", "dtype"), [(2, torch.float64), (4, torch.float32), (4, torch.bfloat16)]
)
def test_values_and_gradients(
    warm_ranks: RankPool, world_size: int, dtype: torch.dtype, name: str
) -> None:
    """Each collective gives every rank its result, and its conjugate every rank its gradient."""
    found = warm_ranks.run(there_and_back, name, dtype, world_size=world_size)
    assert found == [[True, True, True]] * world_size


SPLITS = [[0, 3, 1], [2, 0, 0], [5, 1, 0]]
"""Rows that rank i sends to rank j; rank 2 receives one row in all, rank 1 sends to nobody else."""


def unequal_there_and_back() -> list[bool]:
    """All-to-all of unequal parts, some of them empty."""
    axis = whole_axis()
    outgoing, incoming = SPLITS[axis.rank], [row[axis.rank] for row in SPLITS]
    xs = [numbers("x", r, (sum(SPLITS[r]), 3), torch.float32) for r in range(axis.size)]
    x = xs[axis.rank].clone().requires_grad_()
    out = collectives.all_to_all(x, axis, outgoing, incoming)
    due = torch.cat([xs[r].split(SPLITS[r])[axis.rank] for r in range(axis.size)])
    out.backward(out.detach() * 2)
    assert x.grad is not None
    return [torch.equal(out, due), torch.equal(x.grad, 2 * x)]


def test_unequal_parts(warm_ranks: RankPool) -> None:
    """Rows go where the splits say, none to some, and gradients come back the same way."""
    assert warm_ranks.run(unequal_there_and_back, world_size=3) == [[True, True]] * 3


def group_of_some() -> list[float]:
    """Sums over the axis that cuts the ranks into pairs of the same parity."""
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    axis = Axis("tp", 2, rank // 2, pairs[rank % 2])
    x = torch.full((2,), float(10**rank), requires_grad=True)
    summed = collectives.reduce_from(x, axis)
    collectives.copy_to(summed, axis).sum().mul(rank + 1).backward()
    assert x.grad is not None
    return [summed[0].item(), x.grad[0].item()]


def test_an_axis_that_is_not_the_world(warm_ranks: RankPool) -> None:
    """Only the ranks of the axis take part, there and back."""
    assert warm_ranks.run(group_of_some, world_size=4) == [
        [101, 4], [1010, 6], [101, 4], [1010, 6],
    ]  # fmt: skip


def second_derivative(name: str) -> str:
    axis, case = whole_axis(), COLLECTIVES[name]
    x = torch.ones(SHAPE, requires_grad=True)
    out = case.call(x, axis).square().sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    try:
        grad.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["copy_to", "gather_from 1", "all_to_all"])
def test_second_derivatives_are_refused(warm_ranks: RankPool, name: str) -> None:
    """They would leave out what other ranks contribute."""
    found: list[Any] = warm_ranks.run(second_derivative, name, world_size=2)
    assert all("once_differentiable" in text for text in found), found
