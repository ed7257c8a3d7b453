"""Settings: what `base`, an axis value or an `include` entry says about one training run.

A setting is one leaf of `fsdp_core.config.TrainConfig` by its dotted name (`optim.lr`), or one of
`graph`, `plant` and `world_size`, with the place where it was written. A mapping is short for the
leaves that it names: `parallel: {dp: 2}` is `parallel.dp: 2`, and says nothing about `parallel.tp`.
So later settings overlay earlier ones leaf by leaf: base, then axes, then include. The legal leaves
and their types are read off the dataclasses, so a new field of the configuration is a legal key.

An axis of layouts may be listed by the rules, in place of the file:

    axes:
      parallel: {legal_layouts: 64}                       every legal layout of 64 ranks
      parallel: {legal_layouts: 64, tp: [1, 2], pp: 1}    those of these degrees

The model is that of `base`. The keys beside `legal_layouts` are those of `parallel`, each with the
value, or the list of values, that it may have; any, if it is left out (`pp_chunks` is 1 then, and
`dynamic_cp` empty). A value of the axis names what differs from degree 1 alone.

With the key `program` a scenario has somebody's training program in place of the built-in one:

    script, module, entry   one of them: a file beside the scenario, a module, module:function
    args, env, packages     options, variables, package versions; axes are args.X, env.X, packages.X
    smaller, folder         see `harness.program.spec`; where script and modules are looked for
    and the keys of `PROGRAM`, which are leaves like those above
"""

import dataclasses
import functools
import itertools
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_core import config as training
from fsdp_core.config import ConfigError, ParallelConfig, TrainConfig, tap_pattern, to_plain
from fsdp_core.layouts import legal_layouts
from harness.codec import dumps
from harness.errors import ScenarioError, shown
from harness.faults.catalogue import CATALOGUE, LEGS, is_of_any_engine
from harness.faults.fault import Fault
from harness.program.spec import ProgramSpec, command_line
from harness.records import MAX_WORLD_SIZE, PlantSpec, joined
from harness.scenario import decode as take
from harness.scenario.decode import Key, Taker, dotted, one_of, refuse, unknown_key
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
    if key == "model" and not isinstance(node.value, dict):
        preset = take.take_str(node, full, legal=training.MODEL_PRESETS)
        return (Setting("model.preset", preset, node.origin),)
    if key in parts():
        entries = take.take_mapping(node, full, legal=_hints(parts()[key]), may_be_empty=False)
        leaves = ((f"{key}.{name}", f"{full}.{name}", entry) for name, entry in entries.items())
        return tuple(Setting(leaf, decode_leaf(leaf, entry, path), entry.origin)
                     for leaf, path, entry in leaves)  # fmt: skip
    if key in leaf_types():
        return (Setting(key, decode_leaf(key, node, full), node.origin),)
    inner = tuple(leaf for leaf in leaf_types() if leaf.startswith(f"{part}."))
    raise unknown_key(key, written, where, inner or (*_FIELDS, "world_size", "plant"))


def decode_leaf(leaf: str, node: Node, full: str) -> Value:
    """The value of one leaf, whose key in messages is `full` (`ScenarioError`: a wrong type)."""
    kind = leaf_types()[leaf]
    if isinstance(kind, types.UnionType):
        if node.value is None:
            return None
        (kind,) = (option for option in typing.get_args(kind) if option is not type(None))
    value: Value = (_OF_LEAF.get(leaf) or _OF_TYPE[kind])(node, full)
    return value


def _sizes(node: Node, full: str) -> tuple[int, ...]:
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
        raise refuse(node, full, f"{none} or a list of {what}", got=got, legal=(none, *words))
    return tuple(sorted(take.take_words(node, full, what=what, legal=words), key=words.index))


def _plant(node: Node, full: str) -> PlantSpec | None:
    """Null or `none`, a mapping, or a list of mappings: several faults at once."""
    if node.value is None or node.value == "none":
        return None
    if not isinstance(node.value, tuple):
        return _fault(node, full)
    faults = [_fault(each, full) for each in take.take_list(node, full, "faults")]
    names = [fault.fault for fault in faults]
    for name in names:
        if names.count(name) > 1:
            raise refuse(node, full, "each fault once", got=f"{name} {names.count(name)} times")
    return joined(faults)


def _fault(node: Node, full: str) -> PlantSpec:
    values = take.take_fields(node, full, FAULT, required=("fault",))
    name = values["fault"]
    takes = ("fault", *CATALOGUE[name].takes, "legs", "chance")
    # A step left out would be step 0, before any graph is captured: say it.
    due = ("step",) if "step" in takes else ()
    for key in (*values, *due):
        if key not in takes or key not in values:
            raise node.keys.get(key, node.origin).error(
                f"{full}.{key}", f"what the fault {name} takes",
                "nothing" if key in due else "a key that it does not take", legal=takes,
            )  # fmt: skip
    return PlantSpec(**values)


def _rank(node: Node, full: str) -> int:
    last = node.value in ("last", LAST_RANK)
    return LAST_RANK if last else take.take_int(node, full, least=0)


def _chance(node: Node, full: str) -> float:
    if (chance := take.take_positive(node, full)) > 1:
        raise refuse(node, full, "a number > 0, at most 1")
    return float(chance)


FAULT: Mapping[str, Key] = {
    "fault": Key(one_of(*CATALOGUE), "its name in the catalogue"),
    "step": Key(functools.partial(take.take_int, least=0), "in which it is planted"),
    "rank": Key(_rank, "`last`, or a number"),
    "tensor": Key(take.take_str, "a parameter's name; by default the fault's own choice"),
    "legs": Key(functools.partial(take.take_words, what="legs", legal=LEGS, once="leg"),
                "runs of the case that it is planted in; candidate"),
    "chance": Key(_chance, "that it fires; 1"),
}  # fmt: skip
# An empty list of names is a value too: an axis compares with and without.
_names = functools.partial(take.take_words, what="names", may_be_empty=True)
_OF_TYPE: Mapping[Any, Taker] = {
    bool: take.take_bool, int: take.take_int, float: take.take_float, str: take.take_str,
    tuple[int, ...]: _sizes, tuple[str, ...]: _names,
}  # fmt: skip
_WORDS = {
    "graph": ("scopes", training.EAGER, training.SCOPES),
    "stress": ("stressors", training.NO_STRESS, training.STRESSORS),
    "compile": ("parts", training.NO_COMPILE, training.PARTS),
}
_OF_LEAF: Mapping[str, Taker] = {"plant": _plant} | {
    leaf: functools.partial(_none_or_list, what=what, none=none, words=words)
    for leaf, (what, none, words) in _WORDS.items()
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
            error.key, error.expected, shown(error.got), legal=error.legal,
            rule=error.rule,
        ) from None  # fmt: skip
    degrees = {axis: getattr(config.parallel, axis) for axis in training.DENSE_DEGREES}
    ranks = config.parallel.world_size
    if ranks > MAX_WORLD_SIZE:
        largest = max(degrees, key=lambda axis: degrees[axis])
        key = f"parallel.{largest}"
        expected = f"at most {MAX_WORLD_SIZE} ranks, the product of the degrees"
        got = f"{degrees[largest]}, which makes {ranks} ranks"
        where = settings[key].origin if key in settings else fallback
        raise where.error(key, expected, got)
    stated = settings.get("world_size")
    if stated is not None and stated.value != ranks:
        product = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree != 1)
        raise stated.origin.error(
            "world_size",
            f"{ranks}, the product of the degrees ({product or 'all 1'})",
            shown(stated.value),
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
                "plant.step", f"a step below steps={config.steps}", shown(fault.step)
            )
        if fault.rank >= config.parallel.world_size:
            expected = f"last or a rank below the world size {config.parallel.world_size}"
            raise written.error("plant.rank", expected, shown(fault.rank))


def check_has_part(fault: Fault, config: TrainConfig, role: str, written: Origin) -> None:
    """See that the run, `role` in its case, has what a fault is planted in (`ScenarioError`)."""
    parallel = vars(config.parallel)
    place = f"for {fault.name} to be planted in"
    if fault.scopes and not set(fault.scopes) & set(config.graph):
        raise written.error(
            "plant.fault",
            f"a graph scope that {fault.name} can be planted in",
            f"{'+'.join(config.graph) or 'eager'} in the {role}",
            legal=fault.scopes,
        )
    if config.engine != "ours" and not is_of_any_engine(fault):
        got = f"{config.engine} in the {role}"
        raise written.error("engine", f"ours, {place}", got)
    if lacks := fault.lacks(parallel):
        held = ", ".join(f"{name} {shown(parallel[name])}" for name in fault.needs)
        raise written.error(
            "plant.fault", f"a layout with {lacks}, {place}", f"{held} in the {role}"
        )


def is_listed(axis: str, node: Node) -> bool:
    """Whether the values of an axis are for the rules to list."""
    return axis == "parallel" and isinstance(node.value, dict) and LISTED in node.value


def listed_layouts(
    node: Node, key: str, base: Mapping[str, Setting], fallback: Origin
) -> tuple[tuple[Setting, ...], ...]:
    """The settings of each legal layout, in the order of `fsdp_core.layouts`.

    `node` is the axis, `key` its name in messages, `base` has the model; `fallback` is where to
    point when a default of the model is at fault.

    Raises:
        ScenarioError: bad keys or values, degrees in base too, no legal layout, or too many.
    """
    entries = dict(take.take_mapping(node, key, legal=(LISTED, *_DEGREES)))
    for leaf, setting in base.items():
        if leaf.startswith("parallel."):
            expected = f"no degree, as {key} lists whole layouts"
            raise setting.origin.error(dotted("base", leaf), expected, shown(setting.value))
    world_size = take.take_count(entries.pop(LISTED), dotted(key, LISTED))
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


# --- programs that are not the built-in trainer -----------------------------------------------

KINDS = ("script", "module", "entry")
DETERMINISM = ("off", "enforce")
STRESSORS = ("poison", "scramble")
"""Of `harness.recorder.graphs`, which needs torch."""


def _argument(node: Node, full: str) -> Any:
    if isinstance(node.value, tuple):
        return tuple(_one_argument(each, full) for each in node.value)
    return _one_argument(node, full)


def _one_argument(node: Node, full: str) -> Any:
    if isinstance(node.value, bool) and node.raw.lower() not in ("", "true", "false"):
        raise refuse(node, full, f'true, false, or "{node.raw}" in quotes')
    if isinstance(node.value, dict | tuple):
        raise refuse(node, full, "a text, a number, a bool, null, or a list of these")
    if isinstance(node.value, str) and node.raw:
        try:
            return take.take_float(node, full)  # YAML 1.1 reads 1e-3 as a text
        except ScenarioError:
            return node.value
    return node.value


def _variable(node: Node, full: str) -> str | None:
    if isinstance(node.value, bool | dict | tuple):
        raise refuse(node, full, "a text or a number")
    if node.value is None or isinstance(node.value, str):
        return node.value
    return node.raw or str(node.value)


def _version(node: Node, full: str) -> str | None:
    if node.value is None:
        return None
    text = node.raw or node.value  # 2.10 would lose its zero as a number
    if not isinstance(text, str) or not text:
        raise refuse(node, full, "a version")
    return text


OPEN: Mapping[str, Taker] = {"args": _argument, "env": _variable, "packages": _version}
"""Keys that hold names of the program's own."""
PROGRAM: Mapping[str, Key] = {
    "ranks": Key(functools.partial(take.take_int, least=1, most=MAX_WORLD_SIZE), "processes; 1"),
    "steps": Key(take.take_count, "the optimizer steps that each of them takes"),
    "taps": Key(functools.partial(take.take_words, what="patterns", may_be_empty=True),
                "modules whose calls are compared"),
    "stress": Key(functools.partial(take.take_words, what="stressors", legal=STRESSORS,
                                    may_be_empty=True),
                  "what disturbs memory between replays of CUDA graphs"),
    "every": Key(take.take_count, "state is digested in each step whose number this divides; 1"),
    "determinism": Key(one_of(*DETERMINISM), "enforce: deterministic kernels, seeded; off"),
    "record": Key(one_of("auto", "lines"), "lines: only what the script itself records; auto"),
}  # fmt: skip
KEYS = (*KINDS, *OPEN, *PROGRAM, "smaller", "folder")


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
            raise refuse(node, "program", "one of script, module and entry", got=got, legal=KINDS)
        self.kind = given[0]
        self.folder = Path(path).resolve().parent
        if "folder" in entries:
            self.folder = (
                self.folder / take.take_str(entries["folder"], "program.folder")
            ).resolve()
        self.target = _target(self.kind, entries[self.kind], self.folder)
        smaller = entries.get("smaller", Node({}, node.origin))
        self.smaller = {name: take.take_str(value, f"program.smaller.{name}") for name, value in
                        take.take_mapping(smaller, "program.smaller").items()}  # fmt: skip
        self.base = tuple(
            each
            for name, value in entries.items()
            if name not in (*KINDS, "smaller", "folder")
            for each in self.decode(name, value, node.keys[name], "program")
        )

    def decode(self, key: str, node: Node, written: Origin, where: str) -> tuple[Setting, ...]:
        """As `decode_settings`."""
        full = dotted(where, key)
        head, _, name = key.partition(".")
        if head in OPEN and name:
            return (Setting(key, OPEN[head](node, full), node.origin),)
        if key in OPEN:
            return tuple(
                Setting(f"{key}.{each}", OPEN[key](value, f"{full}.{each}"), value.origin)
                for each, value in take.take_mapping(node, full).items()
            )
        if key not in PROGRAM:
            legal = (*(f"{name}.X" for name in OPEN), *PROGRAM)
            raise written.error(full, "a known key", shown(key), legal=legal)
        return (Setting(key, PROGRAM[key].take(node, full), node.origin),)

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
                raise settings["taps"].origin.error(
                    "taps", error.expected, shown(error.got), legal=error.legal
                ) from None
        spec = ProgramSpec(
            kind=self.kind,  # type: ignore[arg-type] # one of KINDS
            target=self.target,
            folder=str(self.folder),
            **opened,
            record=values.get("record", "auto"),
            determinism="enforce" if values.get("determinism") == "enforce" else "",
            every=values.get("every", 1),
            smaller=self.smaller,
        )
        world_size = values.get("ranks", 1)
        words = command_line(spec.args) if spec.kind != "entry" else spec.args
        told = dumps({"words": words, "env": spec.env, "packages": spec.packages})
        rest = (spec.kind, spec.target, spec.record, spec.determinism, spec.every)

        def plain() -> dict[str, Any]:
            held = {"program": spec.to_json(), "steps": steps, "taps": list(taps)}
            # Keys of runs without it are older than this.
            return held | ({"stress": list(stress)} if stress else {})

        return Leg(
            plain=plain, identity=(told, rest, steps, world_size, taps, stress), steps=steps,
            world_size=world_size, taps=taps,
        )  # fmt: skip


def _target(kind: str, node: Node, folder: Path) -> str:
    text = take.take_str(node, f"program.{kind}")
    if kind == "script":
        path = folder / text
        if not path.is_file():
            raise refuse(node, "program.script", "a file, by its path from the scenario's folder")
        return str(path.resolve())
    if kind == "entry" and not all(text.partition(":")):
        raise refuse(node, "program.entry", "module:function")
    return text
