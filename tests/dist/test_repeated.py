"""The same layout has the same bits each time, also where layers are computed twice."""

import pytest
import torch

from fsdp_core.config import ParallelConfig, model_from_preset
from tests.dist.parity_batches import Batch
from tests.dist.parity_programs import Layout, Problem
from tests.dist.rank_pool import RankPool
from tests.dist.repeated_programs import take_thrice

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
