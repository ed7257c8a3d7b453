"""AdamW: torch's own bits, in place, and empty pieces left out."""

import torch

from fsdp_core.config import OptimConfig
from fsdp_core.train.build import AdamW

CONFIG = OptimConfig(lr=3e-3, weight_decay=0.17, beta1=0.85, beta2=0.97, eps=1e-7)
Named = list[tuple[str, torch.Tensor, torch.Tensor]]


def parameters(seed: int = 0) -> Named:
    """Matrices, vectors, a scalar and empty pieces, each with the gradient that stays its own."""
    generator = torch.Generator().manual_seed(seed)
    named = []
    for index, shape in enumerate([(5, 7), (9,), (0, 7), (), (2, 3, 4), (0,)]):
        weight = torch.randn(shape, generator=generator)
        named.append((f"p{index}", weight, torch.zeros_like(weight)))
    return named


def fill_grads(named: Named, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for _, weight, grad in named:
        drawn = torch.randn(weight.shape, generator=generator)
        grad.copy_(torch.where(drawn.abs() < 0.2, 0.0, drawn))


def test_equals_torch_bit_for_bit() -> None:
    """Ten steps give the bits of torch's fused AdamW with weight decay on matrices only."""
    ours, theirs = parameters(), parameters()
    optimizer = AdamW(ours, CONFIG)
    kept = []
    for _, weight, grad in theirs:
        if weight.numel():
            weight.grad = grad
            kept.append(weight)
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
        for (name, mine, _), (_, other, _) in zip(ours, theirs, strict=True):
            assert torch.equal(mine.view(torch.int32), other.view(torch.int32)), (step, name)
    for mine, first, second in zip(kept, optimizer.exp_avg, optimizer.exp_avg_sq, strict=True):
        state = reference.state[mine]
        assert torch.equal(first, state["exp_avg"])
        assert torch.equal(second, state["exp_avg_sq"])
    assert optimizer.step_count.item() == 10


def test_a_skipped_step_changes_nothing() -> None:
    """Not by NaN gradients either; the next step is the one that would have been taken."""
    ours, theirs = parameters(), parameters()
    skipping, plain = AdamW(ours, CONFIG), AdamW(theirs, CONFIG)
    for step, is_skipped in enumerate((0.0, 1.0, 0.0)):
        fill_grads(ours, step)
        if is_skipped:
            for grad in skipping.grads:
                grad.fill_(torch.nan)
        skipping.step(torch.tensor(is_skipped))
        if not is_skipped:
            fill_grads(theirs, step)
            plain.step()
        for name in ("params", "exp_avg", "exp_avg_sq"):
            assert all(map(torch.equal, getattr(skipping, name), getattr(plain, name))), name
        assert skipping.step_count == plain.step_count == (1, 1, 2)[step]


def test_leaves_empty_parameters_out() -> None:
    """Empty pieces are neither named nor given moments; the others stay the caller's tensors."""
    named = parameters()
    optimizer = AdamW(named, CONFIG)
    assert optimizer.names == ["p0", "p1", "p3", "p4"]
    assert [tuple(m.shape) for m in optimizer.exp_avg] == [(5, 7), (9,), (), (2, 3, 4)]
    kept = [named[i] for i in (0, 1, 3, 4)]
    for (_, weight, grad), ours, mine in zip(kept, optimizer.params, optimizer.grads, strict=True):
        assert ours is weight
        assert mine is grad
    nothing = AdamW([("empty", torch.zeros(0), torch.zeros(0))], CONFIG)
    nothing.step()
    assert nothing.step_count.item() == 1


def test_weights_and_gradients_may_be_views() -> None:
    """Views of one flat buffer are updated where they lie, and nothing beside them is."""
    flat, grads = torch.full((20,), 2.0), torch.ones(20)
    views = [(flat[2:8].view(2, 3), grads[2:8].view(2, 3)), (flat[12:17], grads[12:17])]
    AdamW([(f"v{i}", *views[i]) for i in range(2)], CONFIG).step()
    changed = flat != 2.0
    assert changed[2:8].all()
    assert changed[12:17].all()
    assert int(changed.sum()) == 11


def test_learning_rate_is_read_from_the_device() -> None:
    """Writing the learning rate in place takes effect at the next step."""
    named = parameters()
    optimizer = AdamW(named, CONFIG)
    optimizer.lr.zero_()
    before = [weight.clone() for _, weight, _ in named]
    fill_grads(named, 0)
    optimizer.step()
    assert all(torch.equal(p, old) for (_, p, _), old in zip(named, before, strict=True))
