"""Settings: what `base`, an axis value or an `include` entry says about one training run.

A setting is one leaf of `fsdp_core.config.TrainConfig` by its dotted name (`optim.lr`), or `plant`,
the faults that are planted. A mapping is short for the leaves that it names: `parallel: {dp: 2}` is
`parallel.dp: 2`, and says nothing about `parallel.tp`; later settings overlay earlier ones leaf by
leaf. Legal leaves and their types are read off the dataclasses.

With the key `program` a scenario has somebody's training program in place of the built-in one:

    script, module, entry   one of them: a file beside the scenario, a module, module:function
    args, env, packages     options, variables, package versions; axes are args.X, env.X, packages.X
    smaller, folder         see `harness.program.spec`; where script and modules are looked for
    and the keys of `PROGRAM`, which are leaves like those above
"""

import dataclasses
import functools
import hashlib
import itertools
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_core import config as training
from fsdp_core.config import ConfigError, TrainConfig, tap_pattern, to_plain
from harness.errors import ScenarioError, shown
from harness.faults.catalogue import CATALOGUE, LEGS, Fault, is_of_any_engine
from harness.program.packages import A_VERSION, NAME, is_version
from harness.program.spec import OF_RANKS, ProgramSpec, command_line
from harness.records import MAX_WORLD_SIZE, PlantSpec, joined
from harness.scenario import yaml_source as take
from harness.scenario.yaml_source import Node, Origin, Taker, dotted, one_of, unknown_key
from harness.values import dumps

LAST_RANK = -1
_FIELDS = tuple(field.name for field in dataclasses.fields(TrainConfig))
_BARE = ("graph", "model.preset", "fsdp.strategy", "engine", "backend", "dtype")
"""Leaves whose values speak for themselves; every other token carries the leaf's name."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=-]")
_hints = functools.cache(typing.get_type_hints)


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf, its decoded value and where it was written."""

    leaf: str
    value: Any
    origin: Origin


@dataclass(frozen=True)
class Choice:
    """One value of an axis, or one key of an include entry: the settings that it stands for."""

    settings: tuple[Setting, ...]
    origin: Origin

    @functools.cached_property
    def leaves(self) -> dict[str, Any]:
        return {setting.leaf: setting.value for setting in self.settings}

    @functools.cached_property
    def identity(self) -> tuple[tuple[str, Any], ...]:
        """Two choices are the same if these are."""
        return tuple(sorted(self.leaves.items(), key=lambda item: item[0]))

    @functools.cached_property
    def label(self) -> str:
        """What a table shows: the value alone, or all settings if there are more."""
        if len(self.settings) == 1 and self.settings[0].leaf.partition(".")[0] != "parallel":
            (setting,) = self.settings
            is_none = setting.leaf in ("stress", "compile") and not setting.value
            text = "none" if is_none else _text(setting.value)
            return text if text.strip() else repr(text)
        return self.token

    @functools.cached_property
    def token(self) -> str:
        """The part of an id: the settings in the order of the configuration, safe in file names."""
        order = list(leaf_types())
        # A program's own leaves have no order but the file's.
        place = {leaf: order.index(leaf) for leaf in self.leaves if leaf in order}
        leaves = sorted(self.leaves, key=lambda leaf: place.get(leaf, len(order)))
        words = []
        for text in (_leaf_token(leaf, self.leaves[leaf]) for leaf in leaves):
            safe = _UNSAFE.sub("_", text)
            mark = "" if safe == text else f"_{hashlib.sha256(text.encode()).hexdigest()[:6]}"
            words.append(safe + mark)
        return "_".join(words)


def _leaf_token(leaf: str, value: Any) -> str:
    head, _, name = leaf.partition(".")
    name = name if head in OPEN else leaf.rpartition(".")[2]
    if leaf in _BARE:
        return _text(value)
    if leaf == "plant":
        return "unplanted" if value is None else _text(value)
    if value == () or value is False:
        return f"no_{name}"
    if value is True:
        return name
    return f"{name}{value}" if isinstance(value, int | float) else f"{name}_{_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, PlantSpec):
        return "+".join(map(_fault_text, value.each))
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "eager"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def _fault_text(plant: PlantSpec) -> str:
    takes, rank = CATALOGUE[plant.fault].takes, "last" if plant.rank == LAST_RANK else plant.rank
    place = f"d{plant.device}" if plant.device else f"r{rank}"
    words = [
        plant.fault, f"s{plant.step}" if "step" in takes else "",
        place if "rank" in takes else "", "once" if plant.once else "", plant.tensor,
        "" if plant.legs == ("candidate",) else "+".join(plant.legs),
        "" if plant.chance == 1.0 else f"p{plant.chance}",
    ]  # fmt: skip
    return "_".join(filter(None, words))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """The run that a set of settings describes, and the fault that they plant.

    `plain` makes `RunSpec.config`, another each time; `identity` is equal for runs that do the
    same. `microbatches` is 0 where nobody knows, `compiled` says what is compiled by whom,
    `config` is None for a program that is not the built-in trainer.
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
    config: TrainConfig | None = None
    plant: PlantSpec | None = None


# --- leaves -----------------------------------------------------------------------------------


@functools.cache
def parts() -> dict[str, Any]:
    """The nested configurations of `TrainConfig`, by field name."""
    return {n: kind for n, kind in _hints(TrainConfig).items() if dataclasses.is_dataclass(kind)}


@functools.cache
def leaf_types() -> dict[str, Any]:
    """Type of every leaf, by dotted name."""
    leaves: dict[str, Any] = {}
    for name, kind in _hints(TrainConfig).items():
        inner = _hints(kind).items() if name in parts() else ()
        leaves |= {f"{name}.{leaf}": each for leaf, each in inner} or {name: kind}
    return leaves | {"plant": PlantSpec}


def decode_settings(key: str, node: Node, written: Origin, where: str) -> tuple[Setting, ...]:
    """The settings that `key: node` stands for in the section `where`.

    Raises:
        ScenarioError: unknown key, or a value of the wrong type.
    """
    full = dotted(where, key)
    if key == "model" and not isinstance(node.value, dict):
        preset = take.take_str(node, full, legal=training.MODEL_PRESETS)
        return (Setting("model.preset", preset, node.origin),)
    if key in parts():
        entries = take.take_mapping(node, full, legal=_hints(parts()[key]), may_be_empty=False)
        return tuple(
            Setting(leaf := f"{key}.{name}", take_leaf(leaf, each, f"{full}.{name}"), each.origin)
            for name, each in entries.items()
        )
    if key in leaf_types():
        return (Setting(key, take_leaf(key, node, full), node.origin),)
    head = key.partition(".")[0]
    near = tuple(leaf for leaf in leaf_types() if leaf.startswith(f"{head}."))
    raise unknown_key(key, written, where, near or (*_FIELDS, "plant"))


def take_leaf(leaf: str, node: Node, full: str) -> Any:
    """The value of one leaf, whose key in messages is `full`."""
    kind = leaf_types()[leaf]
    if isinstance(kind, types.UnionType):
        if node.value is None:
            return None
        (kind,) = (option for option in typing.get_args(kind) if option is not type(None))
    return (_OF_LEAF.get(leaf) or _OF_TYPE[kind])(node, full)


def take_sizes(node: Node, full: str) -> tuple[int, ...]:
    """A list of integers."""
    return tuple(take.take_int(entry, full) for entry in take.take_list(node, full, "sizes"))


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
        raise node.refused(full, f"{none} or a list of {what}", got=got, legal=(none, *words))
    return tuple(sorted(take.take_words(node, full, what=what, legal=words), key=words.index))


def _plant(node: Node, full: str) -> PlantSpec | None:
    """Null or `none`, a mapping, or a list of mappings: several faults at once."""
    if node.value is None or node.value == "none":
        return None
    if not isinstance(node.value, tuple):
        return _fault(node, full)
    faults = [_fault(each, full) for each in take.take_list(node, full, "faults")]
    if len({fault.fault for fault in faults}) < len(faults):
        raise node.refused(full, "each fault once")
    return joined(faults)


def _fault(node: Node, full: str) -> PlantSpec:
    values = take.take_fields(node, full, FAULT, required=("fault",))
    own = CATALOGUE[values["fault"]].takes
    # In the place of a rank, not beside one.
    place = ("device",) if "rank" in own and "rank" not in values else ()
    takes = ("fault", *own, "legs", "chance", *place, "once")
    # A step left out would be step 0, before any graph is captured: say it.
    due = {"step"}.intersection(takes) - set(values)
    for key in (*due, *(name for name in values if name not in takes)):
        got, origin = "nothing" if key in due else "this key", node.keys.get(key, node.origin)
        expected = f"what the fault {values['fault']} takes"
        raise origin.error(f"{full}.{key}", expected, got, legal=takes)
    return PlantSpec(**values)


FAULT: Mapping[str, Taker] = {
    "fault": one_of(*CATALOGUE),
    "step": partial(take.take_int, least=0),  # in which it is planted
    "rank": lambda node, full: (
        LAST_RANK if node.value in ("last", -1) else take.take_int(node, full, least=0)
    ),
    "tensor": take.take_str,  # a parameter's name; by default the fault's own choice
    "legs": partial(take.take_words, what="legs", legal=LEGS, once="leg"),  # candidate
    "chance": partial(take.take_float, above=0, most=1),  # that it fires; 1
    "device": lambda node, full: str(take.take_int(node, full, least=0)),  # in place of a rank
    "once": take.take_bool,  # not in repeats of a run
}
_OF_TYPE: Mapping[Any, Taker] = {
    bool: take.take_bool, int: take.take_int, float: take.take_float, str: take.take_str,
    tuple[int, ...]: take_sizes,
    # An empty list of names is a value too: an axis compares with and without.
    tuple[str, ...]: partial(take.take_words, what="names", may_be_empty=True),
}  # fmt: skip
_OF_LEAF: Mapping[str, Taker] = {"plant": _plant} | {
    leaf: partial(_none_or_list, what=what, none=none, words=words)
    for leaf, what, none, words in (
        ("graph", "scopes", training.EAGER, training.SCOPES),
        ("stress", "stressors", training.NO_STRESS, training.STRESSORS),
        ("compile", "parts", training.NO_COMPILE, training.PARTS),
    )
}


# --- runs of the built-in trainer -------------------------------------------------------------


def overlay(*layers: Iterable[Setting]) -> dict[str, Setting]:
    """Leaf to setting; a later layer wins leaf by leaf."""
    return {setting.leaf: setting for layer in layers for setting in layer}


def build_leg(settings: Mapping[str, Setting], fallback: Origin) -> Leg:
    """The run that `settings` describe, all rules of the configuration checked.

    Raises:
        ScenarioError: a rule broken, at the place of the setting that broke it; `fallback` is
            where to point when the value at fault is a default.
    """
    config = build_config(settings, fallback)
    plant: PlantSpec | None = settings["plant"].value if "plant" in settings else None
    for fault in () if plant is None else plant.each:
        written = settings["plant"].origin
        if "step" in CATALOGUE[fault.fault].takes and fault.step >= config.steps:
            expected = f"a step below steps={config.steps}"
            raise written.error("plant.step", expected, shown(fault.step))
        if "step" in CATALOGUE[fault.fault].takes and fault.step < config.first_recorded:
            expected = f"a step from resume_at={config.resume_at} on, in the layout that has faults"
            raise written.error("plant.step", expected, shown(fault.step))
        if fault.rank >= config.parallel.world_size:
            expected = f"last or a rank below the world size {config.parallel.world_size}"
            raise written.error("plant.rank", expected, shown(fault.rank))
    compiled = "+".join(sorted(config.compile))
    return Leg(
        plain=partial(plain_config, config), identity=config, config=config, plant=plant,
        steps=config.steps, world_size=config.parallel.world_size, taps=config.taps,
        graph=config.graph, microbatches=config.microbatches, engine=config.engine,
        compiled=f"{compiled} by {config.compile_backend}" if compiled else "none",
    )  # fmt: skip


def plain_config(config: TrainConfig) -> dict[str, Any]:
    """`config.to_dict()`, faster where thousands of configurations share their parts."""
    plain: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(config).items()
    }
    plain |= {name: dict(_plain_part(plain[name])) for name in parts()}
    plain["parallel"]["dynamic_cp"] = list(config.parallel.dynamic_cp)
    return plain


@functools.lru_cache(maxsize=4096)
def _plain_part(part: Any) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(part)
    return plain


def build_config(settings: Mapping[str, Setting], fallback: Origin) -> TrainConfig:
    """The configuration that settings describe (`ScenarioError` as `build_leg`)."""
    try:
        config = _build(settings)
        if (ranks := config.parallel.world_size) > MAX_WORLD_SIZE:
            largest = max(training.DENSE_DEGREES, key=lambda axis: getattr(config.parallel, axis))
            expected = f"at most {MAX_WORLD_SIZE} ranks, the product of the degrees"
            raise ConfigError(f"parallel.{largest}", expected=expected, got=ranks)
    except ConfigError as error:
        # The leaf itself, else the last one written in the same part.
        part = error.key.partition(".")[0]
        near = [s for leaf, s in settings.items() if leaf.partition(".")[0] == part]
        found = settings.get(error.key) or (near[-1] if near else settings.get("graph"))
        raise _broken(found.origin if found else fallback, error) from None
    return config


def _broken(origin: Origin, error: ConfigError) -> ScenarioError:
    return origin.error(
        error.key, error.expected, shown(error.got), legal=error.legal, rule=error.rule
    )


def _build(settings: Mapping[str, Setting]) -> TrainConfig:
    values: dict[str, Any] = {}
    # Parts that nobody sets are shared too: they are checked once.
    nested: dict[str, dict[str, Any]] = {part: {} for part in parts()}
    for leaf, setting in settings.items():
        part, _, name = leaf.partition(".")
        if name:
            nested[part][name] = setting.value
        elif leaf != "plant":
            values[leaf] = setting.value
    built = {part: _build_part(part, tuple(given.items())) for part, given in nested.items()}
    return TrainConfig(**values, **built)


@functools.lru_cache(maxsize=4096)
def _build_part(part: str, given: tuple[tuple[str, Any], ...]) -> Any:
    fields: dict[str, Any] = dict(given)
    try:
        if part == "model":
            default = training.ModelConfig.__dataclass_fields__["preset"].default
            return training.model_from_preset(fields.pop("preset", default), fields)
        return parts()[part](**fields)
    except ConfigError as error:
        raise error.within(part) from None


def check_has_part(fault: Fault, config: TrainConfig, role: str, written: Origin) -> None:
    """See that the run, `role` in its case, has what a fault is planted in (`ScenarioError`)."""
    parallel, place = vars(config.parallel), f"for {fault.name} to be planted in"
    if fault.scopes and not set(fault.scopes) & set(config.graph):
        got = f"{'+'.join(config.graph) or 'eager'} in the {role}"
        expected = f"a graph scope that {fault.name} can be planted in"
        raise written.error("plant.fault", expected, got, legal=fault.scopes)
    if config.engine != "ours" and not is_of_any_engine(fault):
        raise written.error("engine", f"ours, {place}", f"{config.engine} in the {role}")
    if lacks := fault.lacks(parallel):
        held = ", ".join(f"{name} {shown(parallel[name])}" for name in fault.needs)
        expected = f"a layout with {lacks}, {place}"
        raise written.error("plant.fault", expected, f"{held} in the {role}")


# --- programs that are not the built-in trainer -----------------------------------------------

KINDS = ("script", "module", "entry")
DETERMINISM = ("off", "enforce")
STRESSORS = ("poison", "scramble")
"""Of `harness.recorder.graphs`, which needs torch."""


def _argument(node: Node, full: str) -> Any:
    if isinstance(node.value, tuple) and not any(isinstance(n.value, tuple) for n in node.value):
        return tuple(_argument(each, full) for each in node.value)
    if isinstance(node.value, dict | tuple):
        raise node.refused(full, "a text, a number, a bool, null, or a list of these")
    if isinstance(node.value, bool) and node.raw.lower() not in ("true", "false"):
        raise node.refused(full, f'true, false, or "{node.raw}" in quotes')
    if isinstance(node.value, str) and node.raw:
        try:
            return take.take_float(node, full)  # YAML 1.1 reads 1e-3 as a text
        except ScenarioError:
            return node.value
    return node.value


def _text_only(node: Node, full: str, *, what: str, fits: Callable[[str], bool]) -> str | None:
    text = node.raw or str(node.value)  # 2.10 would lose its zero as a number
    is_one = not isinstance(node.value, bool | dict | tuple)
    if not is_one or not (node.value is None or fits(text)):
        raise node.refused(full, what)
    return None if node.value is None else text


OPEN: Mapping[str, tuple[Callable[[str], object], str, Taker]] = {
    "args": (bool, "a name", _argument),
    "env": (lambda name: name not in ("", *OF_RANKS) and "=" not in name,
            f"a variable, none of {', '.join(OF_RANKS)}",
            partial(_text_only, what="a text or a number", fits=lambda _: True)),
    "packages": (NAME.fullmatch, "the name of a package",
                 partial(_text_only, what=A_VERSION, fits=is_version)),
}  # fmt: skip
"""Keys that hold names of the program's own: what a name is, in words, too, and its values."""
PROGRAM: Mapping[str, Taker] = {
    "ranks": partial(take.take_int, least=1, most=MAX_WORLD_SIZE),  # processes; 1
    "steps": take.take_count,  # the optimizer steps that each of them takes
    "taps": partial(take.take_words, what="patterns", may_be_empty=True),
    "stress": partial(take.take_words, what="stressors", legal=STRESSORS, may_be_empty=True),
    "every": take.take_count,  # state is digested in each step whose number this divides; 1
    "determinism": one_of(*DETERMINISM),  # enforce: deterministic kernels, seeded; off
    "record": one_of("auto", "lines"),  # lines: only what the script itself records; auto
}
KEYS = (*KINDS, *OPEN, *PROGRAM, "smaller", "folder")


def _counted(node: Node, full: str) -> str:
    leaf = take.take_str(node, full)
    if leaf != "ranks" and not leaf.startswith("args."):
        raise node.refused(full, "ranks, or an argument as args.X")
    return leaf


class ProgramVocabulary:
    """What `program`, axes and `--set` may say where a scenario has a program."""

    def __init__(self, node: Node, path: str) -> None:
        """Take what does not change from run to run.

        Raises:
            ScenarioError: no program, or more than one; a file that is not there.
        """
        entries = take.take_mapping(node, "program", legal=KEYS, required=("steps",))
        given = [name for name in KINDS if name in entries]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise node.refused("program", "one of script, module and entry", got=got, legal=KINDS)
        self.kind = given[0]
        self.folder = Path(path).resolve().parent
        if "folder" in entries:
            inner = take.take_str(entries["folder"], "program.folder")
            self.folder = (self.folder / inner).resolve()
            if not self.folder.is_dir():
                expected = "a folder, by its path from the scenario's folder"
                raise entries["folder"].refused("program.folder", expected)
        named, key = entries[self.kind], f"program.{self.kind}"
        self.target = take.take_str(named, key)
        if self.kind == "script":
            if not (self.folder / self.target).is_file():
                raise named.refused(key, "a file, by its path from the scenario's folder")
            self.target = str((self.folder / self.target).resolve())
        if self.kind == "entry" and not all(self.target.partition(":")):
            raise named.refused(key, "module:function")
        smaller, key = entries.get("smaller", Node({}, node.origin)), "program.smaller"
        self.smaller = {name: _counted(value, f"{key}.{name}")
                        for name, value in take.take_mapping(smaller, key).items()}  # fmt: skip
        leaves = [name for name in entries if name in OPEN or name in PROGRAM]
        decoded = (self.decode(n, entries[n], node.keys[n], "program") for n in leaves)
        self.base = tuple(itertools.chain(*decoded))

    def decode(self, key: str, node: Node, written: Origin, where: str) -> tuple[Setting, ...]:
        full = dotted(where, key)
        head, dot, name = key.partition(".")
        if key in OPEN:
            return tuple(each for n, value in take.take_mapping(node, full).items()
                         for each in self.decode(f"{key}.{n}", value, written, where))  # fmt: skip
        if dot and head in OPEN:
            is_name, what, taker = OPEN[head]
            if not is_name(name):
                raise written.error(full, what, shown(name))
            return (Setting(key, taker(node, full), node.origin),)
        if key not in PROGRAM:
            raise unknown_key(key, written, where, (*(f"{name}.X" for name in OPEN), *PROGRAM))
        return (Setting(key, PROGRAM[key](node, full), node.origin),)

    def build(self, settings: Mapping[str, Setting]) -> Leg:
        """The run that settings describe, by leaf (`ScenarioError`: a tap that is no pattern)."""
        values = {leaf: setting.value for leaf, setting in settings.items()}
        opened: dict[str, dict[str, Any]] = {name: {} for name in OPEN}
        for leaf, value in values.items():
            head, _, name = leaf.partition(".")
            if head in OPEN and value is not None:
                opened[head][name] = list(value) if isinstance(value, tuple) else value
        steps, taps, stress = values["steps"], values.get("taps", ()), values.get("stress", ())
        for pattern in taps:
            try:
                tap_pattern(pattern)
            except ConfigError as error:
                raise _broken(settings["taps"].origin, error) from None
        spec = ProgramSpec(
            kind=self.kind,  # type: ignore[arg-type] # one of KINDS
            target=self.target, folder=str(self.folder), **opened, smaller=self.smaller,
            record=values.get("record", "auto"), every=values.get("every", 1),
            determinism="enforce" if values.get("determinism") == "enforce" else "",
        )  # fmt: skip
        ranks = values.get("ranks", 1)
        words = command_line(spec.args) if spec.kind != "entry" else spec.args
        started = dumps({"words": words, "env": spec.env, "packages": spec.packages})
        rest = (spec.kind, spec.target, spec.record, spec.determinism, spec.every)

        def plain() -> dict[str, Any]:
            held = {"program": spec.to_json(), "steps": steps, "taps": list(taps)}
            return held | ({"stress": list(stress)} if stress else {})

        identity = (started, rest, steps, ranks, taps, stress)
        return Leg(plain=plain, identity=identity, steps=steps, world_size=ranks, taps=taps)
