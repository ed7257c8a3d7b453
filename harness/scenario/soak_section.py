"""The section `soak` of a scenario: how long runs go on, and stressors that take turns.

soak: {replays: 20000, rotate: [jitter, poison, scramble], period: 500}

steps, replays, duration_s   one of them: how long (`harness.soaking`)
rotate                       stressors of every run, short for `stress` in base
period                       steps of a stressor's turn; without it all are at work at all times
stall_s                      seconds without a record after which a run counts as hung
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fsdp_core.config import STRESSORS
from harness.scenario.decode import (
    MAX_SECONDS,
    dotted,
    refuse,
    take_float,
    take_int,
    take_list,
    take_mapping,
    take_str,
)
from harness.scenario.sections import split_option
from harness.scenario.settings import Setting
from harness.scenario.yaml_source import Node, Origin
from harness.soaking import ALWAYS_ON, DEFAULT_STALL_S, SoakBy, SoakSpec

LENGTHS: dict[str, SoakBy] = {"steps": "steps", "replays": "replays", "duration_s": "duration"}
KEYS = (*LENGTHS, "rotate", "period", "stall_s")


@dataclass(frozen=True, slots=True)
class Soak:
    """The section: what runs are told, the settings that it is short for, and where it is."""

    spec: SoakSpec
    settings: tuple[Setting, ...]
    origin: Origin


def decode_soak(node: Node | None, sets: Iterable[str], timeout_s: float) -> Soak | None:
    """The section with `--set soak.X` laid over it; None if there is none.

    Args:
        timeout_s: of the scenario's runs.

    Raises:
        ScenarioError: an unknown key, no length or several, a turn of nobody, turns that do not
            come, a duration that the runs' time does not leave.
    """
    entries = dict(take_mapping(node, "soak", legal=KEYS)) if node is not None else {}
    origin = None if node is None else node.origin
    for option in sets:
        key, value, where = split_option("--set", option)
        head, _, name = key.partition(".")
        if head != "soak":
            continue
        if name not in KEYS:
            legal = tuple(f"soak.{key}" for key in KEYS)
            raise where.error(key, expected="a known key", got=repr(key), legal=legal)
        if name in LENGTHS:
            # An option says how long instead of what the file says.
            entries = {key: entry for key, entry in entries.items() if key not in LENGTHS}
        entries[name] = value
        origin = origin or where
    if origin is None:
        return None
    return _soak(entries, origin, timeout_s)


def _soak(entries: Mapping[str, Node], origin: Origin, timeout_s: float) -> Soak:
    by, amount = _length(entries, origin, timeout_s)
    settings = []
    if by == "steps":
        settings.append(Setting("steps", int(amount), entries["steps"].origin))
    if "rotate" in entries:
        settings.append(_rotating(entries["rotate"]))
        if "period" not in entries:
            raise entries["rotate"].origin.error(
                "soak.period", expected="the steps of a stressor's turn beside rotate", got="none"
            )
    turn_steps = 0
    if "period" in entries:
        turn_steps = take_int(entries["period"], "soak.period", minimum=1)
        names = len(_names(entries["rotate"])) if "rotate" in entries else 1
        if by == "steps" and amount <= (names - 1) * turn_steps:
            expected = f"less, as {names} stressors are to have a turn in {amount:.0f} steps"
            raise refuse(entries["period"], "soak.period", expected)
    stall_s = DEFAULT_STALL_S
    if "stall_s" in entries:
        stall_s = take_float(entries["stall_s"], "soak.stall_s", above=0, most=MAX_SECONDS)
    spec = SoakSpec(by=by, amount=amount, turn_steps=turn_steps, stall_s=stall_s)
    return Soak(spec, tuple(settings), origin)


def _length(entries: Mapping[str, Node], origin: Origin, timeout_s: float) -> tuple[SoakBy, float]:
    given = [name for name in LENGTHS if name in entries]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise origin.error("soak", expected=f"one of {', '.join(LENGTHS)}", got=got)
    (name,) = given
    node, key = entries[name], dotted("soak", name)
    if name != "duration_s":
        return LENGTHS[name], float(take_int(node, key, minimum=1))
    seconds = take_float(node, key, above=0)
    if seconds >= timeout_s:
        expected = f"less than launch.timeout_s, {timeout_s:g}, which ends the whole run"
        raise refuse(node, key, expected)
    return LENGTHS[name], seconds


def _rotating(node: Node) -> Setting:
    return Setting("stress", _names(node), node.origin)


def _names(node: Node) -> tuple[str, ...]:
    legal = tuple(name for name in STRESSORS if name not in ALWAYS_ON)
    names = [
        take_str(each, "soak.rotate", legal=legal)
        for each in take_list(node, "soak.rotate", "stressors")
    ]
    if len(set(names)) != len(names):
        raise refuse(node, "soak.rotate", "each stressor once")
    return tuple(sorted(names, key=legal.index))


def joined(
    base: tuple[Setting, ...], axis_leaves: Mapping[str, str], soak: Soak | None
) -> tuple[Setting, ...]:
    """`base` with what the soak sets.

    Args:
        axis_leaves: leaves that axes set, to the axis.

    Raises:
        ScenarioError: base or an axis sets the same.
    """
    if soak is None:
        return base
    written = {setting.leaf: setting for setting in base}
    for setting in soak.settings:
        owner = axis_leaves.get(setting.leaf)
        if setting.leaf in written or owner is not None:
            where = "base" if owner is None else f"the axis {owner}"
            name = "steps" if setting.leaf == "steps" else "rotate"
            raise setting.origin.error(
                dotted("soak", name),
                expected=f"{setting.leaf} in one place",
                got=f"{setting.leaf} in {where}, too",
            )
    return (*base, *soak.settings)
