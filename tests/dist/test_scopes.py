"""Graph scopes in the trainer, in every legal combination: each bit of each step is eager's."""

from dataclasses import replace
from typing import Any

import pytest

from fsdp_core.config import STRATEGIES
from tests.dist.rank_pool import RankPool
from tests.dist.scope_programs import (
    CAPACITY,
    MIXED,
    STEADY,
    STEPS,
    WARMUP,
    Scoped,
    Seen,
    train_all,
)
from tests.dist.train_layout_programs import Run

ATTN, LAYER, FULL = ("attn",), ("layer",), ("full_iteration",)
ROUTER, PLANS, MOE = ("moe_router",), ("moe_router", "moe_preprocess"), ("moe",)
MLP = ("mlp",)
ALL_PARTS = (*ATTN, *MLP, *PLANS)
PAIRS = [
    MLP, (*ATTN, *MLP), (*ATTN, *ROUTER), (*MLP, *ROUTER), PLANS, ALL_PARTS, (*ATTN, *MOE),
    (*MLP, *MOE), LAYER,
]  # fmt: skip
"""Of all sets of scopes that are legal with dense layers and experts, enough for every pair."""


def num_pieces(scopes: tuple[str, ...], dense: int, experts: int) -> int:
    """Pieces that are captured of so many layers."""
    of_dense = len({"attn", "mlp", "layer"} & set(scopes))
    of_experts = len({"attn", "moe_router", "moe", "layer"} & set(scopes))
    return of_dense * dense + of_experts * experts


def check(runs: list[Scoped], ranks: list[list[Seen]]) -> None:
    """Every run has the first one's bits after every event, and no two of its steps look alike."""
    for eager, *graphed in ranks:
        steps = [
            seen for seen, event in zip(eager.bits, runs[0].events, strict=True)
            if event[0] == "step"
        ]  # fmt: skip
        for group in ("grads", "weights", "optim"):
            assert len({digests[group] for _, digests, _ in steps}) == len(steps)
        for run, seen in zip(runs[1:], graphed, strict=True):
            for event, expected, got in zip(run.events, eager.bits, seen.bits, strict=True):
                assert got == expected, (run.graph, event)
            assert seen.captured, run.graph


def compare(pool: RankPool, run: Run, scopes: list[tuple[str, ...]], **options: Any) -> list[Seen]:
    """Run eagerly and under each of `scopes`; the first rank's."""
    runs = [Scoped(run, scope, **options) for scope in ((), *scopes)]
    ranks = pool.run(train_all, runs, world_size=runs[0].world_size, timeout_s=180.0)
    check(runs, ranks)
    first: list[Seen] = ranks[0][1:]
    return first


def check_counts(
    found: list[Seen], scopes: list[tuple[str, ...]], layers: tuple[int, int], microbatches: int = 2
) -> None:
    """Every piece has a forward and a backward graph, each replayed in each microbatch."""
    for seen, scope in zip(found, scopes, strict=True):
        pieces = num_pieces(scope, *layers)
        assert seen.captured == 2 * pieces, scope
        assert seen.replays == 2 * pieces * microbatches * (STEPS - WARMUP), scope


def test_combinations_of_partial_scopes(warm_ranks: RankPool) -> None:
    """Scopes together, two by two, of dense layers and experts over two ranks have eager's bits."""
    run = Run({"dp": 2, "ep": 2}, "moe_tiny", MIXED | CAPACITY, dtype="bf16")
    check_counts(compare(warm_ranks, run, PAIRS), PAIRS, (1, 1))


def test_dropless_experts_stay_eager_behind_their_router(warm_ranks: RankPool) -> None:
    """Where sizes depend on the data graphs end before they are read, after a gather of plans."""
    model = MIXED | {"dispatcher": "all_gather", "score": "sigmoid", "expert_bias": True}
    run = Run({"dp": 2, "ep": 2}, "moe_tiny", model)
    scopes = [ROUTER, ALL_PARTS]
    check_counts(compare(warm_ranks, run, scopes), scopes, (1, 1))


def test_layers_outside_of_the_captured_range_stay_eager(warm_ranks: RankPool) -> None:
    """Graphs of the layers in the range and of no other, with eager's bits."""
    run = Run({"dp": 2}, "dense_tiny", {"layers": 4, "dropout": 0.1}, dtype="bf16")
    scopes = [ATTN, LAYER, ATTN]
    ranges = [(1, 2), (3, 3), (0, 3)]
    runs = [
        Scoped(run),
        *(Scoped(run, s, graph_layers=r) for s, r in zip(scopes, ranges, strict=True)),
    ]
    ranks = warm_ranks.run(train_all, runs, world_size=2)
    check(runs, ranks)
    assert [seen.captured for seen in ranks[0]] == [0, 4, 2, 8]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_and_stable_pools(warm_ranks: RankPool, strategy: str) -> None:
    """Whatever is sharded, in the buffers of either pool: eager's bits."""
    run = Run({"dp": 2, "ep": 2}, "moe_tiny", MIXED | CAPACITY | {"layers": 3})
    runs = [
        Scoped(replace(run, fsdp={"strategy": strategy, "pool": pool}), scope)
        for pool, scope in (("double", ()), ("double", ALL_PARTS), ("traced", LAYER),
                            ("traced", (*ATTN, *MLP, *MOE)))
    ]  # fmt: skip
    check(runs, warm_ranks.run(train_all, runs, world_size=2))


LAYOUTS: dict[str, tuple[Run, list[tuple[str, ...]]]] = {
    "TP2 SP": (
        Run({"tp": 2, "sequence_parallel": True}, "mla_moe_tiny", MIXED | CAPACITY),
        [ALL_PARTS, LAYER]),
    "EP2xETP2": (
        Run({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, "moe_tiny", MIXED | CAPACITY), [ALL_PARTS]),
    "EP2, lightest dropped": (
        Run({"dp": 2, "ep": 2}, "moe_tiny",
            MIXED | {"capacity_factor": 0.5, "drop": "probs", "dispatcher": "all_gather"}),
        [ALL_PARTS, (*ATTN, *MOE)]),
    "CP2": (Run({"cp": 2}, "dense_tiny_dropout"), [(*ATTN, *MLP), LAYER]),
    "PP2": (Run({"pp": 2}, "dense_tiny_dropout", microbatches=4), [ATTN, MLP, LAYER]),
    "PP2 interleaved": (
        Run({"pp": 2, "pp_chunks": 2}, "moe_tiny", MIXED | CAPACITY | {"layers": 4},
            microbatches=4), [ALL_PARTS]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(warm_ranks: RankPool, name: str) -> None:
    """Every axis, and pipelines with several microbatches between forward and backward."""
    compare(warm_ranks, *LAYOUTS[name])


def test_full_iteration_with_the_optimizer_and_without(warm_ranks: RankPool) -> None:
    """One graph of gradients alone, or of the update, too: one launch a step, eager's bits."""
    run = Run({"dp": 2, "ep": 2}, "moe_tiny", MIXED | CAPACITY)
    runs = [Scoped(run), *(Scoped(run, FULL, graph_optimizer=whole) for whole in (True, False))]
    ranks = warm_ranks.run(train_all, runs, world_size=2)
    check(runs, ranks)
    assert {(seen.captured, seen.replays) for seen in ranks[0][1:]} == {(1, STEPS - WARMUP)}


# ---- around the steps


def test_evaluation_between_replays(warm_ranks: RankPool) -> None:
    """Evaluation, and life after the graphs, are eager's."""
    events = (
        ("step", 0), ("evaluate", 7), ("step", 1), ("evaluate", 8), ("step", 2),
        ("step", 5), ("close",), ("step", 6),
        ("evaluate", 9),
    )  # fmt: skip
    run = Run({"dp": 2, "ep": 2}, "moe_tiny", MIXED | CAPACITY, micro_batch_size=2)
    scopes = [ALL_PARTS, LAYER, FULL]
    found = compare(warm_ranks, run, scopes, events=events)
    # Steps 1, 2 and 5 are replayed.
    parts, layer, full = found
    assert parts.replays == 2 * num_pieces(ALL_PARTS, 1, 1) * 3 * 2
    assert layer.replays == 2 * num_pieces(LAYER, 1, 1) * 3 * 2
    assert full.replays == 3


def test_evaluation_changes_nothing(warm_ranks: RankPool) -> None:
    """It has the loss of a step without dropout, draws no numbers, and leaves the steps alone."""
    run = Run({"dp": 2, "ep": 2}, "moe_tiny", MIXED | CAPACITY)
    plain = replace(run, overrides=run.overrides | {"dropout": 0.0})
    runs = [
        Scoped(run),
        Scoped(run, events=(("evaluate", 5), *STEADY[:1], ("evaluate", 6), *STEADY[1:])),
        Scoped(plain, events=(("evaluate", 0), ("step", 0))),
    ]
    for steady, between, dry in warm_ranks.run(train_all, runs, world_size=2):
        assert [between.bits[i] for i in (1, 3, 4)] == steady.bits
        evaluated, (floats, _, _) = dry.bits
        assert evaluated == [floats[-2]]
