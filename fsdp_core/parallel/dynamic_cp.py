"""Context parallelism whose size changes from microbatch to microbatch.

The dp x cp ranks of a layout, in order of rank, form groups of `size` neighbours for a microbatch;
each group works on one pack of sequences, cut over its ranks:

    ranks      0 1 2 3 4 5 6 7
    size 1     a b c d e f g h       8 packs of C tokens
    size 2     a a b b c c d d       4 packs of 2 C tokens
    size 4     a a a a b b b b       2 packs of 4 C tokens
    size 8     a a a a a a a a       1 pack  of 8 C tokens

A rank has C tokens whatever the size, so shapes on a rank never change. Groups are made once: a
graph holds the communicator that it was captured with, and a group made again for the same ranks
is another one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from fsdp_core.parallel.axes import Axis, world_timeout


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
