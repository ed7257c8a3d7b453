"""Coordinates of ranks in a layout; arithmetic only, no torch.

    dense     rank = (((pp * DP_OUTER + dp_outer) * DP + dp) * CP + cp) * TP + tp
    expert    rank = ((pp * EDP + edp) * EP + ep) * ETP + etp

The group of a rank on an axis is the ranks that differ from it in that coordinate alone, in the
order of the coordinate. Example, dp 2, cp 2, tp 2, ep 2, etp 2:

    rank      0  1  2  3  4  5  6  7
    dense     dp 0        dp 1              tp groups 01 23 45 67, cp groups 02 13 46 57
              cp 0  cp 1  cp 0  cp 1
    expert    edp 0       edp 1             etp groups 01 23 45 67, ep groups 02 13 46 57
"""

import math
from typing import NamedTuple

from fsdp_core.config import ParallelConfig


class Dense(NamedTuple):
    """A place in the dense mesh, or its sizes."""

    pp: int
    dp_outer: int
    dp: int
    cp: int
    tp: int


class Expert(NamedTuple):
    """A place in the expert mesh, or its sizes."""

    pp: int
    edp: int
    ep: int
    etp: int


AXES = ("tp", "cp", "pp", "dp", "dp_outer", "ep", "etp", "edp")


def dense_sizes(parallel: ParallelConfig) -> Dense:
    """Sizes of the dense mesh."""
    return Dense(*(getattr(parallel, axis) for axis in Dense._fields))


def expert_sizes(parallel: ParallelConfig) -> Expert:
    """Sizes of the expert mesh."""
    return Expert(*(getattr(parallel, axis) for axis in Expert._fields))


def dense_coordinates(parallel: ParallelConfig, rank: int) -> Dense:
    """Where `rank` is in the dense mesh."""
    return Dense(*_unravel(rank, dense_sizes(parallel)))


def axis_rank(parallel: ParallelConfig, axis: str, rank: int) -> int:
    """The coordinate of `rank` on `axis`."""
    sizes = dense_sizes(parallel) if axis in Dense._fields else expert_sizes(parallel)
    return _unravel(rank, sizes)[sizes._fields.index(axis)]


def groups(parallel: ParallelConfig, axes: str | tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """All groups of `axes`, one or several of a mesh: ranks that differ on these alone."""
    names = {axes} if isinstance(axes, str) else set(axes)
    sizes = dense_sizes(parallel) if names <= set(Dense._fields) else expert_sizes(parallel)
    assert names <= set(sizes._fields), f"{axes} are not of one mesh"
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(parallel.world_size):
        place = zip(sizes._fields, _unravel(rank, sizes), strict=True)
        others = tuple(coordinate for axis, coordinate in place if axis not in names)
        found.setdefault(others, []).append(rank)
    return tuple(map(tuple, found.values()))


def _unravel(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    place, rest = [], rank
    for size in reversed(sizes):
        rest, coordinate = divmod(rest, size)
        place.append(coordinate)
    if rest:  # of records, which may be anybody's
        raise ValueError(f"Expected a rank below {math.prod(sizes)}, got {rank}.")
    return tuple(reversed(place))
