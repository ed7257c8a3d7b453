"""Every layout of a number of ranks that breaks no rule of the configuration."""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fsdp_core.config import (
    LAYOUT_RULES,
    ConfigError,
    Layout,
    ModelConfig,
    ParallelConfig,
    broken,
    divisors,
)

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
    # Degrees that break a rule by one axis alone are left out early: most of a large world's are.
    fit = {
        axis: [
            degree
            for degree in divisors(world_size)
            if degree in only.get(axis, (degree,)) and (axis == "dp" or _fits(model, axis, degree))
        ]
        for axis in ("pp", "tp", "cp", "ep", "etp", "dp_outer", "dp")
    }
    for degrees in _degrees(world_size, fit):
        for sequence_parallel, pp_chunks, dynamic_cp in itertools.product(*options):
            if sequence_parallel and degrees["tp"] == 1:
                continue  # refused by a rule too; not to build it halves the time
            try:
                parallel = ParallelConfig(
                    **degrees,
                    sequence_parallel=sequence_parallel,
                    pp_chunks=pp_chunks,
                    dynamic_cp=dynamic_cp,
                )
            except ConfigError:
                continue
            if broken(LAYOUT_RULES, Layout(model, parallel, microbatches)) is None:
                yield parallel


def _degrees(world_size: int, fit: Mapping[str, list[int]]) -> Iterator[dict[str, int]]:
    """Degrees whose dense product is the world and whose expert product divides a stage.

    Ascending, pp slowest and etp fastest.
    """

    def choices(axis: str, ranks: int) -> list[int]:
        return [degree for degree in fit[axis] if ranks % degree == 0]

    for pp in choices("pp", world_size):
        stage = world_size // pp
        for tp in choices("tp", stage):
            for cp in choices("cp", stage // tp):
                for dp_outer in choices("dp_outer", stage // (tp * cp)):
                    dp = stage // (tp * cp * dp_outer)
                    dense = {"pp": pp, "tp": tp, "cp": cp, "dp_outer": dp_outer, "dp": dp}
                    for ep in choices("ep", stage) if dp in fit["dp"] else ():
                        for etp in choices("etp", stage // ep):
                            yield dense | {"ep": ep, "etp": etp}


def _fits(model: ModelConfig, axis: str, degree: int) -> bool:
    """Whether a layout that has no other degree keeps the rules that look at this one alone."""
    room = degree if axis in ("ep", "etp") else 1  # expert degrees cut ranks that are there
    chosen: dict[str, Any] = {"dp": room, axis: degree}
    candidate = Layout(model, ParallelConfig(**chosen))
    return broken((rule for rule in LAYOUT_RULES if axis in rule.alone), candidate) is None
