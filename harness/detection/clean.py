"""Clean cells: nothing is planted, so whatever is said of them is a false alarm.

    the catalogue's own cells without their faults
    -> further settings x graph scopes x stressors, those that the rules allow, in rounds:
       one candidate of each setting, then the next, until there are as many as are asked for

Candidates of one setting share its reference and control, so 240 cells take some 300 runs.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from harness.errors import UsageError
from harness.faults.cases import (
    CELL,
    RACES,
    SCENARIO,
    TIMEOUT_S,
    Variant,
    beside_reference,
    cases_of,
    settings_of,
    stress_of,
    written,
)
from harness.faults.catalogue import BASE
from harness.faults.fault import Fault
from harness.records import CaseSpec
from harness.scenario.matrix import Device

CLEAN_LABEL = "clean"
WHY = "Nothing is planted here: whatever is said is a false alarm."
STRESS: tuple[tuple[str, ...], ...] = (
    (), ("jitter",), ("poison", "scramble"), ("races",), ("poison",), ("scramble",),
)  # fmt: skip
GRAPHS: tuple[tuple[str, ...], ...] = (
    (), ("attn",), ("full_iteration",), ("layer",), ("attn", "mlp"), ("mlp",),
    ("moe_router",), ("attn", "moe_router"), ("attn", "moe_router", "moe_preprocess"), ("moe",),
)  # fmt: skip
_MOE = {"preset": "moe_tiny", "capacity_factor": 1.25}
_MLA = {"preset": "mla_moe_tiny", "capacity_factor": 1.25}
SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"parallel": {"dp": 1}},
    {"parallel": {"dp": 1}, "seed": 77, "dtype": "bf16"},
    {"parallel": {"dp": 1}, "model": _MOE},
    {"parallel": {"dp": 1}, "model": "dense_tiny_dropout", "seed": 5},
    {"parallel": {"dp": 1}, "fsdp": {"pool": "dynamic"}, "microbatches": 1},
    {"parallel": {"dp": 1}, "model": _MLA, "dtype": "bf16"},
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
_Candidate = tuple[tuple[str, ...], tuple[str, ...]]
_Named = tuple[str, _Candidate, Mapping[str, Any]]
STEPS = 4
"""Of further cells: two eager, one that captures, one that only replays."""


def clean_cells(faults: Iterable[Fault], number: int, device: Device) -> tuple[CaseSpec, ...]:
    """At most `number` clean cases; fewer only where there are no more.

    Args:
        faults: whose cells are run without them too.
        number: of cases.
        device: where.
    """
    found: dict[str, CaseSpec] = {}
    for name, candidate, settings in itertools.chain(_of_faults(faults, device), _further()):
        if len(found) >= number:
            break
        case = _case(name, candidate, settings, device)
        if case is not None and case.candidate.key not in found:
            found[case.candidate.key] = case
    return tuple(found.values())


def _case(
    name: str, cell: _Candidate, settings: Mapping[str, Any], device: Device
) -> CaseSpec | None:
    """The case of a candidate; None where the rules do not allow it."""
    graph, stress = cell
    if device != "cpu" and RACES in stress:
        return None
    base, axes = dict(settings), {"stress": ["none", list(stress) or ["jitter"]]}
    if graph:
        base["stress"] = list(stress) or "none"
        axes = {"graph": ["eager", list(graph)]}
    try:
        (case,) = cases_of(
            written("clean", WHY, base, axes, checks={}, timeout_s=TIMEOUT_S), device
        )
        case = beside_reference(case, settings, device)
    except UsageError:
        return None
    labels = {CLEAN_LABEL: name} | case.labels
    return dataclasses.replace(case, id=f"clean.{name}", scenario=SCENARIO, labels=labels)


def _of_faults(faults: Iterable[Fault], device: Device) -> Iterator[_Named]:
    for fault in faults:
        settings = settings_of(fault, Variant(name=CELL), taps=True)
        yield f"of_{fault.name}", (fault.cell.graph, stress_of(fault.cell, device)), settings


def _further() -> Iterator[_Named]:
    for candidate in _candidates():
        words = "-".join("+".join(part) for part in candidate if part)
        for place, settings in enumerate(SETTINGS):
            yield f"{place}-{words}", candidate, {**BASE, "steps": STEPS, **settings}


def _candidates() -> Iterator[_Candidate]:
    pairs = itertools.product(STRESS, GRAPHS)
    return (pair for pair in ((graph, stress) for stress, graph in pairs) if pair != ((), ()))
