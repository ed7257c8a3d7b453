"""The trainer over ranks: strategies agree, layouts train what one process trains.

That graphs have eager's bits is shown by scenarios: `nightly/graph_scopes_*`, `layouts_of_*`."""

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.config import STRATEGIES, ParallelConfig
from fsdp_core.config.parallel import AXES, axis_rank, groups
from fsdp_core.device import Device
from fsdp_core.fsdp import fully_shard
from fsdp_core.parallel.context import DynamicContext
from fsdp_core.parallel.mesh import Axes, Axis, build_axes
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


# --- `build_axes` over 8 ranks: every group has the ranks that `config.parallel` says, in order ---


ALL_LAYOUTS = {
    "dp8": ParallelConfig(dp=8),
    "dp4_tp2": ParallelConfig(dp=4, tp=2, sequence_parallel=True),
    "dp8_ep2_etp2": ParallelConfig(dp=8, ep=2, etp=2),
    "dp2_cp2_tp2_ep4": ParallelConfig(dp=2, cp=2, tp=2, ep=4, sequence_parallel=True),
    "tp2_pp2_outer2": ParallelConfig(tp=2, pp=2, dp_outer=2, etp=2),
    "dp2_outer2_pp2_ep4": ParallelConfig(dp=2, dp_outer=2, pp=2, ep=4),
    "cp4_pp2": ParallelConfig(cp=4, pp=2, ep=2),
    "ep8": ParallelConfig(dp=2, cp=4, ep=8),
    "dynamic_cp": ParallelConfig(dp=4, cp=2, dynamic_cp=(1, 2, 4, 8)),
}


def group_of(parallel: ParallelConfig, axes: str | tuple[str, ...], rank: int) -> tuple[int, ...]:
    return next(group for group in groups(parallel, axes) if rank in group)


def built(parallel: ParallelConfig) -> Axes:
    """The axes of a layout on the CPU."""
    return build_axes(parallel, Device("cpu"))


def named(axes: Axes) -> dict[str, Axis]:
    return {name: getattr(axes, name) for name in AXES}


def seen(group: dist.ProcessGroup) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks that a group claims, and those that an all-gather over it really hears."""
    heard = [torch.zeros((), dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(heard, torch.tensor(dist.get_rank()), group=group)
    return tuple(dist.get_process_group_ranks(group)), tuple(int(rank) for rank in heard)


def describe(parallel: ParallelConfig) -> dict[str, Any]:
    """What each axis and both meshes of FSDP are on this rank."""
    axes = built(parallel)
    found: dict[str, Any] = {
        name: (axis.name, axis.size, axis.rank, *seen(axis.group))
        for name, axis in named(axes).items()
    }
    for name, mesh in (("dense_mesh", axes.dense_mesh), ("expert_mesh", axes.expert_mesh)):
        found[name] = (
            tuple(mesh.shape),
            tuple(mesh.get_coordinate() or ()),
            tuple(mesh.mesh.flatten().tolist()),
            [seen(mesh.get_group(axis)) for axis in range(mesh.ndim)],
        )
    found["sequence_parallel"] = axes.tp.cuts_sequence
    return found


@pytest.mark.parametrize("name", ALL_LAYOUTS)
def test_groups_have_the_ranks_of_the_arithmetic(warm_ranks: RankPool, name: str) -> None:
    """Size, coordinate and ranks of each axis, size 1 included, in the order of coordinates.

    FSDP cuts dense parameters over dp x cp, and dp_outer around it; those of experts over edp.
    """
    parallel = ALL_LAYOUTS[name]
    for rank, found in enumerate(warm_ranks.run(describe, parallel, world_size=8)):
        for axis in AXES:
            ranks = group_of(parallel, axis, rank)
            place = axis_rank(parallel, axis, rank)
            assert found[axis] == (axis, getattr(parallel, axis), place, ranks, ranks)
            assert ranks[place] == rank
        assert found["sequence_parallel"] == parallel.sequence_parallel
        inner = group_of(parallel, ("dp", "cp"), rank)
        outer = group_of(parallel, "dp_outer", rank)
        along = [inner] if parallel.dp_outer == 1 else [outer, inner]
        shape, place, ranks, seen_groups = found["dense_mesh"]
        assert shape == tuple(len(group) for group in along)
        assert place == tuple(group.index(rank) for group in along)
        assert ranks == group_of(parallel, ("dp_outer", "dp", "cp"), rank)
        assert seen_groups == [(group, group) for group in along]
        edp = group_of(parallel, "edp", rank)
        assert found["expert_mesh"] == ((len(edp),), (edp.index(rank),), edp, [(edp, edp)])


def shared_groups(parallel: ParallelConfig) -> dict[tuple[str, str], bool]:
    """For each pair of axes, and of an axis and a mesh's innermost, whether it is one group."""
    axes = built(parallel)
    found = {name: axis.group for name, axis in named(axes).items()}
    found["dense_mesh"] = axes.dense_mesh.get_group(axes.dense_mesh.ndim - 1)
    found["expert_mesh"] = axes.expert_mesh.get_group()
    return {(a, b): found[a] is found[b] for a, b in itertools.combinations(found, 2)}


def test_axes_that_cut_alike_share_a_group(warm_ranks: RankPool) -> None:
    """A communicator costs memory: tp and etp of the same ranks are one, as are dp and the mesh."""
    parallel = ParallelConfig(dp=2, cp=2, tp=2, ep=2, etp=2)
    for shared in warm_ranks.run(shared_groups, parallel, world_size=8):
        pairs = {pair for pair, same in shared.items() if same}
        assert pairs == {
            ("tp", "etp"), ("cp", "ep"), ("dp", "edp"), ("pp", "dp_outer"), ("dp", "expert_mesh"),
            ("edp", "expert_mesh"),
        }  # fmt: skip


def test_layers_and_fsdp_share_no_group(warm_ranks: RankPool) -> None:
    """FSDP's collectives run beside those of the layers: cp over all ranks is not FSDP's group."""
    parallel = ParallelConfig(cp=8, ep=8)
    for shared in warm_ranks.run(shared_groups, parallel, world_size=8):
        assert shared["cp", "ep"]
        assert not shared["cp", "dense_mesh"]


def timeouts(parallel: ParallelConfig) -> list[timedelta]:
    """The timeout of the default group, of each axis' group and of dynamic contexts'."""
    everyone = dist.group.WORLD
    assert everyone is not None
    made = [everyone, *(axis.group for axis in named(built(parallel)).values())]
    dynamic = DynamicContext([list(range(dist.get_world_size()))], (1, 2))
    made += [dynamic.axis(size).group for size in dynamic.sizes]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in made]


def test_groups_have_the_timeout_of_the_run(warm_ranks: RankPool) -> None:
    """A collective that hangs on a small group ends as soon as one of the whole would."""
    for found in warm_ranks.run(timeouts, ParallelConfig(cp=2, tp=2), world_size=4, timeout_s=41):
        assert set(found) == {timedelta(seconds=41)}


def sharded_sums(parallel: ParallelConfig) -> tuple[list[float], list[float]]:
    """Gradients of a weight sharded over each mesh of FSDP, whose inputs differ by rank."""
    axes = built(parallel)
    found = []
    for mesh in (axes.dense_mesh, axes.expert_mesh):
        module = nn.Linear(8, 256, bias=False)  # rows for every rank: an empty shard has no grad
        strategy = ("optim", "optim_grads_params") if mesh.ndim == 2 else "optim_grads_params"
        sharded = fully_shard(module, mesh=mesh, strategy=strategy)
        sharded(torch.full((1, 8), float(2 ** dist.get_rank()))).sum().backward()
        gradient: Any = module.weight.grad
        found.append(sorted(set(gradient.full_tensor().flatten().tolist())))
    return found[0], found[1]


@pytest.mark.parametrize("name", ["dp2_outer2_pp2_ep4", "dp2_cp2_tp2_ep4", "tp2_pp2_outer2"])
def test_fsdp_averages_over_its_mesh(warm_ranks: RankPool, name: str) -> None:
    """`fully_shard` takes both meshes and averages gradients over exactly their ranks."""
    parallel = ALL_LAYOUTS[name]
    for rank, (dense, expert) in enumerate(warm_ranks.run(sharded_sums, parallel, world_size=8)):
        whole = group_of(parallel, ("dp_outer", "dp", "cp"), rank)
        edp = group_of(parallel, "edp", rank)
        assert dense == [sum(2.0**r for r in whole) / len(whole)]
        assert expert == [sum(2.0**r for r in edp) / len(edp)]


def dynamic_ranks(parallel: ParallelConfig) -> dict[int, tuple[tuple[int, ...], bool]]:
    """Ranks of this rank's group of each dynamic size, and whether it is the group of cp."""
    axes = built(parallel)
    known = {parallel.cp: axes.cp} if parallel.cp in parallel.dynamic_cp else {}
    context = DynamicContext(groups(parallel, ("dp", "cp")), parallel.dynamic_cp, known)
    return {
        size: (
            tuple(dist.get_process_group_ranks(context.axis(size).group)),
            context.axis(size).group is axes.cp.group,
        )
        for size in parallel.dynamic_cp
    }


def test_dynamic_context_takes_the_rows_of_the_layout(warm_ranks: RankPool) -> None:
    """Groups of a dynamic size are stretches of the dp x cp ranks; that of cp is not made again."""
    parallel = ParallelConfig(dp=2, cp=2, tp=2, dynamic_cp=(1, 2, 4))
    for rank, found in enumerate(warm_ranks.run(dynamic_ranks, parallel, world_size=8)):
        row = group_of(parallel, ("dp", "cp"), rank)
        place = row.index(rank)
        for size, (ranks, is_cp) in found.items():
            start = place // size * size
            assert ranks == row[start : start + size]
            assert is_cp == (size == 2)


def refusal(parallel: ParallelConfig) -> str:
    """What `build_axes` says to a layout of other ranks."""
    with pytest.raises(ValueError, match="ranks") as caught:
        built(parallel)
    return str(caught.value)


def test_a_wrong_world_is_refused(warm_ranks: RankPool) -> None:
    """Degrees that do not multiply to the ranks that joined are an error, before any group."""
    for said in warm_ranks.run(refusal, ParallelConfig(dp=2, tp=2), world_size=2):
        assert said.startswith("Expected 4 ranks for ParallelConfig(")
        assert said.endswith(", got 2.")
