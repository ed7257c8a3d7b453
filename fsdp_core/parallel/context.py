"""Which tokens a context-parallel rank has, as index arithmetic, and context sizes that change.

Each sequence is cut into 2 * size equal chunks, and a rank takes one from either end, so every rank
has the same causal work (zigzag order, as in Llama 3).

    size 4        | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |       chunks of a sequence
    rank            0   1   2   3   3   2   1   0
    on rank 1     | 1 | 6 |                               early half, late half

Packed sequences lie one after another in a row of tokens, each cut on its own. All sizes are fixed
by the row's capacity, where sequences begin is data: a graph that holds these operators follows new
offsets without the host looking at them.

The size may change from microbatch to microbatch: the dp x cp ranks, in order of rank, form groups
of `size` neighbours, each of which works on one pack of sequences, cut over its ranks:

    ranks      0 1 2 3 4 5 6 7
    size 1     a b c d e f g h       8 packs of C tokens
    size 4     a a a a b b b b       2 packs of 4 C tokens

A rank has C tokens whatever the size. Groups are made once: a graph holds the communicator that it
was captured with.

B batch, T local tokens, S sequences.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_core.parallel.mesh import Axis, world_timeout


def _chunk_length(length: int, size: int) -> int:
    assert not length % (2 * size), f"{length} tokens in chunks of 2 * cp {size}"
    return length // (2 * size)


def split(whole: torch.Tensor, dim: int, size: int, rank: int) -> torch.Tensor:
    """The part of a sequence along `dim` that `rank` has."""
    if size == 1:
        return whole
    chunk = _chunk_length(whole.shape[dim], size)
    parts = [whole.narrow(dim, c * chunk, chunk) for c in (rank, 2 * size - 1 - rank)]
    return torch.cat(parts, dim)


@dataclass(frozen=True)
class Spans:
    """Where the sequences lie in a row of tokens. `offsets`: int32 [S + 1], first token of each
    sequence and the end of the last; None where every row of the batch is one sequence. `max_len`:
    no sequence is longer, a constant.
    """

    offsets: torch.Tensor | None
    max_len: int


@dataclass(frozen=True)
class Rows:
    """m rows out of n, along dim 1 of tensors [B, n, ...]. `index`: int64 [m], the rows chosen.
    `inverse`: int64 [n], the place of each row among the chosen ones, m where it is not chosen.
    """

    index: torch.Tensor
    inverse: torch.Tensor

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """[B, n, ...] -> [B, m, ...]."""
        return whole.index_select(1, self.index)

    def spread(self, part: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """[B, m, ...] -> [B, n, ...], `fill` in rows that were not chosen; no scatter."""
        absent = part.new_full((part.shape[0], 1, *part.shape[2:]), fill)
        return torch.cat((part, absent), 1).index_select(1, self.inverse)


@dataclass(frozen=True)
class Block:
    """Queries that look at keys: some rows of each (None means all), and where sequences lie. With
    `causal` the last query of a sequence sees all of its keys, the one before it all but one.
    """

    queries: Rows | None
    keys: Rows | None
    query_spans: Spans
    key_spans: Spans
    causal: bool


@dataclass(frozen=True)
class ContextPlan:
    """A rank's tokens, as attention needs to know them. Made by `dense_plan` or `packed_plan`.

    size, rank: of the context axis that the plan is for.
    rows: int64 [T], place of each local token in the whole row of tokens.
    positions: int64 [T], place of each token in its sequence; 0 for padding.
    valid: bool [T], whether a token is no padding; None where all are.
    spans: where sequences lie in the local tokens.
    half_spans: where they lie in the early, or the late, halves alone.
    halves: the local tokens of the early and of the late chunks; None for size 1.
    """

    size: int
    rank: int
    rows: torch.Tensor
    positions: torch.Tensor
    valid: torch.Tensor | None
    spans: Spans
    half_spans: Spans
    halves: tuple[Rows, Rows] | None

    def ring_block(self, source: int) -> Block:
        """What this rank's queries see of the keys of rank `source`. Of an earlier rank's keys the
        early half; of a later rank's both, from the late queries.
        """
        if source == self.rank:
            return Block(None, None, self.spans, self.spans, causal=True)
        assert self.halves is not None
        early, late = self.halves
        if source < self.rank:
            return Block(None, early, self.spans, self.half_spans, causal=False)
        return Block(late, None, self.half_spans, self.spans, causal=False)

    def blank(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] with zeros in the rows of padding, whatever was in them."""
        if self.valid is None:
            return x
        kept = self.valid.view(1, -1, *(1,) * (x.dim() - 2))
        return torch.where(kept, x, torch.zeros((), dtype=x.dtype, device=x.device))


def dense_plan(length: int, size: int, rank: int, device: torch.device) -> ContextPlan:
    """The plan of a batch whose rows are one sequence of `length` tokens each."""
    if size == 1:
        rows = torch.arange(length, device=device)
        spans = Spans(None, length)
        return ContextPlan(1, 0, rows, rows, None, spans, spans, None)
    chunk = _chunk_length(length, size)
    rows, _, halves = _zigzag(torch.arange(2, device=device) * length, length, size, rank)
    spans, half_spans = Spans(None, 2 * chunk), Spans(None, chunk)
    return ContextPlan(size, rank, rows, rows, None, spans, half_spans, halves)


def packed_plan(
    lengths: torch.Tensor, padded_offsets: torch.Tensor, total: int, size: int, rank: int
) -> ContextPlan:
    """The plan of one row of packed sequences; operators only, so a graph can hold it.

    lengths: int [S], valid tokens of each sequence; the rest of its tokens is padding.
    padded_offsets: int [S + 1], first token of each sequence, padding counted, multiples of 2 *
        size. Tokens from the last offset to `total` are padding of no sequence.
    total: tokens of the whole row, over all ranks.
    """
    chunk = _chunk_length(total, size)
    # A sequence for what lies behind the last offset: no token is without one.
    starts = with_tail(padded_offsets, total).to(torch.int64)
    rows, sequence, halves = _zigzag(starts, total, size, rank)
    inside = rows - starts[sequence]
    num_valid = torch.cat((lengths, lengths.new_zeros(1))).to(torch.int64)
    valid = inside < num_valid[sequence]
    offsets = starts // (2 * size)
    spans, half_spans = (Spans((offsets * n).to(torch.int32), chunk * n) for n in (2, 1))
    positions = torch.where(valid, inside, 0)
    return ContextPlan(size, rank, rows, positions, valid, spans, half_spans, halves)


def _zigzag(
    starts: torch.Tensor, total: int, size: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[Rows, Rows] | None]:
    """Of a rank's tokens of a row of `total`: place in the row, sequence, early and late chunks."""
    sequence, inside = _place(starts // size, total // size)
    chunk = (starts[1:] - starts[:-1])[sequence] // (2 * size)
    late = inside >= chunk
    within = inside - late * chunk
    rows = starts[sequence] + torch.where(late, 2 * size - 1 - rank, rank) * chunk + within
    if size == 1:
        return rows, sequence, None
    num, begins = total // (2 * size), starts // (2 * size)
    of, place = _place(begins, num)
    early = begins[of] * 2 + place
    inverse = begins[sequence] + within
    return rows, sequence, (
        Rows(early, torch.where(late, num, inverse)),
        Rows(early + (begins[1:] - begins[:-1])[of], torch.where(late, inverse, num)),
    )  # fmt: skip


def positions_of(
    offsets: torch.Tensor, num: int, size: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of a rank's `num` tokens as a kernel finds them from int [S + 1] offsets alone.
    Offsets are over all ranks, padding counted. Returns int64 [num], and bool [num]: whether a
    token is of any sequence, 0 where it is of none.
    """
    starts = offsets.to(torch.int64) // size
    sequence, inside = _place(with_tail(starts, num), num)
    lengths = torch.cat((starts[1:] - starts[:-1], starts.new_zeros(1)))
    chunk = lengths[sequence] // 2
    late = inside >= chunk
    positions = inside + torch.where(late, 2 * size - 2 - rank, rank) * chunk
    written = sequence < lengths.shape[0] - 1
    return torch.where(written, positions, 0), written


def with_tail(offsets: torch.Tensor, total: int) -> torch.Tensor:
    """Offsets with one more sequence, from the last of them to `total`, the end of the row."""
    return torch.cat((offsets, offsets.new_full((1,), total)))


def _place(starts: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each of `num` tokens and the place in it; sequences may be empty."""
    token = torch.arange(num, device=starts.device)
    sequence = torch.searchsorted(starts[1:], token, right=True)
    return sequence, token - starts[sequence]


# ---- context sizes that change


class MicrobatchLayout(NamedTuple):
    """Which pack of sequences, of those over all ranks, a rank works on, and which part of it."""

    size: int
    num_packs: int
    pack: int
    cp_rank: int


class DynamicContext:
    """The context axes of all supported sizes; collective, as groups are made. `rows` are the
    global ranks of each dp x cp, in order, of equal length; each of `sizes` divides one. `known`
    are axes that exist already, by size, to be used as they are.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        sizes: Iterable[int],
        known: Mapping[int, Axis] | None = None,
    ) -> None:
        self.sizes = tuple(sorted(set(sizes)))
        me = dist.get_rank()
        (mine,) = (list(row) for row in rows if me in row)
        self._row_size, self._rank = len(mine), mine.index(me)
        self._axes = dict(known or {})
        for size in self.sizes:
            at = self.layout(size)
            if size not in self._axes:
                self._axes[size] = Axis("cp", size, at.cp_rank, _make_groups(rows, size, me))
            got = dist.get_process_group_ranks(self._axes[size].group)
            assert got == mine[at.pack * size : (at.pack + 1) * size], (size, got, mine)

    def layout(self, size: int) -> MicrobatchLayout:
        """This rank's place in a microbatch of context size `size`."""
        assert self._row_size % size == 0, f"size {size} of {self._row_size} ranks"
        return MicrobatchLayout(size, self._row_size // size, self._rank // size, self._rank % size)

    def axis(self, size: int) -> Axis:
        """The axis of that size: the same object, with the same group, each time."""
        assert size in self.sizes, f"Expected a context size out of {self.sizes}, got {size}."
        return self._axes[size]

    def check(self, axis: Axis) -> None:
        """Graphs hold a group: another one, of the same ranks perhaps, would never meet it."""
        same = self.axis(axis.size).group is axis.group
        assert same, f"another group than the one that is kept for context size {axis.size}"


def _make_groups(rows: Sequence[Sequence[int]], size: int, me: int) -> dist.ProcessGroup:
    found = None
    for row in rows:
        for start in range(0, len(row), size):
            ranks = list(row[start : start + size])
            # Made without it, a group has torch's own timeout, of many minutes.
            group = dist.new_group(ranks, timeout=world_timeout(), group_desc=f"cp {size}")
            if me in ranks:
                found = group
    assert isinstance(found, dist.ProcessGroup)
    return found
