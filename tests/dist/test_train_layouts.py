"""The trainer over ranks: graphs have eager's bits, layouts train what one process trains."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdp_core.config import POOLS, STRATEGIES, TrainConfig
from fsdp_core.graph.ledger import StaleAddress
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer
from tests.dist.rank_pool import RankPool
from tests.dist.train_layout_programs import (
    DEVICE,
    Run,
    Shown,
    check,
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


@pytest.mark.parametrize("name", CAPTURED)
def test_graphs_have_the_bits_of_eager(name: str, warm_ranks: RankPool) -> None:
    """Losses, norm, digests and random states of every rank and step are those of the eager run."""
    run, scopes = CAPTURED[name]
    runs = [run, *(replace(run, graph=scope) for scope in scopes)]
    check(runs, warm_ranks.run(train_all, runs, world_size=run.parallel.world_size))


# ---- strategies and pools

SHARDED = "optim_grads_params"
TINY: dict[str, Any] = {
    "vocab_size": 40, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "seq": 6,
}  # fmt: skip
LONG = Run({"dp": 2}, "dense_tiny", TINY, steps=6, dtype="bf16")


def of(run: Run, strategy: str, pool: str, dropout: float = 0.2, **options: Any) -> Run:
    """The run with these settings of FSDP."""
    fsdp = {"strategy": strategy, "pool": pool, **options}
    return replace(run, fsdp=fsdp, overrides=TINY | {"dropout": dropout})


def compare(ranks: RankPool, *runs: Run, control: bool = False) -> None:
    """Every run in every scope that is legal there; with `control` the eager one again.

    Attention is not captured where gathered weights move.
    """
    every = []
    for run in runs:
        moves = SHARDED in (run.fsdp["strategy"], run.fsdp.get("outer_strategy"))
        moves = moves and run.fsdp["pool"] == "dynamic"
        every += [replace(run, graph=scope) for scope in ((), FULL, *([] if moves else [ATTN]))]
    every += every[: int(control)]
    seen = ranks.run(train_all, every, world_size=runs[0].parallel.world_size)
    check(every, seen)
    # Each rank has its own data, and its own dropout.
    assert len({rank[0].floats[0] for rank in seen}) == len(seen)
    assert len({tuple(rank[0].rng[0].items()) for rank in seen}) == len(seen)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("dtype", "dropout"), [("bf16", 0.2), ("fp32", 0.0)])
def test_pools_and_modes_agree_at_two_ranks(
    warm_ranks: RankPool, strategy: str, dtype: str, dropout: float
) -> None:
    """Each pool and graph scope has eager's losses, norm, digests and RNG in every step."""
    run = replace(LONG, dtype=dtype)
    compare(warm_ranks, *(of(run, strategy, pool, dropout) for pool in POOLS))


AT_FOUR = {
    "double": of(LONG, SHARDED, "double"),
    "dynamic unclipped": of(replace(LONG, dtype="fp32", clip=0.0), SHARDED, "dynamic"),
    "kept gathered": of(
        LONG, SHARDED, "traced", 0.0, reduce_dtype="bf16", reshard_after_forward=False
    ),
    "three microbatches": of(
        replace(LONG, microbatches=3), "optim_grads", "double", 0.0, reduce_dtype="bf16"
    ),
}


@pytest.mark.parametrize("name", AT_FOUR)
def test_modes_agree_at_four_ranks(warm_ranks: RankPool, name: str) -> None:
    """The same at four ranks, with other reductions and resharding, and eager run again."""
    compare(warm_ranks, replace(AT_FOUR[name], degrees={"dp": 4}), control=True)


@pytest.mark.parametrize(
    ("outer", "strategy", "pool"),
    [
        ("no_shard", SHARDED, "double"), ("optim", SHARDED, "traced"),
        ("optim_grads", "optim", "dynamic"), (SHARDED, SHARDED, "traced"),
        (SHARDED, "no_shard", "double"),
    ],
)  # fmt: skip
def test_modes_agree_on_two_axes(
    warm_ranks: RankPool, outer: str, strategy: str, pool: str
) -> None:
    """The same on two outer groups of two ranks, whatever the groups share."""
    run = replace(LONG, degrees={"dp": 2, "dp_outer": 2})
    compare(warm_ranks, of(run, strategy, pool, outer_strategy=outer))


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


# ---- addresses

STALE = of(replace(LONG, dtype="fp32"), SHARDED, "double", 0.0)


def trained(graph: tuple[str, ...], ledger: bool = True) -> Trainer:
    """A trainer some steps after its capture."""
    plain = replace(STALE, graph=graph).config.to_dict() | {"ledger": ledger}
    config = TrainConfig.from_dict(plain)
    trainer = Trainer(config, build_axes(config.parallel, DEVICE), DEVICE)
    for step in range(4):
        trainer.step(step)
    return trainer


def move_a_parameter(graph: tuple[str, ...], ledger: bool) -> str:
    """Moves a gathered buffer between two replays; the error's text, or nothing."""
    trainer = trained(graph, ledger)
    block = next(group for group in trainer.groups if group.name == "layers.0")
    index = block.names.index("layers.0.attn.attention.wq.weight")
    storage = block.unsharded[index].untyped_storage()
    nbytes = storage.nbytes()
    # Growing allocates before it frees: the one way to move a storage for certain.
    DEVICE.resize_storage(storage, 2 * nbytes)
    squatter = torch.full((nbytes // 4,), float("nan"))
    try:
        trainer.step(4)
    except (StaleAddress, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        del squatter
    return ""


@pytest.mark.parametrize("graph", [ATTN, FULL], ids=["attn", "full"])
def test_moved_parameter_is_stale(warm_ranks: RankPool, graph: tuple[str, ...]) -> None:
    """A gathered parameter that moved is named by the ledger; without it the replay still stops."""
    for text in warm_ranks.run(move_a_parameter, graph, True, world_size=2):
        assert text.startswith("StaleAddress: layers.0.")
        assert "layers.0.attn.attention.wq.weight" in text
    for text in warm_ranks.run(move_a_parameter, graph, False, world_size=2):
        assert "illegal memory access" in text


def lose_a_gather(graph: tuple[str, ...]) -> str:
    """Takes the hook that gathers the first layer between two replays; the error's text."""
    trainer = trained(graph)
    layer = trainer.stages[0].numbered_layers["0"]
    layer._forward_pre_hooks.clear()
    layer._forward_pre_hooks_with_kwargs.clear()
    with pytest.raises(StaleAddress) as stale:
        trainer.step(4)
    return str(stale.value)


@pytest.mark.parametrize("graph", [ATTN, ("layer",)], ids=["attn", "layer"])
def test_weights_that_nobody_gathered_are_stale(
    warm_ranks: RankPool, graph: tuple[str, ...]
) -> None:
    """At the right address lie the weights of the step before, or of another layer."""
    for text in warm_ranks.run(lose_a_gather, graph, world_size=2):
        assert text.startswith("layers.0.")
        assert "captured while its owner held its memory" in text


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
