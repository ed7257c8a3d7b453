"""Which tokens a context-parallel rank has, as index arithmetic.

A causal query late in a sequence sees more keys than an early one. So each sequence is cut into
2 * size equal chunks, and a rank takes one from either end; every rank then has the same work
(zigzag order, as in Llama 3 and in ring attention with load balance).

    size 4        | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |       chunks of a sequence
    rank            0   1   2   3   3   2   1   0
    on rank 1     | 1 | 6 |                               early half, late half

Packed sequences lie one after another in a row of tokens, each cut on its own: a rank has the early
and the late half of the first sequence, then those of the second, and so on. All sizes are fixed by
the row's capacity, and where sequences begin is data: so is everything here that depends on it, and
a graph that holds these operators follows new offsets without the host looking at them.

A `ContextPlan` is what attention asks about a rank's tokens. B batch, T local tokens, S sequences.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_core.parallel.mesh import Axis, world_timeout


def chunks_of(size: int, rank: int) -> tuple[int, int]:
    """The early and the late chunk, of 2 * size, that `rank` has."""
    return rank, 2 * size - 1 - rank


def owner_of(size: int, chunk: int) -> int:
    """The rank that has `chunk`."""
    return min(chunk, 2 * size - 1 - chunk)


def chunk_length(length: int, size: int) -> int:
    """Tokens of one of 2 * size chunks of a sequence of `length` tokens.

    Raises:
        ValueError: the sequence cannot be cut evenly.
    """
    if length < 1 or length % (2 * size):
        raise ValueError(
            f"Expected a sequence length that is a multiple of {2 * size} (2 * cp {size}), "
            f"got {length}."
        )
    return length // (2 * size)


def split(whole: torch.Tensor, dim: int, size: int, rank: int) -> torch.Tensor:
    """The part of one sequence along `dim` that `rank` has; a size of 1 has it whole.

    Raises:
        ValueError: the sequence cannot be cut evenly.
    """
    if size == 1:
        return whole
    chunk = chunk_length(whole.shape[dim], size)
    return torch.cat([whole.narrow(dim, c * chunk, chunk) for c in chunks_of(size, rank)], dim)


def join(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The inverse of `split`: all ranks' parts, in order of rank, to the whole sequence."""
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2, dim) for part in parts]
    early = [half[0] for half in halves]
    late = [half[1] for half in reversed(halves)]
    return torch.cat(early + late, dim)


@dataclass(frozen=True)
class Spans:
    """Where the sequences lie in a row of tokens.

    Attributes:
        offsets: int32 [S + 1], first token of each sequence and the end of the last; None where
            every row of the batch is one sequence.
        max_len: no sequence is longer, a constant.
    """

    offsets: torch.Tensor | None
    max_len: int


@dataclass(frozen=True)
class Rows:
    """A choice of m rows out of n, along dim 1 of tensors [B, n, ...].

    Attributes:
        index: int64 [m], the rows chosen.
        inverse: int64 [n], the place of each row among the chosen ones, m where it is not chosen.
    """

    index: torch.Tensor
    inverse: torch.Tensor

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """[B, n, ...] -> [B, m, ...]."""
        return whole.index_select(1, self.index)

    def spread(self, part: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """[B, m, ...] -> [B, n, ...], `fill` in rows that were not chosen.

        A gather, not a scatter: no order of additions to depend on.
        """
        absent = part.new_full((part.shape[0], 1, *part.shape[2:]), fill)
        return torch.cat((part, absent), 1).index_select(1, self.inverse)


@dataclass(frozen=True)
class Block:
    """Queries that look at keys: some rows of each (None means all), and where sequences lie.

    With `causal` the last query of a sequence sees all of its keys, the one before it all but the
    last, and so on; without, every query sees every key of its sequence.
    """

    queries: Rows | None
    keys: Rows | None
    query_spans: Spans
    key_spans: Spans
    causal: bool


@dataclass(frozen=True)
class ContextPlan:
    """A rank's tokens, as attention needs to know them. Made by `dense_plan` or `packed_plan`.

    Attributes:
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
        """What this rank's queries see of the keys of rank `source`.

        Of an earlier rank's keys the early half, which lies before all queries here; of a later
        rank's keys both halves, but only from the late half of the queries.
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


@dataclass(frozen=True)
class _Cut:
    """Sequences of a whole row of tokens, each cut into 2 * size chunks. All int64.

    Attributes:
        starts: [S + 1], first token of each sequence in the whole row, and the row's length.
        sequence: [T], the sequence of each of a rank's tokens.
        chunk: [T], length of a chunk of that sequence.
        within: [T], place in the early or the late chunk.
        late: bool [T], in the late chunk.
    """

    size: int
    total: int
    starts: torch.Tensor
    sequence: torch.Tensor
    chunk: torch.Tensor
    within: torch.Tensor
    late: torch.Tensor

    @classmethod
    def of(cls, starts: torch.Tensor, total: int, size: int) -> "_Cut":
        """The cut of a row of `total` tokens; the same for every rank of the axis."""
        mine = starts // size
        sequence, inside = _place(mine, total // size)
        chunk = _lengths(starts)[sequence] // (2 * size)
        late = inside >= chunk
        return cls(size, total, starts, sequence, chunk, inside - late * chunk, late)

    def spans(self, num_chunks: int) -> Spans:
        """Where sequences lie if each has its first `num_chunks` chunks only."""
        offsets = self.starts // (2 * self.size) * num_chunks
        return Spans(offsets.to(torch.int32), self.total // (2 * self.size) * num_chunks)

    def halves(self) -> tuple[Rows, Rows]:
        """A rank's tokens of early and of late chunks."""
        num = self.total // (2 * self.size)
        starts = self.starts // (2 * self.size)
        sequence, within = _place(starts, num)
        early = starts[sequence] * 2 + within
        place = starts[self.sequence] + self.within
        return (
            Rows(early, torch.where(self.late, num, place)),
            Rows(early + _lengths(starts)[sequence], torch.where(self.late, place, num)),
        )


def _lengths(starts: torch.Tensor) -> torch.Tensor:
    return starts[1:] - starts[:-1]


def _place(starts: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each of `num` tokens and the place in it; sequences may be empty."""
    token = torch.arange(num, device=starts.device)
    sequence = torch.searchsorted(starts[1:], token, right=True)
    return sequence, token - starts[sequence]


def dense_plan(length: int, size: int, rank: int, device: torch.device) -> ContextPlan:
    """The plan of a batch whose rows are one sequence of `length` tokens each.

    Raises:
        ValueError: the sequence cannot be cut evenly.
    """
    if size == 1:
        rows = torch.arange(length, device=device)
        spans = Spans(None, length)
        return ContextPlan(1, 0, rows, rows, None, spans, spans, None)
    chunk = chunk_length(length, size)
    cut = _Cut.of(torch.arange(2, device=device) * length, length, size)
    rows = _rows(cut, rank)
    return ContextPlan(
        size=size,
        rank=rank,
        rows=rows,
        positions=rows,
        valid=None,
        spans=Spans(None, 2 * chunk),
        half_spans=Spans(None, chunk),
        halves=cut.halves(),
    )


def packed_plan(
    lengths: torch.Tensor, padded_offsets: torch.Tensor, total: int, size: int, rank: int
) -> ContextPlan:
    """The plan of one row of packed sequences.

    Operators only: nothing is read on the host, so a graph can hold it and follow new offsets.

    Args:
        lengths: int [S], valid tokens of each sequence; the rest of its tokens is padding.
        padded_offsets: int [S + 1], first token of each sequence, padding counted, multiples of
            2 * size. Tokens from the last offset to `total` are padding of no sequence.
        total: tokens of the whole row, over all ranks.

    Raises:
        ValueError: the row cannot be cut evenly.
    """
    chunk_length(total, size)
    # A sequence for what lies behind the last offset: no token is without one.
    end = padded_offsets.new_full((1,), total)
    cut = _Cut.of(torch.cat((padded_offsets, end)).to(torch.int64), total, size)
    rows = _rows(cut, rank)
    inside = rows - cut.starts[cut.sequence]
    num_valid = torch.cat((lengths, lengths.new_zeros(1))).to(torch.int64)
    valid = inside < num_valid[cut.sequence]
    return ContextPlan(
        size=size,
        rank=rank,
        rows=rows,
        positions=torch.where(valid, inside, 0),
        valid=valid,
        spans=cut.spans(2),
        half_spans=cut.spans(1),
        halves=cut.halves() if size > 1 else None,
    )


def _rows(cut: _Cut, rank: int) -> torch.Tensor:
    """Place in the whole row of each of a rank's tokens."""
    early, late = chunks_of(cut.size, rank)
    chunk = torch.where(cut.late, late, early)
    return cut.starts[cut.sequence] + chunk * cut.chunk + cut.within


@dataclass(frozen=True)
class MicrobatchLayout:
    """Where a rank of dp x cp stands in a microbatch of context size `size`.

    Attributes:
        num_packs: packs of sequences in the microbatch, over all ranks.
        pack: the one that this rank works on.
        cp_rank: which part of it.
    """

    size: int
    num_packs: int
    pack: int
    cp_rank: int


def microbatch_layout(size: int, num_ranks: int, rank: int) -> MicrobatchLayout:
    """The place of `rank`, of `num_ranks` of dp x cp, for context size `size`.

    Raises:
        ValueError: groups of that size do not cover the ranks.
    """
    if size < 1 or num_ranks % size:
        raise ValueError(f"Expected a context size that divides {num_ranks} ranks, got {size}.")
    return MicrobatchLayout(size, num_ranks // size, rank // size, rank % size)


def smallest_size(longest: int, tokens_per_rank: int, sizes: Iterable[int]) -> int:
    """The smallest supported size whose packs hold a sequence of `longest` tokens.

    `tokens_per_rank` is the capacity of a pack over its ranks, so a padded sequence fits where a
    bare one does.

    Raises:
        ValueError: none does.
    """
    known = sorted(sizes)
    for size in known:
        if longest <= tokens_per_rank * size:
            return size
    raise ValueError(
        f"Expected sequences of at most {tokens_per_rank * known[-1]} tokens "
        f"({tokens_per_rank} a rank, context sizes up to {known[-1]}), got one of {longest}."
    )


class DynamicContext:
    """The context axes of all supported sizes.

    Every rank of the default group must make it, with the same arguments but `known`'s axes: making
    groups is collective.

    Args:
        rows: the global ranks of each dp x cp, in order; all rows of the layout, of equal length.
        sizes: the supported context sizes.
        known: axes that exist already, by size, to be used as they are.

    Raises:
        ValueError: a size that does not divide the ranks, this rank in no row, or a known axis of
            other ranks.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        sizes: Iterable[int],
        known: Mapping[int, Axis] | None = None,
    ) -> None:
        self.sizes = tuple(sorted(set(sizes)))
        me = dist.get_rank()
        mine = [row for row in rows if me in row]
        if len(mine) != 1 or len({len(row) for row in rows}) != 1 or not self.sizes:
            raise ValueError(
                f"Expected rows of equal length, one with rank {me}, and some sizes, got "
                f"{[list(row) for row in rows]} and {self.sizes}."
            )
        self.num_ranks, self.rank = len(mine[0]), list(mine[0]).index(me)
        self._axes: dict[int, Axis] = {}
        for size in self.sizes:
            layout = self.layout(size)
            ranks = list(mine[0])[layout.pack * size : (layout.pack + 1) * size]
            axis = (known or {}).get(size)
            if axis is None:
                axis = Axis("cp", size, layout.cp_rank, _make_groups(rows, size, me))
            elif dist.get_process_group_ranks(axis.group) != ranks:
                raise ValueError(
                    f"Expected the axis of size {size} to have ranks {ranks}, got "
                    f"{dist.get_process_group_ranks(axis.group)}."
                )
            self._axes[size] = axis

    def layout(self, size: int) -> MicrobatchLayout:
        """This rank's place in a microbatch of context size `size`."""
        return microbatch_layout(size, self.num_ranks, self.rank)

    def axis(self, size: int) -> Axis:
        """The axis of that size: the same object, with the same group, each time.

        Raises:
            ValueError: a size that is not supported.
        """
        if size not in self._axes:
            raise ValueError(f"Expected a context size out of {self.sizes}, got {size}.")
        return self._axes[size]

    def check(self, axis: Axis) -> None:
        """Raise unless `axis` has the very group that is kept for its size.

        Raises:
            RuntimeError: it has another group, of the same ranks perhaps, which no graph holds.
        """
        if self.axis(axis.size).group is not axis.group:
            raise RuntimeError(
                f"Expected the process group that is kept for context size {axis.size}, got "
                "another one; take axes from DynamicContext.axis, and make no groups again"
            )


def _make_groups(rows: Sequence[Sequence[int]], size: int, me: int) -> dist.ProcessGroup:
    """Make all groups of `size` neighbours, in the same order on every rank; the one with `me`."""
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
