"""A scenario file, decoded: what it says, where it says it, and nothing that it does not.

docs/GUIDE.md explains the sections; `settings` those of base and program, `matrix` exclude and
include, `LAUNCH` and `SOAK` their keys. Every refusal is a `ScenarioError`, one line with file,
line and key.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from fsdp_core.config import (
    LAYOUT_RULES,
    STRESSORS,
    ConfigError,
    Layout,
    ModelConfig,
    ParallelConfig,
    broken,
    divisors,
)
from harness.checks import CHECKS, Option, defaults
from harness.checks.memory import FORMULA_NAMES, FormulaError, names_in
from harness.engine.slurm import DEFAULT_OPTIONS, SlurmOptions
from harness.errors import shown
from harness.scenario import yaml_source as take
from harness.scenario.settings import (
    Choice,
    Leg,
    ProgramVocabulary,
    Setting,
    build_config,
    build_leg,
    decode_settings,
    overlay,
    take_leaf,
    take_sizes,
)
from harness.scenario.yaml_source import Node, Origin, Taker, dotted, one_of
from harness.values import (
    ALWAYS_ON,
    DEFAULT_STALL_S,
    FORMS,
    ROUNDING,
    SELECTIONS,
    TIERS,
    Expect,
    SoakBy,
    SoakSpec,
    ToleranceError,
    tolerance_of,
)

SECTIONS = (
    "name", "why", "base", "program", "axes", "exclude", "include", "compare", "checks", "soak",
    "launch", "tier", "select", "about",
)  # fmt: skip
REQUIRED = ("name", "why", "axes", "compare", "checks")
ENGINES = ("local", "slurm")
LENGTHS: dict[str, SoakBy] = {"steps": "steps", "replays": "replays", "duration_s": "duration"}
MAX_WHY_CHARS = 1000
MAX_RETRIES = 5
"""A machine that fails more often than this is not one to test on."""
_SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")
Decode = Callable[[str, Node, Origin, str], tuple[Setting, ...]]
"""The settings that a key and its node stand for, in a section."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The section `launch`; its keys are explained in `LAUNCH`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: float = 300.0
    slots: int | None = None
    engine: Literal["local", "slurm"] = "local"
    slurm: SlurmOptions = DEFAULT_OPTIONS
    retries: int = 0
    stall_s: float | None = None
    confirm: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """A named list of values, in the order of the file."""

    name: str
    choices: tuple[Choice, ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Rule:
    """An entry of exclude or include: key to choice."""

    choices: dict[str, Choice]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Compare:
    """Which axis is compared, and which of its values is the reference."""

    axis: str
    reference: Choice
    expect: Expect


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line puts over the file: `KEY=YAML` and `NAME=YAML_LIST` texts."""

    sets: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A decoded scenario: `source` holds the file's bytes, `origins` those of its sections."""

    name: str
    why: str
    path: str
    source: bytes
    base: tuple[Setting, ...]
    axes: tuple[Axis, ...]
    exclude: tuple[Rule, ...]
    include: tuple[Rule, ...]
    compare: Compare
    checks: dict[str, dict[str, Any]]
    launch: Launch
    origins: Mapping[str, Origin]
    soak: SoakSpec | None = None
    tier: str = ""
    select: str = "all"
    about: Mapping[str, Any] = field(default_factory=dict)
    program: ProgramVocabulary | None = None

    def build(self, settings: Mapping[str, Setting]) -> Leg:
        """The run that settings describe, by leaf (`ScenarioError`: a rule is broken)."""
        if self.program is None:
            return build_leg(settings, self.origins["compare"])
        return self.program.build(settings)


def load_scenario(path: Path | str, *, overrides: Overrides = Overrides()) -> Scenario:
    """Read and decode one scenario, under values that replace what it says."""
    return decode_scenario(_text_of(Path(path)), str(Path(path)), overrides=overrides)


def _text_of(path: Path) -> bytes:
    texts = take.documents(path)
    if len(texts) > 1:
        several, legal = f"{path}, which has several", map(str, texts)
        raise Origin(str(path)).error("file", "one scenario", several, legal=legal)
    return next(iter(texts.values()))


def decode_scenario(source: bytes, path: str, *, overrides: Overrides = Overrides()) -> Scenario:
    """Decode what a scenario file holds, or would hold; `path` names it in messages."""
    origin = Origin(path.partition("::")[0], 1)
    root = take.parse_bytes(source, origin)
    written = take.take_mapping(root, "file", legal=SECTIONS, required=REQUIRED)
    sections, options = _with_options(written, overrides.sets)
    program = _decode_program(sections, path)
    decode = decode_settings if program is None else program.decode
    base = program.base if program else _decode_base(sections.get("base"), decode)
    base += tuple(each for option in options for each in decode(*option, ""))
    axes, owners = _decode_axes(sections["axes"], overrides.axes, base, decode)
    for key, value, where in options:
        for leaf in (setting.leaf for setting in decode(key, value, where, "")):
            if leaf in owners:  # it would change nothing
                expected = f"a key that no axis sets (say --axis {owners[leaf]}=[...])"
                raise where.error(key, expected, f"{leaf}, a value of the axis {owners[leaf]}")
    compare, stated = _decode_compare(sections["compare"], axes, decode)
    launch = Launch(**take.take_fields(sections.get("launch", Node({}, origin)), "launch", LAUNCH))
    checks = _decode_checks(sections["checks"], compare.expect)
    soak, more = _decode_soak(sections, launch.timeout_s, compare.expect, soaked="soak" in checks)
    owned = {each.leaf: "base" for each in base} | {k: f"the axis {v}" for k, v in owners.items()}
    for each in more:
        key = "soak.steps" if each.leaf == "steps" else "soak.rotate"
        _claim(owned, "soak", [each.leaf], key, each.origin)
    simple = {n: taker(sections[n], n) for n, taker in SIMPLE.items() if n in sections}
    names = [axis.name for axis in axes]
    for word in simple.get("about", {}).get("combination", ()):
        if word.startswith(("args.", "env.", "packages.")) and word not in names:
            expected = "a word for a feature, or the name of an axis"
            raise sections["about"].origin.error("about.combination", expected, word, legal=names)
    return Scenario(
        path=path, source=source.lstrip(b"\n"), base=(*base, *more), axes=axes,
        exclude=_decode_rules("exclude", sections.get("exclude"), axes, decode, owners),
        include=_decode_rules("include", sections.get("include"), axes, decode, owners),
        compare=compare, checks=checks, launch=launch, soak=soak, program=program, **simple,
        origins={n: node.origin for n, node in sections.items()} | {"expect": stated.origin},
    )  # fmt: skip


def read_tier(path: Path) -> str:
    """The tier of a scenario, whatever else is in it; "" for none (or `ScenarioError`)."""
    origin = Origin(str(path).partition("::")[0], 1)
    root = take.take_mapping(take.parse_bytes(_text_of(path), origin), "file")
    return str(SIMPLE["tier"](root["tier"], "tier")) if "tier" in root else ""


def _claim(
    owners: dict[str, str], owner: str, leaves: Iterable[str], key: str, origin: Origin
) -> None:
    for leaf in leaves:
        if (other := owners.setdefault(leaf, owner)) != owner:
            raise origin.error(key, "each setting once", f"{leaf}, which {other} sets too")


# --- options over the file --------------------------------------------------------------------


def _split_option(option: str, text: str) -> tuple[str, Node, Origin]:
    """Key, value and origin of a `KEY=YAML` text."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not (equals and key and value.strip()):
        raise Origin(f"{option} {text!r}").error(key or "key", "KEY=YAML", repr(text))
    origin = Origin(f"{option} {key}")
    return key, take.parse_text(value, origin), origin


def _with_options(
    written: Mapping[str, Node], sets: Iterable[str]
) -> tuple[dict[str, Node], list[tuple[str, Node, Origin]]]:
    """The sections with `--set launch.X` and `--set soak.X` in them, and what else is set."""
    sections, others = dict(written), []
    for option in sets:
        key, value, origin = _split_option("--set", option)
        head, *names = key.split(".")
        if head in ("launch", "soak") and names:
            sections[head] = _put(sections.get(head), key, names, value, origin)
        else:
            others.append((key, value, origin))
    return sections, others


def _put(node: Node | None, key: str, names: list[str], value: Node, origin: Origin) -> Node:
    """A mapping with the option's value in it, under these names one below the other."""
    if not names:
        return value
    node = Node({}, origin) if node is None else node
    if not isinstance(node.value, dict):
        raise origin.error(key, "a key of a mapping", f"one of {node.shown()}")
    name, *inner = names
    # An option says how long a soak is instead of what the file says.
    held = {k: v for k, v in node.value.items() if name not in LENGTHS or k not in LENGTHS}
    held[name] = _put(node.value.get(name), key, inner, value, origin)
    return dataclasses.replace(node, value=held, keys=node.keys | {name: origin})


# --- name, why, program, base -----------------------------------------------------------------


def _slug(node: Node, key: str) -> str:
    if not _SLUG.fullmatch(name := take.take_str(node, key)):
        expected = "a file name of at most 80 letters, digits, '_', '-' and '.', no '.' first"
        raise node.refused(key, expected)
    return name


def _sentence(node: Node, key: str) -> str:
    if not 0 < len(text := take.take_str(node, key).strip()) <= MAX_WHY_CHARS:
        expected = f"a sentence that says what is at stake, of at most {MAX_WHY_CHARS} characters"
        raise node.refused(key, expected, got="" if text else "an empty string")
    return text


def _about(node: Node, key: str) -> dict[str, Any]:
    """Of which package a case says something, and of which of its features together."""
    combination = partial(take.take_words, what="features", once="feature", may_be_empty=True)
    fields: dict[str, Taker] = {"package": _slug, "combination": combination}
    return take.take_fields(node, key, fields, required=fields)


SIMPLE: Mapping[str, Taker] = {
    "name": _slug, "why": _sentence, "tier": one_of(*TIERS), "select": one_of(*SELECTIONS),
    "about": _about,
}  # fmt: skip


def _decode_program(sections: Mapping[str, Node], path: str) -> ProgramVocabulary | None:
    """The program of a scenario that has one; then nothing is said of the built-in trainer."""
    if "program" not in sections:
        return None
    for other in {"base", "soak"}.intersection(sections):
        expected = "none with program, which is another trainer"
        raise sections[other].origin.error(other, expected, "a section")
    return ProgramVocabulary(sections["program"], path)


def _decode_base(node: Node | None, decode: Decode) -> tuple[Setting, ...]:
    owners, found = dict[str, str](), list[Setting]()
    if node is None:
        return ()
    for key, value in take.take_mapping(node, "base").items():
        settings = decode(key, value, node.keys[key], "base")
        _claim(owners, key, (s.leaf for s in settings), dotted("base", key), value.origin)
        found += settings
    return tuple(found)


# --- axes, exclude, include, compare ----------------------------------------------------------


def _decode_axes(
    node: Node, overrides: Iterable[str], base: tuple[Setting, ...], decode: Decode
) -> tuple[tuple[Axis, ...], dict[str, str]]:
    entries, origins = dict(take.take_mapping(node, "axes")), dict(node.keys)
    for option in overrides:
        name, value, origin = _split_option("--axis", option)
        entries[name], origins[name] = value, origin
    if not entries:
        raise node.refused("axes", "at least one axis", got="an empty mapping")
    axes = tuple(_decode_axis(name, entries[name], origins[name], base, decode) for name in entries)
    owners: dict[str, str] = {}
    for axis in axes:
        leaves = (leaf for choice in axis.choices for leaf in choice.leaves)
        _claim(owners, axis.name, leaves, dotted("axes", axis.name), axis.origin)
    # Which layouts are legal depends on the model, so there can be but one.
    is_any_listed = any(is_listed(name, entry) for name, entry in entries.items())
    for name in (owners[leaf] for leaf in owners if leaf.startswith("model.") and is_any_listed):
        expected = "the model in base, as the axis parallel lists layouts that are legal for it"
        raise origins[name].error(dotted("axes", name), expected, "an axis of models")
    return axes, owners


def _decode_axis(
    name: str, node: Node, origin: Origin, base: tuple[Setting, ...], decode: Decode
) -> Axis:
    key = dotted("axes", name)
    if is_listed(name, node):
        layouts = listed_layouts(node, key, overlay(base), origin)
        return Axis(name, tuple(Choice(layout, node.origin) for layout in layouts), origin)
    seen: dict[tuple[Any, ...], Choice] = {}
    for value in take.take_list(node, key, f"values of {name}"):
        choice = Choice(decode(name, value, origin, "axes"), value.origin)
        if seen.setdefault(choice.identity, choice) is not choice:
            raise value.refused(key, "each value once", got=f"{value.shown()} again")
    return Axis(name, tuple(seen.values()), origin)


def _decode_rules(
    section: str, node: Node | None, axes: tuple[Axis, ...], decode: Decode,
    owners: Mapping[str, str],
) -> tuple[Rule, ...]:  # fmt: skip
    """The entries of exclude or include, with the axes' own objects for values of axes."""
    by_name, rules = {axis.name: axis for axis in axes}, []
    legal = by_name if section == "exclude" else None
    nodes = () if node is None else take.take_list(node, section, "mappings", may_be_empty=True)
    for entry in nodes:
        choices, seen = {}, dict(owners)
        for key, value in take.take_mapping(
            entry, section, legal=legal, may_be_empty=False
        ).items():
            where = dotted(section, key)
            choice = Choice(decode(key, value, entry.keys[key], section), value.origin)
            _claim(seen, key, choice.leaves, where, value.origin)
            found = _find_choice(by_name[key], choice) if key in by_name else None
            if found is None and section == "exclude":
                raise value.refused(where, f"a value of the axis {key}")
            choices[key] = found or choice
        rules.append(Rule(choices, entry.origin))
    return tuple(rules)


def _find_choice(axis: Axis, choice: Choice) -> Choice | None:
    return next((each for each in axis.choices if each.identity == choice.identity), None)


def _decode_compare(node: Node, axes: tuple[Axis, ...], decode: Decode) -> tuple[Compare, Node]:
    """The section, and the node to point at where a tolerance does not fit the steps."""
    keys = ("axis", "reference", "expect")
    entries = take.take_mapping(node, "compare", legal=keys, required=keys)
    by_name = {axis.name: axis for axis in axes}
    name = take.take_str(entries["axis"], "compare.axis", legal=by_name)
    stated, wanted, axis = entries["expect"], entries["reference"], by_name[name]
    expect = decode_expect(stated, "compare.expect")
    given = Choice(decode(name, wanted, entries["axis"].origin, "compare.reference"), wanted.origin)
    if (reference := _find_choice(axis, given)) is None:
        raise wanted.refused("compare.reference", f"a value of the axis {name}")
    if len(axis.choices) < 2:
        expected = "a value beside the reference to compare with it"
        raise axis.origin.error(dotted("axes", name), expected, "the reference alone")
    over = stated.value.get("over", stated) if isinstance(stated.value, dict) else stated
    return Compare(name, reference, expect), over


EXPECT: Mapping[str, Taker] = {
    name: take.take_count if name == "over" else take.take_float for form in FORMS for name in form
}


def decode_expect(node: Node, key: str) -> Expect:
    """`bitwise`, `rounding`, or a tolerance by its numbers (see `harness.values`)."""
    if not isinstance(node.value, dict):
        word = take.take_str(node, key, legal=("bitwise", ROUNDING))
        return ROUNDING if word == ROUNDING else "bitwise"
    expect = {name: float(value) for name, value in take.take_fields(node, key, EXPECT).items()}
    try:
        tolerance_of(expect, key)
    except ToleranceError as error:
        raise node.refused(error.key, error.expected, got=error.got) from None
    return expect


# --- checks -----------------------------------------------------------------------------------


def _decode_checks(node: Node, expect: Expect) -> dict[str, dict[str, Any]]:
    """Check name to its limits; at least one check must compare bits, or within the tolerance."""
    entries = take.take_mapping(node, "checks", legal=CHECKS)
    got = ", ".join(entries)
    if not entries:
        raise node.refused("checks", "at least one check", got="an empty mapping", legal=CHECKS)
    if expect != "bitwise" and "loss" not in entries:
        expected = "loss, which is what the tolerance of compare.expect is on"
        raise node.refused("checks", expected, got=got)
    evidence = tuple(name for name, check in CHECKS.items() if check.compares)
    if not set(entries) & set(evidence):
        expected = "a check that compares bits, since compare.expect is bitwise"
        raise node.refused("checks", expected, got=got, legal=evidence)
    return {name: _options(name, entry) for name, entry in entries.items()}


def _options(name: str, node: Node) -> dict[str, Any]:
    """What a check is asked; what is left unsaid is filled in, so that a case's file says it."""
    key, legal = dotted("checks", name), CHECKS[name].options
    if not legal and node.value != {}:
        raise node.refused(key, "an empty mapping, {}")
    options = take.take_fields(node, key, {n: _of_option(each) for n, each in legal.items()})
    if CHECKS[name].needs_option and not options:
        raise node.refused(key, " or ".join(legal), got="an empty mapping", legal=legal)
    return defaults(name) | options


def _of_option(option: Option) -> Taker:
    if option.kind == "integer":
        return partial(take.take_int, least=option.least, most=option.most)
    return take.take_positive if option.kind == "number" else _bytes_or_formula


def _bytes_or_formula(node: Node, key: str) -> int | str:
    if not isinstance(node.value, str):
        return take.take_int(node, key, least=1)
    try:
        unknown = sorted(names_in(node.value) - set(FORMULA_NAMES))
    except FormulaError as error:
        raise node.refused(key, error.expected, got=error.got) from None
    if unknown:
        raise node.refused(key, "a formula over known names", got=unknown[0], legal=FORMULA_NAMES)
    return node.value


# --- launch -----------------------------------------------------------------------------------


SLURM: Mapping[str, Taker] = {
    "nodes": take.take_count,  # over how many nodes a run is spread; 1
    "ranks_per_node": take.take_count,  # at most; by default a node's GPUs, or no limit
    "gpus_per_node": take.take_count,  # that the allocation has
}
LAUNCH: Mapping[str, Taker] = {
    "device": one_of("auto", "cpu", "cuda"),  # where runs train; auto: GPUs where there are
    "timeout_s": take.take_seconds,  # of a run; 300
    "stall_s": take.take_seconds,  # without a record of any rank, until it is a hang; no limit
    "slots": take.take_count,  # ranks at a time; what the machine has, or the cluster
    "engine": one_of(*ENGINES),  # who starts the runs; local
    "retries": partial(take.take_int, least=0, most=MAX_RETRIES),  # after failures of the machine
    "confirm": take.take_bool,  # where bits differ, both sides are run once more; false
    "slurm": lambda node, key: SlurmOptions(**take.take_fields(node, key, SLURM)),
}


# --- soak -------------------------------------------------------------------------------------


def _stressors(node: Node, key: str) -> tuple[str, ...]:
    legal = tuple(name for name in STRESSORS if name not in ALWAYS_ON)
    names = take.take_words(node, key, what="stressors", legal=legal, once="stressor")
    return tuple(sorted(names, key=legal.index))


SOAK: Mapping[str, Taker] = {
    "steps": take.take_count,  # how long, as steps
    "replays": take.take_count,  # how long, as launches of graphs
    "duration_s": take.take_positive,  # how long, as seconds of training
    "rotate": _stressors,  # stressors of every run, short for `stress` in base
    "period": take.take_count,  # steps of a stressor's turn; without it all are always on
    "stall_s": take.take_seconds,  # without a record, until the run counts as hung; 300
}


def _decode_soak(
    sections: Mapping[str, Node], timeout_s: float, expect: Expect, *, soaked: bool
) -> tuple[SoakSpec | None, list[Setting]]:
    """What runs are asked for, and the settings that the section is short for."""
    node = sections.get("soak")
    values = {} if node is None else take.take_fields(node, "soak", SOAK)
    if soaked != (node is not None):
        got = "the check alone" if soaked else "the section alone"
        expected = "the check soak and the section soak together"
        raise sections["checks"].refused("checks.soak", expected, got=got)
    if node is None:
        return None, []
    if expect == ROUNDING:
        raise node.refused("soak", "no soak with compare.expect rounding", got="one")
    entries = take.take_mapping(node, "soak")
    name, *others = [name for name in LENGTHS if name in values] or [""]
    if others or not name:
        got = " and ".join([name, *others]) or "none"
        raise node.refused("soak", f"one of {', '.join(LENGTHS)}", got=got)
    amount, rotate, period = values[name], values.get("rotate", ()), values.get("period", 0)
    if name == "duration_s" and amount >= timeout_s:
        expected = f"less than launch.timeout_s, {timeout_s:g}, which ends the whole run"
        raise entries[name].refused("soak.duration_s", expected)
    if rotate and not period:
        expected = "the steps of a stressor's turn together with rotate"
        raise entries["rotate"].refused("soak.period", expected, got="none")
    if name == "steps" and period and amount <= (max(1, len(rotate)) - 1) * period:
        expected = f"less, as {len(rotate)} stressors are to have a turn in {amount} steps"
        raise entries["period"].refused("soak.period", expected)
    settings = [Setting("steps", amount, entries[name].origin)] if name == "steps" else []
    settings += [Setting("stress", rotate, entries["rotate"].origin)] if rotate else []
    stall_s = values.get("stall_s", DEFAULT_STALL_S)
    return SoakSpec(by=LENGTHS[name], amount=amount, turn_steps=period, stall_s=stall_s), settings


# --- axes of layouts ---------------------------------------------------------------------------

# {legal_layouts: 64, tp: [1, 2], pp: 1}: every layout of 64 ranks that breaks no rule of the
# configuration, for the model of `base`, each key of `parallel` with the values that it may have.
LISTED = "legal_layouts"
MAX_RANKS, MAX_LAYOUTS = 2**20, 50_000
_FIELDS = {field.name: field.default for field in dataclasses.fields(ParallelConfig)}


def legal_layouts(
    world_size: int, model: ModelConfig, *, microbatches: int = 1,
    only: Mapping[str, Collection[Any]] = MappingProxyType({}),
) -> Iterator[ParallelConfig]:  # fmt: skip
    """Every layout of `world_size` ranks that breaks no rule, lazily, in a fixed order.

    `only` has values that a field of `ParallelConfig` may have. One that is left out may have any,
    but `pp_chunks` is 1 and `dynamic_cp` empty, which have no end.
    """
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
    size = partial(take.take_int, least=1, most=MAX_RANKS)
    world_size = size(entries.pop(LISTED), dotted(key, LISTED))
    only = {name: _allowed(name, value, dotted(key, name)) for name, value in entries.items()}
    model = build_config({k: v for k, v in base.items() if k.startswith("model.")}, fallback).model
    microbatches = base["microbatches"].value if "microbatches" in base else 1
    legal = legal_layouts(world_size, model, microbatches=microbatches, only=only)
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
