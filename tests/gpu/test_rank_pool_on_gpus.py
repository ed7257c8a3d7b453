"""GPU ranks stay in one default group for life, so that it can be split again and again."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.dist.rank_pool import RankPool


def split_and_sum() -> tuple[int, int, float, int]:
    """Process id, id of the default group, a sum over a fresh half of it, and how many groups."""
    world = dist.group.WORLD
    assert world is not None
    size = dist.get_world_size()
    halves = [list(range(start, size, 2)) for start in range(min(2, size))]
    half = dist.split_group(world, halves)
    number = torch.full((), float(dist.get_rank()), device="cuda")
    dist.all_reduce(number, group=half)
    return os.getpid(), id(world), float(number), len(dist.distributed_c10d._world.pg_map)


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
