"""The assignment of slots to places, against a list written by hand."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_core.model.moe.permute import assign_places, count_slots

BUCKETS = 4


def buckets(max_slots: int = 30) -> st.SearchStrategy[list[int]]:
    """A bucket for each slot; BUCKETS is nowhere."""
    return st.lists(st.integers(0, BUCKETS), min_size=1, max_size=max_slots)


@settings(max_examples=60, deadline=None)
@given(buckets())
def test_without_capacity_slots_are_in_order_of_bucket_and_number(chosen: list[int]) -> None:
    """Places are the slots sorted by (bucket, slot), and the assignment is known both ways."""
    places = assign_places(torch.tensor(chosen), BUCKETS)
    order = sorted(range(len(chosen)), key=lambda slot: (chosen[slot], slot))
    assert places.slot_of_place.tolist() == order
    assert [places.slot_of_place[p].item() for p in places.place_of_slot] == [*range(len(chosen))]
    assert places.counts.tolist() == [chosen.count(b) for b in range(BUCKETS)]


@settings(max_examples=60, deadline=None)
@given(buckets(), st.integers(1, 5), st.booleans(), st.randoms())
def test_with_a_capacity_the_first_or_the_largest_stay(
    chosen: list[int], capacity: int, ranked: bool, random: Random
) -> None:
    """Bucket b has the places [b C, (b + 1) C), filled from the front; the rest are dropped."""
    priority = [random.choice([0.25, 0.5, 1.0]) for _ in chosen]
    places = assign_places(
        torch.tensor(chosen), BUCKETS, capacity, torch.tensor(priority) if ranked else None
    )
    slots = range(len(chosen))
    expected = []
    for bucket in range(BUCKETS):
        wanting = [slot for slot in slots if chosen[slot] == bucket]
        if ranked:
            wanting.sort(key=lambda slot: -priority[slot])
        kept = wanting[:capacity]
        expected += kept + [len(chosen)] * (capacity - len(kept))
    assert places.slot_of_place.tolist() == expected
    assert places.counts.tolist() == [chosen.count(b) for b in range(BUCKETS)]
    for slot in slots:
        place = places.place_of_slot[slot].item()
        dropped = slot not in expected
        assert place == (BUCKETS * capacity if dropped else expected.index(slot))


def test_the_shape_of_buckets_is_kept() -> None:
    """Slots are read row by row: token * K + choice."""
    chosen = torch.tensor([[3, 0], [0, 3], [4, 1]])
    places = assign_places(chosen, BUCKETS)
    assert places.place_of_slot.tolist() == [[3, 0], [1, 4], [5, 2]]
    assert places.slot_of_place.tolist() == [1, 2, 5, 0, 3, 4]


@pytest.mark.parametrize("shape", [(7,), (4, 3)])
def test_counting_leaves_out_nowhere(shape: tuple[int, ...]) -> None:
    """Slots that go nowhere are not counted."""
    chosen = torch.randint(0, BUCKETS + 1, shape, generator=torch.Generator().manual_seed(2))
    expected = [(chosen == bucket).sum().item() for bucket in range(BUCKETS)]
    assert count_slots(chosen, BUCKETS).tolist() == expected
