"""The sections of a scenario that are not settings: name, why, compare.expect, checks, launch,
soak, tier and select.

    tier     smoke     with every change, in seconds
             pr        before a change is merged
             nightly   once a night
             weekly    once a week: what a night has no room for
    select   all       every case
             pairwise  so many that every pair of values that some case has is covered
             changed   those that have not passed as they are now, with the code as it is now

    soak     steps, replays, duration_s   one of them: how long (`harness.soaking`)
             rotate                       stressors of every run, short for `stress` in base
             period                       steps of a stressor's turn; without it all are always on
             stall_s                      seconds without a record after which a run counts as hung

`launch.slurm` is described in `harness.engine.slurm_job`. A scenario without a tier is run by
its name only. Every refusal is a `ScenarioError`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from fsdp_core.config import STRESSORS
from harness.checks import CHECKS, Option, defaults
from harness.checks.memory import (
    FORMULA_NAMES,
    FormulaError,
    names_in,
)
from harness.engine.slurm_job import DEFAULT_OPTIONS, OURS, SlurmOptions
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
    take_seconds,
    take_str,
)
from harness.scenario.settings import Setting
from harness.scenario.yaml_source import Node, Origin, parse_text
from harness.soaking import ALWAYS_ON, DEFAULT_STALL_S, SoakBy, SoakSpec
from harness.tolerance import FORMS, ROUNDING, Expect, ToleranceError, tolerance_of

ENGINES = ("local", "slurm")
DEVICES = ("auto", "cpu", "cuda")
TIERS = ("smoke", "pr", "nightly", "weekly")
SELECTIONS = ("all", "pairwise", "changed")
LENGTHS: dict[str, SoakBy] = {"steps": "steps", "replays": "replays", "duration_s": "duration"}
MAX_WHY_CHARS = 1000
MAX_RETRIES = 5
"""A machine that fails more often than this is not one to test on."""
_SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")


@dataclass(frozen=True, slots=True)
class Launch:
    """Where and for how long runs may run. `slots` None: what the machine has, or the cluster.

    `retries`: how often a run may be made again after a failure of the machine. `kernels`: runs say
    what they launched. `stall_s`: a run in which no rank records anything for so long is a hang;
    None for as long as it may take. `confirm`: where bits differ, both sides are run once more.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: float = 300.0
    slots: int | None = None
    engine: Literal["local", "slurm"] = "local"
    slurm: SlurmOptions = DEFAULT_OPTIONS
    retries: int = 0
    kernels: bool = False
    stall_s: float | None = None
    confirm: bool = False


@dataclass(frozen=True, slots=True)
class Soak:
    """The section: what runs are told, the settings that it is short for, and where it is."""

    spec: SoakSpec
    settings: tuple[Setting, ...]
    origin: Origin


def split_option(option: str, text: str) -> tuple[str, Node, Origin]:
    """Key, value and origin of a `KEY=YAML` text."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not (equals and key and value.strip()):
        raise Origin(f"{option} {text!r}").error(key or "key", expected="KEY=YAML", got=repr(text))
    origin = Origin(f"{option} {key}")
    return key, parse_text(value, origin), origin


def decode_name(node: Node) -> str:
    """A slug that is safe as a file name."""
    name = take_str(node, "name")
    if not _SLUG.fullmatch(name):
        expected = "a file name of at most 80 letters, digits, '_', '-' and '.', no '.' first"
        raise refuse(node, "name", expected)
    return name


def decode_why(node: Node) -> str:
    """One sentence, not empty."""
    why = take_str(node, "why").strip()
    if not why:
        raise refuse(node, "why", "a sentence that says what is at stake", got="an empty string")
    if len(why) > MAX_WHY_CHARS:
        raise refuse(node, "why", f"at most {MAX_WHY_CHARS} characters")
    return why


def decode_tier(node: Node | None) -> str:
    """The tier; "" for none."""
    return "" if node is None else take_str(node, "tier", legal=TIERS)


def decode_select(node: Node | None) -> str:
    """What is selected of the scenario."""
    return "all" if node is None else take_str(node, "select", legal=SELECTIONS)


def decode_expect(node: Node, key: str) -> Expect:
    """`bitwise`, `rounding`, or a tolerance by its numbers (see `harness.tolerance`)."""
    if not isinstance(node.value, dict):
        word = take_str(node, key, legal=("bitwise", ROUNDING))
        return ROUNDING if word == ROUNDING else "bitwise"
    bounds: dict[str, Taker] = {name: take_float for form in FORMS for name in form}
    expect = {
        name: float(value)
        for name, value in take_fields(node, key, bounds | {"over": take_count}).items()
    }
    try:
        tolerance_of(expect, key)
    except ToleranceError as error:
        raise refuse(node, error.key, error.expected, got=error.got) from None
    return expect


def _bytes_or_formula(node: Node, key: str) -> int | str:
    if not isinstance(node.value, str):
        return take_int(node, key, least=1)
    try:
        unknown = sorted(names_in(node.value) - set(FORMULA_NAMES))
    except FormulaError as error:
        raise refuse(node, key, error.expected, got=error.got) from None
    if unknown:
        expected = "a formula over known names"
        raise refuse(node, key, expected, got=unknown[0], legal=FORMULA_NAMES)
    return node.value


def _taker(option: Option) -> Taker:
    if option.kind == "integer":
        return partial(take_int, least=option.least, most=option.most)
    return take_positive if option.kind == "number" else _bytes_or_formula


def _options(name: str, node: Node) -> dict[str, Any]:
    """What a check is asked; what is left unsaid is filled in, so that a case's file says it."""
    key, legal = dotted("checks", name), CHECKS[name].options
    if not legal and node.value != {}:
        raise refuse(node, key, "an empty mapping, {}")
    options = take_fields(node, key, {each: _taker(option) for each, option in legal.items()})
    if CHECKS[name].needs_option and not options:
        raise refuse(node, key, " or ".join(legal), got="an empty mapping", legal=legal)
    return defaults(name) | options


def decode_checks(node: Node, expect: Expect) -> dict[str, dict[str, Any]]:
    """Check name to its limits; at least one check must compare bits, or within the tolerance."""
    entries = take_mapping(node, "checks", legal=CHECKS)
    got = ", ".join(entries)
    if not entries:
        raise refuse(node, "checks", "at least one check", got="an empty mapping", legal=CHECKS)
    if expect != "bitwise" and "loss" not in entries:
        expected = "loss, which is what the tolerance of compare.expect is on"
        raise refuse(node, "checks", expected, got=got)
    evidence = tuple(name for name, check in CHECKS.items() if check.compares)
    if not set(entries) & set(evidence):
        expected = "a check that compares bits, since compare.expect is bitwise"
        raise refuse(node, "checks", expected, got=got, legal=evidence)
    return {name: _options(name, entry) for name, entry in entries.items()}


def _word(node: Node, key: str) -> str:
    word = take_str(node, key)
    if not word or word.split() != [word]:
        raise refuse(node, key, "a name without spaces")
    return word


def _arguments(node: Node, key: str) -> tuple[str, ...]:
    entries = take_list(node, key, "options of sbatch", may_be_empty=True)
    return tuple(_argument(entry, key) for entry in entries)


def _argument(node: Node, key: str) -> str:
    text = take_str(node, key)
    # `-pname` and `--partition=name` are one argument each; `-p` and `name` would be two.
    option = text.partition("=")[0] if text.startswith("--") else text[:2]
    # sbatch takes the beginning of an option's name for the option: --arr for --array.
    option = next((ours for ours in OURS if len(option) > 2 and ours.startswith(option)), option)
    if option in OURS:
        ours = OURS[option]
        instead = f"launch.slurm.{ours}" if ours else "an option that is not its own"
        raise refuse(node, key, f"{instead}, as the engine says {option} itself")
    if not text.startswith("-") or "\n" in text:
        raise refuse(node, key, "options of sbatch, each with its value (--qos=high)")
    return text


_OF_TYPE: Mapping[Any, Taker] = {
    str: _word, int: take_count, int | None: take_count, bool: take_bool, float: take_seconds,
    float | None: take_seconds, tuple[str, ...]: _arguments,
}  # fmt: skip
SLURM: Mapping[str, Taker] = {each.name: _OF_TYPE[each.type] for each in fields(SlurmOptions)}
LAUNCH: Mapping[str, Taker] = {
    "device": partial(take_str, legal=DEVICES),
    "timeout_s": take_seconds,
    "stall_s": take_seconds,
    "slots": take_count,
    "engine": partial(take_str, legal=ENGINES),
    "retries": partial(take_int, least=0, most=MAX_RETRIES),
    "kernels": take_bool,
    "confirm": take_bool,
    "slurm": lambda node, key: SlurmOptions(**take_fields(node, key, SLURM)),
}


def decode_launch(node: Node | None) -> Launch:
    """The launch section."""
    return Launch() if node is None else Launch(**take_fields(node, "launch", LAUNCH))


def _stressors(node: Node, key: str) -> tuple[str, ...]:
    legal = tuple(name for name in STRESSORS if name not in ALWAYS_ON)
    names = [take_str(each, key, legal=legal) for each in take_list(node, key, "stressors")]
    if len(set(names)) != len(names):
        raise refuse(node, key, "each stressor once")
    return tuple(sorted(names, key=legal.index))


SOAK: Mapping[str, Taker] = {
    "steps": take_count,
    "replays": take_count,
    "duration_s": take_positive,
    "rotate": _stressors,
    "period": take_count,
    "stall_s": take_seconds,
}


def decode_soak(node: Node | None, timeout_s: float) -> Soak | None:
    """The section, if there is one: how long runs go on, and stressors that take turns.

    Raises:
        ScenarioError: an unknown key, no length or several, a turn of nobody, turns that do not
            come, a duration that `timeout_s` of the scenario's runs does not leave.
    """
    if node is None:
        return None
    entries, values = take_mapping(node, "soak", legal=SOAK), take_fields(node, "soak", SOAK)
    given = [name for name in LENGTHS if name in values]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise refuse(node, "soak", f"one of {', '.join(LENGTHS)}", got=got)
    (name,) = given
    amount, rotate, period = values[name], values.get("rotate", ()), values.get("period", 0)
    settings = []
    if name == "duration_s" and amount >= timeout_s:
        expected = f"less than launch.timeout_s, {timeout_s:g}, which ends the whole run"
        raise refuse(entries[name], "soak.duration_s", expected)
    if name == "steps":
        settings.append(Setting("steps", amount, entries[name].origin))
    if rotate:
        settings.append(Setting("stress", rotate, entries["rotate"].origin))
        if not period:
            expected = "the steps of a stressor's turn beside rotate"
            raise refuse(entries["rotate"], "soak.period", expected, got="none")
    if name == "steps" and period and amount <= (max(1, len(rotate)) - 1) * period:
        expected = f"less, as {len(rotate)} stressors are to have a turn in {amount} steps"
        raise refuse(entries["period"], "soak.period", expected)
    spec = SoakSpec(
        by=LENGTHS[name], amount=amount, turn_steps=period,
        stall_s=values.get("stall_s", DEFAULT_STALL_S),
    )  # fmt: skip
    return Soak(spec, tuple(settings), node.origin)


def joined(
    base: tuple[Setting, ...], axis_leaves: Mapping[str, str], soak: Soak | None
) -> tuple[Setting, ...]:
    """`base` with what the soak sets; `axis_leaves` are leaves that axes set, to the axis.

    Raises:
        ScenarioError: base or an axis sets the same.
    """
    if soak is None:
        return base
    written = {setting.leaf for setting in base}
    for setting in soak.settings:
        owner = axis_leaves.get(setting.leaf)
        if setting.leaf in written or owner is not None:
            where = "base" if owner is None else f"the axis {owner}"
            raise setting.origin.error(
                "soak.steps" if setting.leaf == "steps" else "soak.rotate",
                expected=f"{setting.leaf} in one place",
                got=f"{setting.leaf} in {where}, too",
            )
    return (*base, *soak.settings)
