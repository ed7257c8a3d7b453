"""Losses of a router over the global batch, and how their gradient joins the backward pass.

With N valid tokens on all ranks that hold different tokens, K choices, E experts, n_e the slots of
expert e and p_se the share of expert e in token s (scores divided by their sum):

    balance   E * sum_e (n_e / (K N)) * (sum_s p_se / N)     Fedus, Zoph, Shazeer (2022), eq. 4
    z         sum_s logsumexp(logits_s)^2 / N                Zoph et al. (2022), eq. 5

Both are sums over tokens once n_e and N are known, so a rank needs the counts of all ranks and no
other gradient. Gradients of dense parameters are averaged over `num_averaged` ranks, so each rank's
part is multiplied by that number: the average then is the gradient of the loss of the whole batch,
whatever the layout. The losses join the backward pass through `attach_loss`, which leaves its first
argument alone.
"""

from typing import Any, NamedTuple

import torch

from fsdp_core.model.moe.routing import TINY, RouterRule
from fsdp_core.parallel.collectives import all_reduce
from fsdp_core.parallel.mesh import Axis


class RouterLosses(NamedTuple):
    """Losses of one microbatch.

    Attributes:
        part: this rank's part, scaled for the average over ranks; carries the gradient.
        balance, z: values over the global batch times their coefficients, no gradient.
    """

    part: torch.Tensor
    balance: torch.Tensor
    z: torch.Tensor


def router_losses(
    rule: RouterRule,
    logits_SE: torch.Tensor,
    scores_SE: torch.Tensor,
    counts_E: torch.Tensor,
    valid_S: torch.Tensor | None,
    axes: tuple[Axis, ...],
    num_averaged: int,
) -> RouterLosses:
    """The losses of the tokens of all ranks along `axes`.

    Args:
        counts_E: int64, slots of this rank that chose each expert.
        valid_S: bool, tokens that count; None means all do.
        num_averaged: ranks over which gradients of dense parameters are averaged.
    """
    shares_SE = scores_SE
    if rule.scores == "sigmoid":
        shares_SE = scores_SE / (scores_SE.sum(-1, keepdim=True) + TINY)
    squares_S = logits_SE.logsumexp(-1).square()
    if valid_S is None:
        num_valid = torch.full((1,), logits_SE.shape[0], device=logits_SE.device)
    else:
        num_valid = valid_S.sum().view(1)
        shares_SE = shares_SE.masked_fill(~valid_S[:, None], 0.0)
        squares_S = squares_S.masked_fill(~valid_S, 0.0)
    # One vector of all sums, in float64: counts are exact and layouts differ by float64 roundings.
    wide = torch.float64
    sums = torch.cat(
        [
            num_valid.to(wide),
            counts_E.to(wide),
            shares_SE.detach().sum(0, dtype=wide),
            squares_S.detach().sum(0, dtype=wide).view(1),
        ]
    )
    for axis in axes:
        sums = all_reduce(sums, axis)
    num_experts = rule.num_experts
    # A batch without any valid token has losses of zero.
    tokens = sums[0].clamp(min=1.0)
    counts, share_sums, square_sum = sums[1 : 1 + num_experts], sums[1 + num_experts : -1], sums[-1]
    slope_E = rule.aux_coeff * num_experts / rule.top_k * counts / tokens**2
    z_slope = rule.z_coeff / tokens
    dtype = logits_SE.dtype
    part = (shares_SE * (slope_E * num_averaged).to(dtype)).sum() + (
        squares_S.sum() * (z_slope * num_averaged).to(dtype)
    )
    return RouterLosses(part, (slope_E * share_sums).sum(), z_slope * square_sum)


def attach_loss(
    probs: torch.Tensor, part: torch.Tensor, scale: torch.Tensor, on_backward: Any
) -> torch.Tensor:
    """`probs` unchanged, with the gradient of `scale * part` added to the backward pass, once.

    Args:
        scale: scalar tensor, read in the backward pass: what the main loss is multiplied by.
        on_backward: called once in the backward pass. A forward pass may run twice (recompute) or
            without training, a backward pass runs once a microbatch.
    """
    result: torch.Tensor = _AttachLoss.apply(probs, part, scale, on_backward)
    return result


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, probs: torch.Tensor, part: torch.Tensor, scale: torch.Tensor, on_backward: Any
    ) -> torch.Tensor:
        # Kept beside autograd, which would refuse a scale that is set after the forward pass.
        ctx.scale, ctx.on_backward, ctx.dtype = scale, on_backward, part.dtype
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.on_backward()
        return grad, ctx.scale.to(ctx.dtype), None, None
