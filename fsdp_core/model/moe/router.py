"""The router: scores every expert for every token and chooses the top K (graph scope moe_router).

Logits, scores and losses are float32 whatever the input's dtype (float64 for float64 inputs). With
N valid tokens on all ranks that hold different tokens, n_e the slots of expert e and p_se the share
of expert e in token s (scores divided by their sum):

    balance   E * sum_e (n_e / (K N)) * (sum_s p_se / N)     Fedus, Zoph, Shazeer (2022), eq. 4
    z         sum_s logsumexp(logits_s)^2 / N                Zoph et al. (2022), eq. 5

Both are sums over tokens once n_e and N are known, so a rank needs the counts of all ranks and no
other gradient. Gradients of dense parameters are averaged over `num_averaged` ranks, so each rank's
part is multiplied by that number: the average then is the gradient of the loss of the whole batch,
whatever the layout. S tokens of this rank, H hidden, E experts, K choices a token.
"""

import functools
from collections.abc import Callable
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.config import ModelConfig
from fsdp_core.model.moe.dispatcher import count_slots
from fsdp_core.parallel.mesh import Axes, all_reduce
from fsdp_core.parallel.tensor_parallel import reduce_replicated

Pair = tuple[torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
TINY = 1e-20
"""Keeps the sum of sigmoid scores that all underflowed from dividing zero by zero."""


def watches_load(model: ModelConfig) -> bool:
    """Whether a router has losses or a bias."""
    return model.aux_loss > 0 or model.z_loss > 0 or model.expert_bias


def score(model: ModelConfig, logits_SE: torch.Tensor) -> torch.Tensor:
    """Scores of all experts, [S, E]."""
    return logits_SE.softmax(-1) if model.score == "softmax" else logits_SE.sigmoid()


def choose(
    model: ModelConfig, scores_SE: torch.Tensor, bias_E: torch.Tensor | None
) -> torch.Tensor:
    """The top_k experts of each token by score plus bias, int64 [S, K]. Of equal scores the expert
    of the lowest number wins, on every device and at every size: a stable sort says so, `topk`
    leaves it open.
    """
    ranked = scores_SE.detach()
    if bias_E is not None:
        ranked = ranked + bias_E
    return ranked.sort(dim=-1, descending=True, stable=True).indices[:, : model.top_k]


def weigh(model: ModelConfig, scores_SE: torch.Tensor, experts_SK: torch.Tensor) -> torch.Tensor:
    """Weights of the chosen experts, [S, K]."""
    chosen = scores_SE.gather(1, experts_SK)
    if model.normalise_top_k:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + TINY)
    return chosen * model.route_scale


# ---- losses


def router_losses(
    model: ModelConfig, logits_SE: torch.Tensor, scores_SE: torch.Tensor, counts_E: torch.Tensor,
    valid_S: torch.Tensor | None, axes: Axes,
) -> Three:  # fmt: skip
    """The losses of the tokens of all ranks: this rank's part, scaled for the average over ranks,
    which carries the gradient; and the values of the balance loss and the z-loss over the global
    batch times their coefficients, no gradient.

    counts_E: int64, slots of this rank that chose each expert.
    valid_S: bool, tokens that count; None means all do.
    """
    shares_SE = scores_SE
    if model.score == "sigmoid":
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
    for axis in axes.tokens:
        sums = all_reduce(sums, axis)
    num_experts = model.experts
    # A batch without any valid token has losses of zero.
    tokens = sums[0].clamp(min=1.0)
    counts, share_sums, square_sum = sums[1 : 1 + num_experts], sums[1 + num_experts : -1], sums[-1]
    slope_E = model.aux_loss * num_experts / model.top_k * counts / tokens**2
    z_slope = model.z_loss / tokens
    dtype = logits_SE.dtype
    part = (shares_SE * (slope_E * axes.num_averaged).to(dtype)).sum() + (
        squares_S.sum() * (z_slope * axes.num_averaged).to(dtype)
    )
    return part, (slope_E * share_sums).sum(), z_slope * square_sum


def attach_loss(
    probs: torch.Tensor, part: torch.Tensor, scale: torch.Tensor, on_backward: Any
) -> torch.Tensor:
    """`probs` unchanged, with the gradient of `scale * part` added to the backward pass, once.
    `scale`: scalar tensor, read in the backward pass: what the main loss is multiplied by.
    `on_backward`: called once in the backward pass. A forward pass may run twice (recompute) or
    without training, a backward pass runs once a microbatch.
    """
    return cast("torch.Tensor", _AttachLoss.apply(probs, part, scale, on_backward))


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


# ---- the module


class Router(nn.Module):
    """Tokens [S, H] -> weights and experts of their choices.

    The weight [E, H] is replicated. Under sequence parallel it sees this rank's part of the
    sequence, and its gradient is summed over tp in the backward pass. What rows of tokens that are
    not valid hold, be it NaN, reaches nothing.

    Buffers keep their dtypes when the model is cast to less than float32, in which a bias would
    lose small steps, and start anew when the model leaves the meta device:
        expert_bias: float32 [E], if the model has one; part of the state dict.
        slots_per_expert: int64 [E], slots of this rank since the last `update_bias`, counted once a
            microbatch that went backward.
        loss_scale: float64, what the main loss is multiplied by before backward; the losses'
            gradients are multiplied by it when the backward pass reaches the router.
        balance_loss, z_loss: float32, values of the last forward pass over the global batch.
    """

    weight: nn.Parameter
    expert_bias: torch.Tensor | None
    slots_per_expert: torch.Tensor
    loss_scale: torch.Tensor
    balance_loss: torch.Tensor
    z_loss: torch.Tensor

    def __init__(self, model: ModelConfig, axes: Axes) -> None:
        super().__init__()
        self.model, self._axes = model, axes
        self.weight = nn.Parameter(torch.full((model.experts, model.hidden), torch.nan))
        bias = torch.zeros(model.experts) if model.expert_bias else None
        self.register_buffer("expert_bias", bias)
        counts = torch.zeros(model.experts, dtype=torch.int64)
        self.register_buffer("slots_per_expert", counts, persistent=False)
        # Not a scalar: the compiler would read it on the host, and guard what it read.
        self.register_buffer("loss_scale", torch.ones(1, dtype=torch.float64), persistent=False)
        self.register_buffer("balance_loss", torch.zeros(()), persistent=False)
        self.register_buffer("z_loss", torch.zeros(()), persistent=False)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002  (torch's signature)
        held = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, old in held.items():
            new = self._buffers[name]
            assert new is not None
            if old.is_meta and not new.is_meta:
                self._buffers[name] = torch.full_like(new, float(name == "loss_scale"))
            elif new.is_floating_point() and new.itemsize < torch.float32.itemsize:
                self._buffers[name] = old.to(new.device)
        return self

    def forward(self, x_SH: torch.Tensor, valid_S: torch.Tensor | None = None) -> Pair:
        """Route [S, H]; `valid_S` (bool) is false for tokens that are to go nowhere.

        Returns the weight of each choice, float32 (float64 for float64 inputs) [S, K], connected to
        the router's weight by autograd, zero for tokens that are not valid; and int64 [S, K],
        distinct experts by falling score, for those tokens the number of experts, which is nowhere.
        """
        model = self.model
        dtype = torch.promote_types(x_SH.dtype, torch.float32)
        if valid_S is not None:
            # A gradient of zero times NaN is NaN, so masking what comes out is not enough.
            x_SH = x_SH.masked_fill(~valid_S[:, None], 0.0)
        weight = self.weight.to(dtype)
        if self._axes.tp.cuts_sequence:
            weight = reduce_replicated(weight, self._axes.tp)
        logits_SE = F.linear(x_SH.to(dtype), weight)
        scores_SE = score(model, logits_SE)
        experts_SK = choose(model, scores_SE, self.expert_bias)
        experts_SK = self._without_invalid(experts_SK, valid_S)
        somewhere_SK = experts_SK < model.experts
        probs_SK = weigh(model, scores_SE, experts_SK.clamp(max=model.experts - 1))
        probs_SK = probs_SK.masked_fill(~somewhere_SK, 0.0)
        if watches_load(model):
            probs_SK = self._attach(logits_SE, scores_SE, probs_SK, experts_SK, valid_S)
        return probs_SK, experts_SK

    def _without_invalid(
        self, experts_SK: torch.Tensor, valid_S: torch.Tensor | None
    ) -> torch.Tensor:
        if valid_S is None:
            return experts_SK
        return experts_SK.masked_fill(~valid_S[:, None], self.model.experts)

    def _attach(
        self, logits_SE: torch.Tensor, scores_SE: torch.Tensor, probs_SK: torch.Tensor,
        experts_SK: torch.Tensor, valid_S: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        counts_E = count_slots(experts_SK, self.model.experts)
        part, balance, z = router_losses(
            self.model, logits_SE, scores_SE, counts_E, valid_S, self._axes
        )
        self.balance_loss.copy_(balance)
        self.z_loss.copy_(z)
        count = functools.partial(self.slots_per_expert.add_, counts_E)
        return attach_loss(probs_SK, part, self.loss_scale.view(()), count)

    @torch.no_grad()
    def update_bias(self, rate: float) -> None:
        """Move the bias of experts with too few slots up by `rate`, of others down; then recount.
        Slots are those of all ranks since the last call. The rule is that of Wang et al. (2024),
        "Auxiliary-loss-free load balancing", algorithm 1. Call it once a step, on every rank.
        """
        assert self.expert_bias is not None
        counts_E = self.slots_per_expert.to(torch.float64)
        for axis in self._axes.tokens:
            counts_E = all_reduce(counts_E, axis)
        self.expert_bias.add_((counts_E.mean() - counts_E).sign(), alpha=rate)
        self.slots_per_expert.zero_()
