"""A mixture of experts over ranks: what one process with the whole weights computes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsdp_core.model.moe.dispatcher import Delivery
from fsdp_core.model.moe.router import RouterRule
from tests.dist.moe_programs import (
    COTANGENT,
    NUM_TOKENS,
    Spec,
    Travelled,
    Trip,
    errors,
    kept_of_source,
    run_specs,
    travel,
)
from tests.dist.rank_pool import RankPool

ROUNDINGS = {torch.float64: 64 * 2**-53, torch.float32: 16 * 2**-24, torch.bfloat16: 4 * 2**-8}
"""Errors relative to the largest element, in roundings of a type: twice those that were seen, and
less than a worst-case analysis of these sums allows. A fault changes results by a percent."""
EXACT = {"losses": 2.0**-23, "bias": 2.0**-23, "slots": 0.0}
"""Whatever the dtype: float32 buffers of sums in float64, and counts."""
DROPLESS, GATHERED = Delivery(), Delivery(dispatcher="all_gather")
PADDED = Delivery(capacity_factor=1.0)
PADDED_GATHERED = Delivery(dispatcher="all_gather", capacity_factor=1.0)
DELIVERIES = (DROPLESS, GATHERED, PADDED, PADDED_GATHERED)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads, much slower beside busy ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rule(experts: int, top_k: int, **changes: Any) -> RouterRule:
    """A router with both losses and a bias."""
    settings: dict[str, Any] = {"aux_coeff": 0.7, "z_coeff": 0.3, "expert_bias": True}
    return RouterRule(num_experts=experts, top_k=top_k, **(settings | changes))


SIGMOID: dict[str, Any] = {"scores": "sigmoid", "normalised": False, "scale": 2.5}
SOFTMAX = rule(8, 2, expert_bias=False)
TASKS: tuple[dict[str, Any], ...] = (
    {"rule": SOFTMAX}, {"rule": rule(8, 3, **SIGMOID), "padding": "rank"},
)  # fmt: skip
LAYOUTS: tuple[dict[str, Any], ...] = (
    {}, {"dp": 2, "ep": 2}, {"dp": 2, "etp": 2}, {"dp": 4, "ep": 2, "etp": 2}, {"dp": 4, "ep": 4},
    {"dp": 8, "ep": 8}, {"dp": 8, "ep": 4, "etp": 2}, {"dp": 4, "ep": 2},
    {"dp": 8, "ep": 2, "etp": 2}, {"dp": 2, "tp": 2, "sp": True, "ep": 4},
    {"dp": 2, "tp": 2, "sp": True, "ep": 2, "etp": 2}, {"tp": 2, "etp": 2},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
)  # fmt: skip


def check(pool: RankPool, specs: list[Spec]) -> None:
    """Outputs, losses, every gradient, loads and the bias are those of one process."""
    by_rank = pool.run(run_specs, specs, world_size=specs[0].world_size)
    for spec, *ranks in zip(specs, *by_rank, strict=True):
        found = errors(spec, ranks)
        limit = ROUNDINGS[spec.dtype]
        wrong = {k: e for k, e in found.items() if not e <= EXACT.get(k, limit)}
        assert not wrong, (spec, wrong)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: Spec(**layout).name)
def test_layouts_equal_one_process(warm_ranks: RankPool, layout: dict[str, Any]) -> None:
    """Both scores, dropless and padded, by either dispatcher, on every layout."""
    deliveries: list[dict[str, Any]] = [
        {"delivery": each, "shared": "gated"} for each in DELIVERIES
    ]
    check(warm_ranks, [Spec(**layout, **task, **each) for task in TASKS for each in deliveries])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: Spec(**layout).name)
def test_layouts_equal_one_process_in_less_precision(
    warm_ranks: RankPool, layout: dict[str, Any]
) -> None:
    """Inputs are such that no rounding of float32's scores chooses another expert."""
    specs = [
        Spec(**layout, rule=SOFTMAX, delivery=delivery, dtype=dtype, path=path, shared="gated")
        for dtype in (torch.float32, torch.bfloat16)
        for delivery, path in ((DROPLESS, "grouped"), (PADDED_GATHERED, "batched"))
    ]
    check(warm_ranks, specs)


@pytest.mark.parametrize("layout", [LAYOUTS[i] for i in (1, 3, 4, 12)],
                         ids=lambda layout: Spec(**layout).name)  # fmt: skip
def test_dispatchers_and_paths_agree_bit_for_bit(
    warm_ranks: RankPool, layout: dict[str, Any]
) -> None:
    """With two choices a token every sum has one order, so both dispatchers give the same bits.

    On the CPU a grouped product is a loop of products, a batched one may sum in another order.
    """
    alike: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"delivery": DROPLESS}, {"delivery": GATHERED}),
        ({"delivery": PADDED}, {"delivery": PADDED_GATHERED}),
        ({"path": "loop"}, {"path": "grouped"}),
        ({"path": "loop", "delivery": PADDED}, {"path": "grouped", "delivery": PADDED}),
    )
    pairs = [
        [Spec(**layout, rule=SOFTMAX, dtype=dtype, shared="gated", **each) for each in pair]
        for pair in alike
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
        if not ("path" in pair[0] and dtype == torch.float64)
    ]
    specs = [spec for pair in pairs for spec in pair]
    for found in warm_ranks.run(run_specs, specs, world_size=specs[0].world_size):
        for spec, one, other in zip(specs[::2], found[::2], found[1::2], strict=True):
            assert one.bits() == other.bits(), spec


LIGHTEST = Delivery(capacity_factor=0.5, drop="probs")
LIGHTEST_GATHERED = Delivery(dispatcher="all_gather", capacity_factor=0.75, drop="probs")
FEW = Delivery(capacity_factor=0.5)
PRODUCTS = {
    "one expert a rank, all of them chosen": Spec(
        dp=2, cp=2, ep=4, rule=rule(4, 4), padding="some", microbatches=3, shared="gated"
    ),
    "one expert a rank, one chosen": Spec(
        dp=2, cp=2, ep=4, rule=rule(4, 1, **SIGMOID), delivery=GATHERED, padding="rank"
    ),
    "context and sequence cut, lightest dropped": Spec(
        cp=2, tp=2, sp=True, ep=2, etp=2, rule=rule(6, 3), delivery=LIGHTEST,
        padding="some", microbatches=2, shared="gated",
    ),
    "the same, gathered": Spec(
        cp=2, tp=2, sp=True, ep=2, etp=2, rule=rule(6, 3, **SIGMOID),
        delivery=LIGHTEST_GATHERED, padding="microbatch", microbatches=3, shared="plain",
    ),
    "whole sequences, lightest dropped": Spec(
        cp=2, tp=2, ep=2, etp=2, rule=rule(6, 3, expert_bias=False), delivery=LIGHTEST,
        padding="microbatch", microbatches=2, shared="gated",
    ),
    "whole sequences, gathered": Spec(
        cp=2, tp=2, ep=2, etp=2, rule=rule(4, 2, **SIGMOID), delivery=GATHERED,
        padding="rank", microbatches=3, shared="plain",
    ),
    "more etp than tp": Spec(
        dp=2, tp=2, sp=True, etp=4, rule=rule(6, 2), delivery=FEW, padding="rank",
        microbatches=2,
    ),
    "tp without etp": Spec(
        dp=2, tp=2, sp=True, ep=4, rule=rule(8, 8, aux_coeff=0.0), delivery=LIGHTEST_GATHERED,
        padding="some",
    ),
    "no expert's replica, nothing watched": Spec(
        dp=4, ep=4, rule=rule(8, 2, expert_bias=False, aux_coeff=0.0, z_coeff=0.0), shared="gated"
    ),
    "replicas alone": Spec(
        dp=4, rule=rule(5, 2), delivery=FEW, padding="rank", microbatches=3, shared="gated"
    ),
}  # fmt: skip


def test_products_of_features_equal_one_process(warm_ranks: RankPool) -> None:
    """With NaN in padding, several microbatches and what a capacity drops, in every product."""
    check(warm_ranks, list(PRODUCTS.values()))


# ---- token for token, without experts in between

LARGEST, EXPERTS = 8.0, 8
TRAVELS = [LAYOUTS[i] for i in (0, 1, 5, 3, 9, 12)] + [{"dp": 4, "ep": 2}]


def spread(spec: Spec) -> torch.Tensor:
    """Three different experts a token, at random."""
    generator = torch.Generator().manual_seed(4)
    return torch.rand(NUM_TOKENS, EXPERTS, generator=generator).argsort(-1)[:, :3]


def a_rank_without_tokens(spec: Spec) -> torch.Tensor:
    """The first rank has no valid token, and of the others every third is not valid."""
    experts = spread(spec)
    experts[spec.tokens(0).flatten()] = EXPERTS
    experts[::3] = EXPERTS
    return experts


ROUTINGS = [
    spread, a_rank_without_tokens,
    lambda _: torch.tensor([[EXPERTS - 1, 0]]).repeat(NUM_TOKENS, 1),  # nothing for those between
    lambda _: torch.full((NUM_TOKENS, 1), 5),
    lambda _: torch.full((NUM_TOKENS, 2), EXPERTS),  # no token of any rank is valid
]  # fmt: skip


def trips_of(spec: Spec) -> list[Trip]:
    """Every routing dropless and with capacities, exactly and in 16 bits."""
    trips = []
    for routing in ROUTINGS:
        experts = routing(spec)
        # Powers of 16 by choice: a sum of weight times digit shows every digit.
        weights = (16.0 ** torch.arange(experts.shape[1])).repeat(NUM_TOKENS, 1)
        for dtype in (torch.float64, torch.bfloat16):
            for factor in (None, 0.5, LARGEST):
                trips.append(Trip(experts, weights, factor, dtype=dtype))
    generator = torch.Generator().manual_seed(7)
    few, many = (torch.randint(1, most, (NUM_TOKENS, 3), generator=generator) for most in (5, 64))
    return [
        *trips,
        Trip(spread(spec), few / 64, 0.5, "probs"),  # of four values: some are equal
        Trip(spread(spec), many / 1, dtype=torch.bfloat16),
    ]


def kept_of(spec: Spec, trip: Trip) -> torch.Tensor:
    """bool [N, K]: which choices the capacity of each source leaves."""
    kept = trip.experts < EXPERTS
    if trip.factor is None:
        return kept
    experts, weights = trip.experts.tolist(), trip.weights.tolist()
    for source in spec.sources():
        capacity = trip.delivery().capacity(len(source) * kept.shape[1], EXPERTS)
        assert capacity is not None
        for expert in range(EXPERTS):
            slots = [(n, k) for n in source for k, e in enumerate(experts[n]) if e == expert]
            waiting = [(i, weights[n][k]) for i, (n, k) in enumerate(slots)]
            stay = kept_of_source(waiting, capacity, trip.drop)
            for i in set(range(len(slots))) - set(stay):
                kept[slots[i]] = False
    return kept


def check_trip(spec: Spec, trip: Trip, found: list[Travelled], *, sums_once: bool) -> None:
    """Arrivals at each expert, sums, counts and gradients, exactly.

    A sum is rounded once; of tokens' gradients where all their terms come to one rank.
    """
    kept, sources = kept_of(spec, trip), spec.sources()
    # A count for each etp group, which is one source, whichever rank of ep counts it.
    counted = sum(seen.dropped for seen in found[:: spec.etp])
    there = trip.experts < EXPERTS
    assert counted == sum(int((there[n] & ~kept[n]).sum()) for source in sources for n in source)
    if trip.factor == LARGEST:
        assert kept.equal(there)
    if trip.factor is not None:
        capacity = trip.delivery().capacity(len(sources[0]) * trip.experts.shape[1], EXPERTS)
        assert capacity is not None
        shape = (EXPERTS // spec.ep, spec.ep * capacity, 2)
        assert {seen.rows_shape for seen in found} == {shape}, "whatever the routing"
    goes = trip.experts.masked_fill(~kept, EXPERTS).tolist()
    for rank, seen in enumerate(found):
        row = rank // spec.etp // spec.ep
        passed = [n for source in sources[row * spec.ep : (row + 1) * spec.ep] for n in source]
        for expert, tokens in enumerate(seen.arrived, start=seen.first_expert):
            arrivals = [n for n in passed if expert in goes[n]]
            if trip.drop == "probs":  # then a source's are in the order of their weights
                tokens, arrivals = sorted(tokens), sorted(arrivals)
            assert tokens == arrivals, (rank, expert)
        mine = spec.tokens(rank).flatten()
        weights, ids = trip.weights[mine].double() * kept[mine], mine + 1.0
        sums = torch.stack([weights.sum(1) * ids, (weights * (trip.experts[mine] + 1)).sum(1)], 1)
        assert torch.equal(seen.sums, sums.to(trip.dtype)), rank
        due = kept[mine] * ids[:, None] * COTANGENT
        assert torch.equal(seen.weight_grad.double(), due.double()), rank
        if sums_once or trip.dtype == torch.float64:
            terms = (weights * COTANGENT).to(trip.dtype).double()
            assert torch.equal(seen.x_grad, terms.sum(1).to(trip.dtype)), rank


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("layout", TRAVELS, ids=lambda layout: Spec(**layout).name)
def test_every_token_travels_and_comes_back(
    warm_ranks: RankPool, layout: dict[str, Any], dispatcher: str
) -> None:
    """Each choice arrives at its expert in the documented order and returns, but for what its
    source has no room for: the later ones, or the lightest.
    """
    spec = Spec(**layout)
    trips = trips_of(spec)
    assert sum(int((~kept_of(spec, trip)).sum()) for trip in trips if trip.factor == 0.5) > 0
    by_rank = warm_ranks.run(travel, spec, trips, dispatcher, world_size=spec.world_size)
    for trip, *found in zip(trips, *by_rank, strict=True):
        sums_once = spec.etp == 1 and dispatcher == "all_to_all"
        check_trip(spec, trip, found, sums_once=sums_once)
