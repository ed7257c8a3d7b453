"""Programs that show what one call leaves behind for the next on GPU ranks."""

import os

import torch
import torch.distributed as dist


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
