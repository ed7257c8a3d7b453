"""One process with the whole weights and all tokens: what every layout must compute.

Written token by token, from the formulas alone: no permutation, no batched product, nothing of the
code under test but the rule's settings. N tokens, H hidden, F width of an expert, E experts, K
choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fsdp_core.model.moe.router import RouterRule

Weights = dict[str, torch.Tensor]

NUM_EXPERTS, HIDDEN, FFN, SHARED_FFN = 8, 16, 16, 8
BATCH, TIME = 8, 4


@dataclass(frozen=True)
class Problem:
    """Global weights and data, each exact in bfloat16.

    Attributes:
        x: [BATCH, TIME, H].
        cotangent: gradient of the mean loss with respect to the output, times its weight.
        valid: bool [BATCH, TIME], None where all tokens are.
    """

    rule: RouterRule
    weights: Weights
    x: torch.Tensor
    cotangent: torch.Tensor
    bias: torch.Tensor | None
    valid: torch.Tensor | None


def draw(shape: Sequence[int], seed: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers, float64, each exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().double()


def problem(rule: RouterRule, *, seed: int = 1, masked: bool = False) -> Problem:
    """A problem for `rule`; `masked` makes some tokens invalid, all of the first sequence too."""
    shapes = {
        "router.weight": (NUM_EXPERTS, HIDDEN),
        "experts.gate.weight": (NUM_EXPERTS, FFN, HIDDEN),
        "experts.up.weight": (NUM_EXPERTS, FFN, HIDDEN),
        "experts.down.weight": (NUM_EXPERTS, HIDDEN, FFN),
        "shared.gate.weight": (SHARED_FFN, HIDDEN),
        "shared.up.weight": (SHARED_FFN, HIDDEN),
        "shared.down.weight": (HIDDEN, SHARED_FFN),
        "shared.share_weight": (1, HIDDEN),
    }
    weights = {
        name: draw(shape, 100 * seed + number, scale=shape[-1] ** -0.5)
        for number, (name, shape) in enumerate(shapes.items())
    }
    valid = None
    if masked:
        valid = torch.rand(BATCH, TIME, generator=torch.Generator().manual_seed(seed)) > 0.3
        valid[0] = False
    bias = draw((NUM_EXPERTS,), seed + 50, 0.05) if rule.expert_bias else None
    shape = (BATCH, TIME, HIDDEN)
    return Problem(rule, weights, draw(shape, seed + 51), draw(shape, seed + 52), bias, valid)


def route(
    rule: RouterRule,
    weight: torch.Tensor,
    x_nh: torch.Tensor,
    bias: torch.Tensor | None,
    valid_n: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, scores, and the experts of each token: the highest scores, the first of equals."""
    logits = x_nh @ weight.t()
    if rule.scores == "softmax":
        scores = logits.exp() / logits.exp().sum(-1, keepdim=True)
    else:
        scores = 1 / (1 + (-logits).exp())
    ranked = scores.detach() if bias is None else scores.detach() + bias
    experts = []
    for n, row in enumerate(ranked.tolist()):
        best = sorted(range(rule.num_experts), key=lambda e: (-row[e], e))[: rule.top_k]
        lost = valid_n is not None and not bool(valid_n[n])
        experts.append([rule.num_experts] * rule.top_k if lost else best)
    return logits, scores, torch.tensor(experts)


def losses(
    rule: RouterRule,
    logits: torch.Tensor,
    scores: torch.Tensor,
    experts: torch.Tensor,
    valid_n: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Balance and z-loss of all tokens, with their coefficients."""
    chosen = torch.arange(len(logits)) if valid_n is None else valid_n.nonzero()[:, 0]
    num = max(len(chosen), 1)
    balance = logits.new_zeros(())
    for e in range(rule.num_experts):
        slots = (experts[chosen] == e).sum().item()
        share = (scores[chosen, e] / scores[chosen].sum(-1)).sum()
        balance = balance + slots / (rule.top_k * num) * share / num
    z = (logits[chosen].exp().sum(-1).log() ** 2).sum() / num
    return rule.aux_coeff * rule.num_experts * balance, rule.z_coeff * z


def swiglu(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """One expert on rows [n, H]."""
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def forward(
    task: Problem, weights: Weights, x: torch.Tensor, kept_nk: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output [BATCH, TIME, H], experts [N, K], balance loss, z-loss.

    `kept_nk` (bool [N, K]) is false for choices that a capacity drops.
    """
    rule, x_nh = task.rule, x.flatten(0, 1)
    valid = None if task.valid is None else task.valid.flatten()
    if valid is not None:
        x_nh = x_nh * valid[:, None]
    logits, scores, experts = route(rule, weights["router.weight"], x_nh, task.bias, valid)
    rows = []
    for n, token in enumerate(x_nh):
        picked = [e for e in experts[n].tolist() if e < rule.num_experts]
        total = scores[n, picked].sum() if rule.normalised else 1.0
        y = torch.zeros_like(token)
        for k, e in enumerate(picked):
            if kept_nk is not None and not bool(kept_nk[n, k]):
                continue
            mats = [weights[f"experts.{name}.weight"][e] for name in ("gate", "up", "down")]
            y = y + rule.scale * scores[n, e] / total * swiglu(token[None], *mats)[0]
        rows.append(y)
    mats = [weights[f"shared.{name}.weight"] for name in ("gate", "up", "down")]
    share = (x_nh @ weights["shared.share_weight"].t()).sigmoid()
    y_nh = torch.stack(rows) + swiglu(x_nh, *mats) * share
    return (y_nh.view_as(x), experts, *losses(rule, logits, scores, experts, valid))


@dataclass(frozen=True)
class Expected:
    """What one process computes, float64. `grads` has the weights' and that of "x"."""

    y: torch.Tensor
    experts: torch.Tensor
    balance: float
    z: float
    grads: Weights


def expected(task: Problem, kept_nk: torch.Tensor | None = None) -> Expected:
    """Output and gradients of sum(y * cotangent) + balance + z."""
    weights = {name: weight.clone().requires_grad_() for name, weight in task.weights.items()}
    x = task.x.clone().requires_grad_()
    y, experts, balance, z = forward(task, weights, x, kept_nk)
    ((y * task.cotangent).sum() + balance + z).backward()
    grads = {"x": x, **weights}
    return Expected(
        y.detach(),
        experts,
        balance.item(),
        z.item(),
        {n: t.grad if t.grad is not None else torch.zeros_like(t) for n, t in grads.items()},
    )


def kept_by_position(
    experts_nk: torch.Tensor, sources: list[list[int]], capacity: int
) -> torch.Tensor:
    """Which choices stay, if each source keeps `capacity` rows an expert, the first ones.

    `sources` lists the tokens of each source in its own order.
    """
    kept = torch.zeros_like(experts_nk, dtype=torch.bool)
    for tokens in sources:
        used = dict.fromkeys(range(NUM_EXPERTS), 0)
        for n in tokens:
            for k, e in enumerate(experts_nk[n].tolist()):
                if e < NUM_EXPERTS and used[e] < capacity:
                    used[e] += 1
                    kept[n, k] = True
    return kept
