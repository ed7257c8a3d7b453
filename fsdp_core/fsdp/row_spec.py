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
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_core.fsdp.collectives import all_gather


class RowShard(Shard):
    """Placement on one mesh axis of a tensor whose rows are cut at `bounds`, not evenly.

    Attributes:
        bounds: shard s holds rows [bounds[s], bounds[s + 1]).
        level: this axis makes the `level`-th of `num_levels` cuts, 0 is the coarsest.

    DTensor's own algorithms assume even cuts. Those that ask this object for its cuts get the true
    ones where one axis cuts; all others raise.
    """

    def __init__(self, bounds: tuple[int, ...], level: int = 0, num_levels: int = 1) -> None:
        # The C++ base takes its dim in __new__ or in __init__, as torch's release has it.
        super().__init__(0)
        self.bounds, self.level, self.num_levels = bounds, level, num_levels

    def __new__(cls, *_args: Any, **_kwargs: Any) -> "RowShard":
        """A placement of dim 0, whatever the bounds."""
        return super().__new__(cls)

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, int]:
        asked = (curr_local_size, num_chunks, 1)
        if asked != (self.bounds[-1], len(self.bounds) - 1, self.num_levels):
            self._refuse()
        return self.bounds[rank + 1] - self.bounds[rank], self.bounds[rank]

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self} cuts rows unevenly, which DTensor's algorithms cannot do: use .full_tensor() "
            "of the sharded tensor."
        )

    _split_tensor = _select_split_tensor = _shard_tensor = _reduce_shard_tensor = _refuse
    _to_replicate_tensor = _replicate_to_shard = _to_new_shard_dim = _refuse

    def _key(self) -> tuple[Any, ...]:
        return self.bounds, self.level, self.num_levels

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowShard) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return RowShard, self._key()

    def __repr__(self) -> str:
        cut = f", level={self.level} of {self.num_levels}" if self.num_levels > 1 else ""
        return f"RowShard(bounds={self.bounds}{cut})"

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
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"Expected a rank of {mesh}, got one outside of it.")
        _check_cuts(mesh, shape[0] if shape else 1, bounds, axes)
        self.shard_index = 0
        placements: list[Placement] = [Replicate() for _ in range(mesh.ndim)]
        for level, axis in enumerate(axes):
            self.shard_index = self.shard_index * mesh.size(axis) + coordinate[axis]
            placements[axis] = RowShard(bounds, level, len(axes))
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


def _check_cuts(
    mesh: DeviceMesh, rows: int, bounds: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    if len(set(axes)) != len(axes) or not set(axes) <= set(range(mesh.ndim)):
        raise ValueError(f"Expected distinct axes of a mesh of {mesh.ndim}, got {axes}.")
    shards = math.prod(mesh.size(axis) for axis in axes)
    if len(bounds) != shards + 1 or bounds[0] != 0 or bounds[-1] != rows:
        raise ValueError(f"Expected {shards + 1} bounds from 0 to {rows}, got {bounds}.")
    if list(bounds) != sorted(bounds):
        raise ValueError(f"Expected bounds that never fall, got {bounds}.")


def gather_rows(local: torch.Tensor, spec: RowSpec) -> torch.Tensor:
    """All rows, on every rank: shape `spec.shape`, memory of its own.

    A collective over the axes of `spec`, from the finest. Pieces travel as bytes, so bits arrive as
    they are.
    """
    if local.is_meta:
        return torch.empty(spec.shape, dtype=local.dtype, device=local.device)
    width = math.prod(spec.shape[1:]) * local.element_size()
    device = spec.mesh.device_type
    flat = torch.empty(spec.bounds[-1] * width, dtype=torch.uint8, device=device)
    own = local.detach().contiguous().flatten().view(torch.uint8)
    flat[spec.row_start * width : spec.row_stop * width].copy_(own)
    block = 1  # shards that are one piece along this axis
    for axis in reversed(spec.axes):
        size = spec.mesh.size(axis)
        first = spec.shard_index - spec.shard_index % (block * size)
        cuts = [spec.bounds[first + i * block] * width for i in range(size + 1)]
        pieces = [flat[start:stop] for start, stop in itertools.pairwise(cuts)]
        _gather_pieces(pieces, spec.mesh.get_local_rank(axis), spec.mesh.get_group(axis))
        block *= size
    return flat.view(local.dtype).view(spec.shape).to(local.device)


def _gather_pieces(pieces: list[torch.Tensor], own: int, group: dist.ProcessGroup) -> None:
    """Fill all pieces, one a rank of the group, of which this rank has its own.

    Pieces of like length are padded to the longest and all-gathered; where padding would more than
    double the data, each is broadcast.
    """
    lengths = [piece.numel() for piece in pieces]
    if max(lengths) * len(pieces) > 2 * sum(lengths):
        for rank, piece in enumerate(pieces):
            if piece.numel():
                dist.broadcast(piece, group=group, group_src=rank)
        return
    sent = pieces[own].new_zeros(max(lengths))
    sent[: lengths[own]].copy_(pieces[own])
    gathered = sent.new_empty(len(pieces), max(lengths))
    all_gather(gathered.view(-1), sent, group)
    for piece, row in zip(pieces, gathered, strict=True):
        piece.copy_(row[: piece.numel()])
