"""GPU ranks stay in one default group for life, so that it can be split again and again."""

import pytest

from tests.dist.rank_pool import RankPool
from tests.gpu.rank_pool_on_gpus import split_and_sum


@pytest.mark.gpu(2)
def test_calls_share_the_default_group_and_nothing_else(gpu_ranks: RankPool) -> None:
    """Each call splits it anew and sums right; groups of the call before are gone."""
    calls = [gpu_ranks.run(split_and_sum, world_size=2) for _ in range(3)]
    assert calls[0] == calls[1] == calls[2]
    assert [(total, groups) for _, _, total, groups in calls[0]] == [(0.0, 2), (1.0, 2)]


@pytest.mark.gpu(2)
def test_another_world_size_gets_new_ranks(gpu_ranks: RankPool) -> None:
    """The group of a world cannot serve another."""
    pair = {pid for pid, *_ in gpu_ranks.run(split_and_sum, world_size=2)}
    ((alone, _, total, _),) = gpu_ranks.run(split_and_sum, world_size=1)
    assert alone not in pair
    assert total == 0.0
