"""A mixture of experts in stages, with nothing but tensors at the boundaries that graphs cut.

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
from torch import nn

from fsdp_core.model.moe.dispatcher import Combine, Delivery, Dispatch, MoeAxes, Plan, Preprocess
from fsdp_core.model.moe.router import Router, RouterRule


class Routed(NamedTuple):
    """What crosses after the router stage.

    probs: float32 [S, K], connected to the router by autograd.
    experts: int64 [S, K].
    shared: output of the shared experts, None without them.
    """

    probs: torch.Tensor
    experts: torch.Tensor
    shared: torch.Tensor | None


class MoeLayer(nn.Module):
    """Routed experts plus shared ones: [B, T, H] -> [B, T, H]. `experts`: computes rows of experts
    as `experts.Experts` does. `shared`: what every token passes, if the model has some
    (`ValueError`: sizes that the axes do not divide).
    """

    def __init__(
        self, hidden: int, rule: RouterRule, axes: MoeAxes,
        *, delivery: Delivery, experts: nn.Module, shared: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.router = Router(hidden, rule, axes)
        self.preprocess = Preprocess(rule.num_experts, delivery, axes)
        self.dispatch = Dispatch(delivery, axes)
        self.experts = experts
        self.combine = Combine(delivery, axes)
        self.shared = shared

    def forward(self, x_BTH: torch.Tensor, valid_BT: torch.Tensor | None = None) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]; rows of zeros for tokens whose `valid_BT` (bool) is false. What
        such tokens hold, be it NaN, reaches no other token and no gradient of a weight
        (`RuntimeError`: dropless while a CUDA graph is captured).
        """
        routed = self.router_stage(x_BTH, valid_BT)
        plan = self.preprocess(routed.experts, routed.probs)
        return self.experts_stage(x_BTH, routed, plan)

    def router_stage(self, x_BTH: torch.Tensor, valid_BT: torch.Tensor | None = None) -> Routed:
        """Router and shared experts."""
        valid_S = None if valid_BT is None else valid_BT.flatten()
        probs, experts = self.router(x_BTH.flatten(0, 1), valid_S)
        shared_BTH = None
        if self.shared is not None:
            if valid_BT is not None:
                x_BTH = x_BTH.masked_fill(~valid_BT[..., None], 0.0)
            shared_BTH = self.shared(x_BTH)
        return Routed(probs, experts, shared_BTH)

    def experts_stage(self, x_BTH: torch.Tensor, routed: Routed, plan: Plan) -> torch.Tensor:
        """Dispatch, experts, combine, and the shared output added."""
        rows, groups = self.dispatch(x_BTH.flatten(0, 1), plan)
        rows = self.experts(rows, groups)
        y_BTH = self.combine(rows, routed.probs, plan, groups).view(x_BTH.shape)
        return y_BTH if routed.shared is None else y_BTH + routed.shared
