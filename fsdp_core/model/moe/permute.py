"""Rows of tokens to their places and back, in one order whatever the device.

A *slot* is one choice of one token: slot = token * K + choice. A *bucket* is where its row is to go
(an expert, say); a slot whose bucket is `num_buckets` goes nowhere. A *place* is a row of the
permuted tensor:

    no capacity    places are the slots in order of (bucket, slot); those that go nowhere come last
    capacity C     bucket b has the places [b * C, (b + 1) * C); those left over are empty

Places are integers of fixed shapes, nothing is read on the host. Scattering rows with atomic
additions would sum in any order on a GPU: here every sum runs over a token's choices in their
order, by gathering from where each choice's row is. The assignment is known both ways, so neither
direction scatters. M tokens, K choices, H hidden."""

from typing import Any, NamedTuple, cast

import torch


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
