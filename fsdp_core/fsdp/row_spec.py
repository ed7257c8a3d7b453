"""Which rows of a parameter lie on which rank, and how to bring them together.

`RowSpec` is the layout of one parameter, shared by its gradient and its optimizer states, and
`RowShard` says it in DTensor's vocabulary. A row is a slice of dim 0, and a shard is a contiguous
range of whole rows, of any length:

    mesh of 3, axes (0,)     bounds (0, 3, 3, 5)     rows 0 1 2 | none | 3 4
    mesh of 2 x 2, axes (1,) bounds (0, 4, 5)        rows 0..3 where coordinate 1 is 0, else row 4
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
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
        known = (self.bounds[-1], len(self.bounds) - 1)
        if self.num_levels != 1 or (curr_local_size, num_chunks) != known:
            self._refuse()
        return self.bounds[rank + 1] - self.bounds[rank], self.bounds[rank]

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self} cuts rows unevenly, which DTensor's algorithms cannot do: use .full_tensor() "
            "of the sharded tensor."
        )

    _split_tensor = _refuse
    _select_split_tensor = _refuse
    _shard_tensor = _refuse
    _reduce_shard_tensor = _refuse
    _to_replicate_tensor = _refuse
    _replicate_to_shard = _refuse
    _to_new_shard_dim = _refuse

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


@dataclass(frozen=True)
class RowSpec:
    """Layout of one parameter over a mesh, seen from this rank. Build once, share.

    Attributes:
        mesh: 1 or 2 axes; this rank is part of it.
        shape: global shape; () counts as one row of one element.
        bounds: rows [bounds[s], bounds[s + 1]) belong to shard s.
        axes: mesh axes that cut, coarsest first; a rank's shard is the mixed radix of its
            coordinates along them. All other axes replicate.
        shard_index: this rank's shard.
        row_start, row_stop: this rank's rows.
        local_shape: shape of this rank's piece; for a 0-d parameter () where it is, (0,) elsewhere.
        stride: of a contiguous tensor of `shape`.

    Raises:
        ValueError: bounds, axes and shape do not fit each other, or this rank is not in the mesh.
    """

    mesh: DeviceMesh
    shape: torch.Size
    bounds: tuple[int, ...]
    axes: tuple[int, ...]
    shard_index: int = field(init=False, repr=False, compare=False)
    row_start: int = field(init=False, repr=False, compare=False)
    row_stop: int = field(init=False, repr=False, compare=False)
    local_shape: torch.Size = field(init=False, repr=False, compare=False)
    local_numel: int = field(init=False, repr=False, compare=False)
    stride: tuple[int, ...] = field(init=False, repr=False, compare=False)
    placements: tuple[Placement, ...] = field(init=False, repr=False, compare=False)
    cache: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._check()
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"Expected a rank of {self.mesh}, got one outside of it.")
        shard = 0
        for axis in self.axes:
            shard = shard * self.mesh.size(axis) + coordinate[axis]
        start, stop = self.bounds[shard], self.bounds[shard + 1]
        local = torch.Size((stop - start, *self.shape[1:]))
        if not self.shape and stop > start:
            local = torch.Size()
        placements: list[Placement] = [Replicate() for _ in range(self.mesh.ndim)]
        for level, axis in enumerate(self.axes):
            placements[axis] = RowShard(self.bounds, level, len(self.axes))
        derived = {
            "shard_index": shard,
            "row_start": start,
            "row_stop": stop,
            "local_shape": local,
            "local_numel": math.prod(local),
            "stride": tuple(torch.empty(self.shape, device="meta").stride()),
            "placements": tuple(placements),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _check(self) -> None:
        if self.mesh.ndim not in (1, 2):
            raise ValueError(f"Expected a mesh of 1 or 2 axes, got {self.mesh}.")
        if len(set(self.axes)) != len(self.axes) or not all(
            0 <= axis < self.mesh.ndim for axis in self.axes
        ):
            raise ValueError(
                f"Expected distinct axes of a mesh of {self.mesh.ndim}, got {self.axes}."
            )
        rows, bounds = self.num_rows, self.bounds
        if len(bounds) != self.num_shards + 1 or bounds[0] != 0 or bounds[-1] != rows:
            raise ValueError(
                f"Expected {self.num_shards + 1} bounds from 0 to {rows}, got {bounds}."
            )
        if list(bounds) != sorted(bounds):
            raise ValueError(f"Expected bounds that never fall, got {bounds}.")

    @property
    def num_rows(self) -> int:
        """Rows of the whole tensor."""
        return self.shape[0] if self.shape else 1

    @property
    def num_shards(self) -> int:
        """Shards, empty ones included."""
        return math.prod(self.mesh.size(axis) for axis in self.axes)

    @property
    def is_absent_scalar(self) -> bool:
        """Whether the tensor is 0-d and lies on another rank: its piece is (0,), not ()."""
        return not self.shape and not self.local_numel

    def own_rows(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a tensor of the global shape: a view."""
        rows = full if self.shape else full.reshape(1)
        return rows[self.row_start : self.row_stop].view(self.local_shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RowSpec":
        return self  # immutable, and the process groups of a mesh cannot be copied

    def __reduce__(self) -> tuple[Any, ...]:
        return RowSpec, (self.mesh, self.shape, self.bounds, self.axes)


def gather_rows(local: torch.Tensor, spec: RowSpec) -> torch.Tensor:
    """All rows, on every rank: shape `spec.shape`, memory of its own.

    A collective over the axes of `spec`. Pieces travel as bytes, so bits arrive as they are. Where
    pieces are of like length they are padded to the longest and all-gathered, axis by axis from the
    finest; where padding would more than double the data, each piece is broadcast.
    """
    here = local.device
    if here.type == "meta":
        return torch.empty(spec.shape, dtype=local.dtype, device=here)
    mine = local.detach().to(spec.mesh.device_type).contiguous().flatten().view(torch.uint8)
    row_bytes = math.prod(spec.shape[1:]) * local.element_size()
    lengths = [
        (stop - start) * row_bytes
        for start, stop in zip(spec.bounds[:-1], spec.bounds[1:], strict=True)
    ]
    if max(lengths) * len(lengths) <= 2 * sum(lengths):
        flat = _all_gather_padded(mine, spec, lengths)
    else:
        flat = _broadcast_pieces(mine, spec, lengths)
    return flat.view(local.dtype).view(spec.shape).to(here)


def _all_gather_padded(mine: torch.Tensor, spec: RowSpec, lengths: list[int]) -> torch.Tensor:
    longest = max(lengths)
    gathered = mine.new_zeros(longest)
    gathered[: mine.numel()].copy_(mine)
    for axis in reversed(spec.axes):
        size = spec.mesh.size(axis)
        whole = gathered.new_empty(size * gathered.numel())
        all_gather(whole, gathered, spec.mesh.get_group(axis))
        gathered = whole
    if min(lengths) == longest:
        return gathered
    pieces = gathered.view(len(lengths), longest)
    return torch.cat([piece[:length] for piece, length in zip(pieces, lengths, strict=True)])


def _broadcast_pieces(mine: torch.Tensor, spec: RowSpec, lengths: list[int]) -> torch.Tensor:
    flat = mine.new_empty(sum(lengths))
    coordinate = spec.mesh.get_coordinate()
    assert coordinate is not None
    own = [coordinate[axis] for axis in spec.axes]
    for at, piece in zip(
        _coordinates(spec), torch.split(flat, lengths), strict=True
    ):  # in one order on every rank
        if not piece.numel():
            continue
        if at == own:
            piece.copy_(mine)
        for level in reversed(range(len(at))):
            if at[:level] == own[:level]:  # the ranks that share the owner's coarser coordinates
                group = spec.mesh.get_group(spec.axes[level])
                dist.broadcast(piece, group=group, group_src=at[level])
    return flat


def _coordinates(spec: RowSpec) -> Iterator[list[int]]:
    """Coordinates along `spec.axes` of the owner of each shard, in shard order."""
    sizes = [spec.mesh.size(axis) for axis in spec.axes]
    for shard in range(spec.num_shards):
        at: list[int] = []
        for size in reversed(sizes):
            shard, digit = divmod(shard, size)
            at.insert(0, digit)
        yield at
