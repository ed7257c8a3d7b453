"""`clip_grad_norm_` over ranks: one process's norm and gradients, the same bits on all."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp_core.fsdp.optimizer import clip_grad_norm_
from fsdp_core.fsdp.row_sharded import RowSharded, RowSpec
from tests.dist.rank_pool import RankPool
from tests.dist.row_layouts import layouts, reference, same_bits, sharded, world_of

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


def clips(name: str) -> list[bytes]:
    norms = []
    specs = layouts(name)
    kinds = [(order, torch.float32) for order in ORDERS] + [(2.0, torch.float64)]
    for cut, (order, dtype) in itertools.product(range(3), kinds):
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


@pytest.mark.parametrize("name", NAMES)
def test_norm_and_gradients_are_those_of_one_process(warm_ranks: RankPool, name: str) -> None:
    """Each row counts once, replicas and plain parameters too; every rank gets the same bits."""
    first, *others = warm_ranks.run(clips, name, world_size=world_of(name))
    assert all(other == first for other in others)


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
    expected = torch.cat([grad.flatten() for grad in grads]).norm()
    norm = clip_grad_norm_(parameters, 0.5)
    for grad, parameter in zip(grads, parameters, strict=True):
        got = parameter.grad.full_tensor()
        torch.testing.assert_close(got, grad * (0.5 / (expected + 1e-6)), rtol=3e-6, atol=0)
    return norm.item(), expected.item()


def test_parameters_on_different_meshes_share_one_norm(warm_ranks: RankPool) -> None:
    """Rows over one axis, two axes and none, and even DTensors among them, add up."""
    for norm, expected in warm_ranks.run(clips_mixed_meshes, world_size=4):
        assert norm == pytest.approx(expected, rel=1e-6)


def clips_nonfinite(value: float, order: float) -> list[str]:
    found = []
    for row in range(7):
        spec = layouts("three")((7, 3))[0]
        parameter: Any = nn.Parameter(sharded(torch.zeros(7, 3), spec))
        grad = torch.ones(7, 3)
        grad[row, 1] = value
        parameter.grad = sharded(grad, spec)
        with pytest.raises(RuntimeError, match="Expected a finite gradient norm"):
            clip_grad_norm_([parameter], 1.0, order, error_if_nonfinite=True)
        assert same_bits(parameter.grad.full_tensor(), grad)  # left as they were
        found.append(str(clip_grad_norm_(parameter, 1.0, order).item()))
    return found


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_on_one_rank_shows_on_all(
    warm_ranks: RankPool, value: float, order: float
) -> None:
    """A NaN stays a NaN, an inf an inf, and `error_if_nonfinite` raises on every rank."""
    for found in warm_ranks.run(clips_nonfinite, value, order, world_size=3):
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


def test_what_has_no_norm_is_refused(warm_ranks: RankPool) -> None:
    """Orders that are no norm, pending sums and mismatched gradients raise; no gradient is zero."""
    warm_ranks.run(refuses, world_size=2)


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
