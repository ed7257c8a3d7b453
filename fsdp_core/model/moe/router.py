"""The router: scores every expert for every token and chooses the top K (graph scope moe_router).

S tokens of this rank, H hidden, E experts, K choices a token. Logits, scores and losses are float32
whatever the input's dtype (float64 for float64 inputs).
"""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.model.moe.axes import MoeAxes
from fsdp_core.model.moe.losses import attach_loss, router_losses
from fsdp_core.model.moe.places import count_slots
from fsdp_core.model.moe.replay import RoutingTape
from fsdp_core.model.moe.routing import RouterRule, Routing
from fsdp_core.parallel.collectives import all_reduce
from fsdp_core.parallel.tensor_parallel import reduce_replicated


class Router(nn.Module):
    """Tokens [S, H] -> weights and experts of their choices.

    The weight [E, H] is replicated. Under sequence parallel it sees this rank's part of the
    sequence, and its gradient is summed over tp in the backward pass. What rows of tokens that are
    not valid hold, be it NaN, reaches nothing.

    Buffers keep their dtypes when the model is cast to less than float32, in which a bias would
    lose small steps, and start anew when the model leaves the meta device:
        expert_bias: float32 [E], if the rule has one; part of the state dict.
        slots_per_expert: int64 [E], slots of this rank since the last `update_bias`, counted once a
            microbatch that went backward.
        loss_scale: float64, what the main loss is multiplied by before backward; the losses'
            gradients are multiplied by it when the backward pass reaches the router.
        balance_loss, z_loss: float32, values of the last forward pass over the global batch.

    Attributes:
        tape: routings to record or to replay; None uses the router's own choice.
    """

    weight: nn.Parameter
    expert_bias: torch.Tensor | None
    slots_per_expert: torch.Tensor
    loss_scale: torch.Tensor
    balance_loss: torch.Tensor
    z_loss: torch.Tensor

    def __init__(self, hidden: int, rule: RouterRule, axes: MoeAxes) -> None:
        super().__init__()
        self.rule, self._axes = rule, axes
        self.weight = nn.Parameter(torch.full((rule.num_experts, hidden), torch.nan))
        self.tape: RoutingTape | None = None
        bias = torch.zeros(rule.num_experts) if rule.expert_bias else None
        self.register_buffer("expert_bias", bias)
        counts = torch.zeros(rule.num_experts, dtype=torch.int64)
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

    def forward(self, x_SH: torch.Tensor, valid_S: torch.Tensor | None = None) -> Routing:
        """Route [S, H]; `valid_S` (bool) is false for tokens that are to go nowhere."""
        rule = self.rule
        dtype = torch.promote_types(x_SH.dtype, torch.float32)
        if valid_S is not None:
            # A gradient of zero times NaN is NaN, so masking what comes out is not enough.
            x_SH = x_SH.masked_fill(~valid_S[:, None], 0.0)
        weight = self.weight.to(dtype)
        if self._axes.sequence_parallel:
            (weight,) = reduce_replicated((weight,), self._axes.tp)
        logits_SE = F.linear(x_SH.to(dtype), weight)
        scores_SE = rule.score(logits_SE)
        experts_SK = rule.choose(scores_SE, self.expert_bias)
        experts_SK = self._nowhere_if_invalid(experts_SK, valid_S)
        if self.tape is not None:
            # A tape may come from a run with other padding.
            experts_SK = self._nowhere_if_invalid(self.tape.experts(experts_SK), valid_S)
        somewhere_SK = experts_SK < rule.num_experts
        probs_SK = rule.weigh(scores_SE, experts_SK.clamp(max=rule.num_experts - 1))
        probs_SK = probs_SK.masked_fill(~somewhere_SK, 0.0)
        if rule.watches_load:
            probs_SK = self._attach(logits_SE, scores_SE, probs_SK, experts_SK, valid_S)
        return Routing(probs_SK, experts_SK)

    def _nowhere_if_invalid(
        self, experts_SK: torch.Tensor, valid_S: torch.Tensor | None
    ) -> torch.Tensor:
        if valid_S is None:
            return experts_SK
        return experts_SK.masked_fill(~valid_S[:, None], self.rule.num_experts)

    def _attach(
        self,
        logits_SE: torch.Tensor,
        scores_SE: torch.Tensor,
        probs_SK: torch.Tensor,
        experts_SK: torch.Tensor,
        valid_S: torch.Tensor | None,
    ) -> torch.Tensor:
        rule, axes = self.rule, self._axes
        counts_E = count_slots(experts_SK, rule.num_experts)
        losses = router_losses(
            rule, logits_SE, scores_SE, counts_E, valid_S, axes.tokens, axes.num_averaged
        )
        self.balance_loss.copy_(losses.balance)
        self.z_loss.copy_(losses.z)

        def count() -> None:
            self.slots_per_expert.add_(counts_E)

        return attach_loss(probs_SK, losses.part, self.loss_scale.view(()), count)

    @torch.no_grad()
    def update_bias(self, rate: float) -> None:
        """Move the bias of experts with too few slots up by `rate`, of others down; then recount.

        Slots are those of all ranks since the last call. The rule is that of Wang et al. (2024),
        "Auxiliary-loss-free load balancing", algorithm 1. Call it once a step, on every rank.

        Raises:
            RuntimeError: the rule has no expert bias.
        """
        if self.expert_bias is None:
            raise RuntimeError("Expected a router with expert_bias, got one without.")
        counts_E = self.slots_per_expert.to(torch.float64)
        for axis in self._axes.tokens:
            counts_E = all_reduce(counts_E, axis)
        self.expert_bias.add_((counts_E.mean() - counts_E).sign(), alpha=rate)
        self.slots_per_expert.zero_()
