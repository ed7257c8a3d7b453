"""The rule of a router: scores, choice and weights."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fsdp_core.config import ModelConfig
from fsdp_core.model.moe.router import Router, choose, score, weigh
from fsdp_core.parallel.mesh import Axes
from tests.dist.parity_programs import moe_model

RULE_EXPERTS, HIDDEN = 5, 6


def logits(rows: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, RULE_EXPERTS, dtype=torch.float64, generator=generator)


def rule(**changes: Any) -> ModelConfig:
    return moe_model(HIDDEN, RULE_EXPERTS, **changes)


def test_of_equal_scores_the_first_expert_wins() -> None:
    """Ties have one outcome, for few rows and for many."""
    for rows in (1, 3000):
        scores = torch.tensor([[0.1, 0.3, 0.3, 0.1, 0.3]]).repeat(rows, 1)
        assert choose(rule(), scores, None).tolist() == [[1, 2]] * rows


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    """A biased expert is chosen, at the weight of its own score."""
    settings = rule(normalise_top_k=False)
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0]])
    experts = choose(settings, scores, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.35]))
    assert experts.tolist() == [[0, 4]]
    torch.testing.assert_close(weigh(settings, scores, experts), torch.tensor([[0.4, 0.0]]))


def test_scores_that_all_underflow_weigh_nothing() -> None:
    """Normalising zeros gives zeros, no NaN."""
    settings = rule(score="sigmoid")
    scores = score(settings, torch.full((1, RULE_EXPERTS), -1000.0))
    assert weigh(settings, scores, choose(settings, scores, None)).tolist() == [[0.0, 0.0]]


EXPERTS, TOKENS = 4, 10
VALID = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1, 1, 0], dtype=torch.bool)


def make(axes: Axes, **changes: Any) -> Router:
    settings = {"aux_loss": 0.3, "z_loss": 0.2, **changes}
    router = Router(moe_model(HIDDEN, EXPERTS, **settings), axes).double()
    generator = torch.Generator().manual_seed(5)
    router.weight.data.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator))
    return router


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(TOKENS, HIDDEN, generator=generator).double().requires_grad_()


def losses(router: Router, x: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    rule = router.model
    keep = torch.ones(TOKENS, dtype=torch.bool) if valid is None else valid
    logits = (x @ router.weight.t())[keep]
    num = len(logits)
    scores = logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid()
    experts = scores.topk(rule.top_k).indices
    shares = scores / scores.sum(-1, keepdim=True)
    slots = torch.stack([(experts == e).sum() for e in range(EXPERTS)]).double()
    balance = EXPERTS * (slots / (rule.top_k * num) * shares.mean(0)).sum()
    return rule.aux_loss * balance + rule.z_loss * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("valid", [None, VALID], ids=["all", "some"])
def test_the_gradient_of_the_losses_joins_once(
    alone: Axes, scores: str, valid: torch.Tensor | None
) -> None:
    """Backward adds scale times the losses' gradient to that of what follows, and no value."""
    router, x = make(alone, score=scores), tokens()
    quiet = make(alone, score=scores, aux_loss=0.0, z_loss=0.0)
    router.loss_scale.fill_(0.25)
    wanted = torch.randn(TOKENS, 2, dtype=torch.float64)
    probs, experts = router(x, valid)
    quiet_probs, quiet_experts = quiet(x, valid)
    assert torch.equal(probs, quiet_probs)
    assert torch.equal(experts, quiet_experts)
    found = torch.autograd.grad(probs, (x, router.weight), wanted)
    main = torch.autograd.grad(quiet_probs, (x, quiet.weight), wanted)
    total = losses(router, x, valid)
    extra = torch.autograd.grad(total, (x, router.weight))
    for got, one, other in zip(found, main, extra, strict=True):
        torch.testing.assert_close(got, one + 0.25 * other, rtol=1e-12, atol=1e-14)
    assert (router.balance_loss + router.z_loss).item() == pytest.approx(total.item(), rel=1e-12)


def test_the_scale_is_that_of_the_backward_pass(alone: Axes) -> None:
    """A loss scale that is set after the forward pass counts, as a loss scaler's does."""
    grads = []
    for scale in (1.0, 8.0):
        router, x = make(alone), tokens()
        probs, _ = router(x)
        router.loss_scale.fill_(scale)
        (probs * 0).sum().backward()
        assert router.weight.grad is not None
        grads.append(router.weight.grad)
    assert torch.equal(grads[0] * 8, grads[1])
    assert grads[0].abs().max() > 0


def test_tokens_that_are_not_valid_go_nowhere(alone: Axes) -> None:
    """Their experts are the number of experts, their weights and gradients zero."""
    router, x = make(alone, expert_bias=True), tokens()
    probs, experts = router(x, VALID)
    assert (experts[~VALID] == EXPERTS).all()
    assert (experts[VALID] < EXPERTS).all()
    assert not probs[~VALID].any()
    probs.sum().backward()
    assert x.grad is not None
    assert not x.grad[~VALID].any()
    assert router.slots_per_expert.sum() == 2 * VALID.sum()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("size", [-1e3, 1e3])
def test_huge_logits_have_finite_losses(alone: Axes, scores: str, size: float) -> None:
    """Logits past the range of exp, and sigmoids that all underflow to zero, give no NaN."""
    router, x = make(alone, score=scores), torch.full((TOKENS, HIDDEN), size).requires_grad_()
    router.float().weight.data.copy_(torch.linspace(0.5, 1, EXPERTS)[:, None])
    probs, experts = router(x)
    probs.sum().backward()
    assert router.weight.grad is not None
    for tensor in (probs, router.balance_loss, router.z_loss, router.weight.grad):
        assert tensor.isfinite().all()
    if scores == "softmax":
        assert (experts[:, 0] == (EXPERTS - 1 if size > 0 else 0)).all()


def test_casts_leave_the_bias_alone(alone: Axes) -> None:
    """In a bfloat16 model the bias is float32, bit for bit, and still moves by small steps."""
    router = make(alone, expert_bias=True).float()
    router.loss_scale = router.loss_scale.double()
    assert router.expert_bias is not None
    router.expert_bias.copy_(torch.tensor([1.001, -1.001, 0.3, 0.0]))
    before = router.expert_bias.clone()
    router.loss_scale.fill_(1 / 3)
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert torch.equal(router.expert_bias, before)
    assert router.loss_scale.item() == 1 / 3
    router.slots_per_expert.copy_(torch.tensor([7, 1, 4, 4]))
    router.update_bias(0.001)
    assert torch.equal(router.expert_bias, before + torch.tensor([-0.001, 0.001, 0.0, 0.0]))
    assert router.double().loss_scale.dtype == torch.float64


def test_a_router_from_the_meta_device_starts_anew(alone: Axes) -> None:
    """What torch leaves in memory is no bias, no load and no scale."""
    with torch.device("meta"):
        router = make_on_meta(alone)
    router.to_empty(device="cpu")
    assert router.expert_bias is not None
    assert not router.expert_bias.any()
    assert not router.slots_per_expert.any()
    assert router.loss_scale.item() == 1.0


def make_on_meta(axes: Axes) -> Router:
    return Router(moe_model(HIDDEN, EXPERTS, expert_bias=True), axes)


def test_without_any_valid_token_losses_are_zero(alone: Axes) -> None:
    """No division by zero."""
    router, x = make(alone), tokens()
    probs, _ = router(x, torch.zeros(TOKENS, dtype=torch.bool))
    probs.sum().backward()
    assert (router.balance_loss.item(), router.z_loss.item()) == (0.0, 0.0)
    assert router.weight.grad is not None
    assert not router.weight.grad.any()


def test_slots_are_counted_once_a_backward_pass(alone: Axes) -> None:
    """Evaluation counts nothing, recomputation counts once, and microbatches add up."""
    router, x = make(alone, expert_bias=True), tokens()
    with torch.no_grad():
        _, experts = router(x)
    due = torch.stack([(experts == e).sum() for e in range(EXPERTS)])
    assert not router.slots_per_expert.any()
    for number in (1, 2):
        probs: torch.Tensor = checkpoint(lambda x: router(x)[0], x, use_reentrant=False)
        probs.sum().backward()
        assert torch.equal(router.slots_per_expert, number * due)
    router(x)[0].sum().backward()
    assert torch.equal(router.slots_per_expert, 3 * due)


def test_the_bias_moves_towards_the_mean_load(alone: Axes) -> None:
    """Experts above the mean go down by the rate, those below up, those at the mean stay."""
    router = make(alone, expert_bias=True)
    assert router.expert_bias is not None
    router.slots_per_expert.copy_(torch.tensor([7, 1, 4, 4]))
    router.update_bias(0.125)
    assert router.expert_bias.tolist() == [-0.125, 0.125, 0.0, 0.0]
    assert not router.slots_per_expert.any()
    assert "expert_bias" in router.state_dict()
    assert router.expert_bias.grad_fn is None


def test_bfloat16_is_routed_in_float32(alone: Axes) -> None:
    """Logits, weights and losses are float32; bfloat16 logits would tie."""
    router, x = make(alone), tokens().detach().bfloat16()
    router.weight.data = router.weight.data.bfloat16()
    probs, experts = router(x)
    wide = make(alone)
    wide.weight.data = router.weight.data.float()
    expected_probs, expected_experts = wide(x.float())
    assert probs.dtype == torch.float32
    assert torch.equal(probs, expected_probs)
    assert torch.equal(experts, expected_experts)
