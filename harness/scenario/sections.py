"""The sections of a scenario that stand alone: name, why, checks, launch; and option texts."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from harness.engine.slurm_options import DEFAULT_OPTIONS, SlurmOptions
from harness.engine.slurm_options import KEYS as SLURM_KEYS
from harness.scenario.check_limits import decode_peak_memory, decode_throughput
from harness.scenario.decode import (
    MAX_SECONDS,
    dotted,
    refuse,
    take_bool,
    take_float,
    take_int,
    take_mapping,
    take_str,
)
from harness.scenario.slurm_section import decode_slurm
from harness.scenario.yaml_source import Node, Origin, parse_text
from harness.tolerance import FORMS, ROUNDING, Expect, ToleranceError, tolerance_of

CHECKS = ("loss", "state", "taps", "finite", "peak_memory", "throughput", "soak", "graphs")
EVIDENCE = ("loss", "state", "taps")
LAUNCH_KEYS = (
    "device", "timeout_s", "stall_s", "slots", "engine", "retries", "kernels", "confirm", "slurm",
)  # fmt: skip
ENGINES = ("local", "slurm")
DEVICES = ("auto", "cpu", "cuda")
DEFAULT_TIMEOUT_S = 300.0
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
    timeout_s: float = DEFAULT_TIMEOUT_S
    slots: int | None = None
    engine: Literal["local", "slurm"] = "local"
    slurm: SlurmOptions = DEFAULT_OPTIONS
    retries: int = 0
    kernels: bool = False
    stall_s: float | None = None
    confirm: bool = False


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


def split_option(option: str, text: str) -> tuple[str, Node, Origin]:
    """Key, value and origin of a `KEY=YAML` text.

    Raises:
        ScenarioError: no key, no value, or not YAML.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not (equals and key and value.strip()):
        raise Origin(f"{option} {text!r}").error(key or "key", expected="KEY=YAML", got=repr(text))
    origin = Origin(f"{option} {key}")
    return key, parse_text(value, origin), origin


def decode_expect(node: Node, key: str) -> Expect:
    """`bitwise`, `rounding`, or a tolerance by its numbers (see `harness.tolerance`).

    Raises:
        ScenarioError: neither.
    """
    if not isinstance(node.value, dict):
        word = take_str(node, key, legal=("bitwise", ROUNDING))
        return ROUNDING if word == ROUNDING else "bitwise"
    entries = take_mapping(node, key, legal=tuple(name for form in FORMS for name in form))
    expect = {
        name: float(take_int(value, f"{key}.{name}", minimum=1))
        if name == "over"
        else take_float(value, f"{key}.{name}")
        for name, value in entries.items()
    }
    try:
        tolerance_of(expect, key)
    except ToleranceError as error:
        raise refuse(node, error.key, error.expected, got=error.got) from None
    return expect


def decode_checks(node: Node, expect: Expect = "bitwise") -> dict[str, dict[str, Any]]:
    """Check name to its limits; at least one check must compare bits, or within the tolerance."""
    entries = take_mapping(node, "checks", legal=CHECKS)
    if not entries:
        raise refuse(node, "checks", "at least one check", got="an empty mapping", legal=CHECKS)
    if expect != "bitwise" and "loss" not in entries:
        expected = "loss, which is what the tolerance of compare.expect is on"
        raise refuse(node, "checks", expected, got=", ".join(entries))
    if not set(entries) & set(EVIDENCE):
        raise refuse(
            node,
            "checks",
            "a check that compares bits, since compare.expect is bitwise",
            got=", ".join(entries),
            legal=EVIDENCE,
        )
    return {name: _decode_check(name, entry) for name, entry in entries.items()}


def _decode_check(name: str, node: Node) -> dict[str, Any]:
    key = dotted("checks", name)
    if name == "soak":
        given = take_mapping(node, key, legal=("max_leak_bytes",))
        return {
            limit: take_int(value, f"{key}.{limit}", minimum=0) for limit, value in given.items()
        }
    if name == "graphs":
        given = take_mapping(node, key, legal=("min_replays",))
        least = given.get("min_replays")
        return {"min_replays": 1 if least is None else take_int(least, f"{key}.min_replays")}
    if name == "peak_memory":
        return decode_peak_memory(node, key)
    if name == "throughput":
        return decode_throughput(node, key)
    if not isinstance(node.value, dict) or node.value:
        raise refuse(node, key, "an empty mapping, {}")
    return {}


def decode_launch(node: Node | None, sets: Iterable[str]) -> Launch:
    """The launch section with `--set launch.X` laid over it."""
    entries = dict(take_mapping(node, "launch", legal=LAUNCH_KEYS)) if node is not None else {}
    slurm: dict[str, Node] = {}
    for option in sets:
        key, value, origin = split_option("--set", option)
        head, _, name = key.partition(".")
        if head != "launch":
            continue
        part, _, option_name = name.partition(".")
        if part == "slurm" and option_name in SLURM_KEYS:
            slurm[option_name] = value
        elif name not in LAUNCH_KEYS:
            _refuse_launch_key(key, origin)
        else:
            entries[name] = value
    device = "auto"
    if "device" in entries:
        device = take_str(entries["device"], "launch.device", legal=DEVICES)
    seconds = {
        name: take_float(entries[name], f"launch.{name}", above=0, most=MAX_SECONDS)
        for name in ("timeout_s", "stall_s")
        if name in entries
    }
    slots = None
    if "slots" in entries:
        slots = take_int(entries["slots"], "launch.slots", minimum=1)
    engine = "local"
    if "engine" in entries:
        engine = take_str(entries["engine"], "launch.engine", legal=ENGINES)
    retries = 0
    if "retries" in entries:
        retries = take_int(entries["retries"], "launch.retries", minimum=0)
        if retries > MAX_RETRIES:
            expected = f"an integer from 0 to {MAX_RETRIES}"
            raise refuse(entries["retries"], "launch.retries", expected)
    kernels, confirm = (
        name in entries and take_bool(entries[name], f"launch.{name}")
        for name in ("kernels", "confirm")
    )
    if "slurm" in entries:
        written = take_mapping(entries["slurm"], "launch.slurm", legal=SLURM_KEYS)
        slurm = {**written, **slurm}
    options = decode_slurm(slurm)
    return Launch(
        device=device,  # type: ignore[arg-type] # take_str
        slots=slots,
        engine=engine,  # type: ignore[arg-type] # take_str
        slurm=options,
        retries=retries,
        kernels=kernels,
        confirm=confirm,
        **seconds,
    )


def _refuse_launch_key(key: str, origin: Origin) -> NoReturn:
    names = (*LAUNCH_KEYS[:-1], *(f"slurm.{name}" for name in SLURM_KEYS))
    legal = tuple(f"launch.{name}" for name in names)
    raise origin.error(key, expected="a known key", got=repr(key), legal=legal)
