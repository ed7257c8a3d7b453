"""The collectives of sharding over one mesh axis, and the nest of axes they go along.

`Nest` knows this rank's place when a flat buffer is cut over one mesh axis after another (see
`placement`): its slice at each level, and how to get from level to level.
"""

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.fsdp.placement import Placements

# torch 2.13 renamed both; the old names warn there and the new ones are absent before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

GatherStep = tuple[torch.Tensor, torch.Tensor, dist.ProcessGroup]
"""Arguments of an `all_gather`: output, input, ranks."""


def all_gather(full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `full` [ranks * n] with every rank's `shard` [n], in rank order."""
    _all_gather(full, shard, group=group)


def reduce_scatter(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum `full` [ranks * n] over the ranks and give each its part in `shard` [n]."""
    _reduce_scatter(shard, full, group=group)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum `tensor` over the ranks, in place."""
    dist.all_reduce(tensor, group=group)


class Nest:
    """This rank's place in a buffer that is cut over the axes `placements.nest` of a mesh."""

    def __init__(self, mesh: DeviceMesh, placements: Placements) -> None:
        self.mesh, self.placements = mesh, placements
        self.axes = placements.nest
        self.groups = [mesh.get_group(axis) for axis in self.axes]
        self.sizes = [mesh.size(axis) for axis in self.axes]
        self.coordinates = [mesh.get_local_rank(axis) for axis in self.axes]
        self.replica_groups = [mesh.get_group(axis) for axis in placements.replicated]
        self.weight_level, self.grad_level, self.main_level = placements.levels

    @property
    def num_shards(self) -> int:
        """Shards of the main weight."""
        return math.prod(self.sizes)

    @property
    def shard_index(self) -> int:
        """Which of them this rank holds."""
        return self._index(self.main_level)

    @property
    def num_ranks(self) -> int:
        """Ranks whose gradients are averaged: all of the mesh."""
        return self.mesh.size()

    @functools.cached_property
    def main_group(self) -> dist.ProcessGroup:
        """The ranks that together hold the main weight; if each holds it whole, any of them."""
        if len(self.groups) < 2:
            return self.groups[0] if self.groups else self.mesh.get_group(0)
        return self.mesh._flatten().get_group()

    def _index(self, level: int) -> int:
        index = 0
        for size, coordinate in zip(self.sizes[:level], self.coordinates[:level], strict=True):
            index = index * size + coordinate
        return index

    def numel(self, total: int, level: int) -> int:
        """Elements of a slice at `level` of a buffer of `total` elements."""
        return total // math.prod(self.sizes[:level])

    def slice(self, buffer: torch.Tensor, at: int, level: int) -> torch.Tensor:
        """This rank's slice at `level` of `buffer`, its slice at the coarser level `at`."""
        numel = buffer.numel() // math.prod(self.sizes[at:level])
        offset = (self._index(level) - self._index(at) * math.prod(self.sizes[at:level])) * numel
        return buffer[offset : offset + numel]

    def gather(self, buffer: torch.Tensor, start: int, at: int) -> None:
        """Complete `buffer`, a slice at level `at`, of which this rank's slice at `start` is there.

        In place: each collective's input is the part of its output that it belongs in.
        """
        for step in self.gather_steps(buffer, start, at):
            all_gather(*step)

    def gather_steps(self, buffer: torch.Tensor, start: int, at: int) -> list[GatherStep]:
        """The collectives of `gather`, from the finest level."""
        slices = [self.slice(buffer, at, level) for level in range(at, start + 1)]
        steps = zip(slices[:-1], slices[1:], self.groups[at:start], strict=True)
        return list(steps)[::-1]

    def reduce(self, buffer: torch.Tensor, outputs: list[torch.Tensor], level: int) -> torch.Tensor:
        """Sum a slice at `level` over the ranks, one axis an output, and return the last output.

        Outputs are other memory than inputs: a collective that writes into its own input can
        overwrite what other ranks have yet to read.
        """
        for axis, output in enumerate(outputs, start=level):
            reduce_scatter(output, buffer, self.groups[axis])
            buffer = output
        return buffer
