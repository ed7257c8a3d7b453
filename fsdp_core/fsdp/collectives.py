"""The two collectives of sharding, under whichever name this torch has for them."""

from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed both; the old names warn there and the new ones are absent before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `full` [ranks * n] with every rank's `shard` [n], in rank order."""
    _all_gather(full, shard, group=group)


def reduce_scatter(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum `full` [ranks * n] over the ranks and give each its part in `shard` [n]."""
    _reduce_scatter(shard, full, group=group)
