"""From an entry of the catalogue to the cases that it is looked for in, and cases without a fault.

The candidate is the entry's setup with the fault, the reference an eager run of the same settings
without fault and stressors, and the control the reference again: entries with the same settings
share both. Of a setup with stressors, or whose fault is one for the ledger, there are further
variants, the barest first:

    bare        no stressor and no ledger: what somebody would see who only trains
    <stressor>  one of several stressors alone
    whole       as the catalogue has it

Where the stressor races is not, on GPUs, the others stand in for it. Clean cases plant nothing, so
whatever is said of them is a false alarm.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fsdp_core.config import STRESSORS
from harness.bisect.repro import written_plant
from harness.errors import UsageError
from harness.faults.catalogue import BASE, Fault, Setup
from harness.records import CaseSpec, Device, PlantSpec
from harness.scenario.matrix import expand
from harness.scenario.schema import decode_scenario

SCENARIO = "faults"
FAULT_LABEL, VARIANT_LABEL, CLEAN_LABEL = "fault", "variant", "clean"
BARE, WHOLE = "bare", "whole"
RACES = "races"
"""A stressor of the CPU only."""
WIDE_TAPS = ("**:input", "**:output", "**:gradient")
"""Every module, so that a search for the place needs no run of its own."""
BROKEN = "its setup is no scenario: "
"""Begins the reason why a case is not run that the catalogue is to blame for."""
TIMEOUT_S = 120.0


class Variant(NamedTuple):
    """One way to run a setup."""

    name: str = WHOLE
    stress: tuple[str, ...] = ()
    ledger: bool = True


def stress_of(setup: Setup, device: Device) -> tuple[str, ...]:
    """Stressors of a setup that the device has."""
    if device == "cpu" or RACES not in setup.stress:
        return setup.stress
    return tuple(name for name in STRESSORS if name != RACES)


def variants(fault: Fault, device: Device = "cpu") -> tuple[Variant, ...]:
    """Those of a fault, the barest first."""
    stress = stress_of(fault.setup, device)
    found = []
    if stress or {"stale_address", "stale_guards"} & set(fault.expects):
        found.append(Variant(BARE, ledger=False))
    if len(stress) > 1:
        found += [Variant(one, (one,)) for one in stress]
    return (*found, Variant(WHOLE, stress))


# ---- a scenario's text


def scenario_text(fault: Fault, variant: Variant | None = None, *, taps: bool = False) -> str:
    """A scenario that shows the fault, in the catalogue's setup if no variant is named."""
    setup = fault.setup
    variant = variant or Variant(stress=setup.stress)
    base, plant = settings_of(fault, variant, taps=taps), written_plant(PlantSpec(
        fault=fault.name, step=setup.step, rank=setup.rank, tensor=setup.tensor, legs=setup.legs
    ))  # fmt: skip
    axis, values = "plant", ["none", plant]
    if setup.graph:
        if variant.stress:
            base["stress"] = variant.stress
        axis, values = "graph", ["eager", setup.graph]
    elif variant.stress or "candidate" not in setup.legs:
        axis, values = "stress", ["none", variant.stress or ["jitter"]]
    if axis != "plant":
        base["plant"] = plant
    name, why = f"fault_{fault.name}", fault.description
    return _written(name, why, base, axis, values, setup.checks, setup.timeout_s)


def settings_of(fault: Fault, variant: Variant, *, taps: bool) -> dict[str, Any]:
    """What all runs of a fault's case share: the keys of its setup over those of `BASE`."""
    base: dict[str, Any] = _plain({**BASE, **fault.setup.settings})
    if taps:
        base.setdefault("taps", list(WIDE_TAPS))
    return base if variant.ledger else base | {"ledger": False}


def _written(
    name: str, why: str, base: Mapping[str, Any], axis: str, values: list[Any],
    checks: Mapping[str, Any], timeout_s: float = TIMEOUT_S,
) -> str:  # fmt: skip
    """A scenario file that compares the values of its one axis with the first of them."""
    content = {
        "name": name, "why": why, "base": base, "axes": {axis: values},
        "compare": {"axis": axis, "reference": values[0], "expect": "bitwise"},
        "checks": {"loss": {}, "state": {}, "finite": {}, **checks},
        "launch": {"device": "auto", "timeout_s": timeout_s},
    }  # fmt: skip
    return yaml.safe_dump(
        _plain(content), sort_keys=False, width=100, default_flow_style=None, allow_unicode=True
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


# ---- cases


@functools.lru_cache(maxsize=256)
def cases_of(text: str, device: Device) -> tuple[CaseSpec, ...]:
    """The cases of a scenario that is no file.

    Raises:
        ScenarioError: it breaks a rule.
    """
    name = text.partition("\n")[0].removeprefix("name: ")
    return expand(decode_scenario(text.encode(), name), device)


def fault_case(fault: Fault, variant: Variant, device: Device, *, taps: bool = True) -> CaseSpec:
    """The case of one variant; its id is that of the fault: `ulp`, `early_release.bare`.

    A fault of other devices, or a setup that breaks a rule, gives a case that is skipped and says
    why: it must show as not run.
    """
    labels = {FAULT_LABEL: fault.name, VARIANT_LABEL: variant.name}
    # Taps of every module make a run three times as long: only where there is one to be found.
    taps = taps and bool(fault.points_at.module or fault.points_at.tensor)
    other = f"its mechanism is there on {' and '.join(fault.devices)} only"
    reason = "" if device in fault.devices else other
    try:
        (case,) = cases_of(scenario_text(fault, variant, taps=taps), device)
        if fault.setup.legs == ("candidate",) and not fault.counterpart:
            own = settings_of(fault, Variant(), taps=taps)
            case = replace(case, **_reference(own, device))
    except UsageError as error:
        text = _written("broken", fault.name, BASE, "stress", ["none", ["jitter"]], {})
        (case,) = cases_of(text, device)
        reason = reason or f"{BROKEN}{error}"
    name = fault.name if variant.name == WHOLE else f"{fault.name}.{variant.name}"
    return replace(
        case, id=name, scenario=SCENARIO, labels=labels | case.labels, skip_reason=reason
    )


def _reference(settings: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """Eager runs of `settings`, which candidates of one setting share.

    Stressors and the ledger decide no bits.
    """
    text = _written("reference", "A reference.", settings, "stress", ["none", ["jitter"]], {})
    (case,) = cases_of(text, device)
    return {"reference": case.reference, "control": case.control}


def plan_cases(faults: Iterable[Fault], clean: int, device: Device) -> tuple[CaseSpec, ...]:
    """The cases of a campaign: those of each fault together, clean cases after them."""
    chosen = tuple(faults)
    cases = [fault_case(f, variant, device) for f in chosen for variant in variants(f, device)]
    return (*cases, *clean_cases(chosen, clean, device))


# ---- clean cases: the catalogue's own setups without their faults, then those of clean.yaml


def clean_cases(faults: Iterable[Fault], number: int, device: Device) -> tuple[CaseSpec, ...]:
    """At most `number` cases without a fault, setups of `faults` first."""
    found: dict[str, CaseSpec] = {}
    for asked in _clean(faults, device):
        if len(found) >= number:
            break
        case = _clean_case(*asked, device)
        if case is not None:
            found.setdefault(case.candidate.key, case)
    return tuple(found.values())


def _clean(
    faults: Iterable[Fault], device: Device
) -> Iterator[tuple[str, list[str], list[str], dict[str, Any]]]:
    for fault in faults:
        graph, stress = list(fault.setup.graph), list(stress_of(fault.setup, device))
        yield f"of_{fault.name}", graph, stress, settings_of(fault, Variant(), taps=True)
    further = yaml.safe_load(Path(__file__).with_name("clean.yaml").read_text())
    for stress, graph in itertools.product(further["stress"], further["graph"]):
        words = "-".join("+".join(part) for part in (graph, stress) if part)
        for place, settings in enumerate(further["settings"] if words else ()):
            # Four steps: two eager, one that captures, one that only replays.
            yield f"{place}-{words}", graph, stress, {**BASE, "steps": 4, **settings}


def _clean_case(
    name: str, graph: list[str], stress: list[str], settings: dict[str, Any], device: Device
) -> CaseSpec | None:
    """The case of a candidate; None where the rules do not allow it."""
    if device != "cpu" and RACES in stress:
        return None
    base, axis, values = settings, "stress", ["none", stress or ["jitter"]]
    if graph:
        base, axis, values = settings | {"stress": stress or "none"}, "graph", ["eager", graph]
    try:
        (case,) = cases_of(_written("clean", "A false alarm?", base, axis, values, {}), device)
        own = _reference(settings, device)
    except UsageError:
        return None
    labels = {CLEAN_LABEL: name} | case.labels
    return replace(case, id=f"clean.{name}", scenario=SCENARIO, labels=labels, **own)
