"""Dispatch and combine, token for token: who arrives where, in which order, and what comes back."""

from typing import Any

import pytest
import torch

from fsdp_core.model.moe.dispatcher import Delivery
from tests.dist.moe_layouts import Layout
from tests.dist.moe_reference import BATCH, NUM_EXPERTS, TIME, kept_by_position
from tests.dist.moe_token_programs import Travelled, Trip, travel
from tests.dist.rank_pool import RankPool

N = BATCH * TIME
LAYOUTS = [
    Layout(), Layout(ep=2), Layout(ep=8), Layout(ep=2, etp=2), Layout(ep=4, tp=2, sp=True),
    Layout(ep=2, etp=2, tp=2), Layout(ep=2, edp=2),
]  # fmt: skip
DISPATCHERS = ("all_to_all", "all_gather")


def spread(layout: Layout) -> torch.Tensor:
    """Three different experts a token, at random."""
    generator = torch.Generator().manual_seed(4)
    return torch.rand(N, NUM_EXPERTS, generator=generator).argsort(-1)[:, :3]


def empty_experts(layout: Layout) -> torch.Tensor:
    """The first and the last expert get everything, those between nothing."""
    return torch.tensor([[NUM_EXPERTS - 1, 0]]).repeat(N, 1)


def one_expert(layout: Layout) -> torch.Tensor:
    """Every token goes to one expert."""
    return torch.full((N, 1), 5)


def a_rank_without_tokens(layout: Layout) -> torch.Tensor:
    """The first rank has no valid token, and of the others every third is not valid."""
    experts = spread(layout)
    experts[layout.tokens(0).flatten()] = NUM_EXPERTS
    experts[::3] = NUM_EXPERTS
    return experts


def nobody(layout: Layout) -> torch.Tensor:
    """No token of any rank is valid."""
    return torch.full((N, 2), NUM_EXPERTS)


ROUTINGS = [spread, empty_experts, one_expert, a_rank_without_tokens, nobody]


def weights_of(experts: torch.Tensor) -> torch.Tensor:
    """Powers of 16 by choice: a sum of weight times digit shows every digit."""
    return (16.0 ** torch.arange(experts.shape[1])).repeat(N, 1)


def check(layout: Layout, trip: Trip, kept: torch.Tensor, found: list[Travelled]) -> None:
    """Arrivals at each expert, sums, and gradients, exactly."""
    sources = layout.sources()
    # A count for each etp group, which is one source, whichever rank of ep counts it.
    counted = sum(seen.dropped for seen in found[:: layout.etp])
    due = [(trip.experts[n] < NUM_EXPERTS) & ~kept[n] for source in sources for n in source]
    assert counted == sum(int(lost.sum()) for lost in due)
    for rank, seen in enumerate(found):
        row = rank // layout.etp // layout.ep
        for number, tokens in enumerate(seen.arrived):
            expert = seen.first_expert + number
            arrivals = [
                n
                for source in sources[row * layout.ep : (row + 1) * layout.ep]
                for n in source
                if bool(((trip.experts[n] == expert) & kept[n]).any())
            ]
            assert tokens == arrivals, (rank, expert)
        mine = layout.tokens(rank).flatten()
        weights = trip.weights[mine].double() * kept[mine]
        ids = mine + 1.0
        numbers = trip.experts[mine] + 1.0
        assert seen.sums[:, 0].tolist() == (weights.sum(1) * ids).tolist(), rank
        assert seen.sums[:, 1].tolist() == (weights * numbers).sum(1).tolist(), rank
        assert seen.x_grad.tolist() == weights.sum(1).tolist(), rank
        assert seen.weight_grad.tolist() == (kept[mine] * ids[:, None]).tolist(), rank


def run(warm_ranks: RankPool, layout: Layout, trips: list[Trip]) -> list[list[Travelled]]:
    """What the ranks saw of each trip."""
    by_rank: list[Any] = warm_ranks.run(travel, layout, trips, world_size=layout.world_size)
    return [list(seen) for seen in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_token_travels_and_comes_back(warm_ranks: RankPool, layout: Layout) -> None:
    """Dropless, each choice arrives at its expert, in the documented order, and returns."""
    for dispatcher in DISPATCHERS:
        trips = []
        for routing in ROUTINGS:
            experts = routing(layout)
            delivery = Delivery(dispatcher=dispatcher)
            trips.append(Trip(experts, weights_of(experts), delivery))
        for trip, found in zip(trips, run(warm_ranks, layout, trips), strict=True):
            check(layout, trip, trip.experts < NUM_EXPERTS, found)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_past_the_capacity_the_last_tokens_are_dropped(
    warm_ranks: RankPool, layout: Layout
) -> None:
    """Each source keeps its first tokens an expert; shapes do not depend on the routing."""
    for dispatcher in DISPATCHERS:
        trips, kept, shapes = [], [], []
        for routing in ROUTINGS:
            for factor in (0.5, float(NUM_EXPERTS)):
                experts = routing(layout)
                delivery = Delivery(dispatcher=dispatcher, capacity_factor=factor)
                trips.append(Trip(experts, weights_of(experts), delivery))
                sources = layout.sources()
                capacity = delivery.capacity(len(sources[0]) * experts.shape[1], NUM_EXPERTS)
                assert capacity is not None
                kept.append(kept_by_position(experts, sources, capacity))
                shapes.append((NUM_EXPERTS // layout.ep, layout.ep * capacity, 2))
        results = run(warm_ranks, layout, trips)
        for trip, mask, shape, found in zip(trips, kept, shapes, results, strict=True):
            check(layout, trip, mask, found)
            assert {seen.rows_shape for seen in found} == {shape}
            if trip.delivery.capacity_factor == NUM_EXPERTS:
                assert mask.equal(trip.experts < NUM_EXPERTS)
        assert not kept[4].all(), "one expert at half capacity drops"


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_the_smallest_weights_are_dropped(warm_ranks: RankPool, dispatcher: str) -> None:
    """With drop "probs" a source keeps its largest weights an expert, the earlier of equals."""
    layout = Layout(ep=2, etp=2)
    experts = spread(layout)
    delivery = Delivery(dispatcher=dispatcher, capacity_factor=0.5, drop="probs")
    # Few different values, so that some are equal.
    weights = torch.randint(1, 5, experts.shape, generator=torch.Generator().manual_seed(7)) / 64
    capacity = delivery.capacity(len(layout.sources()[0]) * 3, NUM_EXPERTS)
    assert capacity is not None
    kept = torch.zeros_like(experts, dtype=torch.bool)
    for source in layout.sources():
        for expert in range(NUM_EXPERTS):
            slots = [(n, k) for n in source for k in range(3) if experts[n, k] == expert]
            slots.sort(key=lambda slot: -weights[slot].item())
            for slot in slots[:capacity]:
                kept[slot] = True
    (found,) = run(warm_ranks, layout, [Trip(experts, weights, delivery)])
    assert 0 < (~kept).sum() < kept.numel()
    for rank, seen in enumerate(found):
        mine = layout.tokens(rank).flatten()
        ids = mine[:, None] + 1.0
        assert seen.weight_grad.tolist() == (kept[mine] * ids).tolist(), rank
        expected = (weights[mine] * kept[mine] * ids).sum(1)
        assert seen.sums[:, 0].tolist() == expected.tolist(), rank
