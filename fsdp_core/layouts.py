"""Coordinates of ranks, and the list of legal layouts; arithmetic only, no torch.

    dense     rank = (((pp * DP_OUTER + dp_outer) * DP + dp) * CP + cp) * TP + tp
    expert    rank = ((pp * EDP + edp) * EP + ep) * ETP + etp

Both number the same ranks, pipeline stages outermost, so a stage's ranks are the same in both. The
group of a rank on an axis is the ranks that differ from it in that coordinate alone, in the order
of the coordinate. Example, dp 2, cp 2, tp 2, ep 2, etp 2:

    rank      0  1  2  3  4  5  6  7
    dense     dp 0        dp 1              tp groups 01 23 45 67, cp groups 02 13 46 57
              cp 0  cp 1  cp 0  cp 1
    expert    edp 0       edp 1             etp groups 01 23 45 67, ep groups 02 13 46 57
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from fsdp_core.config import (
    LAYOUT_RULES,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    broken,
    divisors,
)


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
    return Dense(parallel.pp, parallel.dp_outer, parallel.dp, parallel.cp, parallel.tp)


def expert_sizes(parallel: ParallelConfig) -> Expert:
    """Sizes of the expert mesh."""
    return Expert(parallel.pp, parallel.edp, parallel.ep, parallel.etp)


def axis_size(parallel: ParallelConfig, axis: str) -> int:
    """Number of ranks along `axis`.

    Raises:
        ValueError: there is no such axis.
    """
    if axis not in AXES:
        raise ValueError(f"Expected one of the axes {AXES}, got {axis!r}.")
    size: int = getattr(parallel, axis)
    return size


def dense_coordinates(parallel: ParallelConfig, rank: int) -> Dense:
    """Where `rank` stands in the dense mesh.

    Raises:
        ValueError: there is no such rank.
    """
    return Dense(*_unravel(rank, dense_sizes(parallel)))


def expert_coordinates(parallel: ParallelConfig, rank: int) -> Expert:
    """Where `rank` stands in the expert mesh.

    Raises:
        ValueError: there is no such rank.
    """
    return Expert(*_unravel(rank, expert_sizes(parallel)))


def rank_at(parallel: ParallelConfig, place: Dense | Expert) -> int:
    """The rank that stands at `place`: the inverse of both kinds of coordinates.

    Raises:
        ValueError: the place is outside the mesh.
    """
    sizes = dense_sizes(parallel) if isinstance(place, Dense) else expert_sizes(parallel)
    rank = 0
    for coordinate, size in zip(place, sizes, strict=True):
        if not 0 <= coordinate < size:
            raise ValueError(f"Expected a place within {sizes}, got {place}.")
        rank = rank * size + coordinate
    return rank


def axis_rank(parallel: ParallelConfig, axis: str, rank: int) -> int:
    """The coordinate of `rank` on `axis`."""
    axis_size(parallel, axis)
    dense = dense_coordinates(parallel, rank)
    place = dense if axis in Dense._fields else expert_coordinates(parallel, rank)
    coordinate: int = getattr(place, axis)
    return coordinate


def group_of(parallel: ParallelConfig, axes: str | tuple[str, ...], rank: int) -> tuple[int, ...]:
    """The ranks that differ from `rank` on `axes` alone, ascending, which is their order.

    Args:
        parallel: the layout.
        axes: one axis, or several of one mesh, such as ("dp", "cp"), which FSDP shards over.
        rank: any rank of the layout.

    Raises:
        ValueError: no such rank or axis, or axes of both meshes.
    """
    mesh, sizes = _mesh_of(parallel, axes)
    names = (axes,) if isinstance(axes, str) else axes
    place = _unravel(rank, sizes)
    ranges = [
        range(size) if name in names else (place[i],)
        for i, (name, size) in enumerate(zip(mesh._fields, sizes, strict=True))
    ]
    return tuple(rank_at(parallel, mesh(*point)) for point in itertools.product(*ranges))


def groups(parallel: ParallelConfig, axes: str | tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """All groups of `axes`: each rank is in exactly one; sorted by their first ranks.

    Raises:
        ValueError: as `group_of`.
    """
    found: dict[int, tuple[int, ...]] = {}
    grouped: set[int] = set()
    for rank in range(parallel.world_size):
        if rank not in grouped:
            found[rank] = group_of(parallel, axes, rank)
            grouped.update(found[rank])
    return tuple(found.values())


def dynamic_cp_groups(parallel: ParallelConfig, size: int) -> tuple[tuple[int, ...], ...]:
    """The groups of a dynamic cp `size`: the dp x cp ranks, dp outermost, in stretches of `size`.

    Raises:
        ValueError: `size` does not divide dp * cp.
    """
    if size < 1 or (parallel.dp * parallel.cp) % size:
        raise ValueError(
            f"Expected a size that divides dp * cp = {parallel.dp * parallel.cp}, got {size}."
        )
    parts = [
        whole[start : start + size]
        for whole in groups(parallel, ("dp", "cp"))
        for start in range(0, len(whole), size)
    ]
    return tuple(sorted(parts))


def _unravel(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if not 0 <= rank < math.prod(sizes):
        raise ValueError(f"Expected a rank below {math.prod(sizes)}, got {rank}.")
    place = []
    for size in reversed(sizes):
        rank, coordinate = divmod(rank, size)
        place.append(coordinate)
    return tuple(reversed(place))


def _mesh_of(
    parallel: ParallelConfig, axes: str | tuple[str, ...]
) -> tuple[type[Dense] | type[Expert], Dense | Expert]:
    names = (axes,) if isinstance(axes, str) else axes
    if names and set(names) <= set(Dense._fields):
        return Dense, dense_sizes(parallel)
    if names and set(names) <= set(Expert._fields):
        return Expert, expert_sizes(parallel)
    raise ValueError(
        f"Expected axes of one mesh, of {Dense._fields} or of {Expert._fields}, got {axes!r}."
    )


# --- legal layouts ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    """What `LAYOUT_RULES` look at."""

    model: ModelConfig
    parallel: ParallelConfig
    microbatches: int


def legal_layouts(
    world_size: int,
    model: ModelConfig,
    *,
    microbatches: int = 1,
    only: Mapping[str, Collection[Any]] | None = None,
) -> Iterator[ParallelConfig]:
    """Every layout of `world_size` ranks that breaks no rule, lazily, in a fixed order.

    Args:
        world_size: number of ranks.
        model: what is trained.
        microbatches: microbatches a step.
        only: field of `ParallelConfig` to the values that it may have. A field that is left out
            may have any value, but `pp_chunks` is 1 and `dynamic_cp` empty, which have no end.

    Raises:
        ConfigError: a world size below 1, or a field that there is none of.
    """
    if world_size < 1:
        raise ConfigError("world_size", expected="an integer >= 1", got=world_size)
    names = tuple(field.name for field in fields(ParallelConfig))
    for name in only or {}:
        if name not in names:
            raise ConfigError(name, expected="a field of the layout", got=name, legal=names)
    return _legal(world_size, model, microbatches, dict(only or {}))


def _legal(
    world_size: int, model: ModelConfig, microbatches: int, only: dict[str, Collection[Any]]
) -> Iterator[ParallelConfig]:
    options = (
        only.get("sequence_parallel", (False, True)),
        only.get("pp_chunks", (1,)),
        only.get("dynamic_cp", ((),)),
    )
    for degrees in _degrees(world_size, only):
        for sequence_parallel, pp_chunks, dynamic_cp in itertools.product(*options):
            try:
                parallel = ParallelConfig(
                    **degrees,
                    sequence_parallel=sequence_parallel,
                    pp_chunks=pp_chunks,
                    dynamic_cp=dynamic_cp,
                )
            except ConfigError:
                continue
            if broken(LAYOUT_RULES, _Candidate(model, parallel, microbatches)) is None:
                yield parallel


def _degrees(world_size: int, only: Mapping[str, Collection[Any]]) -> Iterator[dict[str, int]]:
    """Degrees whose dense product is the world and whose expert product divides a stage."""

    def choices(axis: str, ranks: int) -> Iterator[int]:
        return (d for d in divisors(ranks) if d in only.get(axis, (d,)))

    for pp in choices("pp", world_size):
        stage = world_size // pp
        for tp in choices("tp", stage):
            for cp in choices("cp", stage // tp):
                for dp_outer in choices("dp_outer", stage // (tp * cp)):
                    dp = stage // (tp * cp * dp_outer)
                    if dp not in only.get("dp", (dp,)):
                        continue
                    for ep in choices("ep", stage):
                        for etp in choices("etp", stage // ep):
                            yield {
                                "dp": dp, "dp_outer": dp_outer, "tp": tp, "cp": cp,
                                "ep": ep, "etp": etp, "pp": pp,
                            }  # fmt: skip
