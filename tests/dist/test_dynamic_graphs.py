"""Graph banks of dynamic context parallelism in the trainer: eager's bits, or an error."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.dist.dynamic_graph_programs import (
    failed_capture,
    lifetime_of_tables,
    refused,
    replayed,
    train_mixed,
)
from tests.dist.rank_pool import RankPool
from tests.dist.train_layout_programs import STEPS, Run, same_bits, train_all

SP: dict[str, Any] = {"sequence_parallel": True}
ATTN, FRONT = ("attn",), ("attn", "moe_router", "moe_preprocess")
ONE: dict[str, Any] = {"layers": 1}
DENSE = "dense_tiny_dropout"

CASES = {
    "DP4": (Run({"dp": 4, "dynamic_cp": (1, 4)}, DENSE, ONE), ATTN),
    "DP2xTP2 SP": (
        Run({"dp": 2, "tp": 2, "dynamic_cp": (1, 2)} | SP, DENSE, ONE), ATTN),
    "DP2xPP2": (
        Run({"dp": 2, "pp": 2, "dynamic_cp": (1, 2)}, DENSE, dtype="bf16", microbatches=4), ATTN),
    "MLA and experts": (
        Run({"dp": 2, "ep": 2, "dynamic_cp": (1, 2)}, "mla_moe_tiny",
            fsdp={"pool": "traced"}), FRONT),
}  # fmt: skip
NUM_SLOTS = {"DP2xPP2": 2}


@pytest.mark.parametrize("name", CASES)
def test_banks_have_the_bits_of_eager(name: str, warm_ranks: RankPool) -> None:
    """Losses, norm, digests and random states are eager's, whichever size and slot is replayed."""
    run, scopes = CASES[name]
    runs = [run, replace(run, graph=scopes)]
    # Every size is replayed, in every slot.
    sizes, num_slots = run.parallel.dynamic_cp, NUM_SLOTS.get(name, 1)
    assert replayed(run) == set(itertools.product(sizes, range(num_slots)))
    for eager, seen in warm_ranks.run(train_all, runs, world_size=run.parallel.world_size):
        for group in ("grads", "weights", "optim"):
            assert len({digests[group] for digests in eager.digests}) == STEPS
        same_bits(eager, seen)
        # Forward and backward of as many pieces for each.
        assert seen.captured % (2 * num_slots * len(sizes)) == 0 < seen.captured
        assert seen.replays > 0
        assert seen.places == []


def test_a_forced_size(warm_ranks: RankPool) -> None:
    """Every microbatch on one size, which is not the layout's, has eager's bits."""
    run = Run({"dp": 2, "dynamic_cp": (2,)}, overrides=ONE)
    for eager, seen in warm_ranks.run(train_all, [run, replace(run, graph=ATTN)], world_size=2):
        same_bits(eager, seen)
        assert (seen.captured, seen.places) == (2, [])


def test_groups_may_differ(warm_ranks: RankPool) -> None:
    """Two ranks on one size beside two on another, in one microbatch: no rank waits, same bits."""
    run = Run({"dp": 4, "dynamic_cp": (1, 2)}, "moe_tiny", ONE)
    runs = [run, replace(run, graph=FRONT)]
    for eager, graphed in warm_ranks.run(train_mixed, runs, world_size=4):
        assert graphed == eager
        assert len({str(step) for step in eager}) == STEPS


def test_what_was_not_captured_is_refused(warm_ranks: RankPool) -> None:
    """Other capacities, slots and groups raise, and training goes on as before, with evaluations in
    between."""
    run = Run({"dp": 2, "dynamic_cp": (1, 2)}, overrides=ONE, graph=ATTN)
    for messages, seen, expected in warm_ranks.run(refused, run, world_size=2):
        assert "ValueError: Expected plan." in messages["capacity"]
        assert "packed with one capacity of tokens and sequences" in messages["capacity"]
        assert "ValueError: Expected at most 1 microbatches" in messages["slot"]
        assert "RuntimeError: Expected the process group that is kept" in messages["group"]
        assert "Expected at most 8 sequences in a pack of 9 slots" in messages["sequences"]
        assert "RuntimeError: Expected slot 0 to be free" in messages["waiting"]
        assert seen == expected


def test_a_failed_capture_leaves_no_bank(warm_ranks: RankPool) -> None:
    """The smallest size, the last, is refused: no graph of another is installed; a retry works."""
    run = Run({"dp": 2, "dynamic_cp": (1, 2)}, DENSE, ONE, graph=ATTN)
    for message, left, seen, expected in warm_ranks.run(failed_capture, run, world_size=2):
        assert "_local_scalar_dense" in message
        assert left == []
        assert seen == expected


def test_tables_live_as_long_as_banks(warm_ranks: RankPool) -> None:
    """RoPE tables that a model replaced stay while graphs may read them, and no longer."""
    run = Run({"dp": 2, "dynamic_cp": (1, 2)}, DENSE, ONE, graph=ATTN)
    for is_kept, message, is_gone in warm_ranks.run(lifetime_of_tables, run, world_size=2):
        assert is_kept
        assert "rope.cos: captured at" in message
        assert is_gone
