"""Where parameters lie in a unit's one flat buffer, and how it is cut and gathered over a mesh.

The flat buffer has `num_shards` equal shards; rank r owns shard r. Parameters lie one after
another, each contiguous, and a shard boundary never cuts a row (dim 0 slice) of a parameter, so a
rank's piece of a parameter is a contiguous range of whole rows:

    shard 0                | shard 1                | shard 2
    [wq: rows 0..5 ] [wk: ro|ws 0..1][pad][norm] ... | [down: rows ...

A collective therefore works on the buffer itself, with no copy in or out. What strategies cut says
a table of docs/ARCHITECTURE.md. A mesh of two axes takes a strategy for each: ("no_shard",
"optim_grads_params") is HSDP, ("optim", "optim_grads_params") is HFSDP (Megatron's name: weights
cut inside a node, optimizer state over all nodes). All cuts nest: level k is what is left after the
first k axes of `Placements.nest`, a contiguous slice. So weight, gradient and main weight are each
known by a level, and collectives go from one level to the next on one axis.

Seen from a rank, a parameter is cut into whole rows, slices of dim 0 or of the spec's `dim`:

    mesh of 3, axes (0,)     bounds (0, 3, 3, 5)     rows 0 1 2 | none | 3 4
    mesh of 2 x 2, axes (1,) bounds (0, 4, 5)        rows 0..3 where coordinate 1 is 0, else row 4
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from fsdp_core.config import STRATEGIES
from fsdp_core.dispatch import ALL_GATHER, REDUCE_SCATTER, opens_itself

GatherStep = tuple[torch.Tensor, torch.Tensor, dist.ProcessGroup]
"""Arguments of an `all_gather`: output, input, ranks."""

ALIGN_NUMEL = 16
"""Parameters start at multiples of this many elements: 16 bytes in fp8, as matmuls want."""
_FINE_TRIES = 256


# ---- places in the flat buffer: pure arithmetic


@dataclass(frozen=True)
class Slot:
    """One parameter's place. `offset` is in elements from the start of the flat buffer. `shape` has
    the rows first, which are slices of the parameter's `dim`.
    """

    shape: tuple[int, ...]
    offset: int
    dim: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Elements of one row: a slice of dim 0; 1 for a 0-d or 1-d parameter."""
        return math.prod(self.shape[1:])


def view_at(buffer: Any, offset: int, shape: Sequence[int], dim: int = 0) -> Any:
    """`shape` as a view of a flat buffer from element `offset` on, its first dim moved to `dim`."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    view = buffer.as_strided(shape, strides[: len(shape)], buffer.storage_offset() + offset)
    return view.movedim(0, dim) if dim else view


@dataclass(frozen=True)
class FlatLayout:
    """Places of all parameters of a unit. `shard_numel` is the same on every rank."""

    slots: tuple[Slot, ...]
    shard_numel: int
    num_shards: int

    @property
    def total_numel(self) -> int:
        return self.shard_numel * self.num_shards

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, stop) of the flat buffer that no parameter covers."""
        stops = [0, *(slot.offset + slot.numel for slot in self.slots)]
        starts = [*(slot.offset for slot in self.slots), self.total_numel]
        between = zip(stops, starts, strict=True)
        return tuple((stop, start) for stop, start in between if stop < start)

    def views(self, full: Any) -> list[Any]:
        return [view_at(full, s.offset, s.shape, s.dim) for s in self.slots]

    def row_bounds(self, index: int) -> tuple[int, ...]:
        """Bounds b of the shards of parameter `index`: s has rows [b[s], b[s + 1])."""
        slot = self.slots[index]
        boundaries = (shard * self.shard_numel for shard in range(self.num_shards))
        before = (min(max(boundary - slot.offset, 0), slot.numel) for boundary in boundaries)
        rows = slot.shape[0] if slot.shape else 1
        return (*(numel // max(slot.row_numel, 1) for numel in before), rows)


def build_layout(shapes: Sequence[tuple[int, ...]], num_shards: int) -> FlatLayout:
    """Place `shapes` in order into the smallest equal shards that this search finds.

    A parameter that spans two boundaries or more needs the shard to be a multiple of its row; one
    that spans one boundary only needs a suitable start. So the search first tries sizes that suit
    some of the large parameters' rows, then multiples of all of them, and beyond that sizes which
    hold the largest parameter whole, where a solution always exists.
    """
    # Starts and shards are aligned: no solution has less than all parameters rounded up.
    numels = [_round_up(math.prod(shape), ALIGN_NUMEL) for shape in shapes]
    lower = _round_up(max(-(-sum(numels) // num_shards), 1), ALIGN_NUMEL)
    rows = [math.prod(s[1:]) for s, n in zip(shapes, numels, strict=True) if n > lower]
    sizes = _sizes(lower, max(numels, default=0), rows)
    tries = (_place(shapes, shard_numel, num_shards) for shard_numel in sizes)
    return next(layout for layout in tries if layout is not None)


def _sizes(lower: int, largest: int, rows: Sequence[int]) -> Iterator[int]:
    """Shard sizes to try, in order; without end."""
    fine, coarse = math.lcm(ALIGN_NUMEL, math.gcd(*rows) or 1), math.lcm(ALIGN_NUMEL, *rows)
    first = _round_up(lower, fine)
    yield from range(first, min(first + _FINE_TRIES * fine, 2 * largest), fine)
    stride = _round_up(max(coarse, lower // 64), coarse)
    yield from range(_round_up(lower, coarse), 2 * largest, stride)
    whole = max(largest, lower)
    yield from itertools.count(whole, _round_up(max(1, whole // 64), ALIGN_NUMEL))


def _place(
    shapes: Sequence[tuple[int, ...]], shard_numel: int, num_shards: int
) -> FlatLayout | None:
    cursor, slots = 0, []
    for shape in shapes:
        start = _first_start(cursor, shape, shard_numel)
        if start is None:
            return None
        slots.append(Slot(shape, start))
        cursor = start + math.prod(shape)
    layout = FlatLayout(tuple(slots), shard_numel, num_shards)
    return layout if cursor <= layout.total_numel else None


def _first_start(cursor: int, shape: tuple[int, ...], shard_numel: int) -> int | None:
    """First aligned start at or after `cursor` from which no boundary cuts a row, if any."""
    numel, row = math.prod(shape), max(math.prod(shape[1:]), 1)
    start = _round_up(cursor, ALIGN_NUMEL)
    boundary = (start // shard_numel + 1) * shard_numel
    if start + numel <= boundary:
        return start
    unit = math.lcm(row, ALIGN_NUMEL)
    start = boundary - (boundary - start) // unit * unit
    # The next boundary is a shard further, and is between two rows if a shard is whole rows.
    crosses_another = start + numel > boundary + shard_numel
    return None if crosses_another and shard_numel % row else start


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# ---- what is cut over which axis


class Placements(NamedTuple):
    """How a group is cut over a mesh.

    nest: mesh axes that cut anything, coarsest first.
    levels: how many of them cut the weight, the gradient, the main weight.
    replicated: mesh axes over which even the main weight is whole: gradients are all-reduced.
    """

    nest: tuple[int, ...]
    levels: tuple[int, int, int]
    replicated: tuple[int, ...]


def placements_of(strategy: str | Sequence[str], num_axes: int) -> Placements:
    """Placements of a strategy, or of one strategy a mesh axis, outermost first. One name on a mesh
    of two axes means that name on the inner axis and `no_shard` on the outer (`ValueError`: unknown
    name, or not one name an axis).
    """
    outer = ("no_shard",) * (num_axes - 1)
    names = (*outer, strategy) if isinstance(strategy, str) else tuple(strategy)
    if len(names) != num_axes or any(name not in STRATEGIES for name in names):
        raise ValueError(
            f"Expected a strategy, or one for each of {num_axes} mesh axes, of {STRATEGIES}, "
            f"got {strategy!r}."
        )
    depths = [STRATEGIES.index(name) for name in names]
    # Ties go to the last axis, which is the innermost and fastest of a mesh.
    order = sorted(range(num_axes), key=lambda axis: (depths[axis], axis), reverse=True)
    weight, grad, main = (sum(depth >= least for depth in depths) for least in (3, 2, 1))
    return Placements(
        nest=tuple(axis for axis in order if depths[axis]),
        levels=(weight, grad, main),
        replicated=tuple(axis for axis in range(num_axes) if not depths[axis]),
    )


# ---- collectives from level to level


# Looked up when called: a profiler or a test may have put its own in their place.
def _all_gather(*tensors: torch.Tensor, group: dist.ProcessGroup) -> None:
    getattr(dist, ALL_GATHER)(*tensors, group=group)


def _reduce_scatter(*tensors: torch.Tensor, group: dist.ProcessGroup) -> None:
    getattr(dist, REDUCE_SCATTER)(*tensors, group=group)


def all_gather(full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `full` [ranks * n] with every rank's `shard` [n], in rank order."""
    if group.size() == 1:
        _copy(full, shard)
    elif full.element_size() == 1:  # as bytes: not every backend knows fp8
        _all_gather(full.view(torch.uint8), shard.view(torch.uint8), group=group)
    else:
        _all_gather(full, shard, group=group)


def reduce_scatter(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum `full` [ranks * n] over the ranks and give each its part in `shard` [n]."""
    if group.size() == 1:
        _copy(shard, full)
    else:
        _reduce_scatter(shard, full, group=group)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum `tensor` over the ranks, in place."""
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """What a collective of one rank does."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


class Nest:
    """This rank's place in a buffer that is cut over the axes `placements.nest` of a mesh."""

    def __init__(self, mesh: DeviceMesh, placements: Placements) -> None:
        self.mesh, self.placements = mesh, placements
        self.axes = placements.nest
        self.groups = [mesh.get_group(axis) for axis in self.axes]
        self.sizes = [mesh.size(axis) for axis in self.axes]
        self.num_shards = math.prod(self.sizes)  # of the main weight
        self.coordinates = [mesh.get_local_rank(axis) for axis in self.axes]
        self.replica_groups = [mesh.get_group(axis) for axis in placements.replicated]
        self.weight_level, self.grad_level, self.main_level = placements.levels

    def _index(self, level: int) -> int:
        index = 0
        for size, coordinate in zip(self.sizes[:level], self.coordinates[:level], strict=True):
            index = index * size + coordinate
        return index

    def numel(self, total: int, level: int) -> int:
        return total // math.prod(self.sizes[:level])

    def slice(self, buffer: torch.Tensor, at: int, level: int) -> torch.Tensor:
        """This rank's slice at `level` of `buffer`, its slice at the coarser level `at`."""
        numel = buffer.numel() // math.prod(self.sizes[at:level])
        offset = (self._index(level) - self._index(at) * math.prod(self.sizes[at:level])) * numel
        return buffer[offset : offset + numel]

    def gather_steps(self, buffer: torch.Tensor, start: int, at: int) -> list[GatherStep]:
        """The all-gathers, finest axis first, that complete `buffer`, a slice at level `at`. In
        place, from this rank's slice at level `start`: each input is a part of its output.
        """
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


# ---- one parameter, as this rank has it


class RowShard(Shard):
    """Placement on the mesh axis of the `level`-th cut of a tensor whose rows are cut at `bounds`.
    It equals no `Shard(0)`, so DTensor, which assumes even cuts, refuses to be built with it. Who
    asks the placement itself for its cuts gets the true ones where one axis cuts.
    """

    def __init__(self, bounds: tuple[int, ...], level: int = 0, dim: int = 0) -> None:
        # The C++ base takes its dim in __new__ or in __init__, as torch's release has it.
        super().__init__(dim)
        self.bounds, self.level = bounds, level

    def __new__(cls, *_args: Any) -> "RowShard":
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
        return RowShard, (self.bounds, self.level, self.dim)

    def __repr__(self) -> str:
        return f"RowShard(bounds={self.bounds}, level={self.level}, dim={self.dim})"

    __str__ = __repr__


def rows_first(shape: Sequence[int], dim: int) -> torch.Size:
    """A shape whose rows are slices of `dim`, as the flat buffer has it: that dim first."""
    return torch.Size((*shape[dim : dim + 1], *shape[:dim], *shape[dim + 1 :]))


def joined_mesh(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """All axes of both, outer first, which must be different axes of one mesh with names."""
    return DeviceMesh._concatenate([outer, inner])


class Inner(NamedTuple):
    """How tensor parallelism cuts a parameter before rows are: a DTensor's mesh and placements.
    `shape`: global; `part_shape`, `offsets`: of this rank's part in it, which is cut into rows.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    part_shape: torch.Size
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Inner | None":
        """Of a DTensor; None for any other tensor."""
        if not isinstance(tensor, DTensor) or hasattr(tensor, "row_spec"):
            return None
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        with torch.device("cpu"):  # it counts in tensors, which `with torch.device("meta")` empties
            part, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        return cls(mesh, placements, tensor.shape, torch.Size(part), tuple(offsets))

    def wrap(self, part: torch.Tensor) -> DTensor:
        """The DTensor of which this rank has `part`."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride
        )

    def unwrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a DTensor, which is first laid out so: a collective if it is not."""
        part: Any = cast("DTensor", tensor).redistribute(placements=self.placements).to_local()
        return part.wait() if isinstance(part, AsyncCollectiveTensor) else part


@dataclass(unsafe_hash=True)
class RowSpec:
    """Layout of one parameter over a mesh, seen from this rank. Build once, share, never change.

    shape: global shape; () counts as one row of one element.
    bounds: rows [bounds[s], bounds[s + 1]) of `part_shape` belong to shard s.
    axes: mesh axes that cut rows, coarsest first; a rank's shard is the mixed radix of its
        coordinates along them. All other axes replicate, or are those of `inner`, the last.
    inner: cuts of tensor parallelism; then rows are of this rank's part.
    part_shape, part_offsets: what is cut into rows, and where it lies; without `inner` all.
    cut_axes: all axes along which pieces differ, coarsest first.
    row_start, row_stop: this rank's rows.
    local_shape: shape of this rank's piece; for a 0-d parameter () where it is, (0,) elsewhere.
    is_absent_scalar: whether the tensor is 0-d and lies on another rank.
    """

    mesh: DeviceMesh
    shape: torch.Size
    bounds: tuple[int, ...]
    axes: tuple[int, ...]
    inner: Inner | None = None
    dim: int = 0

    def __post_init__(self) -> None:
        mesh, bounds, inner = self.mesh, self.bounds, self.inner
        shape = self.part_shape = inner.part_shape if inner else self.shape
        self.part_offsets = inner.offsets if inner else (0,) * len(shape)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        assert len(bounds) == math.prod(mesh.size(axis) for axis in self.axes) + 1
        assert (bounds[0], bounds[-1]) == (0, shape[self.dim] if shape else 1)
        self.shard_index = 0
        placements: list[Placement] = [Replicate() for _ in range(mesh.ndim)]
        for level, axis in enumerate(self.axes):
            self.shard_index = self.shard_index * mesh.size(axis) + coordinate[axis]
            placements[axis] = RowShard(bounds, level, self.dim)
        inner_axes = range(mesh.ndim - len(inner.placements), mesh.ndim) if inner else ()
        for axis, placement in zip(inner_axes, inner.placements if inner else (), strict=True):
            placements[axis] = placement
        self.placements = tuple(placements)
        cut = (axis for axis in inner_axes if not placements[axis].is_replicate())
        self.cut_axes = (*self.axes, *cut)
        self.row_start, self.row_stop = bounds[self.shard_index : self.shard_index + 2]
        rows = self.row_stop - self.row_start
        self.is_absent_scalar = not shape and not rows
        local = (*shape[: self.dim], rows, *shape[self.dim + 1 :])
        self.local_shape = torch.Size(local) if shape or not rows else shape
        self.local_numel = math.prod(self.local_shape)
        self.stride = tuple(torch.empty(self.shape, device="meta").stride())

    @property
    def rows_first(self) -> torch.Size:
        """`part_shape` as it lies in the flat buffer."""
        return rows_first(self.part_shape, self.dim)

    def own_rows(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a tensor of the global shape: a view."""
        for dim, (start, size) in enumerate(zip(self.part_offsets, self.part_shape, strict=True)):
            full = full.narrow(dim, start, size)
        return self.rows_of_part(full)

    def rows_of_part(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor of `part_shape`: a view."""
        if not self.shape:
            return part.reshape(1)[self.row_start : self.row_stop].view(self.local_shape)
        return part.narrow(self.dim, self.row_start, self.row_stop - self.row_start)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RowSpec":
        return self  # never changes, and the process groups of a mesh cannot be copied

    def __reduce__(self) -> tuple[Any, ...]:
        return RowSpec, (self.mesh, self.shape, self.bounds, self.axes, self.inner, self.dim)


def gather_rows(local: torch.Tensor, spec: RowSpec) -> torch.Tensor:
    """The whole tensor, on every rank, in memory of its own: a collective over the axes of `spec`.
    Pieces travel as bytes, so bits arrive as they are, padded to the longest: no shard of a unit
    holds more than its part of the unit, so all together are no more than the unit.
    """
    if local.is_meta:
        return torch.empty(spec.shape, dtype=local.dtype, device=local.device)
    rows_first = spec.rows_first
    width = math.prod(rows_first[1:]) * local.element_size()
    lengths = [(stop - start) * width for start, stop in itertools.pairwise(spec.bounds)]
    local = local.detach()
    if opens_itself(type(local)):
        local = torch.empty(local.shape, dtype=local.dtype, device=local.device).copy_(local)
    own = (local.movedim(spec.dim, 0) if spec.dim else local).contiguous()
    own = own.flatten().view(torch.uint8)
    pieces = torch.zeros(max(lengths), dtype=torch.uint8, device=spec.mesh.device_type)
    pieces[: own.numel()].copy_(own)
    for axis in reversed(spec.axes):
        sent, pieces = pieces, pieces.new_empty(spec.mesh.size(axis) * pieces.numel())
        all_gather(pieces, sent, spec.mesh.get_group(axis))
    rows = pieces.view(len(lengths), max(lengths))
    flat = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
    part = flat.view(local.dtype).view(rows_first)
    part = part.movedim(0, spec.dim).contiguous() if spec.dim else part
    return (spec.inner.wrap(part).full_tensor() if spec.inner else part).to(local.device)
