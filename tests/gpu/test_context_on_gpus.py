"""Context parallelism on GPUs: the attention of one process, and graphs bit for bit."""

import pytest

from tests.dist.rank_pool import RankPool
from tests.gpu import context_on_gpus as programs


@pytest.mark.gpu(1)
def test_one_gpu_is_attention(gpu_ranks: RankPool) -> None:
    """On one GPU both kernels are off by rounding alone, dense and packed."""
    (cases,) = gpu_ranks.run(programs.all_errors, world_size=1)
    assert {case: e for case, e in cases.items() if max(e.values()) > 1.0} == {}


@pytest.mark.gpu(4)
@pytest.mark.parametrize("size", [2, 4])
def test_gpus_are_as_one_process(gpu_ranks: RankPool, size: int) -> None:
    """Over NCCL too."""
    for cases in gpu_ranks.run(programs.all_errors, world_size=size):
        assert {case: e for case, e in cases.items() if max(e.values()) > 1.0} == {}


@pytest.mark.gpu(4)
def test_graphs_of_all_sizes_replay_in_any_order(gpu_ranks: RankPool) -> None:
    """A CUDA graph for each context size, given new inputs and offsets, has eager's bits."""
    order = (4, 1, 2, 2, 4, 1, 4)
    found = gpu_ranks.run(programs.graphs_and_eager, order, world_size=4)
    assert found == [len(order)] * 4
