"""Preprocess: from chosen experts to places and counts (graph scope moe_preprocess).

Its output is integers alone, of shapes that do not depend on them. S tokens of this rank; D of one
etp group (S times etp where its ranks hold different tokens, else S), in the order of etp ranks; P
ranks of ep, L experts a rank, E = P * L, K choices, C capacity.

| dispatcher | tokens M | a rank's places, in order | sent | received |
| --- | --- | --- | --- | --- |
| all_to_all, dropless | D | D * K: expert, token | [P, L] | [P, L] |
| all_to_all, capacity | D | E * C: expert, column | [P, L] | [0, L] |
| all_gather, dropless | P * D | P * D * K: local expert, source rank, token | [0, L] | [P, L] |
| all_gather, capacity | P * D | L * P * C: local expert, source rank, column | [0, L] | [P, L] |

Capacity is per expert and source etp group: C = ceil(D * K / E * factor). What does not fit is
dropped: with drop "position" the later tokens of the source (order of etp ranks, then of B, then of
T), with drop "probs" those of the smallest weight, the later of equals. A dropped choice adds
nothing to its token.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import nn

from fsdp_core.model.moe.axes import MoeAxes
from fsdp_core.model.moe.places import Places, assign_places
from fsdp_core.parallel.collectives import all_gather, all_to_all

DISPATCHERS = ("all_to_all", "all_gather")
DROPS = ("position", "probs")


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """How rows travel to experts.

    Attributes:
        dispatcher: `all_to_all` sends each row to its expert's rank; `all_gather` gives every
            token to every rank of ep, and sums what comes back.
        capacity_factor: None is dropless: sizes depend on the data, so the host reads them, once a
            forward pass, and no graph can hold it. A number makes every shape static.
        drop: which rows are dropped past the capacity, see the module.

    Raises:
        ValueError: a value out of range.
    """

    dispatcher: str = "all_to_all"
    capacity_factor: float | None = None
    drop: str = "position"

    def __post_init__(self) -> None:
        if self.dispatcher not in DISPATCHERS:
            raise ValueError(f"Expected dispatcher in {DISPATCHERS}, got {self.dispatcher!r}.")
        if self.drop not in DROPS:
            raise ValueError(f"Expected drop in {DROPS}, got {self.drop!r}.")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ValueError(f"Expected a finite capacity_factor > 0, got {self.capacity_factor}.")

    @property
    def gathers(self) -> bool:
        """Whether every rank of ep gets every token."""
        return self.dispatcher == "all_gather"

    def capacity(self, num_slots: int, num_experts: int) -> int | None:
        """Rows of one expert from one source of `num_slots` slots; None if there is no limit."""
        if self.capacity_factor is None:
            return None
        # Exact, of the decimal number that was written: 100 slots of 10 experts at 1.1 are 11 rows,
        # which a product of floats makes 11.000000000000002, and so 12.
        above, below = _ratio(self.capacity_factor)
        return max(1, -(-num_slots * above // (below * num_experts)))


@torch.compiler.assume_constant_result  # which the compiler could not follow
def _ratio(decimal: float) -> tuple[int, int]:
    return Fraction(str(decimal)).as_integer_ratio()


class Plan(NamedTuple):
    """Where rows go; int64, see the module's table.

    Attributes:
        slot_of_place: [places].
        place_of_slot: [M, K].
        sent: slots of this rank (its etp group) for each rank and expert of ep, dropped ones too.
        received: the same of each rank of ep for this rank's experts.
    """

    slot_of_place: torch.Tensor
    place_of_slot: torch.Tensor
    sent: torch.Tensor
    received: torch.Tensor


class Preprocess(nn.Module):
    """Experts of this rank's slots -> `Plan`. Talks to the ranks of ep and etp; no gradient.

    Buffers:
        dropped: int64 scalar, slots that the last forward pass dropped for want of capacity: of
            this rank's tokens (all_to_all) or to its experts (all_gather). Ranks of an etp group
            have the same; the sum over ep is that of the group's tokens under both dispatchers.
    """

    dropped: torch.Tensor

    def __init__(self, num_experts: int, delivery: Delivery, axes: MoeAxes) -> None:
        super().__init__()
        self.num_experts, self.delivery, self._axes = num_experts, delivery, axes
        self.num_local = axes.local_experts(num_experts)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def forward(self, experts_SK: torch.Tensor, probs_SK: torch.Tensor) -> Plan:
        """Plan the way of int64 [S, K]; weights are read for drop "probs" alone."""
        axes, delivery = self._axes, self.delivery
        by_weight = delivery.drop == "probs" and delivery.capacity_factor is not None
        priority_DK = probs_SK.detach() if by_weight else None
        experts_DK = experts_SK
        if not axes.etp_shares_tokens:
            experts_DK = all_gather(experts_DK, axes.etp, 0)
            if priority_DK is not None:
                priority_DK = all_gather(priority_DK, axes.etp, 0)
        capacity = delivery.capacity(experts_DK.numel(), self.num_experts)
        if delivery.gathers:
            return self._plan_gathered(experts_DK, priority_DK, capacity)
        places = self._assign(experts_DK, self.num_experts, capacity, priority_DK)
        sent = places.counts.view(axes.ep.size, self.num_local)
        received = all_to_all(sent, axes.ep) if capacity is None else sent[:0]
        return Plan(places.slot_of_place, places.place_of_slot, sent, received)

    def _plan_gathered(
        self, experts_DK: torch.Tensor, priority_DK: torch.Tensor | None, capacity: int | None
    ) -> Plan:
        """Every rank plans the rows of all ranks for its own experts: bucket = expert, source."""
        ep, num_local = self._axes.ep, self.num_local
        experts_PDK = all_gather(experts_DK, ep, 0).view(ep.size, *experts_DK.shape)
        priority = None if priority_DK is None else all_gather(priority_DK, ep, 0)
        local = experts_PDK - ep.rank * num_local
        source = torch.arange(ep.size, device=local.device).view(-1, 1, 1)
        mine = (local >= 0) & (local < num_local)
        buckets = torch.where(mine, local * ep.size + source, num_local * ep.size).flatten(0, 1)
        places = self._assign(buckets, num_local * ep.size, capacity, priority)
        received = places.counts.view(num_local, ep.size).t()
        received = received.contiguous()
        return Plan(places.slot_of_place, places.place_of_slot, received[:0], received)

    def _assign(
        self,
        buckets: torch.Tensor,
        num_buckets: int,
        capacity: int | None,
        priority: torch.Tensor | None,
    ) -> Places:
        places = assign_places(buckets, num_buckets, capacity, priority)
        if capacity is not None:
            # In place, where a graph finds it.
            self.dropped.copy_((places.counts - capacity).clamp(min=0).sum())
        return places
