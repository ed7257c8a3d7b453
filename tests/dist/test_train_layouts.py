"""The trainer over ranks: strategies agree, layouts train what one process trains.

That graphs have eager's bits is shown by scenarios: `nightly/graph_scopes_*`, `layouts_of_*`.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdp_core.config import STRATEGIES
from tests.dist.rank_pool import RankPool
from tests.dist.train_layout_programs import (
    Run,
    Shown,
    first_loss,
    one_process_loss,
    show,
    train_all,
)

SP: dict[str, Any] = {"sequence_parallel": True}
SHARDED = "optim_grads_params"
TINY: dict[str, Any] = {
    "vocab_size": 40, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "seq": 6,
}  # fmt: skip
LONG = Run({"dp": 2}, "dense_tiny", TINY, steps=6, dtype="bf16")


def of(run: Run, strategy: str, pool: str, dropout: float = 0.2, **options: Any) -> Run:
    """The run with these settings of FSDP."""
    fsdp = {"strategy": strategy, "pool": pool, **options}
    return replace(run, fsdp=fsdp, overrides=TINY | {"dropout": dropout})


@pytest.mark.parametrize(
    ("dtype", "microbatches", "classes"),
    [
        ("bf16", 1, [STRATEGIES]),
        ("fp32", 1, [STRATEGIES]),
        ("fp32", 2, [STRATEGIES[:2], STRATEGIES[2:]]),
    ],
)
def test_strategies_agree_at_two_ranks(
    warm_ranks: RankPool, dtype: str, microbatches: int, classes: list[tuple[str, ...]]
) -> None:
    """Sharding changes no loss bit at two ranks, unclipped: a sum of two has one order.

    Of several microbatches the gradients are summed first over microbatches where they stay whole,
    first over ranks where they are cut. With clipping the norm's own order of summation differs,
    and at four ranks the reductions' do.
    """
    run = replace(LONG, dtype=dtype, microbatches=microbatches, clip=0.0)
    for strategies in classes:
        runs = [of(run, strategy, "double") for strategy in strategies]
        for seen in warm_ranks.run(train_all, runs, world_size=2):
            first, *others = [([f[:-1] for f in each.floats], each.rng) for each in seen]
            assert others == [first] * (len(runs) - 1)


def test_training_learns(warm_ranks: RankPool) -> None:
    """The loss falls on learnable data: the bits that agree are those of a training that works."""
    run = replace(of(LONG, SHARDED, "double", 0.0), steps=40)
    for (seen,) in warm_ranks.run(train_all, [run], world_size=2):
        bits = torch.tensor([floats[-2] for floats in seen.floats], dtype=torch.int32)
        losses = bits.view(torch.float32).tolist()
        assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


# ---- against one process


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
