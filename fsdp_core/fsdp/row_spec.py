"""Which rows of a parameter lie on which rank, and how to bring them together.

`RowSpec` is the layout of one parameter, shared by its gradient and its optimizer states, and
`RowShard` says it in DTensor's vocabulary. A row is a slice of dim 0, and a shard is a contiguous
range of whole rows, of any length:

    mesh of 3, axes (0,)     bounds (0, 3, 3, 5)     rows 0 1 2 | none | 3 4
    mesh of 2 x 2, axes (1,) bounds (0, 4, 5)        rows 0..3 where coordinate 1 is 0, else row 4
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_core.fsdp.collectives import all_gather


class RowShard(Shard):
    """Placement on one mesh axis of a tensor whose rows are cut at `bounds`, not evenly.

    Attributes:
        bounds: shard s holds rows [bounds[s], bounds[s + 1]).
        level: this axis makes the `level`-th cut, 0 is the coarsest.

    It equals no `Shard(0)`, so DTensor, which assumes even cuts, refuses to be built with it. Who
    asks the placement itself for its cuts gets the true ones where one axis cuts.
    """

    def __init__(self, bounds: tuple[int, ...], level: int = 0) -> None:
        # The C++ base takes its dim in __new__ or in __init__, as torch's release has it.
        super().__init__(0)
        self.bounds, self.level = bounds, level

    def __new__(cls, *_args: Any) -> "RowShard":
        """A placement of dim 0, whatever the bounds."""
        return super().__new__(cls)

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, int]:
        if (curr_local_size, num_chunks) != (self.bounds[-1], len(self.bounds) - 1):
            raise NotImplementedError(f"Expected one axis to cut, got {self}: see RowSpec.")
        return self.bounds[rank + 1] - self.bounds[rank], self.bounds[rank]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowShard) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self.__reduce__())

    def __reduce__(self) -> tuple[Any, ...]:
        return RowShard, (self.bounds, self.level)

    def __repr__(self) -> str:
        return f"RowShard(bounds={self.bounds}, level={self.level})"

    __str__ = __repr__


@dataclass(unsafe_hash=True)
class RowSpec:
    """Layout of one parameter over a mesh, seen from this rank. Build once, share, never change.

    Args:
        mesh: this rank is part of it.
        shape: global shape; () counts as one row of one element.
        bounds: rows [bounds[s], bounds[s + 1]) belong to shard s.
        axes: mesh axes that cut, coarsest first; a rank's shard is the mixed radix of its
            coordinates along them. All other axes replicate.

    Attributes:
        shard_index: this rank's shard.
        row_start, row_stop: this rank's rows.
        local_shape: shape of this rank's piece; for a 0-d parameter () where it is, (0,) elsewhere.
        is_absent_scalar: whether the tensor is 0-d and lies on another rank.
        stride: of a contiguous tensor of `shape`.
        placements: `RowShard` on the axes that cut, Replicate on the others.

    Raises:
        ValueError: bounds, axes and shape do not fit each other, or this rank is not in the mesh.
    """

    mesh: DeviceMesh
    shape: torch.Size
    bounds: tuple[int, ...]
    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        mesh, shape, bounds, axes = self.mesh, self.shape, self.bounds, self.axes
        coordinate, num_rows = mesh.get_coordinate(), shape[0] if shape else 1
        if coordinate is None or sorted(axes) != sorted(set(axes) & set(range(mesh.ndim))):
            raise ValueError(f"Expected a rank of {mesh} and distinct axes of it, got {axes}.")
        count = math.prod(mesh.size(axis) for axis in axes) + 1
        rising = len(bounds) == count and list(bounds) == sorted(bounds)
        if not rising or (bounds[0], bounds[-1]) != (0, num_rows):
            raise ValueError(f"Expected {count} rising bounds from 0 to {num_rows}, got {bounds}.")
        self.shard_index = 0
        placements: list[Placement] = [Replicate() for _ in range(mesh.ndim)]
        for level, axis in enumerate(axes):
            self.shard_index = self.shard_index * mesh.size(axis) + coordinate[axis]
            placements[axis] = RowShard(bounds, level)
        self.placements = tuple(placements)
        self.row_start, self.row_stop = bounds[self.shard_index : self.shard_index + 2]
        rows = self.row_stop - self.row_start
        self.is_absent_scalar = not shape and not rows
        self.local_shape = torch.Size((rows, *shape[1:])) if shape or not rows else shape
        self.local_numel = math.prod(self.local_shape)
        self.stride = tuple(torch.empty(shape, device="meta").stride())

    def own_rows(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a tensor of the global shape: a view."""
        rows = full if self.shape else full.reshape(1)
        return rows[self.row_start : self.row_stop].view(self.local_shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RowSpec":
        return self  # never changes, and the process groups of a mesh cannot be copied

    def __reduce__(self) -> tuple[Any, ...]:
        return RowSpec, (self.mesh, self.shape, self.bounds, self.axes)


def gather_rows(local: torch.Tensor, spec: RowSpec) -> torch.Tensor:
    """All rows, on every rank: shape `spec.shape`, memory of its own.

    A collective over the axes of `spec`, from the finest. Pieces travel as bytes, so bits arrive as
    they are, padded to the longest: no shard of a unit holds more than its part of the unit, so all
    together are no more than the unit.
    """
    if local.is_meta:
        return torch.empty(spec.shape, dtype=local.dtype, device=local.device)
    width = math.prod(spec.shape[1:]) * local.element_size()
    lengths = [(stop - start) * width for start, stop in itertools.pairwise(spec.bounds)]
    own = local.detach().contiguous().flatten().view(torch.uint8)
    pieces = torch.zeros(max(lengths), dtype=torch.uint8, device=spec.mesh.device_type)
    pieces[: own.numel()].copy_(own)
    for axis in reversed(spec.axes):
        sent, pieces = pieces, pieces.new_empty(spec.mesh.size(axis) * pieces.numel())
        all_gather(pieces, sent, spec.mesh.get_group(axis))
    rows = pieces.view(len(lengths), max(lengths))
    flat = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
    return flat.view(local.dtype).view(spec.shape).to(local.device)
