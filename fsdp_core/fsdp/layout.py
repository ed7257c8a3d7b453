"""Where each parameter of a unit lies in the unit's one flat buffer, and who owns which rows.

Pure arithmetic, no torch. The flat buffer has `num_shards` equal shards; rank r owns shard r.
Parameters lie one after another, each contiguous, and a shard boundary never cuts a row (dim 0
slice) of a parameter, so a rank's piece of a parameter is a contiguous range of whole rows:

    shard 0                | shard 1                | shard 2
    [wq: rows 0..5 ] [wk: ro|ws 0..1][pad][norm] ... | [down: rows ...

A collective therefore works on the buffer itself, with no copy in or out.
"""

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


@dataclass(frozen=True)
class LocalPiece:
    """One rank's rows of one parameter: rows [row_start, row_stop), at `offset` in its shard."""

    offset: int
    numel: int
    row_start: int
    row_stop: int


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
        found, cursor = [], 0
        for start, stop in [(s.offset, s.offset + s.numel) for s in self.slots] + [
            (self.total_numel, self.total_numel)
        ]:
            if start > cursor:
                found.append((cursor, start))
            cursor = max(cursor, stop)
        return tuple(found)

    def local_piece(self, index: int, shard: int) -> LocalPiece:
        """The part of parameter `index` that lies in `shard`; numel 0 if none does."""
        slot = self.slots[index]
        begin, end = shard * self.shard_numel, (shard + 1) * self.shard_numel
        start = min(max(slot.offset, begin), end)
        stop = max(min(slot.offset + slot.numel, end), start)
        if stop == start:
            return LocalPiece(0, 0, 0, 0)
        row = max(slot.row_numel, 1)
        return LocalPiece(
            offset=start - begin,
            numel=stop - start,
            row_start=(start - slot.offset) // row,
            row_stop=(stop - slot.offset) // row,
        )

    def view(self, full: Any, index: int) -> Any:
        """Parameter `index` as a view of a full buffer."""
        slot = self.slots[index]
        return full[slot.offset : slot.offset + slot.numel].view(slot.shape)

    def local_rows(self, shard_buffer: Any, index: int, shard: int) -> Any:
        """Rows of parameter `index` as a view of the buffer of shard number `shard`.

        Without rows it has shape (0, ...), and (0,) where the parameter has no dimension.
        """
        piece, shape = self.local_piece(index, shard), self.slots[index].shape
        view = shard_buffer[piece.offset : piece.offset + piece.numel]
        if not shape:
            return view.view(()) if piece.numel else view
        return view.view(piece.row_stop - piece.row_start, *shape[1:])

    def row_bounds(self, index: int) -> tuple[int, ...]:
        """Rows of parameter `index` before each shard, and all of them: shard s has [b[s], b[s+1]).

        A parameter of no dimension counts as one row.
        """
        bounds = [0]
        for shard in range(self.num_shards):
            piece = self.local_piece(index, shard)
            bounds.append(piece.row_stop if piece.numel else bounds[-1])
        rows = self.slots[index].shape[0] if self.slots[index].shape else 1
        return (*bounds[:-1], rows)


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
    numels = [math.prod(shape) for shape in shapes]
    lower = _round_up(max(-(-sum(numels) // num_shards), 1), ALIGN_NUMEL)
    rows = [math.prod(s[1:]) for s, n in zip(shapes, numels, strict=True) if n > lower]
    largest = _round_up(max(numels, default=1), ALIGN_NUMEL)
    for shard_numel in _sizes(lower, largest, rows):
        slots = _place(shapes, shard_numel, num_shards)
        if slots is not None:
            return FlatLayout(slots, shard_numel, num_shards)
    raise AssertionError("a shard that holds every parameter was no solution")


def _sizes(lower: int, largest: int, rows: Sequence[int]) -> Iterator[int]:
    """Shard sizes to try, in order; without end."""
    fine, coarse = math.lcm(ALIGN_NUMEL, math.gcd(*rows) or 1), math.lcm(ALIGN_NUMEL, *rows)
    first = _round_up(lower, fine)
    yield from range(first, min(first + _FINE_TRIES * fine, 2 * largest), fine)
    stride = _round_up(max(coarse, lower // 64), coarse)
    yield from range(_round_up(lower, coarse), 2 * largest, stride)
    size = max(largest, lower)
    while True:
        yield size
        size += _round_up(max(1, size // 64), ALIGN_NUMEL)


def _place(
    shapes: Sequence[tuple[int, ...]], shard_numel: int, num_shards: int
) -> tuple[Slot, ...] | None:
    cursor, slots = 0, []
    for shape in shapes:
        start = _first_start(cursor, shape, shard_numel)
        if start is None:
            return None
        slots.append(Slot(shape, start))
        cursor = start + math.prod(shape)
    return tuple(slots) if cursor <= shard_numel * num_shards else None


def _first_start(cursor: int, shape: tuple[int, ...], shard_numel: int) -> int | None:
    """First aligned start at or after `cursor` from which no boundary cuts a row, if any."""
    numel, row = math.prod(shape), max(math.prod(shape[1:]), 1)
    start = _round_up(cursor, ALIGN_NUMEL)
    boundary = (start // shard_numel + 1) * shard_numel
    if start + numel <= boundary:
        return start
    unit = math.lcm(row, ALIGN_NUMEL)
    start = boundary - (boundary - start) // unit * unit
    if start == boundary:
        boundary += shard_numel
    crosses_another = start + numel > boundary + shard_numel or (
        start + numel > boundary and (boundary - start) % row
    )
    return None if crosses_another and shard_numel % row else start


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
