"""Every layout of a number of ranks that breaks no rule of the configuration.

An axis of layouts may be listed by the rules, for the model of `base`, each key of `parallel` with
the value or values that it may have:

    parallel: {legal_layouts: 64, tp: [1, 2], pp: 1}
"""

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
from harness.errors import shown
from harness.scenario import yaml_source as take
from harness.scenario.settings import Setting, build_config, take_leaf, take_sizes
from harness.scenario.yaml_source import Node, Origin, dotted

LISTED = "legal_layouts"
MAX_RANKS, MAX_LAYOUTS = 2**20, 50_000
_FIELDS = {field.name: field.default for field in dataclasses.fields(ParallelConfig)}


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
    for name in set(only or {}).difference(_FIELDS):
        raise ConfigError(name, expected="a field of the layout", got=name, legal=tuple(_FIELDS))
    return _legal(world_size, model, microbatches, dict(only or {}))


def _legal(
    world_size: int, model: ModelConfig, microbatches: int, only: Mapping[str, Collection[Any]]
) -> Iterator[ParallelConfig]:
    options: dict[str, Collection[Any]] = {
        "sequence_parallel": (False, True), "pp_chunks": (1,), "dynamic_cp": ((),),
    }  # fmt: skip
    values = [only.get(name, each) for name, each in options.items()]
    for degrees in _degrees(world_size, model, only):
        for fields in (dict(zip(options, row, strict=True)) for row in itertools.product(*values)):
            if fields["sequence_parallel"] and degrees["tp"] == 1:
                continue  # refused by a rule too; not to build it halves the time
            try:
                parallel = ParallelConfig(**degrees, **fields)
            except ConfigError:
                continue
            if broken(LAYOUT_RULES, Layout(model, parallel, microbatches)) is None:
                yield parallel


def _degrees(
    world_size: int, model: ModelConfig, only: Mapping[str, Collection[Any]]
) -> Iterator[dict[str, Any]]:
    """Degrees whose dense product is the world and whose expert product divides a stage.

    Ascending, pp slowest and etp fastest. Those that break a rule by one axis alone are left out
    early: most of a large world's are.
    """

    def fits(axis: str, degree: int) -> bool:
        room = degree if axis in ("ep", "etp") else 1  # expert degrees cut ranks that are there
        chosen: dict[str, Any] = {"dp": room, axis: degree}
        candidate = Layout(model, ParallelConfig(**chosen))
        return broken((rule for rule in LAYOUT_RULES if axis in rule.alone), candidate) is None

    fit = {
        axis: [degree for degree in divisors(world_size)
               if degree in only.get(axis, (degree,)) and fits(axis, degree)]
        for axis in ("pp", "tp", "cp", "dp_outer", "ep", "etp")
    }  # fmt: skip
    for pp, tp, cp, dp_outer in itertools.product(*(fit[axis] for axis in list(fit)[:4])):
        dp, over = divmod(world_size, pp * tp * cp * dp_outer)
        if over or dp not in only.get("dp", (dp,)):
            continue
        dense = {"pp": pp, "tp": tp, "cp": cp, "dp_outer": dp_outer, "dp": dp}
        for ep, etp in itertools.product(fit["ep"], fit["etp"]):
            if world_size // pp % (ep * etp) == 0:
                yield dense | {"ep": ep, "etp": etp}


# --- the axis ---------------------------------------------------------------------------------


def is_listed(axis: str, node: Node) -> bool:
    """Whether the values of an axis are for the rules to list."""
    return axis == "parallel" and isinstance(node.value, dict) and LISTED in node.value


def listed_layouts(
    node: Node, key: str, base: Mapping[str, Setting], fallback: Origin
) -> tuple[tuple[Setting, ...], ...]:
    """The settings of each legal layout, in the order of `legal_layouts`: what departs from
    degree 1. `node` is the axis, `key` its name in messages, `base` has the model.

    Raises:
        ScenarioError: bad keys or values, degrees in base too, no legal layout, or too many.
    """
    entries = dict(take.take_mapping(node, key, legal=(LISTED, *_FIELDS)))
    for leaf, setting in base.items():
        if leaf.startswith("parallel."):
            expected = f"no degree, as {key} lists whole layouts"
            raise setting.origin.error(dotted("base", leaf), expected, shown(setting.value))
    world_size = take.take_count(entries.pop(LISTED), dotted(key, LISTED))
    only = {name: _allowed(name, value, dotted(key, name)) for name, value in entries.items()}
    model = build_config({k: v for k, v in base.items() if k.startswith("model.")}, fallback).model
    microbatches = base["microbatches"].value if "microbatches" in base else 1
    try:
        legal = legal_layouts(world_size, model, microbatches=microbatches, only=only)
    except ConfigError as error:
        raise node.refused(dotted(key, LISTED), error.expected, got=shown(error.got)) from None
    layouts = list(itertools.islice(legal, MAX_LAYOUTS + 1))
    if not layouts:
        expected = f"a legal layout of {world_size} ranks"
        raise node.refused(key, expected, got=f"none for the model {model.preset}")
    if len(layouts) > MAX_LAYOUTS:
        raise node.refused(key, f"at most {MAX_LAYOUTS:,} layouts", got="more")
    named = ({n: v for n in _FIELDS if (v := getattr(each, n)) != _FIELDS[n]} for each in layouts)
    return tuple(
        tuple(Setting(f"parallel.{name}", value, node.origin) for name, value in each.items())
        for each in (departures or {"dp": 1} for departures in named)
    )


def _allowed(name: str, node: Node, full: str) -> tuple[Any, ...]:
    """The values that a field may have: one, or a list. `dynamic_cp` is a list, or one of lists."""
    nodes = node.value if isinstance(node.value, tuple) else (node,)
    if name != "dynamic_cp":
        return tuple(take_leaf(f"parallel.{name}", each, full) for each in nodes)
    nodes = nodes if any(isinstance(each.value, tuple) for each in nodes) else (node,)
    return tuple(() if each.value == () else take_sizes(each, full) for each in nodes)
