"""Shared experts: a SwiGLU network that every token passes, cut over tp.

A mixture of experts in stages, with nothing but tensors at the boundaries that graphs cut.

    x [B, T, H] --router_stage--> probs, experts, (shared output)       scope moe_router
                --preprocess----> plan                                  scope moe_preprocess
                --dispatch------> rows at their experts
                --experts-------> rows
                --combine-------> y [B, T, H]                           all of it: scope moe

Scope moe needs a capacity factor: every shape is static then and nothing is read on the host. B
batch, T local time, S = B * T tokens of this rank in the order of B, then T, H hidden.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.model.moe.dispatcher import Combine, Delivery, Dispatch, MoeAxes, Plan, Preprocess
from fsdp_core.model.moe.experts import Experts
from fsdp_core.model.moe.router import Router, RouterRule
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.tensor_parallel import ColumnLinear, RowLinear, enter, reduce_replicated


class SharedExperts(nn.Module):
    """[B, T, H] -> [B, T, H]; with `gated`, times a sigmoid of one number a token.

    The shared experts of a model are one network of their summed width. Under sequence parallel T
    is cut over tp, and the gradient of the gate's weight, which sees this rank's part, is summed
    over tp in the backward pass.
    """

    share_weight: nn.Parameter | None

    def __init__(
        self, hidden: int, ffn: int, tp: Axis, *, sequence_parallel: bool, gated: bool = False
    ) -> None:
        super().__init__()
        self._tp, self._sequence_parallel = tp, sequence_parallel
        self.gate = ColumnLinear(hidden, ffn, tp, sequence_parallel=sequence_parallel)
        self.up = ColumnLinear(hidden, ffn, tp, sequence_parallel=sequence_parallel)
        self.down = RowLinear(ffn, hidden, tp, sequence_parallel=sequence_parallel)
        weight = nn.Parameter(torch.full((1, hidden), torch.nan)) if gated else None
        self.register_parameter("share_weight", weight)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]; the gate is computed in float32."""
        whole = enter(x_BTH, self._tp, sequence_parallel=self._sequence_parallel)
        inner = F.silu(self.gate(whole, entered=True)) * self.up(whole, entered=True)
        out: torch.Tensor = self.down(inner)
        if self.share_weight is None:
            return out
        dtype = torch.promote_types(x_BTH.dtype, torch.float32)
        weight = self.share_weight.to(dtype)
        if self._sequence_parallel:
            (weight,) = reduce_replicated((weight,), self._tp)
        share = F.linear(x_BTH.to(dtype), weight).sigmoid()
        return (out * share).to(out.dtype)


class Routed(NamedTuple):
    """What crosses after the router stage.

    Attributes:
        probs: float32 [S, K], connected to the router by autograd.
        experts: int64 [S, K].
        shared: output of the shared experts, None without them.
    """

    probs: torch.Tensor
    experts: torch.Tensor
    shared: torch.Tensor | None


class MoeLayer(nn.Module):
    """Routed experts plus shared ones: [B, T, H] -> [B, T, H].

    Args:
        ffn: feed-forward width of one expert.
        path: how experts multiply, see `experts`.
        shared: shared experts, if the model has some.
        experts: what computes rows of experts, in place of `experts.Experts`.

    Raises:
        ValueError: sizes that the axes do not divide.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        rule: RouterRule,
        axes: MoeAxes,
        *,
        delivery: Delivery,
        path: str = "auto",
        shared: nn.Module | None = None,
        experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.router = Router(hidden, rule, axes)
        self.preprocess = Preprocess(rule.num_experts, delivery, axes)
        self.dispatch = Dispatch(delivery, axes)
        made = experts or Experts(rule.num_experts, hidden, ffn, axes, path)
        self.experts: nn.Module = made
        self.combine = Combine(delivery, axes)
        self.shared = shared

    def forward(self, x_BTH: torch.Tensor, valid_BT: torch.Tensor | None = None) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]; rows of zeros for tokens whose `valid_BT` (bool) is false.

        What such tokens hold, be it NaN, reaches no other token and no gradient of a weight.

        Raises:
            RuntimeError: dropless while a CUDA graph is captured.
        """
        routed = self.router_stage(x_BTH, valid_BT)
        plan = self.preprocess(routed.experts, routed.probs)
        return self.experts_stage(x_BTH, routed, plan)

    def router_stage(self, x_BTH: torch.Tensor, valid_BT: torch.Tensor | None = None) -> Routed:
        """Router and shared experts."""
        valid_S = None if valid_BT is None else valid_BT.flatten()
        routing = self.router(x_BTH.flatten(0, 1), valid_S)
        shared_BTH = None
        if self.shared is not None:
            if valid_BT is not None:
                x_BTH = x_BTH.masked_fill(~valid_BT[..., None], 0.0)
            shared_BTH = self.shared(x_BTH)
        return Routed(routing.probs, routing.experts, shared_BTH)

    def experts_stage(self, x_BTH: torch.Tensor, routed: Routed, plan: Plan) -> torch.Tensor:
        """Dispatch, experts, combine, and the shared output added."""
        rows, groups = self.dispatch(x_BTH.flatten(0, 1), plan)
        rows = self.experts(rows, groups)
        y_BTH = self.combine(rows, routed.probs, plan, groups).view(x_BTH.shape)
        return y_BTH if routed.shared is None else y_BTH + routed.shared
