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

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fsdp_core.config import (
    LAYOUT_RULES,
    ConfigError,
    Layout,
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

MAX_RANKS = 2**20


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
        ConfigError: a world size out of range, or a field that there is none of.
    """
    if not 1 <= world_size <= MAX_RANKS:
        expected = f"an integer from 1 to {MAX_RANKS:,}"
        raise ConfigError("world_size", expected=expected, got=world_size)
    names = tuple(field.name for field in dataclasses.fields(ParallelConfig))
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
    degrees = _Degrees(world_size, model, only)
    for chosen in degrees.all():
        for sequence_parallel, pp_chunks, dynamic_cp in itertools.product(*options):
            if sequence_parallel and chosen["tp"] == 1:
                continue  # refused by a rule too; not to build it halves the time
            try:
                parallel = ParallelConfig(
                    **chosen,
                    sequence_parallel=sequence_parallel,
                    pp_chunks=pp_chunks,
                    dynamic_cp=dynamic_cp,
                )
            except ConfigError:
                continue
            if broken(LAYOUT_RULES, Layout(model, parallel, microbatches)) is None:
                yield parallel


class _Degrees:
    """Degrees whose dense product is the world and whose expert product divides a stage.

    Those that break a rule by one axis alone are left out early: most of a large world's are.
    """

    def __init__(
        self, world_size: int, model: ModelConfig, only: Mapping[str, Collection[Any]]
    ) -> None:
        self.world_size, self.only = world_size, only
        self.fit = {
            axis: [d for d in self._allowed(axis, divisors(world_size)) if _fits(model, axis, d)]
            for axis in ("pp", "tp", "cp", "ep", "etp", "dp_outer")
        }

    def _allowed(self, axis: str, degrees: Iterable[int]) -> Iterator[int]:
        return (d for d in degrees if d in self.only.get(axis, (d,)))

    def _choices(self, axis: str, ranks: int) -> Iterator[int]:
        return (d for d in self.fit[axis] if ranks % d == 0)

    def all(self) -> Iterator[dict[str, int]]:
        """Keywords of `ParallelConfig`, ascending, pp slowest and etp fastest."""
        for pp in self._choices("pp", self.world_size):
            stage = self.world_size // pp
            for tp in self._choices("tp", stage):
                for cp in self._choices("cp", stage // tp):
                    for dp_outer in self._choices("dp_outer", stage // (tp * cp)):
                        dp = stage // (tp * cp * dp_outer)
                        dense = {"pp": pp, "tp": tp, "cp": cp, "dp_outer": dp_outer, "dp": dp}
                        if dp in self.only.get("dp", (dp,)):
                            yield from (dense | expert for expert in self._expert(stage))

    def _expert(self, stage: int) -> Iterator[dict[str, int]]:
        for ep in self._choices("ep", stage):
            for etp in self._choices("etp", stage // ep):
                yield {"ep": ep, "etp": etp}


def _fits(model: ModelConfig, axis: str, degree: int) -> bool:
    """Whether a layout that has no other degree keeps the rules that look at this one alone."""
    room = degree if axis in ("ep", "etp") else 1  # expert degrees cut ranks that are there
    chosen: dict[str, Any] = {"dp": room, axis: degree}
    candidate = Layout(model, ParallelConfig(**chosen))
    return broken((rule for rule in LAYOUT_RULES if axis in rule.alone), candidate) is None
