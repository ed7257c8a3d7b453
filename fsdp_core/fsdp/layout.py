"""Where each parameter of a unit lies in the unit's one flat buffer, and who owns which rows.

Pure arithmetic, no torch. The flat buffer has `num_shards` equal shards; rank r owns shard r.
Parameters lie one after another, each contiguous, and a shard boundary never cuts a row (dim 0
slice) of a parameter, so a rank's piece of a parameter is a contiguous range of whole rows:

    shard 0                | shard 1                | shard 2
    [wq: rows 0..5 ] [wk: ro|ws 0..1][pad][norm] ... | [down: rows ...

A collective therefore works on the buffer itself, with no copy in or out.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

ALIGN_NUMEL = 16
"""Parameters start at multiples of this many elements: 16 bytes in fp8, as matmuls want."""
_FINE_TRIES = 256


@dataclass(frozen=True)
class Slot:
    """One parameter's place. `offset` is in elements from the start of the flat buffer."""

    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Elements of one row: a slice of dim 0; 1 for a 0-d or 1-d parameter."""
        return math.prod(self.shape[1:])


def view_at(buffer: Any, offset: int, shape: Sequence[int]) -> Any:
    """`shape` as a view of a flat buffer from element `offset` on: one operator, not two."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return buffer.as_strided(shape, strides[: len(shape)], buffer.storage_offset() + offset)


@dataclass(frozen=True)
class FlatLayout:
    """Places of all parameters of a unit. `shard_numel` is the same on every rank."""

    slots: tuple[Slot, ...]
    shard_numel: int
    num_shards: int

    @property
    def total_numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.shard_numel * self.num_shards

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, stop) of the flat buffer that no parameter covers."""
        stops = [0, *(slot.offset + slot.numel for slot in self.slots)]
        starts = [*(slot.offset for slot in self.slots), self.total_numel]
        between = zip(stops, starts, strict=True)
        return tuple((stop, start) for stop, start in between if stop < start)

    def views(self, full: Any) -> list[Any]:
        """Every parameter as a view of a full buffer."""
        return [view_at(full, s.offset, s.shape) for s in self.slots]

    def row_bounds(self, index: int) -> tuple[int, ...]:
        """Rows of parameter `index` before each shard, and all of them: shard s has [b[s], b[s+1]).

        A parameter of no dimension counts as one row.
        """
        slot = self.slots[index]
        boundaries = (shard * self.shard_numel for shard in range(self.num_shards))
        before = (min(max(boundary - slot.offset, 0), slot.numel) for boundary in boundaries)
        rows = slot.shape[0] if slot.shape else 1
        return (*(numel // max(slot.row_numel, 1) for numel in before), rows)


def build_layout(shapes: Sequence[tuple[int, ...]], num_shards: int) -> FlatLayout:
    """Place `shapes` in order into the smallest equal shards that this search finds.

    A parameter that spans two boundaries or more needs the shard to be a multiple of its row; one
    that spans one boundary only needs a suitable start. So the search first tries a number of sizes
    that suit some of the large parameters' rows, in steps of what these have in common, then walks
    over multiples of all of them, and beyond that over sizes which hold the largest parameter
    whole, where a solution always exists.

    Raises:
        ValueError: `num_shards` is not positive.
    """
    if num_shards < 1:
        raise ValueError(f"Expected num_shards >= 1, got {num_shards}.")
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
