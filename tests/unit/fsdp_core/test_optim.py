"""AdamW and clipping: torch's own bits, exact norms, and gradients left alone when small."""

import math
import struct

import pytest
import torch
from torch import nn

from fsdp_core.config import OptimConfig
from fsdp_core.optim import AdamW, clip_grads, grad_norm

CONFIG = OptimConfig(lr=3e-3, weight_decay=0.17, beta1=0.85, beta2=0.97, eps=1e-7)


def parameters(seed: int = 0) -> list[tuple[str, nn.Parameter]]:
    """Matrices, vectors, a scalar and empty pieces, with persistent gradients where not empty."""
    generator = torch.Generator().manual_seed(seed)
    named = []
    for index, shape in enumerate([(5, 7), (9,), (0, 7), (), (2, 3, 4), (0,)]):
        parameter = nn.Parameter(torch.randn(shape, generator=generator))
        if parameter.numel():
            parameter.grad = torch.zeros_like(parameter)
        named.append((f"p{index}", parameter))
    return named


def fill_grads(named: list[tuple[str, nn.Parameter]], step: int) -> None:
    """Gradients of one step, some exactly zero."""
    generator = torch.Generator().manual_seed(100 + step)
    for _, parameter in named:
        if parameter.grad is not None:
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.grad.copy_(torch.where(drawn.abs() < 0.2, 0.0, drawn))


def test_equals_torch_bit_for_bit() -> None:
    """Ten steps give the bits of torch's fused AdamW with weight decay on matrices only."""
    ours, theirs = parameters(), parameters()
    optimizer = AdamW(ours, CONFIG)
    kept = [p for _, p in theirs if p.numel()]
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in kept if p.dim() >= 2], "weight_decay": CONFIG.weight_decay},
            {"params": [p for p in kept if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=CONFIG.lr,
        betas=(CONFIG.beta1, CONFIG.beta2),
        eps=CONFIG.eps,
        fused=True,
    )
    for step in range(10):
        fill_grads(ours, step)
        fill_grads(theirs, step)
        optimizer.step()
        reference.step()
        for (name, mine), (_, other) in zip(ours, theirs, strict=True):
            assert torch.equal(mine.view(torch.int32), other.view(torch.int32)), (step, name)
    for mine, first, second in zip(kept, optimizer.exp_avg, optimizer.exp_avg_sq, strict=True):
        state = reference.state[mine]
        assert torch.equal(first, state["exp_avg"])
        assert torch.equal(second, state["exp_avg_sq"])
    assert optimizer.step_count.item() == 10


def test_weight_decay_reaches_matrices_only() -> None:
    """With zero gradients a matrix shrinks by lr * decay, vectors and scalars stay as they are."""
    named = parameters()
    before = [p.detach().clone() for _, p in named]
    AdamW(named, CONFIG).step()
    for (_, parameter), old in zip(named, before, strict=True):
        if parameter.dim() >= 2:
            expected = old * (1 - CONFIG.lr * CONFIG.weight_decay)
            torch.testing.assert_close(parameter.detach(), expected, rtol=2e-7, atol=0)
        else:
            assert torch.equal(parameter, old)


def test_leaves_empty_parameters_out() -> None:
    """Empty pieces are neither named nor given moments, and need no gradient."""
    optimizer = AdamW(parameters(), CONFIG)
    assert optimizer.names == ["p0", "p1", "p3", "p4"]
    assert [tuple(m.shape) for m in optimizer.exp_avg] == [(5, 7), (9,), (), (2, 3, 4)]
    nothing = AdamW([("empty", nn.Parameter(torch.zeros(0)))], CONFIG)
    nothing.step()
    assert nothing.step_count.item() == 1


def test_refuses_a_lost_gradient() -> None:
    """A gradient that was set to None is an error, not a parameter that silently stays."""
    named = parameters()
    optimizer = AdamW(named, CONFIG)
    named[1][1].grad = None
    with pytest.raises(RuntimeError, match="Expected a persistent gradient, got None"):
        optimizer.step()


def test_learning_rate_is_read_from_the_device() -> None:
    """Writing the learning rate in place takes effect at the next step."""
    named = parameters()
    optimizer = AdamW(named, CONFIG)
    optimizer.lr.zero_()
    before = [p.detach().clone() for _, p in named]
    fill_grads(named, 0)
    optimizer.step()
    assert all(torch.equal(p, old) for (_, p), old in zip(named, before, strict=True))


def ordinal(value: float) -> int:
    """Position of a positive float32 among float32 values."""
    return int.from_bytes(struct.pack(">f", value), "big")


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_norm_is_within_one_ulp(scale: float) -> None:
    """The norm is the float64 norm rounded to float32, where float32 squares would be 0 or inf."""
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(n, generator=generator) * scale for n in (1000, 1, 37)]
    exact = math.sqrt(math.fsum(float(v) ** 2 for g in grads for v in g.tolist()))
    norm = grad_norm(grads, None)
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    assert abs(ordinal(norm.item()) - ordinal(exact)) <= 1


def test_norm_shows_nan() -> None:
    """One NaN anywhere makes the norm NaN."""
    assert grad_norm([torch.ones(3), torch.tensor([1.0, math.nan])], None).isnan()


def test_clip_leaves_small_gradients_untouched() -> None:
    """Below the limit not one bit changes, -0.0 and subnormals included."""
    grads = [torch.tensor([0.3, -0.0, 1e-42, -0.5]), torch.tensor([0.1])]
    before = [g.clone() for g in grads]
    clip_grads(grads, grad_norm(grads, None), 1.0)
    for grad, old in zip(grads, before, strict=True):
        assert torch.equal(grad.view(torch.int32), old.view(torch.int32))


def test_clip_scales_large_gradients_in_place() -> None:
    """Above the limit the same tensors come out with a norm at most the limit, same direction."""
    grads = [torch.tensor([3.0, 4.0]), torch.tensor([12.0])]
    addresses = [g.data_ptr() for g in grads]
    clip_grads(grads, grad_norm(grads, None), 1.0)
    assert [g.data_ptr() for g in grads] == addresses
    norm = grad_norm(grads, None).item()
    # The scale is limit / (norm + 1e-6); rounding adds at most two float32 ulps.
    assert 1.0 - 1e-6 / 13 - 2**-22 <= norm <= 1.0 + 2**-22
    torch.testing.assert_close(grads[0] / grads[0][0], torch.tensor([1.0, 4 / 3]))


def test_clip_zero_means_no_clipping() -> None:
    """A limit of 0 leaves gradients of any size alone."""
    grads = [torch.tensor([1e30])]
    clip_grads(grads, grad_norm(grads, None), 0.0)
    assert grads[0].item() == pytest.approx(1e30)
