"""Trainings under stressors: right ones keep their bits, wrong ones are found and named."""

from dataclasses import replace
from typing import Any

import pytest

from tests.dist.rank_pool import RankPool
from tests.dist.stress_programs import (
    Stressed,
    other_steps,
    train,
    train_each,
    train_in_turns,
    train_misordered_each,
)
from tests.dist.train_layout_programs import STEPS, WARMUP, Run

FULL, ATTN = ("full_iteration",), ("attn",)
LATE, RACES = ("jitter", "poison", "scramble"), ("races",)
SHARDED = Run({"dp": 2}, dtype="bf16", fsdp={"pool": "double"})
RIGHT = {
    "dense DP2 full_iteration": replace(SHARDED, graph=FULL, fsdp={"pool": "dynamic"}),
    "dense PP2 traced": Run({"pp": 2}, "dense_tiny_dropout", fsdp={"pool": "traced"}),
    "experts EP2": Run({"dp": 2, "ep": 2}, "moe_tiny", fsdp={"reduce_dtype": "bf16"}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_keeps_its_bits(name: str, warm_ranks: RankPool) -> None:
    """Losses, norm, digests and random states are those without stress, and nothing races."""
    run = RIGHT[name]
    runs = [Stressed(run, stress) for stress in ((), LATE, RACES)]
    for plain, *stressed in warm_ranks.run(train_each, runs, world_size=2):
        assert stressed == [plain, plain]
        assert bool(plain[1]) == bool(run.graph)


@pytest.mark.parametrize("graph", [FULL, ATTN], ids="+".join)
def test_stressors_take_turns(graph: tuple[str, ...], warm_ranks: RankPool) -> None:
    """Other stressors each step, graphs made anew for each: the bits, and the number of replays."""
    run = replace(SHARDED, graph=graph)
    turns = [(), ("jitter",), ("poison",), ("scramble",)]
    plain = warm_ranks.run(train, Stressed(run), world_size=2)
    turned = warm_ranks.run(train_in_turns, Stressed(run, LATE), turns, world_size=2)
    for (bits, replays), (seen, replays_in_turns, captured) in zip(plain, turned, strict=True):
        assert seen == bits
        assert replays_in_turns == replays
        # The two steps after the warm-up are of other turns: as many graphs for each as replays.
        assert captured == (2 if graph == FULL else replays // 2)


def test_all_that_a_trainer_does_is_under_stress(warm_ranks: RankPool) -> None:
    """Evaluation and steps after the graphs are gone keep their bits, too."""
    run = replace(SHARDED, graph=ATTN)
    plain = warm_ranks.run(other_steps, Stressed(run), world_size=2)
    assert warm_ranks.run(other_steps, Stressed(run, (*LATE, *RACES)), world_size=2) == plain


def outcomes(ranks: RankPool, run: Run, fault: str, step: int, *stress: tuple[str, ...]) -> Any:
    """What rank 0 raised, or saw: of a run without the fault, then with it under each stress."""
    runs = [Stressed(run), *(Stressed(run, names) for names in stress)]
    steps = [STEPS, *(step for _ in stress)]
    found = ranks.run(train_misordered_each, runs, fault, steps, world_size=2)
    assert [kind for kind, _ in found[0]] == [kind for kind, _ in found[1]]
    return found[0]


RACING = {
    "gather_ignores_writes": (
        "root main_weight: aten::copy_ reads on stream gather at param_group.py:",
        "aten::_fused_adamw_ writes on stream main at optim.py:"),
    "compute_ignores_gather": (
        "gather buffer of unit root: aten::embedding reads on stream main at vocab.py:",
        "c10d::_allgather_base_ writes on stream gather at collectives.py:"),
    "buffer_ignores_reduction": (
        "grad buffer of unit root: aten::_foreach_copy_ writes on stream main at gradients.py:",
        "c10d::_reduce_scatter_base_ reads on stream reduce at collectives.py:"),
    "reduction_freed_early": (
        "for the grad buffer of unit layers.1: reuse writes on stream main at ",
        "c10d::_reduce_scatter_base_ writes on stream reduce at collectives.py:"),
}  # fmt: skip


@pytest.mark.parametrize("fault", RACING)
def test_a_missing_wait_shows_only_under_races(fault: str, warm_ranks: RankPool) -> None:
    """A run without stress, and one under the others, has right bits; races names who and where."""
    later, earlier = RACING[fault]
    right, *others, (kind, text) = outcomes(warm_ranks, SHARDED, fault, 0, (), LATE, RACES)
    assert right[0] == ""
    assert others == [right, right]
    first = text.splitlines()[0]
    assert kind == "RaceFound", text
    assert later in first
    assert earlier in first


@pytest.mark.parametrize(
    ("graph", "step"),
    [(FULL, WARMUP), (ATTN, WARMUP + 1)],
    ids=["captured", "replayed"],
)
def test_captured_work_is_watched(graph: tuple[str, ...], step: int, warm_ranks: RankPool) -> None:
    """A wait that is missing from the capture on, or around replays alone, is found as well."""
    run = replace(SHARDED, graph=graph)
    _, (kind, text) = outcomes(warm_ranks, run, "compute_ignores_gather", step, RACES)
    assert kind == "RaceFound"
    assert "gather buffer of unit root: aten::embedding reads on stream main at vocab.py:" in text
    if graph == ATTN:
        # The replay reads what it was captured over, with nothing that orders it.
        assert "gather buffer of unit layers.0: aten::mm reads on stream main at " in text


@pytest.mark.parametrize("graph", [ATTN, FULL], ids=["attn", "full_iteration"])
def test_an_early_release_shows_only_under_poison(
    graph: tuple[str, ...], warm_ranks: RankPool
) -> None:
    """The buffer still holds the weights, so every other run has right bits."""
    run = replace(SHARDED, graph=graph)
    others = ("jitter", "scramble", "races")
    right, *same, (kind, seen) = outcomes(
        warm_ranks, run, "early_release", 0, (), others, ("poison",)
    )
    assert same == [right, right]
    assert right[0] == kind == ""
    assert seen[0] != right[1][0]


def test_buffers_that_move_under_graphs_are_stale(warm_ranks: RankPool) -> None:
    """Scramble moves what is gathered into new memory each time, and the ledger names it."""
    run = replace(SHARDED, graph=ATTN)
    _, (kind, text) = outcomes(warm_ranks, run, "unstable_buffers", 0, ("scramble",))
    assert (kind, text.split(".attn")[0]) == ("StaleAddress", "layers.0")
