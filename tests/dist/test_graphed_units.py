"""FSDP units as graphed modules: gathered around captures and replays, eager again afterwards."""

import pytest

from tests.dist import graphed_unit_programs as programs
from tests.dist.rank_pool import RankPool


@pytest.mark.parametrize(
    ("strategy", "pool"),
    [
        ("optim_grads_params", "double"),
        ("optim_grads_params", "traced"),
        ("optim_grads", "double"),
        ("no_shard", "dynamic"),
    ],
)
@pytest.mark.parametrize("way", ["own", "te"])
def test_graphed_units_train_as_eager_ones(
    warm_ranks: RankPool, strategy: str, pool: str, way: str
) -> None:
    """Losses, gradients and weights are eager's before, with and after the graphs, on each rank."""
    found = warm_ranks.run(programs.count_differences, strategy, pool, way, world_size=2)
    # Forward and backward of three blocks for two microbatches in each of two steps.
    assert found == [(24, 0)] * 2
