"""torch's own clipping of row-sharded gradients, of which ranks hold different numbers."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_core.fsdp.optimizer import clip_grad_norm_
from fsdp_core.fsdp.row_sharded import PendingNorm, RowSharded
from tests.dist.rank_pool import RankPool
from tests.dist.row_layouts import layouts, reference, same_bits, sharded, world_of

NAMES = ["one", "two", "three", "replicas of two", "inner then outer"]
ORDERS = (1.0, 2.0, 3.0, math.inf)
CUTS = [((7, 3), 0), ((5,), 1), ((), 2), ((1, 4), 0), ((3, 2), 2)]  # shape, way to cut
# A piece has at most 21 elements: the sum of their powers is off by at most 21 roundings of 2^-24,
# a power and a root by two each, and what combines pieces runs in float64.
REL = 26 * 2**-24


def parameters_of(name: str) -> tuple[list[Any], list[Any]]:
    """Unsharded parameters with gradients, and ours, whose gradient is None where no rows are."""
    specs = layouts(name)
    alone, ours = [], []
    for seed, (shape, cut) in enumerate(CUTS):
        grad, spec = reference(shape, seed=seed), specs(shape)[cut]
        alone.append(nn.Parameter(torch.zeros_like(grad)))
        alone[-1].grad = grad
        ours.append(nn.Parameter(sharded(torch.zeros_like(grad), spec)))
        ours[-1].grad = sharded(grad, spec) if spec.local_numel else None
    return alone, ours


def bits(norm: Any) -> bytes:
    """Of a norm that every rank has."""
    assert type(norm) is DTensor
    assert all(placement == Replicate() for placement in norm.placements)
    whole: torch.Tensor = norm.full_tensor()
    assert same_bits(whole, norm.to_local())
    return whole.numpy().tobytes()


def clips(name: str) -> tuple[int, list[bytes]]:
    found = []
    count = 0
    for order in ORDERS:
        for foreach in (None, True, False):
            alone, theirs = parameters_of(name)
            grads = [grad for p in theirs if (grad := p.grad) is not None]
            count = len(grads)
            exact = torch.cat([p.grad.double().flatten() for p in alone]).norm(order).item()
            early = nn.utils.get_total_norm(grads, order, foreach=foreach)
            norm = nn.utils.clip_grad_norm_(
                theirs, 0.7, order, error_if_nonfinite=True, foreach=foreach
            )
            found += [bits(early), bits(norm)]
            ours = parameters_of(name)[1]
            found.append(clip_grad_norm_(ours, 0.7, order, foreach=foreach).numpy().tobytes())
            assert found[-3] == found[-2] == found[-1], (order, foreach)
            assert norm.item() == pytest.approx(exact, rel=REL), (order, foreach)
            factor = 0.7 / (exact + 1e-6)
            for whole, one, other in zip(alone, theirs, ours, strict=True):
                assert (one.grad is None) == (other.grad is None)
                if one.grad is not None:
                    local, own = one.grad.to_local(), one.row_spec.own_rows(whole.grad)
                    assert same_bits(local, other.grad.to_local())
                    torch.testing.assert_close(local, own * factor, rtol=2 * REL, atol=0)
    return count, found


@pytest.mark.parametrize("name", NAMES)
def test_torchs_clipping_needs_no_gradient_object_on_every_rank(
    warm_ranks: RankPool, name: str
) -> None:
    """The norm is one process's and ours bit for bit, on ranks with unlike numbers of gradients."""
    counts, norms = zip(*warm_ranks.run(clips, name, world_size=world_of(name)), strict=True)
    assert all(norm == norms[0] for norm in norms)
    assert (len(set(counts)) > 1) == (name != "one")


def clips_nonfinite(value: float, order: float) -> list[str]:
    found = []
    for row in range(7):
        ours = parameters_of("three")[1]
        spec = ours[0].row_spec
        if spec.row_start <= row < spec.row_stop:
            ours[0].grad.to_local()[row - spec.row_start, 1] = value
        before = [p.grad.to_local().clone() for p in ours if p.grad is not None]
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(ours, 1.0, order, error_if_nonfinite=True)
        after = [p.grad.to_local() for p in ours if p.grad is not None]
        assert all(map(same_bits, before, after))
        norm: Any = nn.utils.clip_grad_norm_(ours, 1.0, order)
        found.append(str(norm.full_tensor().item()))
    return found


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_on_one_rank_shows_on_all(
    warm_ranks: RankPool, value: float, order: float
) -> None:
    """A NaN stays a NaN and an inf an inf through torch's clipping, which raises on every rank."""
    for found in warm_ranks.run(clips_nonfinite, value, order, world_size=3):
        assert found == [str(value)] * 7


def norms_alone() -> None:
    full = reference((7, 3))
    tensor: Any = sharded(full, layouts("three")((7, 3))[0])
    norm = tensor.norm()
    assert type(norm) is PendingNorm
    assert "parts" in repr(norm)  # no collective: one rank may print
    exact = full.double().norm().item()
    for value in (norm.full_tensor(), norm + 0.0, norm.double(), norm.reshape(1), norm.norm()):
        assert value.to("cpu").numel() == 1
        whole: Any = value.full_tensor() if isinstance(value, (DTensor, PendingNorm)) else value
        assert whole.item() == pytest.approx(exact, rel=REL)
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


def refuses() -> None:
    line, square = layouts("four"), layouts("inner then outer")
    grad = reference((7, 3))
    one, other, part = (
        sharded(grad, specs((7, 3))[0]) for specs in (line, square, layouts("outer axis"))
    )
    even = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (4,)), [Shard(0)])
    for norms in (
        [one.norm(), other.norm()],
        [other.norm(), part.norm()],
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


def test_a_norm_alone_is_reduced_by_what_asks_for_it(warm_ranks: RankPool) -> None:
    """Any operator but stacking and moving finds the norm of all rows."""
    warm_ranks.run(norms_alone, world_size=3)


def test_norms_that_cannot_meet_are_refused(warm_ranks: RankPool) -> None:
    """Other meshes, axes and orders in one stack, or anything but its norm, name the other way."""
    warm_ranks.run(refuses, world_size=4)
