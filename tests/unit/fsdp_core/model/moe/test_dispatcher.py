"""Which layouts a mixture of experts takes, and which axes hold different tokens."""

from dataclasses import replace
from random import Random
from typing import cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.model.moe.dispatcher import (
    Places,
    Preprocess,
    assign_places,
    capacity_of,
    count_slots,
    take_rows,
    weighted_sum,
)
from fsdp_core.parallel.mesh import Axes, Axis
from tests.dist.parity_programs import moe_model

SIZES = {"tp": 2, "cp": 3, "pp": 5, "dp": 7, "dp_outer": 11, "ep": 4, "etp": 2, "edp": 13}


def axes(*, sequence_parallel: bool) -> Axes:
    group = cast("dist.ProcessGroup", None)
    mesh = cast("DeviceMesh", None)
    made = {name: Axis(name, size, 0, group) for name, size in SIZES.items()}
    made["tp"] = replace(made["tp"], cuts_sequence=sequence_parallel)
    return Axes(**made, dense_mesh=mesh, expert_mesh=mesh)


def test_tokens_differ_over_tp_under_sequence_parallel_alone() -> None:
    """Counts are summed over dp_outer, dp and cp, and over tp where it cuts the sequence."""
    cut, whole = (axes(sequence_parallel=sp) for sp in (True, False))
    assert [axis.name for axis in cut.tokens] == ["dp_outer", "dp", "cp", "tp"]
    assert [axis.name for axis in whole.tokens] == ["dp_outer", "dp", "cp"]
    assert not cut.etp_shares_tokens
    assert whole.etp_shares_tokens


def test_dense_gradients_are_averaged_over_dp_and_cp() -> None:
    """The losses' factor is the number of ranks of dp_outer, dp and cp, with or without tp."""
    for sequence_parallel in (True, False):
        assert axes(sequence_parallel=sequence_parallel).num_averaged == 11 * 7 * 3


EXPERTS, NUM_TOKENS, TOP_K = 4, 5, 2


@pytest.mark.parametrize(
    ("factor", "slots", "experts", "capacity"),
    [
        (None, 10, 4, None),
        (1.0, 10, 4, 3),
        (1.0, 8, 4, 2),
        (1.25, 8, 4, 3),
        (0.01, 8, 4, 1),
        (1.1, 100, 10, 11),
        (0.07, 100, 1, 7),
    ],
)
def test_capacity_is_rounded_up(
    factor: float | None, slots: int, experts: int, capacity: int | None
) -> None:
    """ceil(slots * factor / experts), at least one; none without a factor."""
    assert capacity_of(factor, slots, experts) == capacity


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("factor", [None, 1.0])
def test_shapes_do_not_depend_on_the_routing(
    alone: Axes, dispatcher: str, factor: float | None
) -> None:
    """A plan is int64 of the documented shapes, whatever was chosen."""
    config = moe_model(6, EXPERTS, dispatcher=dispatcher, capacity_factor=factor)
    stage = Preprocess(config, alone)
    capacity = capacity_of(factor, NUM_TOKENS * TOP_K, EXPERTS)
    places = NUM_TOKENS * TOP_K if capacity is None else EXPERTS * capacity
    gathers, static = dispatcher == "all_gather", factor is not None
    for experts in (torch.zeros(NUM_TOKENS, TOP_K), torch.full((NUM_TOKENS, TOP_K), EXPERTS)):
        plan = stage(experts.long(), torch.ones(NUM_TOKENS, TOP_K))
        assert {tensor.dtype for tensor in plan} == {torch.int64}
        assert plan.slot_of_place.shape == (places,)
        assert plan.place_of_slot.shape == (NUM_TOKENS, TOP_K)
        assert plan.sent.shape == (0 if gathers else 1, EXPERTS)
        assert plan.received.shape == (0 if static and not gathers else 1, EXPERTS)


NUM_BUCKETS = 4


def buckets(max_slots: int = 30) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, NUM_BUCKETS), min_size=1, max_size=max_slots)


@settings(max_examples=60, deadline=None)
@given(buckets())
@example([4, 1, 0, 2, 3] * 12)  # longer than what a sort that is not stable leaves in order
def test_without_capacity_slots_are_in_order_of_bucket_and_number(chosen: list[int]) -> None:
    """Places are the slots sorted by (bucket, slot), and the assignment is known both ways."""
    found = assign_places(torch.tensor(chosen), NUM_BUCKETS)
    order = sorted(range(len(chosen)), key=lambda slot: (chosen[slot], slot))
    assert found.slot_of_place.tolist() == order
    assert [found.slot_of_place[p].item() for p in found.place_of_slot] == [*range(len(chosen))]
    assert found.counts.tolist() == [chosen.count(b) for b in range(NUM_BUCKETS)]


@settings(max_examples=60, deadline=None)
@given(buckets(), st.integers(1, 5), st.booleans(), st.randoms())
def test_with_a_capacity_the_first_or_the_largest_stay(
    chosen: list[int], capacity: int, ranked: bool, random: Random
) -> None:
    """Bucket b has the places [b C, (b + 1) C), filled from the front; the rest are dropped."""
    priority = [random.choice([0.25, 0.5, 1.0]) for _ in chosen]
    found = assign_places(
        torch.tensor(chosen), NUM_BUCKETS, capacity, torch.tensor(priority) if ranked else None
    )
    slots = range(len(chosen))
    expected = []
    for bucket in range(NUM_BUCKETS):
        wanting = [slot for slot in slots if chosen[slot] == bucket]
        if ranked:
            wanting.sort(key=lambda slot: -priority[slot])
        kept = wanting[:capacity]
        expected += kept + [len(chosen)] * (capacity - len(kept))
    assert found.slot_of_place.tolist() == expected
    assert found.counts.tolist() == [chosen.count(b) for b in range(NUM_BUCKETS)]
    for slot in slots:
        place = found.place_of_slot[slot].item()
        dropped = slot not in expected
        assert place == (NUM_BUCKETS * capacity if dropped else expected.index(slot))


@pytest.mark.parametrize("shape", [(7,), (4, 3)])
def test_counting_leaves_out_nowhere(shape: tuple[int, ...]) -> None:
    """Slots that go nowhere are not counted."""
    chosen = torch.randint(0, NUM_BUCKETS + 1, shape, generator=torch.Generator().manual_seed(2))
    expected = [(chosen == bucket).sum().item() for bucket in range(NUM_BUCKETS)]
    assert count_slots(chosen, NUM_BUCKETS).tolist() == expected


TOKENS, CHOICES, BUCKETS, HIDDEN = 6, 2, 3, 4


def places(capacity: int | None) -> Places:
    """Some slots go nowhere; with a capacity some are dropped and some places are empty."""
    chosen = torch.tensor([[0, 1], [1, 3], [0, 1], [3, 3], [1, 0], [1, 2]])
    return assign_places(chosen, BUCKETS, capacity)


def matrix(found: Places) -> torch.Tensor:
    """One where the slot of a row's place belongs to a column's token, [places, tokens * K]."""
    slots = TOKENS * CHOICES
    return F.one_hot(found.slot_of_place, slots + 1)[:, :slots].double()


def numbers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def front(found: Places, capacity: int | None) -> torch.Tensor:
    """Places that are in use: without a capacity those of slots that go somewhere."""
    if capacity is not None:
        return found.slot_of_place
    return found.slot_of_place[: int(found.counts.sum())]


def test_rows_are_taken_and_their_gradients_summed() -> None:
    """Each place has its token's row, an empty one zero; a token's gradient sums its places."""
    for capacity in (None, 1, 2, 5):
        found = places(capacity)
        slots = front(found, capacity)
        one_hot = matrix(found)[: len(slots)].view(-1, TOKENS, CHOICES).sum(-1)
        x, grad = numbers(TOKENS, HIDDEN), numbers(len(slots), HIDDEN).detach()
        rows = take_rows(x, slots, found.place_of_slot)
        assert torch.equal(rows, one_hot @ x)
        rows.backward(grad)
        torch.testing.assert_close(x.grad, one_hot.t() @ grad, rtol=1e-15, atol=1e-15)


def test_rows_are_weighed_and_summed() -> None:
    """A token's sum runs over its choices that have a place, with gradients of rows and weights."""
    for capacity in (None, 1, 2, 5):
        found = places(capacity)
        slots = front(found, capacity)
        rows, weights = numbers(len(slots), HIDDEN), numbers(TOKENS, CHOICES)
        one_hot = matrix(found)[: len(slots)].view(-1, TOKENS, CHOICES)

        def by_matrix(
            rows: torch.Tensor, weights: torch.Tensor, one_hot: torch.Tensor = one_hot
        ) -> torch.Tensor:
            return torch.einsum("ptk,ph,tk->th", one_hot, rows, weights)

        total = weighted_sum(rows, weights, slots, found.place_of_slot)
        torch.testing.assert_close(total, by_matrix(rows, weights), rtol=1e-15, atol=1e-15)
        grad = numbers(TOKENS, HIDDEN).detach()
        got = torch.autograd.grad(total, (rows, weights), grad)
        due = torch.autograd.grad(by_matrix(rows, weights), (rows, weights), grad)
        for one, other in zip(got, due, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)


def test_sums_are_wider_than_bfloat16() -> None:
    """Weights of float32 make a float32 sum of bfloat16 rows."""
    chosen = torch.tensor([[0, 1, 2]])
    found = assign_places(chosen, BUCKETS)
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    total = weighted_sum(rows, torch.ones(1, 3), found.slot_of_place, found.place_of_slot)
    assert total.dtype == torch.float32
    assert total.item() == 258.0
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    take_rows(x, found.slot_of_place, found.place_of_slot).backward(rows)
    assert x.grad is not None
    assert x.grad.item() == 258.0
