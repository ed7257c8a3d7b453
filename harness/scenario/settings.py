"""Settings: what `base`, an axis value or an `include` entry says about one training run.

A setting is one leaf of `fsdp_core.config.TrainConfig` by its dotted name (`optim.lr`), or one of
`graph`, `plant` and `world_size`, with the place where it was written. A mapping is short for the
leaves that it names: `parallel: {dp: 2}` is `parallel.dp: 2`, and says nothing about `parallel.tp`.
So later settings overlay earlier ones leaf by leaf: base, then axes, then include.

The legal leaves and their types are read off the dataclasses, so a field added to the
configuration is at once a legal key here. Every refusal is a `ScenarioError`.

An axis of layouts may be listed by the rules, in place of the file:

    axes:
      parallel: {legal_layouts: 64}                       every legal layout of 64 ranks
      parallel: {legal_layouts: 64, tp: [1, 2], pp: 1}    those of these degrees

The model is that of `base`. The keys beside `legal_layouts` are those of `parallel`, each with the
value, or the list of values, that it may have; any, if it is left out (`pp_chunks` is 1 then, and
`dynamic_cp` empty). A value of the axis names what differs from degree 1 alone.
"""

import dataclasses
import functools
import itertools
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_core import config as training
from fsdp_core.config import ConfigError, ParallelConfig, TrainConfig, to_plain
from fsdp_core.layouts import legal_layouts
from harness.errors import shown
from harness.faults.catalogue import CATALOGUE, LEGS, is_of_any_engine
from harness.faults.fault import Fault
from harness.records import MAX_WORLD_SIZE, PlantSpec, joined
from harness.scenario.decode import (
    Taker,
    dotted,
    refuse,
    take_bool,
    take_count,
    take_fields,
    take_float,
    take_int,
    take_list,
    take_mapping,
    take_positive,
    take_str,
    unknown_key,
)
from harness.scenario.yaml_source import Node, Origin

LAST_RANK = -1
LISTED = "legal_layouts"
MAX_LAYOUTS = 50_000
_FIELDS = tuple(field.name for field in dataclasses.fields(TrainConfig))
_DEGREES = {f.name: f.default for f in dataclasses.fields(ParallelConfig)}
Value = str | int | float | bool | tuple[str, ...] | tuple[int, ...] | PlantSpec | None


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf, its decoded value and where it was written."""

    leaf: str
    value: Any
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """The run that a set of settings describes, and the fault that they plant.

    Attributes:
        plain: makes `RunSpec.config`, another each time.
        identity: equal for runs that do the same.
        steps: of the run.
        world_size: number of ranks.
        taps: patterns of tapped modules.
        graph: scopes of graphs.
        microbatches: of a step; 0 where nobody knows.
        engine: who shards the model.
        compiled: what is compiled by whom; order means nothing.
        num_steps_before_graphs: steps of warm-up and capture.
        config: of the built-in trainer; None for another program.
    """

    plain: Callable[[], dict[str, Any]]
    identity: Hashable
    steps: int
    world_size: int
    taps: tuple[str, ...]
    graph: tuple[str, ...] = ()
    microbatches: int = 0
    engine: str = ""
    compiled: str = "none"
    num_steps_before_graphs: int = 0
    config: TrainConfig | None = None
    plant: PlantSpec | None = None


def plain_config(config: TrainConfig) -> dict[str, Any]:
    """`config.to_dict()`, faster where thousands of configurations share their parts."""
    plain: dict[str, Any] = {}
    for name in _FIELDS:
        value = getattr(config, name)
        plain[name] = dict(_plain_part(value)) if name in parts() else value
    plain |= {name: list(value) for name, value in plain.items() if isinstance(value, tuple)}
    plain["parallel"]["dynamic_cp"] = list(config.parallel.dynamic_cp)
    return plain


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@functools.cache
def parts() -> dict[str, Any]:
    """The nested configurations of `TrainConfig`, by field name."""
    return {
        name: kind for name, kind in _hints(TrainConfig).items() if dataclasses.is_dataclass(kind)
    }


@functools.cache
def leaf_types() -> dict[str, Any]:
    """Type of every leaf, by dotted name."""
    leaves: dict[str, Any] = {}
    for name, kind in _hints(TrainConfig).items():
        if name in parts():
            leaves |= {f"{name}.{inner}": each for inner, each in _hints(kind).items()}
        else:
            leaves[name] = kind
    return leaves | {"world_size": int, "plant": PlantSpec}


def decode_settings(key: str, node: Node, written: Origin, where: str) -> tuple[Setting, ...]:
    """The settings that `key: node` stands for. `where` is the section, for messages.

    Raises:
        ScenarioError: unknown key, or a value of the wrong type.
    """
    full, part = dotted(where, key), key.partition(".")[0]
    if key in parts():
        return _decode_part(key, node, full)
    if key in leaf_types():
        return (Setting(key, decode_leaf(key, node, full), node.origin),)
    inner = tuple(leaf for leaf in leaf_types() if leaf.startswith(f"{part}."))
    raise unknown_key(key, written, where, inner or (*_FIELDS, "world_size", "plant"))


def _decode_part(part: str, node: Node, full: str) -> tuple[Setting, ...]:
    if part == "model" and not isinstance(node.value, dict):
        preset = take_str(node, full, legal=training.MODEL_PRESETS)
        return (Setting("model.preset", preset, node.origin),)
    legal = _hints(parts()[part])
    entries = take_mapping(node, full, legal=legal)
    if not entries:
        raise refuse(node, full, "at least one key", got="an empty mapping", legal=legal)
    leaves = ((f"{part}.{name}", f"{full}.{name}", entry) for name, entry in entries.items())
    return tuple(Setting(leaf, decode_leaf(leaf, entry, key), entry.origin)
                 for leaf, key, entry in leaves)  # fmt: skip


def decode_leaf(leaf: str, node: Node, full: str) -> Value:
    """The value of one leaf; `full` is its key in messages.

    Raises:
        ScenarioError: a value of the wrong type.
    """
    kind = leaf_types()[leaf]
    if isinstance(kind, types.UnionType):
        if node.value is None:
            return None
        (kind,) = (option for option in typing.get_args(kind) if option is not type(None))
    value: Value = (_OF_LEAF.get(leaf) or _OF_TYPE[kind])(node, full)
    return value


def _sizes(node: Node, full: str) -> tuple[int, ...]:
    return tuple(take_int(entry, full) for entry in take_list(node, full, "sizes"))


def _names(node: Node, full: str) -> tuple[str, ...]:
    # An empty list is a value too: an axis compares with and without.
    entries = take_list(node, full, "names", may_be_empty=True)
    return tuple(take_str(entry, full) for entry in entries)


def _none_or_list(
    node: Node, full: str, *, what: str, none: str, words: tuple[str, ...]
) -> tuple[str, ...]:
    """Words in the order in which they are listed: the order in the file means nothing."""
    if node.value == none:
        return ()
    if not isinstance(node.value, tuple) or not node.value:
        got = node.shown() if node.value != () else f"an empty list (say {none})"
        if node.value in words:
            got += f" ({what} go in a list: [{node.value}])"
        raise refuse(node, full, f"{none} or a list of {what}", got=got, legal=(none, *words))
    return tuple(sorted((take_str(each, full, legal=words) for each in node.value),
                        key=words.index))  # fmt: skip


def decode_plant(node: Node, full: str) -> PlantSpec | None:
    """A `plant` entry: null or `none`, a mapping, or a list of mappings: several faults at once.

    Raises:
        ScenarioError: an unknown fault, a key that the fault does not take, a bad value, a fault
            twice.
    """
    if node.value is None or node.value == "none":
        return None
    if not isinstance(node.value, tuple):
        return _decode_fault(node, full)
    faults = [_decode_fault(each, full) for each in take_list(node, full, "faults")]
    names = [fault.fault for fault in faults]
    for name in names:
        if names.count(name) > 1:
            raise refuse(node, full, "each fault once", got=f"{name} {names.count(name)} times")
    return joined(faults)


def _decode_fault(node: Node, full: str) -> PlantSpec:
    values = take_fields(node, full, _FAULT, required=("fault",))
    name = values["fault"]
    takes = ("fault", *CATALOGUE[name].takes, "legs", "chance")
    # A step left out would be step 0, before any graph is captured: say it.
    due = ("step",) if "step" in takes else ()
    for key in (*values, *due):
        if key not in takes or key not in values:
            raise node.keys.get(key, node.origin).error(
                f"{full}.{key}",
                expected=f"what the fault {name} takes",
                got="nothing" if key in due else "a key that it does not take",
                legal=takes,
            )
    return PlantSpec(**values)


def _rank(node: Node, full: str) -> int:
    return LAST_RANK if node.value in ("last", LAST_RANK) else take_int(node, full, least=0)


def _legs(node: Node, full: str) -> tuple[str, ...]:
    names = tuple(take_str(leg, full, legal=LEGS) for leg in take_list(node, full, "legs"))
    if len(set(names)) != len(names):
        raise refuse(node, full, "each leg once")
    return names


def _chance(node: Node, full: str) -> float:
    if (chance := take_positive(node, full)) > 1:
        raise refuse(node, full, "a number > 0, at most 1")
    return float(chance)


_FAULT: Mapping[str, Taker] = {
    "fault": functools.partial(take_str, legal=CATALOGUE),
    "step": functools.partial(take_int, least=0),
    "rank": _rank,
    "tensor": take_str,
    "legs": _legs,
    "chance": _chance,
}
_OF_TYPE: Mapping[Any, Taker] = {
    bool: take_bool, int: take_int, float: take_float, str: take_str, tuple[int, ...]: _sizes,
    tuple[str, ...]: _names,
}  # fmt: skip
_OF_LEAF: Mapping[str, Taker] = {
    "graph": functools.partial(
        _none_or_list, what="scopes", none=training.EAGER, words=training.SCOPES
    ),
    "stress": functools.partial(
        _none_or_list, what="stressors", none=training.NO_STRESS, words=training.STRESSORS
    ),
    "compile": functools.partial(
        _none_or_list, what="parts", none=training.NO_COMPILE, words=training.PARTS
    ),
    "plant": decode_plant,
}


def overlay(*layers: Iterable[Setting]) -> dict[str, Setting]:
    """Leaf to setting; a later layer wins leaf by leaf."""
    return {setting.leaf: setting for layer in layers for setting in layer}


def build_leg(settings: Mapping[str, Setting], fallback: Origin) -> Leg:
    """The run that `settings` describe, all rules of the configuration checked.

    Raises:
        ScenarioError: a rule broken, at the place of the setting that broke it; `fallback` is
            where to point when the value at fault is a default.
    """
    config = _checked(settings, fallback)
    plant = settings["plant"].value if "plant" in settings else None
    if plant is not None:
        _check_plant(plant, settings["plant"].origin, config)
    compiled = "+".join(sorted(config.compile))
    return Leg(
        plain=functools.partial(plain_config, config),
        identity=config,
        steps=config.steps,
        world_size=config.parallel.world_size,
        taps=config.taps,
        graph=config.graph,
        microbatches=config.microbatches,
        engine=config.engine,
        compiled=f"{compiled} by {config.compile_backend}" if compiled else "none",
        num_steps_before_graphs=config.graph_warmup_steps + 1 if config.graph else 0,
        config=config,
        plant=plant,
    )


def _checked(settings: Mapping[str, Setting], fallback: Origin) -> TrainConfig:
    try:
        config = _build_config(settings)
    except ConfigError as error:
        setting = _culprit(error.key, settings)
        raise (setting.origin if setting else fallback).error(
            error.key, expected=error.expected, got=shown(error.got), legal=error.legal,
            rule=error.rule,
        ) from None  # fmt: skip
    degrees = {axis: getattr(config.parallel, axis) for axis in training.DENSE_DEGREES}
    ranks = config.parallel.world_size
    if ranks > MAX_WORLD_SIZE:
        # At the largest of the degrees, whose product no machine has.
        largest = max(degrees, key=lambda axis: degrees[axis])
        key = f"parallel.{largest}"
        raise (settings[key].origin if key in settings else fallback).error(
            key,
            expected=f"at most {MAX_WORLD_SIZE} ranks, the product of the degrees",
            got=f"{degrees[largest]}, which makes {ranks} ranks",
        )
    stated = settings.get("world_size")
    if stated is not None and stated.value != ranks:
        product = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree != 1)
        raise stated.origin.error(
            "world_size",
            expected=f"{ranks}, the product of the degrees ({product or 'all 1'})",
            got=shown(stated.value),
        )
    return config


def _build_config(settings: Mapping[str, Setting]) -> TrainConfig:
    values: dict[str, Any] = {}
    # Parts that nobody sets are shared too: they are checked once.
    nested: dict[str, dict[str, Any]] = {part: {} for part in parts()}
    for leaf, setting in settings.items():
        part, _, name = leaf.partition(".")
        if name:
            nested[part][name] = setting.value
        elif leaf not in ("world_size", "plant"):
            values[leaf] = setting.value
    for part, given in nested.items():
        values[part] = _build_part(part, tuple(given.items()))
    return TrainConfig(**values)


@functools.lru_cache(maxsize=4096)
def _build_part(part: str, given: tuple[tuple[str, Value], ...]) -> Any:
    fields: dict[str, Any] = dict(given)
    try:
        if part == "model":
            default = training.ModelConfig.__dataclass_fields__["preset"].default
            return training.model_from_preset(fields.pop("preset", default), fields)
        return parts()[part](**fields)
    except ConfigError as error:
        raise error.within(part) from None


@functools.lru_cache(maxsize=4096)
def _plain_part(part: Any) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(part)
    return plain


def _culprit(key: str, settings: Mapping[str, Setting]) -> Setting | None:
    """The setting to point at: the leaf itself, else the last one written in the same part."""
    if key in settings:
        return settings[key]
    part = key.partition(".")[0]
    near = [s for leaf, s in settings.items() if leaf.partition(".")[0] == part]
    return near[-1] if near else settings.get("graph")


def _check_plant(plant: PlantSpec, written: Origin, config: TrainConfig) -> None:
    """Every fault needs a step and a rank of the run."""
    for fault in plant.each:
        if "step" in CATALOGUE[fault.fault].takes and fault.step >= config.steps:
            raise written.error(
                "plant.step", expected=f"a step below steps={config.steps}", got=shown(fault.step)
            )
        if fault.rank >= config.parallel.world_size:
            expected = f"last or a rank below the world size {config.parallel.world_size}"
            raise written.error("plant.rank", expected=expected, got=shown(fault.rank))


def check_has_part(fault: Fault, config: TrainConfig, role: str, written: Origin) -> None:
    """See that the run has what a fault is planted in; `role` is the run's in its case.

    Raises:
        ScenarioError: it has not.
    """
    parallel = vars(config.parallel)
    place = f"for {fault.name} to be planted in"
    if fault.scopes and not set(fault.scopes) & set(config.graph):
        raise written.error(
            "plant.fault",
            expected=f"a graph scope that {fault.name} can be planted in",
            got=f"{'+'.join(config.graph) or 'eager'} in the {role}",
            legal=fault.scopes,
        )
    if config.engine != "ours" and not is_of_any_engine(fault):
        got = f"{config.engine} in the {role}"
        raise written.error("engine", expected=f"ours, {place}", got=got)
    if lacks := fault.lacks(parallel):
        held = ", ".join(f"{name} {shown(parallel[name])}" for name in fault.needs)
        raise written.error(
            "plant.fault", expected=f"a layout with {lacks}, {place}", got=f"{held} in the {role}"
        )


def is_listed(axis: str, node: Node) -> bool:
    """Whether the values of an axis are for the rules to list."""
    return axis == "parallel" and isinstance(node.value, dict) and LISTED in node.value


def listed_layouts(
    node: Node, key: str, base: Mapping[str, Setting], fallback: Origin
) -> tuple[tuple[Setting, ...], ...]:
    """The settings of each legal layout, in the order of `fsdp_core.layouts`.

    Args:
        node: the axis, a mapping with `legal_layouts`.
        key: its name in messages.
        base: settings of every run, the model among them.
        fallback: where to point when a default of the model is at fault.

    Raises:
        ScenarioError: bad keys or values, a base that sets degrees too, no legal layout, or too
            many of them.
    """
    entries = dict(take_mapping(node, key, legal=(LISTED, *_DEGREES)))
    for leaf, setting in base.items():
        if leaf.startswith("parallel."):
            expected = f"no degree, as {key} lists whole layouts"
            raise setting.origin.error(
                dotted("base", leaf), expected=expected, got=shown(setting.value)
            )
    world_size = take_count(entries.pop(LISTED), dotted(key, LISTED))
    only = {name: _allowed(name, value, dotted(key, name)) for name, value in entries.items()}
    model = _checked({k: v for k, v in base.items() if k.startswith("model.")}, fallback).model
    microbatches = base["microbatches"].value if "microbatches" in base else 1
    try:
        legal = legal_layouts(world_size, model, microbatches=microbatches, only=only)
    except ConfigError as error:
        raise refuse(node, dotted(key, LISTED), error.expected, got=shown(error.got)) from None
    layouts = list(itertools.islice(legal, MAX_LAYOUTS + 1))
    if not layouts:
        expected = f"a legal layout of {world_size} ranks"
        raise refuse(node, key, expected, got=f"none for the model {model.preset}")
    if len(layouts) > MAX_LAYOUTS:
        raise refuse(node, key, f"at most {MAX_LAYOUTS:,} layouts", got="more")
    return tuple(_degrees(layout, node.origin) for layout in layouts)


def _allowed(name: str, node: Node, full: str) -> tuple[Any, ...]:
    """The values that a field may have: one, or a list. `dynamic_cp` is a list, or one of lists."""
    many = node.value if isinstance(node.value, tuple) else None
    if name == "dynamic_cp" and many is not None:
        many = many if any(isinstance(entry.value, tuple) for entry in many) else None
    nodes = (node,) if many is None else many
    return tuple(
        # No dynamic sizes, beside some.
        () if name == "dynamic_cp" and each.value == () else decode_leaf(f"parallel.{name}", each,
                                                                         full)
        for each in nodes
    )  # fmt: skip


def _degrees(layout: ParallelConfig, origin: Origin) -> tuple[Setting, ...]:
    named = {k: getattr(layout, k) for k, v in _DEGREES.items() if getattr(layout, k) != v}
    return tuple(
        Setting(f"parallel.{name}", value, origin) for name, value in (named or {"dp": 1}).items()
    )
