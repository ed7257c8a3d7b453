"""The dispatcher: where tokens' rows go, to their experts and back, weighted.

    Preprocess   chosen experts -> `Plan`, integers alone (graph scope moe_preprocess)
    Dispatch     tokens [S, H] and the plan -> rows at their experts
    Combine      rows and the tokens' weights -> tokens [S, H]

Experts are numbered along `ep`: rank r of it has experts [r * L, (r + 1) * L). Each expert's width
is cut along `etp`. What ranks of one etp group hold is one of

| layout | tokens of the ranks of an etp group | enter the experts | leave them |
| --- | --- | --- | --- |
| tp 1, or sequence parallel | different | all-gather | reduce-scatter |
| tp = etp, no sequence parallel | the same | identity (backward all-reduce) | all-reduce |

Any other layout without sequence parallel would send copies of one token to an expert from several
ranks and count its gradient as often, so it is refused.

A plan's shapes do not depend on its contents. S tokens of this rank; D of one etp group (S times
etp where its ranks hold different tokens, else S), in the order of etp ranks; P ranks of ep, L
experts a rank, E = P * L, K choices, C capacity.

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

Rows leave `Dispatch` in one order under either dispatcher, so experts compute the same bits: by
local expert, then by source rank of ep, then by token; [n, H] with their `Groups` dropless, and
with a capacity [L, P * C, H], zero where a place is empty. Rows travel in the compute dtype;
weights and sums, those over etp (and, for all_gather, over ep) included, are float32 (float64 for
float64), and only their result is rounded. A token's terms are added in the order of its choices.
`all_gather` adds the choices of one rank of ep in that order and then the ranks' sums: with up to
two choices the bits are those of `all_to_all`, but for the sign of a zero.

Rows of tokens to their places and back, in one order whatever the device.

A *slot* is one choice of one token: slot = token * K + choice. A *bucket* is where its row is to go
(an expert, say); a slot whose bucket is `num_buckets` goes nowhere. A *place* is a row of the
permuted tensor:

    no capacity    places are the slots in order of (bucket, slot); those that go nowhere come last
    capacity C     bucket b has the places [b * C, (b + 1) * C); those left over are empty

Places are integers of fixed shapes, nothing is read on the host. Scattering rows with atomic
additions would sum in any order on a GPU: here every sum runs over a token's choices in their
order, by gathering from where each choice's row is. The assignment is known both ways, so neither
direction scatters. M tokens, K choices, H hidden.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fsdp_core.config import ModelConfig
from fsdp_core.parallel.mesh import (
    Axes,
    all_gather,
    all_to_all,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
)


class Places(NamedTuple):
    """An assignment of slots to places, both ways.

    slot_of_place: int64 [places], the slot at each place; the number of slots where it is empty.
        Without capacity there are as many places as slots.
    place_of_slot: int64, the shape of the buckets; `places` where the slot was dropped or, with a
        capacity, goes nowhere. Without capacity a slot that goes nowhere has a place past the sum
        of `counts`.
    counts: int64 [num_buckets], slots of each bucket, dropped ones too.
    """

    slot_of_place: torch.Tensor
    place_of_slot: torch.Tensor
    counts: torch.Tensor


def assign_places(
    buckets: torch.Tensor, num_buckets: int, capacity: int | None = None,
    priority: torch.Tensor | None = None,
) -> Places:  # fmt: skip
    """Assign every slot a place.

    buckets: int64, any shape, read flat: the bucket of each slot, `num_buckets` for nowhere.
    capacity: places a bucket; what does not fit is dropped.
    priority: like `buckets`; those of the highest priority keep their place, earlier slots first
        among equals. None keeps the earliest slots.
    """
    flat = buckets.reshape(-1)
    num_slots = flat.numel()
    order = _order(flat, None if priority is None else priority.reshape(-1))
    rank = order.argsort()
    firsts = torch.arange(num_buckets + 1, device=flat.device)
    edges = torch.searchsorted(flat[order], firsts)
    counts = edges.diff()
    if capacity is None:
        return Places(order, rank.view_as(buckets), counts)
    if num_slots == 0:
        return Places(flat.new_zeros(num_buckets * capacity), buckets.clone(), counts)
    position = rank - edges[flat]
    kept = (position < capacity) & (flat < num_buckets)
    place = torch.where(kept, flat * capacity + position, num_buckets * capacity)
    column = torch.arange(capacity, device=flat.device)
    at = (edges[:-1, None] + column).clamp(max=num_slots - 1)
    filled = column < counts[:, None]
    slot_of_place = torch.where(filled, order[at], num_slots).flatten()
    return Places(slot_of_place, place.view_as(buckets), counts)


def _order(flat: torch.Tensor, priority: torch.Tensor | None) -> torch.Tensor:
    """Slots by bucket, then by falling priority, then by number."""
    if priority is None:
        return flat.sort(stable=True).indices
    by_priority = priority.sort(descending=True, stable=True).indices
    return by_priority[flat[by_priority].sort(stable=True).indices]


def count_slots(buckets: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """int64 [num_buckets]: how many slots each bucket has; `num_buckets` itself is not counted."""
    firsts = torch.arange(num_buckets + 1, device=buckets.device)
    return torch.searchsorted(buckets.reshape(-1).sort().values, firsts).diff()


# ---- rows, with gradients


def take_rows(
    x_MH: torch.Tensor, slot_of_place: torch.Tensor, place_of_slot: torch.Tensor
) -> torch.Tensor:
    """Each place's row of its slot's token, zero at empty places: [M, H] -> [places, H].
    `slot_of_place` may be a front part of the assignment: slots whose place is past its end are
    left out. The gradient sums a token's choices in their order, in float32 or wider.
    """
    return cast("torch.Tensor", _TakeRows.apply(x_MH, slot_of_place, place_of_slot))


def weighted_sum(
    rows: torch.Tensor, weights_MK: torch.Tensor,
    slot_of_place: torch.Tensor, place_of_slot: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Sum over each token's choices of weight times row, in the weights' dtype: -> [M, H]. Choices
    without a place add nothing. Terms are added in the order of the choices.
    """
    result = _WeightedSum.apply(rows, weights_MK, slot_of_place, place_of_slot)
    return cast("torch.Tensor", result)


def reorder_rows(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """rows[order], whose gradient is gathered with `inverse`, the inverse permutation."""
    return cast("torch.Tensor", _Reorder.apply(rows, order, inverse))


def _pick(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """rows[place], zero where the place is past the end."""
    num_rows = rows.shape[0]
    if num_rows == 0:
        return rows.new_zeros((place.shape[0], *rows.shape[1:]))
    picked = rows.index_select(0, place.clamp(max=num_rows - 1))
    return picked.masked_fill_((place >= num_rows)[:, None], 0)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MH: torch.Tensor, slot_of_place: torch.Tensor, place_of_slot: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(place_of_slot)
        return _pick(x_MH, slot_of_place // place_of_slot.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place_of_slot,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = None
        for place in place_of_slot.unbind(1):
            term = _pick(grad, place).to(wide)
            total = term if total is None else total.add_(term)
        assert total is not None
        return total.to(grad.dtype), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights_MK: torch.Tensor,
        slot_of_place: torch.Tensor, place_of_slot: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(rows, weights_MK, slot_of_place, place_of_slot)
        total = None
        for weight, place in zip(weights_MK.unbind(1), place_of_slot.unbind(1), strict=True):
            term = _pick(rows, place).to(weight.dtype).mul_(weight[:, None])
            total = term if total is None else total.add_(term)
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights_MK, slot_of_place, place_of_slot = ctx.saved_tensors
        weight_of_place = _pick(weights_MK.reshape(-1, 1), slot_of_place)
        grad_rows = _pick(grad, slot_of_place // place_of_slot.shape[1]).mul_(weight_of_place)
        grad_weights = [
            _pick(rows, place).to(grad.dtype).mul_(grad).sum(-1)
            for place in place_of_slot.unbind(1)
        ]
        grad_weights_MK = torch.stack(grad_weights, dim=1).to(weights_MK.dtype)
        return grad_rows.to(rows.dtype), grad_weights_MK, None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


# ---- the plan


def gathers(model: ModelConfig) -> bool:
    """Whether every rank of ep gets all tokens."""
    return model.dispatcher == "all_gather"


def capacity_of(factor: float | None, num_slots: int, num_experts: int) -> int | None:
    """Rows of one expert from one source of `num_slots` slots; None if there is no limit."""
    if factor is None:
        return None
    # Exact, of the decimal number that was written: 100 slots of 10 experts at 1.1 are 11 rows,
    # which a product of floats makes 11.000000000000002, and so 12.
    above, below = _ratio(factor)
    return max(1, -(-num_slots * above // (below * num_experts)))


@torch.compiler.assume_constant_result  # which the compiler could not follow
def _ratio(decimal: float) -> tuple[int, int]:
    return Fraction(str(decimal)).as_integer_ratio()


class Plan(NamedTuple):
    """Where rows go; int64, see the module's table.

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
    """Experts of this rank's slots -> `Plan`. Collectives over ep and etp; no gradient.

    Buffers:
        dropped: int64 scalar, slots that the last forward pass dropped for want of capacity: of
            this rank's tokens (all_to_all) or to its experts (all_gather). Ranks of an etp group
            have the same; the sum over ep is that of the group's tokens under both dispatchers.
    """

    dropped: torch.Tensor

    def __init__(self, model: ModelConfig, axes: Axes) -> None:
        super().__init__()
        self.model, self._axes = model, axes
        self.num_local = model.experts // axes.ep.size
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def forward(self, experts_SK: torch.Tensor, probs_SK: torch.Tensor) -> Plan:
        """Plan the way of int64 [S, K]; weights are read for drop "probs" alone."""
        axes, model = self._axes, self.model
        priority_DK = probs_SK.detach() if model.drop == "probs" else None
        experts_DK = experts_SK
        if not axes.etp_shares_tokens:
            experts_DK = all_gather(experts_DK, axes.etp, 0)
            if priority_DK is not None:
                priority_DK = all_gather(priority_DK, axes.etp, 0)
        capacity = capacity_of(model.capacity_factor, experts_DK.numel(), model.experts)
        if gathers(model):
            return self._plan_gathered(experts_DK, priority_DK, capacity)
        places = self._assign(experts_DK, model.experts, capacity, priority_DK)
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


# ---- to the experts


@dataclass(frozen=True)
class Groups:
    """Sizes of one dropless forward pass, on the host, and what follows from them.

    counts: rows of each local expert.
    ends: int32 [L] on the device, the running sum of `counts`.
    sent, received: rows to and from each rank of ep; empty for all_gather.
    order, inverse: int64, from the order in which rows arrive to that of experts and back; None for
        all_gather, whose rows need no reordering.
    """

    counts: tuple[int, ...]
    ends: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: torch.Tensor | None
    inverse: torch.Tensor | None


class Dispatch(nn.Module):
    """Tokens [S, H] and their plan -> rows at their experts."""

    def __init__(self, model: ModelConfig, axes: Axes) -> None:
        super().__init__()
        self.model, self._axes = model, axes

    def forward(self, x_SH: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, Groups | None]:
        """Send [S, H] to rows by expert (`RuntimeError`: dropless while a CUDA graph is captured;
        give a capacity factor).
        """
        axes, is_gathered = self._axes, gathers(self.model)
        x_MH = enter_etp(x_SH, axes)
        if is_gathered:
            x_MH = gather_from(x_MH, axes.ep, 0)
        if self.model.capacity_factor is not None:
            return self._static(x_MH, plan), None
        groups = read_groups(plan)
        if is_gathered:
            slots = plan.slot_of_place[: sum(groups.counts)]
            return take_rows(x_MH, slots, plan.place_of_slot), groups
        slots = plan.slot_of_place[: sum(groups.sent)]
        rows = take_rows(x_MH, slots, plan.place_of_slot)
        rows = all_to_all(rows, axes.ep, groups.sent, groups.received)
        assert groups.order is not None
        assert groups.inverse is not None
        return reorder_rows(rows, groups.order, groups.inverse), groups

    def _static(self, x_MH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """[M, H] -> [L, P * C, H]."""
        axes = self._axes
        rows = take_rows(x_MH, plan.slot_of_place, plan.place_of_slot)
        hidden = rows.shape[1]
        if gathers(self.model):
            return rows.view(plan.received.shape[1], -1, hidden)
        num_local = plan.sent.shape[1]
        rows = all_to_all(rows, axes.ep).view(axes.ep.size, num_local, -1, hidden)
        return rows.transpose(0, 1).reshape(num_local, -1, hidden)


def enter_etp(x_SH: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Rows [S, ...] of all tokens of an etp group, [D, ...], for ranks that each have a slice."""
    if axes.etp_shares_tokens:
        return copy_to(x_SH, axes.etp)
    return gather_from(x_SH, axes.etp, 0)


def read_groups(plan: Plan) -> Groups:
    """Read the sizes of a dropless plan: the one place where the host waits for the device
    (`RuntimeError`: while a CUDA graph is captured).
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


# ---- and back


class Combine(nn.Module):
    """Rows at their experts and the tokens' weights -> tokens [S, H] in the order they came in."""

    def __init__(self, model: ModelConfig, axes: Axes) -> None:
        super().__init__()
        self.model, self._axes = model, axes

    def forward(
        self, rows: torch.Tensor, probs_SK: torch.Tensor, plan: Plan, groups: Groups | None
    ) -> torch.Tensor:
        """Rows as `Dispatch` laid them out -> [S, H] in the rows' dtype."""
        axes, is_gathered = self._axes, gathers(self.model)
        weights_MK = enter_etp(probs_SK, axes)
        if is_gathered:
            weights_MK = gather_from(weights_MK, axes.ep, 0)
        returned = self._return(rows, groups)
        slots = plan.slot_of_place[: returned.shape[0]]
        y_MH = weighted_sum(returned, weights_MK, slots, plan.place_of_slot)
        if is_gathered:
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
            if gathers(self.model):
                return rows.reshape(-1, hidden)
            by_source = rows.view(rows.shape[0], axes.ep.size, -1, hidden).transpose(0, 1)
            return all_to_all(by_source.reshape(-1, hidden), axes.ep)
        if gathers(self.model):
            return rows
        assert groups.order is not None
        assert groups.inverse is not None
        arrived = reorder_rows(rows, groups.inverse, groups.order)
        return all_to_all(arrived, axes.ep, groups.received, groups.sent)
