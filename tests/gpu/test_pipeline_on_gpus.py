"""Pipelines on GPUs over NCCL: the bits of one GPU, eager, sharded, and as one graph."""

import pytest

from tests.dist.rank_pool import RankPool
from tests.gpu import pipeline_on_gpus as programs

SHAPES = [(1, 1), (1, 3), (1, 8), (2, 4), (2, 8)]


@pytest.mark.gpu(2)
def test_two_stages_equal_one_gpu(gpu_ranks: RankPool) -> None:
    """Losses and gradients of two ranks have the bits of one GPU."""
    for found in gpu_ranks.run(programs.compare_with_one, "cuda", SHAPES, world_size=2):
        assert found == {shape: [] for shape in SHAPES}


@pytest.mark.gpu(4)
def test_four_stages_equal_one_gpu(gpu_ranks: RankPool) -> None:
    """The same over four, where neighbours are not each other's only partners."""
    for found in gpu_ranks.run(programs.compare_with_one, "cuda", SHAPES, world_size=4):
        assert found == {shape: [] for shape in SHAPES}


@pytest.mark.gpu(4)
def test_sharded_stages_equal_one_gpu(gpu_ranks: RankPool) -> None:
    """Two stages over two data-parallel ranks have the bits of two halves on one GPU."""
    shapes = [(1, 3), (2, 4)]
    for found in gpu_ranks.run(programs.compare_sharded, "cuda", shapes, world_size=4):
        assert found == {shape: [] for shape in shapes}


@pytest.mark.gpu(2)
def test_a_captured_pass_on_gpus(gpu_ranks: RankPool) -> None:
    """A graph of a whole pass, messages included, replays to the bits of eager passes."""
    shapes = [(1, 3), (2, 4)]
    for found in gpu_ranks.run(programs.compare_captured, "cuda", shapes, world_size=2):
        assert found == {shape: [] for shape in shapes}
