"""Norms and clipping over ranks, ours and torch's: those of one process, the same bits on all."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp_core.fsdp.layout import RowSpec
from fsdp_core.fsdp.norms import PendingNorm, clip_grad_norm_
from fsdp_core.fsdp.row_sharded import RowSharded
from tests.dist.rank_pool import RankPool
from tests.dist.test_row_sharded import layouts, reference, sharded, world_of
from tests.support.tensors import same_bits, whole

NAMES = ["one", "two", "three", "four", "replicas of two", "inner then outer", "whole"]
ORDERS = (2.0, 1.0, 3.0, math.inf)


def pairs(specs: Any, cut: int, dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    """Unsharded parameters with gradients, and ours: by rows, plain, and without gradient.

    A rank without rows has a gradient object for every second parameter and None for the others.
    """
    alone: list[Any] = []
    ours: list[Any] = []
    for index, shape in enumerate([(7, 3), (5,), (), (1, 4), (3, 2)]):
        grad = reference(shape, seed=index).to(dtype)
        alone.append(nn.Parameter(torch.zeros_like(grad)))
        alone[-1].grad = grad
        if index == 4:
            ours.append(nn.Parameter(torch.zeros_like(grad)))
            ours[-1].grad = grad.clone()
            continue
        spec = specs(shape)[cut]
        ours.append(nn.Parameter(sharded(torch.zeros_like(grad), spec)))
        if spec.local_numel or index % 2:
            ours[-1].grad = sharded(grad, spec)
    for group in (alone, ours):
        group.append(nn.Parameter(torch.zeros(2, dtype=dtype)))  # never has a gradient
    return alone, ours


def whole_grad(parameter: Any) -> torch.Tensor:
    """The gradient of all rows; ranks without a gradient object take part."""
    if not isinstance(parameter, RowSharded):
        grad: torch.Tensor = parameter.grad
        return grad
    held: Any = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    full: torch.Tensor = held.full_tensor()
    return full.detach()


def check_ours(specs: Any, cut: int, order: float, dtype: torch.dtype) -> list[bytes]:
    """Ours against torch's of one process; the bits of each norm."""
    norms = []
    for max_norm, foreach in ((0.7, None), (1e9, False)):
        alone, ours = pairs(specs, cut, dtype)
        expected = nn.utils.clip_grad_norm_(alone, max_norm, order)
        norm = clip_grad_norm_(iter(ours), max_norm, order, foreach=foreach)
        assert (type(norm), norm.shape, norm.dtype) == (torch.Tensor, (), dtype)
        # torch's norm of norms and ours each round a few times, relative 2^-24 (2^-53).
        rel = 1e-6 if dtype == torch.float32 else 1e-14
        assert norm.item() == pytest.approx(expected.item(), rel=rel), (cut, order)
        for single, parameter in zip(alone[:-1], ours[:-1], strict=True):
            got = whole_grad(parameter)
            torch.testing.assert_close(got, single.grad, rtol=2 * rel, atol=0)
            if max_norm == 1e9:
                assert same_bits(got, single.grad)
        assert ours[-1].grad is None
        norms.append(norm.numpy().tobytes())
    return norms


def check_torchs(specs: Any, cut: int, order: float, foreach: bool | None) -> tuple[int, bytes]:
    """torch's clipping of gradients by rows against ours: their number here, the norm's bits."""
    both = []
    for _ in range(2):
        by_rows = [p for p in pairs(specs, cut, torch.float32)[1] if isinstance(p, RowSharded)]
        both.append([p for p in by_rows if p.grad is not None or not p.row_spec.local_numel])
    theirs, ours = both
    grads = [grad for p in theirs if (grad := p.grad) is not None]
    early = nn.utils.get_total_norm(grads, order, foreach=foreach)
    norm = nn.utils.clip_grad_norm_(theirs, 0.7, order, error_if_nonfinite=True, foreach=foreach)
    due = clip_grad_norm_(ours, 0.7, order, foreach=foreach).numpy().tobytes()
    assert bits(early) == bits(norm) == due, (cut, order, foreach)
    for one, other in zip(theirs, ours, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert same_bits(one.grad.to_local(), other.grad.to_local())
    return len(grads), due


def bits(norm: Any) -> bytes:
    """Of a norm that every rank has."""
    assert type(norm) is DTensor
    assert all(placement == Replicate() for placement in norm.placements)
    whole: torch.Tensor = norm.full_tensor()
    assert same_bits(whole, norm.to_local())
    return whole.numpy().tobytes()


def clips(name: str) -> tuple[list[bytes], list[int]]:
    """Bits of every norm, and numbers of gradients that this rank has."""
    norms, counts = [], []
    specs = layouts(name)
    for cut, order in itertools.product(range(3), ORDERS):
        norms += check_ours(specs, cut, order, torch.float32)
        for foreach in (None, True, False):
            count, norm = check_torchs(specs, cut, order, foreach)
            counts.append(count)
            norms.append(norm)
        norms += check_ours(specs, cut, 2.0, torch.float64)
    return norms, counts


@pytest.mark.parametrize("name", NAMES)
def test_norm_and_gradients_are_those_of_one_process(warm_ranks: RankPool, name: str) -> None:
    """Each row counts once, replicas and plain parameters too; every rank gets the same bits.

    torch's own clipping gives them too, on ranks with unlike numbers of gradients.
    """
    norms, counts = zip(*warm_ranks.run(clips, name, world_size=world_of(name)), strict=True)
    assert all(other == norms[0] for other in norms)
    assert (len({tuple(count) for count in counts}) > 1) == (name not in ("one", "whole"))


def clips_mixed_meshes() -> tuple[float, float]:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    by_rows = [
        RowSpec(line, torch.Size((7, 3)), (0, 0, 6, 6, 7), (0,)),
        RowSpec(square, torch.Size((5, 2)), (0, 4, 5), (1,)),
        RowSpec(square, torch.Size((5, 2)), (0, 1, 1, 4, 5), (1, 0)),
        RowSpec(square, torch.Size((2,)), (0, 2), ()),
    ]
    grads = [reference(tuple(spec.shape), seed=i) for i, spec in enumerate(by_rows)]
    parameters: list[Any] = []
    for grad, spec in zip(grads, by_rows, strict=True):
        parameters.append(nn.Parameter(sharded(torch.zeros_like(grad), spec)))
        parameters[-1].grad = sharded(grad, spec)
    for placements in ([Shard(1), Replicate()], [Shard(0), Shard(1)]):
        grad = reference((4, 6), seed=8)
        grads.append(grad)
        parameters.append(nn.Parameter(distribute_tensor(torch.zeros(4, 6), square, placements)))
        parameters[-1].grad = distribute_tensor(grad, square, placements)
    on_square = [p for p in parameters[1:] if isinstance(p, RowSharded)]
    early = nn.utils.get_total_norm([p.grad for p in on_square])
    assert bits(early) == clip_grad_norm_(on_square, math.inf).numpy().tobytes()
    expected = torch.cat([grad.flatten() for grad in grads]).norm()
    norm = clip_grad_norm_(parameters, 0.5)
    for grad, parameter in zip(grads, parameters, strict=True):
        got = parameter.grad.full_tensor()
        torch.testing.assert_close(got, grad * (0.5 / (expected + 1e-6)), rtol=3e-6, atol=0)
    return norm.item(), expected.item()


def test_parameters_on_different_meshes_share_one_norm(warm_ranks: RankPool) -> None:
    """Rows over one axis, two axes and none, and even DTensors among them, add up; for torch's
    function rows of one mesh do.
    """
    for norm, expected in warm_ranks.run(clips_mixed_meshes, world_size=4):
        assert norm == pytest.approx(expected, rel=1e-6)


def clips_nonfinite(value: float, order: float, by_torch: bool) -> list[str]:
    """The norm with one such element, of each row in turn."""
    clip: Any = nn.utils.clip_grad_norm_ if by_torch else clip_grad_norm_
    said = "non-finite" if by_torch else "Expected a finite gradient norm"
    found = []
    for row in range(7):
        spec = layouts("three")((7, 3))[0]
        parameter: Any = nn.Parameter(sharded(torch.zeros(7, 3), spec))
        grad = torch.ones(7, 3)
        grad[row, 1] = value
        parameter.grad = sharded(grad, spec)
        with pytest.raises(RuntimeError, match=said):
            clip([parameter], 1.0, order, error_if_nonfinite=True)
        assert same_bits(parameter.grad.full_tensor(), grad)  # left as they were
        norm: Any = clip(parameter, 1.0, order)
        found.append(str((norm.full_tensor() if by_torch else norm).item()))
    return found


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_on_one_rank_shows_on_all(
    warm_ranks: RankPool, value: float, order: float, by_torch: bool
) -> None:
    """A NaN stays a NaN, an inf an inf, and `error_if_nonfinite` raises on every rank."""
    for found in warm_ranks.run(clips_nonfinite, value, order, by_torch, world_size=3):
        assert found == [str(value)] * 7


def clips_large() -> float:
    spec = layouts("two")((4,))[0]
    parameter: Any = nn.Parameter(sharded(torch.zeros(4), spec))
    # Two squares, a rank's, are just within float32, and four are not.
    parameter.grad = sharded(torch.full((4,), 1.2e19), spec)
    return clip_grad_norm_([parameter], 1.0).item()


def test_squares_of_all_ranks_may_exceed_float32(warm_ranks: RankPool) -> None:
    """A norm that float32 can hold is found though its square is out of float32's range."""
    for norm in warm_ranks.run(clips_large, world_size=2):
        assert norm == pytest.approx(2.4e19, rel=1e-6)


def refuses() -> None:
    """Orders that are no norm, pending sums and mismatched gradients raise; no gradient is zero."""
    spec = layouts("two")((4,))[0]
    parameter: Any = nn.Parameter(sharded(torch.zeros(4), spec))
    for order in (0.0, -1.0, -math.inf, math.nan):
        with pytest.raises(ValueError, match="norm_type > 0"):
            clip_grad_norm_([parameter], 1.0, order)
    pending: Any = nn.Parameter(DTensor.from_local(torch.ones(3), spec.mesh, [Partial()]))
    with pytest.raises(NotImplementedError, match="pending"):
        clip_grad_norm_([pending], 1.0)
    odd: Any = nn.Parameter(distribute_tensor(torch.zeros(4), spec.mesh, [Shard(0)]))
    odd.grad = distribute_tensor(torch.ones(4), spec.mesh, [Replicate()])
    with pytest.raises(ValueError, match="laid out as its parameter"):
        clip_grad_norm_([odd], 1.0)
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_([parameter], 1.0).item() == 0.0


def unclipped(value: float) -> list[bool]:
    """With an infinite bound: whether each gradient kept its bits."""
    spec = layouts("three")((7, 3))[0]
    grads = [torch.full((7, 3), value), reference((7, 3), seed=1)]
    parameters: list[Any] = [nn.Parameter(sharded(torch.zeros(7, 3), spec)) for _ in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = sharded(grad, spec)
    assert str(clip_grad_norm_(parameters, math.inf).item()) == str(value)
    kept = zip(parameters, grads, strict=True)
    return [same_bits(p.grad.full_tensor(), grad) for p, grad in kept]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_infinite_bound_touches_no_gradient(warm_ranks: RankPool, value: float) -> None:
    """One infinite gradient makes no NaN of all others."""
    assert warm_ranks.run(unclipped, value, world_size=3) == [[True, True]] * 3


# ---- norms of rows

# A piece has at most 21 elements: the sum of their powers is off by at most 21 roundings of 2^-24,
# a power and a root by two each, and what combines pieces runs in float64.
REL = 26 * 2**-24


def norms_alone() -> None:
    """Any operator but stacking and moving finds the norm of all rows."""
    full = reference((7, 3))
    tensor: Any = sharded(full, layouts("three")((7, 3))[0])
    norm = tensor.norm()
    assert type(norm) is PendingNorm
    assert "parts" in repr(norm)  # no collective: one rank may print
    exact = full.double().norm().item()
    for value in (norm.full_tensor(), norm + 0.0, norm.double(), norm.reshape(1), norm.norm()):
        assert value.to("cpu").numel() == 1
        assert whole(value).item() == pytest.approx(exact, rel=REL)
    assert float(norm) == norm.item()
    assert not bool(norm.isnan())
    low: Any = sharded(full.bfloat16(), layouts("three")((7, 3))[0])
    stack = torch.stack([norm, low.norm().to(torch.float16)])
    assert (stack.shape, stack.dtype) == ((2,), torch.float32)


def backpropagates() -> None:
    full = reference((7, 3))
    parameter: Any = nn.Parameter(sharded(full, layouts("one")((7, 3))[0]))
    parameter.norm().full_tensor().backward()
    torch.testing.assert_close(parameter.grad.to_local(), full / full.norm(), rtol=REL, atol=0)


@pytest.mark.skipif(
    not issubclass(RowSharded, DTensor), reason="there torch cannot differentiate DTensor results"
)
def test_a_penalty_on_a_norm_reaches_the_rows(warm_ranks: RankPool) -> None:
    """The gradient of a norm is that of all rows."""
    warm_ranks.run(backpropagates, world_size=1)


def refuses_to_meet() -> None:
    """Other meshes and orders in one stack, or anything but its norm, name the other way."""
    line, square = layouts("four"), layouts("inner then outer")
    grad = reference((7, 3))
    one, other = (sharded(grad, specs((7, 3))[0]) for specs in (line, square))
    even = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (4,)), [Shard(0)])
    for norms in (
        [one.norm(), other.norm()],
        [one.norm(2), one.norm(3)],
        [one.norm(), torch.ones(1)],
        [one.norm(), torch.ones(())],
    ):
        with pytest.raises(NotImplementedError, match="clip_grad_norm_"):
            torch.stack(norms)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.stack([one.norm(), even.norm()])
    stack = torch.stack([one.norm(), one.norm()])
    for call in (
        lambda: torch.linalg.vector_norm(stack, 3),
        lambda: torch.linalg.vector_norm(torch.stack([one.norm(0)]), 0),
        lambda: torch.linalg.vector_norm(stack, dtype=torch.float64),
        lambda: stack.sum(),
        lambda: stack + 1,
    ):
        with pytest.raises(NotImplementedError, match="clip_grad_norm_"):
            call()


@pytest.mark.parametrize(
    ("program", "world_size"), [(refuses, 2), (norms_alone, 3), (refuses_to_meet, 4)]
)
def test_programs(warm_ranks: RankPool, program: Callable[[], None], world_size: int) -> None:
    """See each program."""
    warm_ranks.run(program, world_size=world_size)
