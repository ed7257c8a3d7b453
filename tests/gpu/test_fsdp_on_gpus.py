"""Sharding on GPUs over NCCL: graphs bit for bit, memory, overlap, checkpoints."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_core.config import (
    POOLS,
    STRATEGIES,
    FsdpConfig,
    ParallelConfig,
    TrainConfig,
    model_from_preset,
)
from tests.conftest import RANKS_PER_GPU
from tests.dist.rank_pool import RankPool
from tests.gpu import fsdp_on_gpus as programs

PARAMS = "optim_grads_params"
DTYPES = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]


def cells(parallel: ParallelConfig, outers: tuple[str, ...]) -> list[TrainConfig]:
    """Every strategy, pool and dtype policy: 20 steps of 2 microbatches, the whole as one graph."""
    return [
        TrainConfig(
            model=model_from_preset("dense_tiny_dropout"),
            parallel=parallel,
            fsdp=FsdpConfig(
                strategy=strategy, outer_strategy=outer, pool=pool, reduce_dtype=reduce
            ),
            dtype=dtype,
            microbatches=2,
            graph=("full_iteration",),
        )
        for outer, strategy, pool, (dtype, reduce) in itertools.product(
            outers, STRATEGIES, POOLS, DTYPES
        )
    ]


def check_cells(ranks: RankPool, configs: list[TrainConfig], world_size: int) -> None:
    """On every rank, each configuration trains, and its graph's bits are those of eager."""
    for found in ranks.run(programs.graphs_and_eager, configs, world_size=world_size,
                           timeout_s=280.0):  # fmt: skip
        assert len(found) == len(configs)
        assert {key: at for key, (at, _) in found.items() if at is not None} == {}
        assert min(losses for _, losses in found.values()) == 20


@pytest.mark.gpu(1)
def test_one_gpu_graphs_are_bitwise(gpu_ranks: RankPool) -> None:
    """On one GPU full_iteration equals eager in every strategy, pool and dtype policy."""
    check_cells(gpu_ranks, cells(ParallelConfig(), ("no_shard",)), 1)


@pytest.mark.gpu(4)
def test_four_gpus_graphs_are_bitwise(gpu_ranks: RankPool) -> None:
    """On four GPUs full_iteration equals eager in every strategy, pool and dtype policy."""
    check_cells(gpu_ranks, cells(ParallelConfig(dp=4), ("no_shard",)), 4)


@pytest.mark.gpu(4)
def test_two_axes_graphs_are_bitwise(gpu_ranks: RankPool) -> None:
    """So it does on a mesh of two axes: HSDP, HFSDP and the like."""
    configs = cells(ParallelConfig(dp=2, dp_outer=2), ("no_shard", "optim", PARAMS))
    chosen = [c for c in configs if c.dtype == "bf16" and c.fsdp.strategy in ("optim", PARAMS)]
    chosen = [c for c in chosen if c.fsdp.reduce_dtype == "fp32"]
    check_cells(gpu_ranks, chosen, 4)


def check_memory(ranks: list[dict[str, Any]], units: int, pool: str) -> None:
    """The bound on the peak, and nothing left over."""
    for rank in ranks:
        assert abs(rank["beyond"]) < programs.MIB
        assert max(rank["peak"]) < units * programs.UNIT_BYTES, [
            peak / programs.UNIT_BYTES for peak in rank["peak"]
        ]
        assert min(rank["peak"]) > programs.UNIT_BYTES, "a whole unit is gathered at some time"
        if pool == "dynamic":
            assert max(rank["grads"] + rank["rest"]) < programs.MIB
        assert abs(rank["rest"][-1] - rank["rest"][-2]) < programs.MIB


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("streams", "units"), [(2, 5), (1, 4), (0, 4)])
@pytest.mark.parametrize("recompute", ["", "stopping", "reentrant"])
def test_peak_memory(gpu_ranks: RankPool, recompute: str, streams: int, units: int) -> None:
    """Persistent memory is the formula's; a step holds under 5 full units, 4 with one stream."""
    args = (streams, "dynamic", recompute)
    check_memory(gpu_ranks.run(programs.memory_of_steps, *args, world_size=2), units, "dynamic")


@pytest.mark.gpu(2)
@pytest.mark.parametrize("pool", ["double", "traced"])
def test_peak_memory_of_fixed_buffers(gpu_ranks: RankPool, pool: str) -> None:
    """Pools that keep their buffers stay under the same bound, and stop growing."""
    check_memory(gpu_ranks.run(programs.memory_of_steps, 2, pool, "", world_size=2), 5, pool)


GATHERS, REDUCTIONS = 2 * programs.UNITS - 1, programs.UNITS
"""Backward begins with the unit that forward ended with, so that one is gathered once."""


@pytest.mark.gpu(2)
@pytest.mark.skipif(
    RANKS_PER_GPU > 1, reason="ranks that share a GPU take turns: RANKS_PER_GPU must be 1"
)
@pytest.mark.parametrize(
    ("strategy", "counts"),
    [
        (PARAMS, {"AllGather": GATHERS, "ReduceScatter": REDUCTIONS}),
        ("optim_grads", {"AllGather": programs.UNITS, "ReduceScatter": REDUCTIONS}),
        ("optim", {"AllGather": programs.UNITS, "ReduceScatter": REDUCTIONS}),
        ("no_shard", {"AllReduce": REDUCTIONS}),
    ],
)
def test_collectives_overlap(
    gpu_ranks: RankPool, tmp_path: Path, strategy: str, counts: dict[str, int]
) -> None:
    """A step gathers and reduces what its strategy implies, all but first and last under compute.

    Where weights are whole they are gathered after the optimizer, with nothing to hide under.
    """
    size = min(torch.cuda.device_count(), 4)
    for rank in gpu_ranks.run(programs.profiled_step, strategy, str(tmp_path), world_size=size):
        assert rank["counts"] == counts, rank
        allowed = {("AllGather", 1), ("ReduceScatter", REDUCTIONS), ("AllReduce", REDUCTIONS)}
        after = strategy in ("optim", "optim_grads")
        exposed = {c for c in rank["exposed"] if not (after and c[0] == "AllGather")}
        assert exposed <= allowed, rank
        assert {"fsdp unshard", "fsdp reduce"} <= set(rank["ranges"])


@pytest.mark.gpu(2)
def test_checkpoints(gpu_ranks: RankPool, tmp_path: Path) -> None:
    """Saved and loaded over NCCL, into another strategy too, training goes on bit for bit."""
    for rank in gpu_ranks.run(programs.save_and_load, str(tmp_path), world_size=2):
        assert rank == [True] * len(rank)
