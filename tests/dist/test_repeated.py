"""The same layout has the same bits each time, also where layers are computed twice."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from fsdp_core.config import ParallelConfig, model_from_preset
from fsdp_core.model.decoder import make_stages
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.sharding import shard_stage
from fsdp_core.parallel.pipeline import Microbatch, Pipeline
from fsdp_core.parallel.pipeline_p2p import TensorSpec
from tests.dist.parity_programs import (
    CPU,
    Batch,
    Layout,
    Place,
    Problem,
    global_weights,
    make_shares,
    sharding_of,
    streams_of,
)
from tests.dist.rank_pool import RankPool
from tests.support.global_weights import gather_global_grads, load_global

Step = tuple[list[float], dict[str, torch.Tensor]]
"""Losses, and on rank 0 the global gradients."""


def take(problem: Problem, layout: Layout, place: Place, *, recomputes: bool) -> Step:
    """One step from the same weights and random numbers each time."""
    axes, batch = place.axes, problem.batch
    streams, chunks = streams_of(axes, CPU), layout.parallel.pp_chunks
    stages = make_stages(problem.model, axes, LayerFactory(), streams, chunks=chunks)
    load_global(stages, global_weights(problem))
    for stage in stages:
        for layer in stage.numbered_layers.values() if recomputes else ():
            again: Any = functools.partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False,
                context_fn=streams.checkpoint_contexts,
            )  # fmt: skip
            layer.forward = again  # type: ignore[method-assign]
        shard_stage(stage, axes, sharding_of(layout, torch.float32))
        stage.set_loss_scale(1 / batch.number)
    shares = make_shares(problem, layout, place)
    rows, time = shares[0].numbers.shape
    cut = axes.tp.size if axes.sequence_parallel else 1
    spec = TensorSpec((rows, time // cut, problem.model.hidden), torch.float32)
    losses = Pipeline(stages, axes.pp, spec, CPU, num_slots=len(shares)).forward_backward(
        [Microbatch(share.local.tokens, {"part": share.local.part}) for share in shares]
    )
    grads = gather_global_grads(stages, axes)
    return losses.tolist(), {} if dist.get_rank() else grads


def take_thrice(problem: Problem, layout: Layout) -> list[Step]:
    """Twice the same, and once with every layer computed again in its backward pass."""
    place = Place.of(layout)
    return [take(problem, layout, place, recomputes=again) for again in (False, False, True)]


# ---- tests


LAYOUTS = [
    ("dense_tiny", ParallelConfig(pp=2, cp=2, tp=2, sequence_parallel=True), 3),
    ("mla_moe_tiny", ParallelConfig(pp=2, dp=2, ep=2, pp_chunks=2), 4),
]


@pytest.mark.parametrize(("preset", "parallel", "number"), LAYOUTS)
def test_a_step_has_its_bits_again(
    warm_ranks: RankPool, preset: str, parallel: ParallelConfig, number: int
) -> None:
    """Losses and gradients with dropout repeat, and recomputing changes none of them."""
    config = model_from_preset(preset, {"layers": 5, "dropout": 0.3})
    problem = Problem(config, Batch(config.vocab_size, config.seq, number))
    ranks = warm_ranks.run(take_thrice, problem, Layout(parallel), world_size=parallel.world_size)
    for (losses, grads), *others in ranks:
        for other_losses, other_grads in others:
            assert other_losses == losses
            assert other_grads.keys() == grads.keys()
            for name, grad in grads.items():
                assert torch.equal(other_grads[name], grad), name
    assert ranks[0][0][1]
