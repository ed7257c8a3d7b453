"""Settings: what `base`, an axis value or an `include` entry says about one training run.

A setting is one leaf of `fsdp_core.config.TrainConfig` by its dotted name (`optim.lr`), or one of
`graph`, `plant` and `world_size`, with the place where it was written. A mapping is short for the
leaves that it names: `parallel: {dp: 2}` is `parallel.dp: 2`, and says nothing about `parallel.tp`.
So later settings overlay earlier ones leaf by leaf: base, then axes, then include.

The legal leaves and their types are read off the dataclasses, so a field added to the
configuration is at once a legal key here.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_core import config as training
from fsdp_core.config import ConfigError, TrainConfig, to_plain
from harness.errors import ScenarioError, shown
from harness.plant_spec import PlantSpec
from harness.records import MAX_WORLD_SIZE
from harness.scenario.decode import (
    dotted,
    refuse,
    take_bool,
    take_float,
    take_int,
    take_list,
    take_mapping,
    take_str,
    unknown_key,
)
from harness.scenario.plant_setting import check_plant, decode_plant
from harness.scenario.yaml_source import Node, Origin

_FIELDS = tuple(field.name for field in dataclasses.fields(TrainConfig))
Value = str | int | float | bool | tuple[str, ...] | tuple[int, ...] | PlantSpec | None


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf, its decoded value and where it was written."""

    leaf: str
    value: Value
    origin: Origin


@dataclass(frozen=True, slots=True)
class Leg:
    """The run that a set of settings describes, and the fault that they plant."""

    config: TrainConfig
    plant: PlantSpec | None

    @property
    def identity(self) -> Hashable:
        """Equal for runs that do the same."""
        return self.config

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.config.steps

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.config.parallel.world_size

    @property
    def taps(self) -> tuple[str, ...]:
        """Patterns of tapped modules."""
        return self.config.taps

    @property
    def graph(self) -> tuple[str, ...]:
        """Scopes of graphs."""
        return self.config.graph

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self.config.microbatches

    @property
    def engine(self) -> str:
        """Who shards the model."""
        return self.config.engine

    @property
    def compiled(self) -> str:
        """What is compiled by whom; order means nothing."""
        parts = "+".join(sorted(self.config.compile))
        return f"{parts} by {self.config.compile_backend}" if parts else "none"

    @property
    def num_steps_before_graphs(self) -> int:
        """Steps of warm-up and capture."""
        return self.config.graph_warmup_steps + 1 if self.config.graph else 0

    def plain(self) -> dict[str, Any]:
        """`RunSpec.config`."""
        return plain_config(self.config)


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
def parts() -> dict[str, type[Any]]:
    """The nested configurations of `TrainConfig`, by field name."""
    hints = typing.get_type_hints(TrainConfig)
    return {
        name: kind
        for name, kind in hints.items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }


@functools.cache
def leaf_types() -> dict[str, Any]:
    """Type of every leaf, by dotted name."""
    leaves: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(TrainConfig).items():
        if name in parts():
            for inner, inner_kind in typing.get_type_hints(kind).items():
                leaves[f"{name}.{inner}"] = inner_kind
        else:
            leaves[name] = kind
    return leaves | {"world_size": int, "plant": PlantSpec}


@functools.cache
def legal_keys() -> tuple[str, ...]:
    """What `base` and `axes` may name, without the dotted forms."""
    names = tuple(typing.get_type_hints(TrainConfig))
    return (*names, "world_size", "plant")


def decode_settings(key: str, node: Node, written: Origin, where: str) -> tuple[Setting, ...]:
    """The settings that `key: node` stands for. `where` is the section, for messages.

    Raises:
        ScenarioError: unknown key, or a value of the wrong type.
    """
    full = dotted(where, key)
    if key in parts():
        return _decode_part(key, node, full)
    if key not in leaf_types():
        part = key.partition(".")[0]
        if part in parts():
            legal = tuple(leaf for leaf in leaf_types() if leaf.startswith(f"{part}."))
        else:
            legal = legal_keys()
        raise unknown_key(key, written, where, legal)
    return (Setting(key, decode_leaf(key, node, full), node.origin),)


def _decode_part(part: str, node: Node, full: str) -> tuple[Setting, ...]:
    if part == "model" and not isinstance(node.value, dict):
        expected = tuple(training.MODEL_PRESETS)
        return (Setting("model.preset", take_str(node, full, legal=expected), node.origin),)
    fields = tuple(typing.get_type_hints(parts()[part]))
    entries = take_mapping(node, full, legal=fields)
    if not entries:
        raise refuse(node, full, "at least one key", got="an empty mapping", legal=fields)
    return tuple(
        Setting(f"{part}.{name}", decode_leaf(f"{part}.{name}", entry, f"{full}.{name}"),
                entry.origin)
        for name, entry in entries.items()
    )  # fmt: skip


def decode_leaf(leaf: str, node: Node, full: str) -> Value:
    """The value of one leaf; `full` is its key in messages.

    Raises:
        ScenarioError: a value of the wrong type.
    """
    own = {
        "graph": _decode_graph, "stress": _decode_stress, "compile": _decode_compile,
        "plant": decode_plant,
    }  # fmt: skip
    if leaf in own:
        return own[leaf](node, full)
    kind = leaf_types()[leaf]
    if kind == tuple[int, ...]:
        return tuple(take_int(entry, full) for entry in take_list(node, full, "sizes"))
    if kind == tuple[str, ...]:
        # An empty list is a value too: an axis compares with and without.
        entries = take_list(node, full, "names") if node.value != () else ()
        return tuple(take_str(entry, full) for entry in entries)
    if isinstance(kind, types.UnionType):
        if node.value is None:
            return None
        (kind,) = (option for option in typing.get_args(kind) if option is not type(None))
    takers: dict[Any, Callable[[Node, str], Value]] = {
        bool: take_bool, int: take_int, float: take_float, str: take_str,
    }  # fmt: skip
    return takers[kind](node, full)


def _decode_graph(node: Node, full: str) -> tuple[str, ...]:
    legal = (training.EAGER, *training.SCOPES)
    if node.value == training.EAGER:
        return ()
    if not isinstance(node.value, tuple):
        got = node.shown()
        if node.value in training.SCOPES:
            got += f" (scopes go in a list: [{node.value}])"
        raise refuse(node, full, "eager or a list of scopes", got=got, legal=legal)
    if not node.value:
        got = "an empty list (say eager)"
        raise refuse(node, full, "eager or a list of scopes", got=got, legal=legal)
    return _in_order(node.value, full, training.SCOPES)


def _decode_stress(node: Node, full: str) -> tuple[str, ...]:
    return _none_or_list(node, full, "stressors", training.NO_STRESS, training.STRESSORS)


def _decode_compile(node: Node, full: str) -> tuple[str, ...]:
    return _none_or_list(node, full, "parts", training.NO_COMPILE, training.PARTS)


def _none_or_list(
    node: Node, full: str, what: str, none: str, words: tuple[str, ...]
) -> tuple[str, ...]:
    if node.value == none:
        return ()
    if not isinstance(node.value, tuple) or not node.value:
        got = node.shown() if node.value != () else f"an empty list (say {none})"
        if node.value in words:
            got += f" ({what} go in a list: [{node.value}])"
        raise refuse(node, full, f"{none} or a list of {what}", got=got, legal=(none, *words))
    return _in_order(node.value, full, words)


def _in_order(nodes: Iterable[Node], full: str, legal: tuple[str, ...]) -> tuple[str, ...]:
    """Names in the order in which they are listed: the order in the file means nothing."""
    return tuple(sorted((take_str(node, full, legal=legal) for node in nodes), key=legal.index))


def overlay(*layers: Iterable[Setting]) -> dict[str, Setting]:
    """Leaf to setting; a later layer wins leaf by leaf."""
    return {setting.leaf: setting for layer in layers for setting in layer}


def build_leg(settings: Mapping[str, Setting], fallback: Origin) -> Leg:
    """The run that `settings` describe, all rules of the configuration checked.

    Raises:
        ScenarioError: a rule broken, at the place of the setting that broke it; `fallback` is
            where to point when the value at fault is a default.
    """
    try:
        config = _build_config(settings)
    except ConfigError as error:
        setting = _culprit(error.key, settings)
        raise (setting.origin if setting else fallback).error(
            error.key,
            expected=error.expected,
            got=shown(error.got),
            legal=error.legal,
            rule=error.rule,
        ) from None
    world_size = config.parallel.world_size
    if world_size > MAX_WORLD_SIZE:
        raise _too_many_ranks(config, settings, fallback)
    stated = settings.get("world_size")
    if stated is not None and stated.value != world_size:
        degrees = {axis: getattr(config.parallel, axis) for axis in training.DENSE_DEGREES}
        product = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree != 1)
        raise stated.origin.error(
            "world_size",
            expected=f"{world_size}, the product of the degrees ({product or 'all 1'})",
            got=shown(stated.value),
        )
    plant = settings.get("plant")
    value = plant.value if plant is not None else None
    assert value is None or isinstance(value, PlantSpec)
    if plant is not None and value is not None:
        check_plant(value, plant.origin, config.steps, config.parallel.world_size)
    return Leg(config, value)


def _too_many_ranks(
    config: TrainConfig, settings: Mapping[str, Setting], fallback: Origin
) -> ScenarioError:
    """At the largest of the degrees, whose product no machine has."""
    largest = max(training.DENSE_DEGREES, key=lambda axis: getattr(config.parallel, axis))
    key = f"parallel.{largest}"
    return (settings[key].origin if key in settings else fallback).error(
        key,
        expected=f"at most {MAX_WORLD_SIZE} ranks, the product of the degrees",
        got=f"{getattr(config.parallel, largest)}, which makes {config.parallel.world_size} ranks",
    )


def build_model(settings: Mapping[str, Setting], fallback: Origin) -> training.ModelConfig:
    """The model that `settings` describe, whatever else they say.

    Raises:
        ScenarioError: as `build_leg`.
    """
    ours = {leaf: setting for leaf, setting in settings.items() if leaf.startswith("model.")}
    return build_leg(ours, fallback).config.model


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
