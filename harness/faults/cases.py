"""From an entry of the catalogue to the cases that it is looked for in.

    Fault -> variants -> the text of a scenario -> schema and matrix, as any scenario -> CaseSpec

The candidate is the entry's cell with the fault, the reference an eager run of the same settings
without fault and stressors, and the control the reference again: entries with the same settings
share both. Of a cell with stressors, or whose fault is one for
the ledger, there are further variants:

    bare        no stressor and no ledger: what somebody would see who only trains
    <stressor>  one of several stressors alone
    cell        as the catalogue has it

Where the stressor races is not, on GPUs, the others stand in for it.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from fsdp_core.config import STRESSORS
from harness.errors import UsageError
from harness.faults.catalogue import BASE
from harness.faults.fault import Cell, Fault
from harness.records import CaseSpec, What
from harness.scenario.matrix import Device, expand
from harness.scenario.schema import decode_scenario

SCENARIO = "faults"
"""What cases say they are of."""
TIMEOUT_S = 120.0
"""Of a reference."""
FAULT_LABEL, VARIANT_LABEL = "fault", "variant"
BARE, CELL = "bare", "cell"
RACES = "races"
"""A stressor of the CPU only."""
OF_THE_LEDGER: tuple[What, ...] = ("stale_address", "stale_guards")
"""What the ledger says: without it a run goes on."""
WIDE_TAPS = ("**:input", "**:output", "**:gradient")
"""Every module, so that a search for the place needs no run of its own."""
CHECKS: Mapping[str, Any] = {"loss": {}, "state": {}, "finite": {}}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a cell."""

    name: str
    stress: tuple[str, ...] = ()
    ledger: bool = True


def stress_of(cell: Cell, device: Device) -> tuple[str, ...]:
    """Stressors of a cell that the device has."""
    if device == "cpu" or RACES not in cell.stress:
        return cell.stress
    return tuple(name for name in STRESSORS if name != RACES)


def variants(fault: Fault, device: Device = "cpu") -> tuple[Variant, ...]:
    """Those of a fault, the barest first."""
    stress = stress_of(fault.cell, device)
    found = []
    if stress or set(fault.expects) & set(OF_THE_LEDGER):
        found.append(Variant(name=BARE, ledger=False))
    if len(stress) > 1:
        found += [Variant(name=one, stress=(one,)) for one in stress]
    return (*found, Variant(name=CELL, stress=stress))


def case_name(fault: Fault, variant: Variant) -> str:
    """Id of a case: `ulp`, `early_release.bare`."""
    return fault.name if variant.name == CELL else f"{fault.name}.{variant.name}"


def scenario_text(fault: Fault, variant: Variant | None = None, *, taps: bool = False) -> str:
    """A scenario that shows the fault, in the catalogue's cell if no variant is named."""
    variant = variant or Variant(name=CELL, stress=fault.cell.stress)
    base = settings_of(fault, variant, taps=taps)
    plant = plant_of(fault)
    graph, stress = list(fault.cell.graph), list(variant.stress)
    if graph:
        if stress:
            base["stress"] = stress
        base["plant"] = plant
        axis = "graph"
        values: list[Any] = ["eager", graph]
    elif stress or "candidate" not in fault.cell.legs:
        base["plant"] = plant
        axis, values = "stress", ["none", stress or ["jitter"]]
    else:
        axis, values = "plant", ["none", plant]
    return written(
        f"fault_{fault.name}", fault.description, base, {axis: values},
        checks=fault.cell.checks, timeout_s=fault.cell.timeout_s,
    )  # fmt: skip


def settings_of(fault: Fault, variant: Variant, *, taps: bool) -> dict[str, Any]:
    """What all legs of a fault's case share: the keys of its cell over those of `BASE`."""
    base = _plain({**BASE, **fault.cell.settings})
    if taps:
        base.setdefault("taps", list(WIDE_TAPS))
    if not variant.ledger:
        base["ledger"] = False
    assert isinstance(base, dict)
    return base


def plant_of(fault: Fault) -> dict[str, Any]:
    """The `plant` entry of a fault's cell."""
    cell = fault.cell
    plant: dict[str, Any] = {"fault": fault.name}
    if "step" in fault.takes:
        plant["step"] = cell.step
    if "rank" in fault.takes:
        plant["rank"] = "last" if cell.rank < 0 else cell.rank
    if "tensor" in fault.takes and cell.tensor:
        plant["tensor"] = cell.tensor
    if cell.legs != ("candidate",):
        plant["legs"] = list(cell.legs)
    return plant


def written(
    name: str,
    why: str,
    base: Mapping[str, Any],
    axes: Mapping[str, list[Any]],
    *,
    checks: Mapping[str, Mapping[str, Any]],
    timeout_s: float,
) -> str:
    """A scenario file that compares the values of its one axis with the first of them."""
    ((axis, values),) = axes.items()
    content = {
        "name": name,
        "why": why,
        "base": dict(base),
        "axes": dict(axes),
        "compare": {"axis": axis, "reference": values[0], "expect": "bitwise"},
        "checks": {**CHECKS, **checks},
        "launch": {"device": "auto", "timeout_s": timeout_s},
    }
    return yaml.safe_dump(
        _plain(content),
        sort_keys=False,
        width=100,
        default_flow_style=None,
        allow_unicode=True,
    )


@functools.lru_cache(maxsize=256)
def cases_of(text: str, device: Device) -> tuple[CaseSpec, ...]:
    """The cases of a scenario that is no file.

    Raises:
        ScenarioError: it breaks a rule.
    """
    name = text.partition("\n")[0].removeprefix("name: ")
    return expand(decode_scenario(text.encode(), name), device)


def fault_case(fault: Fault, variant: Variant, device: Device, *, taps: bool = True) -> CaseSpec:
    """The case of one variant.

    A fault of other devices, or a cell that breaks a rule, gives a case that is skipped and says
    why: it must show as not run.
    """
    labels = {FAULT_LABEL: fault.name, VARIANT_LABEL: variant.name}
    pointer = fault.points_at
    # Taps of every module make a run three times as long: only where there is one to be found.
    taps = taps and pointer is not None and bool(pointer.module or pointer.tensor)
    try:
        (case,) = cases_of(scenario_text(fault, variant, taps=taps), device)
        if fault.cell.legs == ("candidate",) and not fault.counterpart:
            plain = Variant(name=CELL)
            case = beside_reference(case, settings_of(fault, plain, taps=taps), device)
        reason = "" if device in fault.devices else _elsewhere(fault)
    except UsageError as error:
        (case,) = cases_of(reference_text(_plain(BASE)), device)
        reason = _elsewhere(fault) if device not in fault.devices else f"{BROKEN}{error}"
    return dataclasses.replace(
        case, id=case_name(fault, variant), scenario=SCENARIO, labels=labels | case.labels,
        skip_reason=reason,
    )  # fmt: skip


BROKEN = "its cell is no scenario: "
"""Begins the reason why a case is not run that the catalogue is to blame for."""


def _elsewhere(fault: Fault) -> str:
    return f"its mechanism is there on {' and '.join(fault.devices)} only"


def reference_text(settings: Mapping[str, Any]) -> str:
    """A scenario whose reference is an eager run of `settings`."""
    return written("reference", "What others are held against.", settings,
                   {"stress": ["none", ["jitter"]]}, checks={}, timeout_s=TIMEOUT_S)  # fmt: skip


def beside_reference(case: CaseSpec, settings: Mapping[str, Any], device: Device) -> CaseSpec:
    """The case with an eager run of `settings` for its reference.

    Stressors and the ledger decide no bits, so candidates of one setting can share it.
    """
    (plain,) = cases_of(reference_text(settings), device)
    return dataclasses.replace(case, reference=plain.reference, control=plain.control)


def _plain(value: Any) -> Any:
    """Without mapping proxies and tuples, which YAML has no form for."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
