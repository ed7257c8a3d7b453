"""The trainer on layouts: graphs have eager's bits, and layouts train what one process trains."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.dist.rank_pool import RankPool
from tests.dist.train_layout_programs import (
    STEPS,
    WARMUP,
    Run,
    Seen,
    Shown,
    first_loss,
    one_process_loss,
    show,
    train_all,
)

SP: dict[str, Any] = {"sequence_parallel": True}
CAPACITY: dict[str, Any] = {"capacity_factor": 1.25}
FULL, ATTN = ("full_iteration",), ("attn",)
UNPOOLED: dict[str, Any] = {"pool": "dynamic"}

# A gradient buffer that a pool keeps has no name; with the dynamic pool there is none.
CAPTURED = {
    "dense DP2xTP2 SP": (
        Run({"dp": 2, "tp": 2} | SP, "dense_tiny_dropout", dtype="bf16"), (FULL,)),
    "dense TP2": (Run({"tp": 2}, "dense_tiny_dropout"), (ATTN,)),
    "dense CP2": (Run({"cp": 2}, dtype="bf16"), (FULL, ATTN)),
    "dense TP2xPP2": (
        Run({"tp": 2, "pp": 2}, "dense_tiny_dropout", microbatches=3, fsdp=UNPOOLED), (FULL,)),
    "dense PP2 interleaved": (
        Run({"pp": 2, "pp_chunks": 2}, "dense_tiny_dropout", {"layers": 4}, dtype="bf16"), (FULL,)),
    "experts EP2": (Run({"dp": 2, "ep": 2}, "moe_tiny", CAPACITY, fsdp=UNPOOLED), (FULL,)),
    "MLA and experts PP2xEP2": (
        Run({"dp": 2, "pp": 2, "ep": 2}, "mla_moe_tiny", CAPACITY, fsdp=UNPOOLED), (FULL,)),
}  # fmt: skip


def same_bits(one: Seen, other: Seen) -> None:
    """Every step shows the same."""
    assert one.names == other.names
    for step in range(STEPS):
        for kind in ("floats", "digests", "rng"):
            assert getattr(one, kind)[step] == getattr(other, kind)[step], (kind, step)


@pytest.mark.parametrize("name", CAPTURED)
def test_graphs_have_the_bits_of_eager(name: str, warm_ranks: RankPool) -> None:
    """Losses, norm, digests and random states of every rank and step are those of the eager run."""
    run, scopes = CAPTURED[name]
    runs = [run, *(replace(run, graph=scope) for scope in scopes)]
    for eager, *graphed in warm_ranks.run(train_all, runs, world_size=run.parallel.world_size):
        # No two steps look alike, or the comparison would compare nothing.
        for group in ("grads", "weights", "optim"):
            assert len({digests[group] for digests in eager.digests}) == STEPS
        for seen, scope in zip(graphed, scopes, strict=True):
            same_bits(eager, seen)
            layers = run.config.model.layers
            replays = STEPS - WARMUP
            expected = (1, replays)
            if scope == ATTN:
                expected = (2 * layers, replays * run.microbatches * 2 * layers)
            assert (seen.captured, seen.replays) == expected
            assert seen.places == []


def test_ranks_agree_on_what_they_share(warm_ranks: RankPool) -> None:
    """Loss and norm are of the whole step; losses are of a rank's tokens, tp and pp alike."""
    run = Run({"dp": 2, "tp": 2, "pp": 2}, "dense_tiny_dropout")
    ranks = [each[0] for each in warm_ranks.run(train_all, [run], world_size=8)]
    assert len({rank.floats[-1][-2:] for rank in ranks}) == 1
    losses = [rank.floats[-1][:-2] for rank in ranks]
    # Coordinates are (pp, dp, tp), tp fastest.
    assert losses == [losses[0], losses[0], losses[2], losses[2]] * 2
    assert losses[0] != losses[2]
    # What tp ranks hold alike loses the same elements; data and layers of other ranks lose others.
    drawn = [rank.rng[-1]["equal over tp"] for rank in ranks]
    assert drawn == [drawn[0], drawn[0], drawn[2], drawn[2], drawn[4], drawn[4], drawn[6], drawn[6]]
    assert len(set(drawn)) == 4
    assert len({rank.rng[-1]["cpu"] for rank in ranks}) == 8
    # Every parameter is digested, on the stages that have it.
    names = [set(rank.names["weights"]) for rank in ranks]
    first, last = names[0] | names[2], names[4] | names[6]
    assert not first & last
    assert "embedding.weight" in first
    assert "head.weight" in last
    assert {n.split(".")[1] for n in last if n.startswith("layers")} == {"1"}


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 2} | SP, {"tp": 2, "etp": 2, "pp": 2}, {"cp": 2, "ep": 2},
)  # fmt: skip


def test_layouts_train_what_one_process_trains(warm_ranks: RankPool) -> None:
    """Losses and norms of clipped steps, weights, and experts' biases follow those of one rank.

    Each is a float32 out of sums in another order: loss and norm were seen to be 2 roundings apart,
    16 are allowed. A part that is lost or counted twice changes them by a hundredth or more. Small
    steps keep the choice of experts the same.
    """
    one = Run({}, "mla_moe_tiny", lr=1e-4)
    (expected,) = warm_ranks.run(show, one, world_size=1)
    for degrees in LAYOUTS:
        run = replace(one, degrees=degrees)
        ranks: list[Shown] = warm_ranks.run(show, run, world_size=run.parallel.world_size)
        biases: dict[str, torch.Tensor] = {}
        for rank in ranks:
            for got, wanted in zip(rank.floats, expected.floats, strict=True):
                assert got == pytest.approx(wanted, rel=16 * 2**-24), degrees
            for name, bias in rank.biases.items():
                assert torch.equal(biases.setdefault(name, bias), bias)
        for name, weight in expected.weights.items():
            # AdamW turns a rounding of a gradient near zero into a part of a step of lr.
            error = (ranks[0].weights[name] - weight).norm() / weight.norm()
            assert error < 1e-4, (degrees, name)
        assert biases.keys() == expected.biases.keys() != set()
        for name, bias in expected.biases.items():
            assert torch.equal(biases[name], bias)
            assert bias.abs().max() > 0


@pytest.mark.parametrize(
    "run",
    [
        Run({"dp": 2, "cp": 2}, micro_batch_size=2),
        Run({"dp": 2, "dp_outer": 2}),
        Run({"dp": 4, "dynamic_cp": (1, 2, 4)}, microbatches=4),
        Run({"dp_outer": 2, "cp": 2, "tp": 2, "dynamic_cp": (1, 2)} | SP, microbatches=3),
        Run({"dp": 2, "pp": 2, "dynamic_cp": (1, 2)}, microbatches=3),
    ],
    ids=["DP2xCP2", "HSDP", "dynamic CP", "dynamic CP HSDP TP SP", "dynamic CP PP"],
)
def test_loss_is_the_mean_over_all_tokens(run: Run, warm_ranks: RankPool) -> None:
    """Every rank reports the mean over each token of each sequence of the step, once."""
    expected = one_process_loss(run)
    for loss in warm_ranks.run(first_loss, run, world_size=run.parallel.world_size):
        # Token losses near 4, and their sums, have float32's roundings.
        assert loss == pytest.approx(expected, rel=16 * 2**-24)
