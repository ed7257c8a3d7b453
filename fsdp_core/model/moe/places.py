"""Where each slot's row goes: a stable order by bucket, with or without a capacity.

A *slot* is one choice of one token: slot = token * K + choice. A *bucket* is where its row is to go
(an expert, say); a slot whose bucket is `num_buckets` goes nowhere. A *place* is a row of the
permuted tensor. Everything here is integers of fixed shapes: nothing is read on the host, nothing
depends on the order of atomic operations.

    no capacity    places are the slots in order of (bucket, slot); those that go nowhere come last
    capacity C     bucket b has the places [b * C, (b + 1) * C); those left over are empty
"""

from typing import NamedTuple

import torch


class Places(NamedTuple):
    """An assignment of slots to places, both ways.

    Attributes:
        slot_of_place: int64 [places], the slot at each place; the number of slots where it is
            empty. Without capacity there are as many places as slots.
        place_of_slot: int64, the shape of the buckets; `places` where the slot was dropped or, with
            a capacity, goes nowhere. Without capacity a slot that goes nowhere has a place past
            the sum of `counts`.
        counts: int64 [num_buckets], slots of each bucket, dropped ones too.
    """

    slot_of_place: torch.Tensor
    place_of_slot: torch.Tensor
    counts: torch.Tensor


def assign_places(
    buckets: torch.Tensor,
    num_buckets: int,
    capacity: int | None = None,
    priority: torch.Tensor | None = None,
) -> Places:
    """Assign every slot a place.

    Args:
        buckets: int64, any shape, read flat: the bucket of each slot, `num_buckets` for nowhere.
        capacity: places a bucket; what does not fit is dropped.
        priority: like `buckets`; those of the highest priority keep their place, earlier slots
            first among equals. None keeps the earliest slots.
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
