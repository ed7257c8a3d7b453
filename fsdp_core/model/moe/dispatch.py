"""Dispatch: each token's row to the ranks of its experts.

Rows leave it in one order under either dispatcher, so experts compute the same bits: by local
expert, then by source rank of ep, then by token. Sizes as in `preprocess`.

| | rows | groups |
| --- | --- | --- |
| dropless | [n, H], n rows on this rank now | `Groups`, read on the host |
| capacity | [L, P * C, H], zero where a place is empty | None |
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from fsdp_core.model.moe.axes import MoeAxes
from fsdp_core.model.moe.places import assign_places
from fsdp_core.model.moe.preprocess import Delivery, Plan
from fsdp_core.model.moe.rows import reorder_rows, take_rows
from fsdp_core.parallel.collectives import all_to_all, copy_to, gather_from


@dataclass(frozen=True)
class Groups:
    """Sizes of one dropless forward pass, on the host, and what follows from them.

    Attributes:
        counts: rows of each local expert.
        ends: int32 [L] on the device, the running sum of `counts`.
        sent, received: rows to and from each rank of ep; empty for all_gather.
        order, inverse: int64, from the order in which rows arrive to that of experts and back;
            None for all_gather, whose rows need no reordering.
    """

    counts: tuple[int, ...]
    ends: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: torch.Tensor | None
    inverse: torch.Tensor | None

    @property
    def num_rows(self) -> int:
        """Rows that this rank's experts get."""
        return sum(self.counts)


class Dispatched(NamedTuple):
    """Rows by expert; see the module's table."""

    rows: torch.Tensor
    groups: Groups | None


class Dispatch(nn.Module):
    """Tokens [S, H] and their plan -> rows at their experts."""

    def __init__(self, delivery: Delivery, axes: MoeAxes) -> None:
        super().__init__()
        self.delivery, self._axes = delivery, axes

    def forward(self, x_SH: torch.Tensor, plan: Plan) -> Dispatched:
        """Send [S, H].

        Raises:
            RuntimeError: dropless while a CUDA graph is captured; give a capacity factor.
        """
        axes, delivery = self._axes, self.delivery
        x_MH = enter_etp(x_SH, axes)
        if delivery.gathers:
            x_MH = gather_from(x_MH, axes.ep, 0)
        if delivery.capacity_factor is not None:
            return Dispatched(self._static(x_MH, plan), None)
        groups = read_groups(plan)
        if delivery.gathers:
            slots = plan.slot_of_place[: groups.num_rows]
            return Dispatched(take_rows(x_MH, slots, plan.place_of_slot), groups)
        slots = plan.slot_of_place[: sum(groups.sent)]
        rows = take_rows(x_MH, slots, plan.place_of_slot)
        rows = all_to_all(rows, axes.ep, groups.sent, groups.received)
        assert groups.order is not None
        assert groups.inverse is not None
        return Dispatched(reorder_rows(rows, groups.order, groups.inverse), groups)

    def _static(self, x_MH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """[M, H] -> [L, P * C, H]."""
        axes = self._axes
        rows = take_rows(x_MH, plan.slot_of_place, plan.place_of_slot)
        hidden = rows.shape[1]
        if self.delivery.gathers:
            return rows.view(plan.received.shape[1], -1, hidden)
        num_local = plan.sent.shape[1]
        rows = all_to_all(rows, axes.ep).view(axes.ep.size, num_local, -1, hidden)
        return rows.transpose(0, 1).reshape(num_local, -1, hidden)


def enter_etp(x_SH: torch.Tensor, axes: MoeAxes) -> torch.Tensor:
    """Rows [S, ...] of all tokens of an etp group, [D, ...], for ranks that each have a slice."""
    if axes.etp_shares_tokens:
        return copy_to(x_SH, axes.etp)
    return gather_from(x_SH, axes.etp, 0)


def read_groups(plan: Plan) -> Groups:
    """Read the sizes of a dropless plan: the one place where the host waits for the device.

    Raises:
        RuntimeError: while a CUDA graph is captured.
    """
    device = plan.received.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "Expected drop-and-pad (a capacity factor) inside a captured graph, got dropless "
            "dispatch, whose sizes the host must read."
        )
    num_ranks, num_local = plan.received.shape
    counts_L = plan.received.sum(0)
    sizes = torch.cat([counts_L, plan.sent.sum(-1), plan.received.sum(-1)]).tolist()
    counts, between = tuple(sizes[:num_local]), sizes[num_local:]
    ends = counts_L.cumsum(0, dtype=torch.int32)
    if not plan.sent.numel():
        return Groups(counts, ends, (), (), None, None)
    sent, received = tuple(between[:num_ranks]), tuple(between[num_ranks:])
    experts = torch.arange(num_local, device=device).repeat(num_ranks)
    expert_of_row = experts.repeat_interleave(plan.received.flatten(), output_size=sum(received))
    places = assign_places(expert_of_row, num_local)
    return Groups(counts, ends, sent, received, places.slot_of_place, places.place_of_slot)
