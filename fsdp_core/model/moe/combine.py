"""Combine: experts' outputs back to their tokens, weighted and summed.

Rows travel in the compute dtype; weights and sums, those over etp (and, for all_gather, over ep)
included, are float32 (float64 for float64), and only their result is rounded to the compute dtype.
A token's terms are added in the order of its choices. `all_gather` adds the choices of one rank of
ep in that order and then the ranks' sums: with up to two choices the bits are those of
`all_to_all`, but for the sign of a zero.
"""

import torch
from torch import nn

from fsdp_core.model.moe.axes import MoeAxes
from fsdp_core.model.moe.dispatch import Groups, enter_etp
from fsdp_core.model.moe.preprocess import Delivery, Plan
from fsdp_core.model.moe.rows import reorder_rows, weighted_sum
from fsdp_core.parallel.collectives import (
    all_to_all,
    gather_from,
    reduce_from,
    reduce_scatter_to,
)


class Combine(nn.Module):
    """Rows at their experts and the tokens' weights -> tokens [S, H] in the order they came in."""

    def __init__(self, delivery: Delivery, axes: MoeAxes) -> None:
        super().__init__()
        self.delivery, self._axes = delivery, axes

    def forward(
        self, rows: torch.Tensor, probs_SK: torch.Tensor, plan: Plan, groups: Groups | None
    ) -> torch.Tensor:
        """Rows as `Dispatch` laid them out -> [S, H] in the rows' dtype."""
        axes, delivery = self._axes, self.delivery
        weights_MK = enter_etp(probs_SK, axes)
        if delivery.gathers:
            weights_MK = gather_from(weights_MK, axes.ep, 0)
        returned = self._return(rows, groups)
        slots = plan.slot_of_place[: returned.shape[0]]
        y_MH = weighted_sum(returned, weights_MK, slots, plan.place_of_slot)
        if delivery.gathers:
            y_MH = reduce_scatter_to(y_MH, axes.ep, 0)
        if axes.etp_shares_tokens:
            y_SH = reduce_from(y_MH, axes.etp)
        else:
            y_SH = reduce_scatter_to(y_MH, axes.etp, 0)
        return y_SH.to(rows.dtype)

    def _return(self, rows: torch.Tensor, groups: Groups | None) -> torch.Tensor:
        """Rows in the order of the plan's places, at the rank that weighs them."""
        axes, hidden = self._axes, rows.shape[-1]
        if groups is None:
            if self.delivery.gathers:
                return rows.reshape(-1, hidden)
            by_source = rows.view(rows.shape[0], axes.ep.size, -1, hidden).transpose(0, 1)
            return all_to_all(by_source.reshape(-1, hidden), axes.ep)
        if self.delivery.gathers:
            return rows
        assert groups.order is not None
        assert groups.inverse is not None
        arrived = reorder_rows(rows, groups.inverse, groups.order)
        return all_to_all(arrived, axes.ep, groups.received, groups.sent)
