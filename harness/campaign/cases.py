"""From an entry of the catalogue to the cases that it is looked for in, and cases without a fault.

    Fault -> variants -> the text of a scenario -> schema and matrix, as any scenario -> CaseSpec

The candidate is the entry's setup with the fault, the reference an eager run of the same settings
without fault and stressors, and the control the reference again: entries with the same settings
share both. Of a setup with stressors, or whose fault is one for the ledger, there are further
variants:

    bare        no stressor and no ledger: what somebody would see who only trains
    <stressor>  one of several stressors alone
    whole       as the catalogue has it

Where the stressor races is not, on GPUs, the others stand in for it. Clean cases plant nothing, so
whatever is said of them is a false alarm.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from fsdp_core.config import STRESSORS
from harness.errors import UsageError
from harness.faults.catalogue import BASE
from harness.faults.fault import Fault, Setup
from harness.records import CaseSpec, What
from harness.scenario.matrix import Device, expand
from harness.scenario.schema import decode_scenario

SCENARIO = "faults"
"""What cases say they are of."""
FAULT_LABEL, VARIANT_LABEL, CLEAN_LABEL = "fault", "variant", "clean"
BARE, WHOLE = "bare", "whole"
RACES = "races"
"""A stressor of the CPU only."""
OF_THE_LEDGER: tuple[What, ...] = ("stale_address", "stale_guards")
"""What the ledger says: without it a run goes on."""
WIDE_TAPS = ("**:input", "**:output", "**:gradient")
"""Every module, so that a search for the place needs no run of its own."""
BROKEN = "its setup is no scenario: "
"""Begins the reason why a case is not run that the catalogue is to blame for."""
TIMEOUT_S = 120.0
"""Of a reference."""


@dataclass(frozen=True, kw_only=True)
class Variant:
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
    if stress or set(fault.expects) & set(OF_THE_LEDGER):
        found.append(Variant(name=BARE, ledger=False))
    if len(stress) > 1:
        found += [Variant(name=one, stress=(one,)) for one in stress]
    return (*found, Variant(stress=stress))


# ---- a scenario's text


def scenario_text(fault: Fault, variant: Variant | None = None, *, taps: bool = False) -> str:
    """A scenario that shows the fault, in the catalogue's setup if no variant is named."""
    setup = fault.setup
    variant = variant or Variant(stress=setup.stress)
    base, plant = settings_of(fault, variant, taps=taps), plant_of(fault)
    axis, values = "plant", ["none", plant]
    if setup.graph:
        if variant.stress:
            base["stress"] = list(variant.stress)
        axis, values = "graph", ["eager", list(setup.graph)]
    elif variant.stress or "candidate" not in setup.legs:
        axis, values = "stress", ["none", list(variant.stress) or ["jitter"]]
    if axis != "plant":
        base["plant"] = plant
    return _written(
        f"fault_{fault.name}", fault.description, base, {axis: values}, setup.checks,
        setup.timeout_s,
    )  # fmt: skip


def settings_of(fault: Fault, variant: Variant, *, taps: bool) -> dict[str, Any]:
    """What all runs of a fault's case share: the keys of its setup over those of `BASE`."""
    base: dict[str, Any] = _plain({**BASE, **fault.setup.settings})
    if taps:
        base.setdefault("taps", list(WIDE_TAPS))
    if not variant.ledger:
        base["ledger"] = False
    return base


def plant_of(fault: Fault) -> dict[str, Any]:
    """The `plant` entry of a fault's setup."""
    setup = fault.setup
    plant: dict[str, Any] = {"fault": fault.name}
    if "step" in fault.takes:
        plant["step"] = setup.step
    if "rank" in fault.takes:
        plant["rank"] = "last" if setup.rank < 0 else setup.rank
    if "tensor" in fault.takes and setup.tensor:
        plant["tensor"] = setup.tensor
    if setup.legs != ("candidate",):
        plant["legs"] = list(setup.legs)
    return plant


def _written(
    name: str, why: str, base: Mapping[str, Any], axes: Mapping[str, list[Any]],
    checks: Mapping[str, Any], timeout_s: float,
) -> str:  # fmt: skip
    """A scenario file that compares the values of its one axis with the first of them."""
    ((axis, values),) = axes.items()
    content = {
        "name": name, "why": why, "base": dict(base), "axes": dict(axes),
        "compare": {"axis": axis, "reference": values[0], "expect": "bitwise"},
        "checks": {"loss": {}, "state": {}, "finite": {}, **checks},
        "launch": {"device": "auto", "timeout_s": timeout_s},
    }  # fmt: skip
    return yaml.safe_dump(
        _plain(content), sort_keys=False, width=100, default_flow_style=None, allow_unicode=True
    )


def _plain(value: Any) -> Any:
    """Without mapping proxies and tuples, which YAML has no form for."""
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
    pointer = fault.points_at
    # Taps of every module make a run three times as long: only where there is one to be found.
    taps = taps and bool(pointer.module or pointer.tensor)
    other = f"its mechanism is there on {' and '.join(fault.devices)} only"
    reason = "" if device in fault.devices else other
    try:
        (case,) = cases_of(scenario_text(fault, variant, taps=taps), device)
        if fault.setup.legs == ("candidate",) and not fault.counterpart:
            case = _with_reference(case, settings_of(fault, Variant(), taps=taps), device)
    except UsageError as error:
        (case,) = cases_of(_reference_text(BASE), device)
        reason = reason or f"{BROKEN}{error}"
    name = fault.name if variant.name == WHOLE else f"{fault.name}.{variant.name}"
    return replace(
        case, id=name, scenario=SCENARIO, labels=labels | case.labels, skip_reason=reason
    )


def _reference_text(settings: Mapping[str, Any]) -> str:
    """A scenario whose reference is an eager run of `settings`."""
    axes: dict[str, list[Any]] = {"stress": ["none", ["jitter"]]}
    return _written("reference", "What others are held against.", settings, axes, {}, TIMEOUT_S)


def _with_reference(case: CaseSpec, settings: Mapping[str, Any], device: Device) -> CaseSpec:
    """The case with an eager run of `settings` for its reference.

    Stressors and the ledger decide no bits, so candidates of one setting can share it.
    """
    (plain,) = cases_of(_reference_text(settings), device)
    return replace(case, reference=plain.reference, control=plain.control)


def plan_cases(faults: Iterable[Fault], clean: int, device: Device) -> tuple[CaseSpec, ...]:
    """The cases of a campaign: those of each fault together, clean cases after them."""
    chosen = tuple(faults)
    cases = [fault_case(f, variant, device) for f in chosen for variant in variants(f, device)]
    return (*cases, *clean_cases(chosen, clean, device))


# ---- clean cases: the catalogue's own setups without their faults, then further settings x graph
# scopes x stressors that the rules allow, in rounds: one candidate of each setting, then the next

_STRESS: tuple[tuple[str, ...], ...] = (
    (), ("jitter",), ("poison", "scramble"), ("races",), ("poison",), ("scramble",),
)  # fmt: skip
_GRAPHS: tuple[tuple[str, ...], ...] = (
    (), ("attn",), ("full_iteration",), ("layer",), ("attn", "mlp"), ("mlp",),
    ("moe_router",), ("attn", "moe_router"), ("attn", "moe_router", "moe_preprocess"), ("moe",),
)  # fmt: skip
_MOE = {"preset": "moe_tiny", "capacity_factor": 1.25}
_SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"parallel": {"dp": 1}, "seed": 77, "dtype": "bf16"},
    {"parallel": {"dp": 1}, "model": _MOE},
    {"parallel": {"dp": 1}, "model": "dense_tiny_dropout", "seed": 5},
    {"parallel": {"dp": 1}, "fsdp": {"pool": "dynamic"}, "microbatches": 1},
    {"parallel": {"dp": 1}, "model": {**_MOE, "preset": "mla_moe_tiny"}, "dtype": "bf16"},
    {"parallel": {"dp": 2}},
    {"parallel": {"dp": 2}, "dtype": "bf16", "seed": 9, "model": "dense_tiny_dropout"},
    {"parallel": {"tp": 2, "sequence_parallel": True}},
    {"parallel": {"cp": 2}},
    {"parallel": {"pp": 2}},
    {"parallel": {"dp": 2, "ep": 2}, "model": _MOE},
    {"parallel": {"dp_outer": 2}},
    {"parallel": {"dp": 2}, "fsdp": {"strategy": "optim_grads", "pool": "traced"}},
    {"parallel": {"dp": 2}, "fsdp": {"strategy": "no_shard"}, "microbatches": 1},
)
_Clean = tuple[str, tuple[str, ...], tuple[str, ...], Mapping[str, Any]]
"""Name, graph scopes, stressors, settings."""


def clean_cases(faults: Iterable[Fault], number: int, device: Device) -> tuple[CaseSpec, ...]:
    """At most `number` cases without a fault, setups of `faults` first; fewer if there are no more.

    Candidates of one setting share its reference and control, so 240 cases take some 300 runs.
    """
    found: dict[str, CaseSpec] = {}
    for asked in itertools.chain(_of_faults(faults, device), _further()):
        if len(found) >= number:
            break
        case = _clean_case(*asked, device)
        if case is not None:
            found.setdefault(case.candidate.key, case)
    return tuple(found.values())


def _of_faults(faults: Iterable[Fault], device: Device) -> Iterator[_Clean]:
    for fault in faults:
        settings = settings_of(fault, Variant(), taps=True)
        yield f"of_{fault.name}", fault.setup.graph, stress_of(fault.setup, device), settings


def _further() -> Iterator[_Clean]:
    for stress, graph in itertools.product(_STRESS, _GRAPHS):
        words = "-".join("+".join(part) for part in (graph, stress) if part)
        for place, settings in enumerate(_SETTINGS if words else ()):
            # Four steps: two eager, one that captures, one that only replays.
            yield f"{place}-{words}", graph, stress, {**BASE, "steps": 4, **settings}


def _clean_case(
    name: str, graph: tuple[str, ...], stress: tuple[str, ...], settings: Mapping[str, Any],
    device: Device,
) -> CaseSpec | None:  # fmt: skip
    """The case of a candidate; None where the rules do not allow it."""
    if device != "cpu" and RACES in stress:
        return None
    base: dict[str, Any] = dict(settings)
    axes: dict[str, list[Any]] = {"stress": ["none", list(stress) or ["jitter"]]}
    if graph:
        base["stress"] = list(stress) or "none"
        axes = {"graph": ["eager", list(graph)]}
    try:
        (case,) = cases_of(_written("clean", "A false alarm?", base, axes, {}, TIMEOUT_S), device)
        case = _with_reference(case, settings, device)
    except UsageError:
        return None
    labels = {CLEAN_LABEL: name} | case.labels
    return replace(case, id=f"clean.{name}", scenario=SCENARIO, labels=labels)
