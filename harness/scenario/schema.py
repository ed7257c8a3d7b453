"""A scenario file, decoded: what it says, where it says it, and nothing that it does not.

    name     slug, safe as a file name
    why      one sentence: what is at stake
    base     settings of every run
    program  in place of base: a training program of the user's own (`program_section`)
    axes     axis -> list of values; the matrix is their product
    exclude  partial mappings axis -> value: cases that match one are removed
    include  mappings key -> value: extend the cases that they fit, or add a case
    compare  the axis whose reference value every other value is compared with, and how equal they
             are to be: `bitwise`, or a tolerance (harness.tolerance)
    checks   loss, state, taps, finite, graphs, peak_memory, throughput, soak
    soak     how long runs go on, and stressors that take turns
    launch   where and for how long runs may run
    tier     smoke, pr, nightly or weekly
    select   all or pairwise

`sections` says more of checks, soak, launch, tier and select, and `matrix` what exclude and include
mean. Every refusal is a `ScenarioError`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.scenario.case_id import Choice
from harness.scenario.decode import dotted, refuse, take_list, take_mapping, take_str
from harness.scenario.program_section import ProgramVocabulary
from harness.scenario.sections import (
    LENGTHS,
    Launch,
    Soak,
    decode_checks,
    decode_expect,
    decode_launch,
    decode_name,
    decode_select,
    decode_soak,
    decode_tier,
    decode_why,
    joined,
    split_option,
)
from harness.scenario.settings import (
    Leg,
    Setting,
    build_leg,
    decode_settings,
    is_listed,
    listed_layouts,
    overlay,
)
from harness.scenario.yaml_source import Node, Origin, parse_bytes, read_bytes
from harness.tolerance import ROUNDING, Expect

SECTIONS = (
    "name", "why", "base", "program", "axes", "exclude", "include", "compare", "checks", "soak",
    "launch", "tier", "select",
)  # fmt: skip
REQUIRED = ("name", "why", "axes", "compare", "checks")
Decode = Callable[[str, Node, Origin, str], tuple[Setting, ...]]
"""The settings that a key and its node stand for, in a section."""


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
    """Which axis is compared, and which of its values is the reference.

    `expect_origin` is that of `over` in a tolerance that has it.
    """

    axis: str
    reference: Choice
    expect: Expect
    expect_origin: Origin
    origin: Origin


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line puts over the file: `KEY=YAML` and `NAME=YAML_LIST` texts."""

    sets: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A decoded scenario. `source` holds the file's bytes, as they go into the run folder."""

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
    checks_origin: Origin
    launch: Launch
    origin: Origin
    soak: Soak | None = None
    tier: str = ""
    select: str = "all"
    program: ProgramVocabulary | None = None

    def build(self, settings: Mapping[str, Setting]) -> Leg:
        """The run that settings describe, by leaf (`ScenarioError`: a rule is broken)."""
        if self.program is None:
            return build_leg(settings, self.compare.origin)
        return self.program.build(settings)

    def axis(self, name: str) -> Axis | None:
        """The axis of that name, if there is one."""
        return next((axis for axis in self.axes if axis.name == name), None)


def load_scenario(path: Path | str, *, overrides: Overrides = Overrides()) -> Scenario:
    """Read and decode one scenario file.

    Args:
        path: the file.
        overrides: values that replace what the file says.

    Raises:
        ScenarioError: the file or an option cannot be used; one line says where and why.
    """
    return decode_scenario(read_bytes(Path(path)), str(Path(path)), overrides=overrides)


def decode_scenario(source: bytes, path: str, *, overrides: Overrides = Overrides()) -> Scenario:
    """Decode what a scenario file holds, or would hold; `path` names it in messages.

    Raises:
        ScenarioError: as `load_scenario`.
    """
    origin = Origin(path, 1)
    root = parse_bytes(source, origin)
    written = take_mapping(root, "file", legal=SECTIONS, required=REQUIRED)
    sections, options = _with_options(written, overrides.sets)
    program = _decode_program(sections, path)
    decode = decode_settings if program is None else program.decode
    base = _decode_base(sections.get("base"), decode) if program is None else program.base
    base += tuple(each for option in options for each in decode(*option, ""))
    axes = _decode_axes(sections["axes"], overrides.axes, base, decode)
    owners = {leaf: axis.name for axis in axes for choice in axis.choices for leaf in choice.leaves}
    for key, value, where in options:
        _refuse_set_axes(key, decode(key, value, where, ""), owners)
    compare = _decode_compare(sections["compare"], axes, decode)
    launch = decode_launch(sections.get("launch"))
    soak = decode_soak(sections.get("soak"), launch.timeout_s)
    checks = decode_checks(sections["checks"], compare.expect)
    _refuse_soak(sections, compare, soaked="soak" in checks)
    return Scenario(
        name=decode_name(sections["name"]),
        why=decode_why(sections["why"]),
        path=path,
        source=source,
        base=joined(base, owners, soak),
        axes=axes,
        exclude=_decode_rules("exclude", sections.get("exclude"), axes, decode),
        include=_decode_rules("include", sections.get("include"), axes, decode, owners),
        compare=compare,
        checks=checks,
        checks_origin=sections["checks"].origin,
        launch=launch,
        origin=origin,
        soak=soak,
        tier=decode_tier(sections.get("tier")),
        select=decode_select(sections.get("select")),
        program=program,
    )


def read_tier(path: Path) -> str:
    """The tier of a scenario file, whatever else is in it; "" for none.

    Raises:
        ScenarioError: not YAML, no mapping, or a tier that there is not.
    """
    root = parse_bytes(read_bytes(path), Origin(str(path), 1))
    return decode_tier(take_mapping(root, "file").get("tier"))


def _with_options(
    written: Mapping[str, Node], sets: Iterable[str]
) -> tuple[dict[str, Node], list[tuple[str, Node, Origin]]]:
    """The sections with `--set launch.X` and `--set soak.X` in them, and what else is set."""
    sections, others = dict(written), []
    for option in sets:
        key, value, origin = split_option("--set", option)
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
        raise origin.error(key, expected="a key of a mapping", got=f"one of {node.shown()}")
    name, *inner = names
    # An option says how long a soak is instead of what the file says.
    held = {k: v for k, v in node.value.items() if name not in LENGTHS or k not in LENGTHS}
    held[name] = _put(node.value.get(name), key, inner, value, origin)
    return dataclasses.replace(node, value=held, keys=node.keys | {name: origin})


def _decode_program(sections: Mapping[str, Node], path: str) -> ProgramVocabulary | None:
    """The program of a scenario that has one; then nothing is said of the built-in trainer."""
    if "program" not in sections:
        return None
    for other in ("base", "soak"):
        if other in sections:
            raise sections[other].origin.error(
                other, expected="nothing beside program, which is another trainer", got="a section"
            )
    return ProgramVocabulary(sections["program"], path)


def _refuse_soak(sections: Mapping[str, Node], compare: Compare, *, soaked: bool) -> None:
    has_section = "soak" in sections
    if has_section and compare.expect == ROUNDING:
        raise sections["soak"].origin.error(
            "soak", expected="no soak with compare.expect rounding", got="one"
        )
    if soaked != has_section:
        raise sections["checks"].origin.error(
            "checks.soak",
            expected="the check soak and the section soak together",
            got="the section alone" if has_section else "the check alone",
        )


def _decode_base(node: Node | None, decode: Decode) -> tuple[Setting, ...]:
    seen: dict[str, Setting] = {}
    for key, value in take_mapping(node, "base").items() if node is not None else ():
        assert node is not None
        for setting in decode(key, value, node.keys[key], "base"):
            if setting.leaf in seen:
                raise setting.origin.error(
                    dotted("base", setting.leaf),
                    expected="each setting once",
                    got=f"it again (first on line {seen[setting.leaf].origin.line})",
                )
            seen[setting.leaf] = setting
    return tuple(seen.values())


def _refuse_set_axes(key: str, settings: Iterable[Setting], owners: Mapping[str, str]) -> None:
    """An option that sets what an axis sets would change nothing."""
    for setting in settings:
        if owner := owners.get(setting.leaf):
            raise setting.origin.error(
                key,
                expected=f"a key that no axis sets (say --axis {owner}=[...])",
                got=f"{setting.leaf}, a value of the axis {owner}",
            )


def _decode_axes(
    node: Node, overrides: Iterable[str], base: tuple[Setting, ...], decode: Decode
) -> tuple[Axis, ...]:
    entries, origins = dict(take_mapping(node, "axes")), dict(node.keys)
    for option in overrides:
        name, value, origin = split_option("--axis", option)
        entries[name], origins[name] = value, origin
    if not entries:
        raise refuse(node, "axes", "at least one axis", got="an empty mapping")
    axes = tuple(_decode_axis(name, entries[name], origins[name], base, decode) for name in entries)
    listed = any(is_listed(name, entry) for name, entry in entries.items())
    owners: dict[str, str] = {}
    for axis in axes:
        for leaf in dict.fromkeys(leaf for choice in axis.choices for leaf in choice.leaves):
            if leaf in owners:
                raise axis.origin.error(
                    dotted("axes", axis.name),
                    expected="each setting on one axis",
                    got=f"{leaf}, which the axis {owners[leaf]} sets too",
                )
            owners[leaf] = axis.name
    for axis in axes:
        # Which layouts are legal depends on the model, so there can be but one.
        if listed and any(
            leaf[:6] == "model." for choice in axis.choices for leaf in choice.leaves
        ):
            raise axis.origin.error(
                dotted("axes", axis.name),
                expected="the model in base, as the axis parallel lists layouts that are legal "
                "for it",
                got="an axis of models",
            )
    return axes


def _decode_axis(
    name: str, node: Node, origin: Origin, base: tuple[Setting, ...], decode: Decode
) -> Axis:
    key = dotted("axes", name)
    if is_listed(name, node):
        layouts = listed_layouts(node, key, overlay(base), origin)
        return Axis(name, tuple(Choice(layout, node.origin) for layout in layouts), origin)
    choices: list[Choice] = []
    seen: dict[tuple[Any, ...], Origin] = {}
    for value in take_list(node, key, f"values of {name}"):
        choice = Choice(decode(name, value, origin, "axes"), value.origin)
        if choice.identity in seen:
            line = seen[choice.identity].line
            got = f"{value.shown()} twice"
            if line is not None and line != value.origin.line:
                got = f"{value.shown()} again (first on line {line})"
            raise value.origin.error(key, expected="each value once", got=got)
        seen[choice.identity] = value.origin
        choices.append(choice)
    return Axis(name, tuple(choices), origin)


def _decode_rules(
    section: str,
    node: Node | None,
    axes: tuple[Axis, ...],
    decode: Decode,
    owners: Mapping[str, str] | None = None,
) -> tuple[Rule, ...]:
    """The entries of exclude, or of include, which knows the owners of leaves."""
    by_name = {axis.name: axis for axis in axes}
    legal = by_name if owners is None else None
    rules = []
    for entry in () if node is None else take_list(node, section, "mappings", may_be_empty=True):
        entries = take_mapping(entry, section, legal=legal)
        if not entries:
            raise refuse(entry, section, "at least one key", got="an empty mapping")
        choices = {
            key: Choice(decode(key, value, entry.keys[key], section), value.origin)
            for key, value in entries.items()
        }
        if owners is not None:
            _refuse_overlap(choices, owners)
        else:
            for key, choice in choices.items():
                _find_choice(by_name[key], choice, entries[key], dotted(section, key))
        rules.append(Rule(choices, entry.origin))
    return tuple(rules)


def _refuse_overlap(choices: dict[str, Choice], owners: Mapping[str, str]) -> None:
    """An include entry may set a leaf once, and an axis' leaf only by the axis' own name."""
    seen: dict[str, str] = {}
    for key, choice in choices.items():
        for leaf in choice.leaves:
            if owners.get(leaf, key) != key:
                raise choice.origin.error(
                    dotted("include", key),
                    expected=f"the axis' own name, {owners[leaf]}",
                    got=f"{leaf} under another name",
                )
            if leaf in seen:
                raise choice.origin.error(
                    dotted("include", key),
                    expected="each setting once",
                    got=f"{leaf}, which {seen[leaf]} sets too",
                )
            seen[leaf] = key


def _find_choice(axis: Axis, choice: Choice, node: Node, key: str) -> Choice:
    for candidate in axis.choices:
        if candidate.identity == choice.identity:
            return candidate
    raise refuse(node, key, f"a value of the axis {axis.name}")


def _decode_compare(node: Node, axes: tuple[Axis, ...], decode: Decode) -> Compare:
    keys = ("axis", "reference", "expect")
    entries = take_mapping(node, "compare", legal=keys, required=keys)
    by_name = {axis.name: axis for axis in axes}
    name = take_str(entries["axis"], "compare.axis", legal=by_name)
    expect = decode_expect(entries["expect"], "compare.expect")
    axis = by_name[name]
    wanted = entries["reference"]
    given = Choice(decode(name, wanted, entries["axis"].origin, "compare.reference"), wanted.origin)
    reference = _find_choice(axis, given, entries["reference"], "compare.reference")
    if len(axis.choices) < 2:
        raise axis.origin.error(
            dotted("axes", name),
            expected="a value beside the reference to compare with it",
            got="the reference alone",
        )
    stated = entries["expect"]
    over = stated.value.get("over", stated) if isinstance(stated.value, dict) else stated
    return Compare(name, reference, expect, over.origin, node.origin)
