"""The detection matrix: every planted fault beside many clean cells, with bounds on both rates.

    faults, clean cells -> cases -> one run folder -> rows, alarms -> places -> rates

Everything is read back from the run folder, so a campaign that was killed goes on with `--resume`,
and the matrix of a finished one can be made again.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.bisector.chance import Bounds, bounds
from harness.bisector.found import Location
from harness.codec import Json
from harness.detection.clean import CLEAN_LABEL, clean_cells
from harness.detection.elsewhere import ELSEWHERE_LABEL, elsewhere
from harness.detection.rows import Judged, Row, can_run, located, row_of, to_locate
from harness.faults.cases import FAULT_LABEL, fault_case, variants
from harness.faults.catalogue import CATALOGUE
from harness.faults.fault import Fault
from harness.records import CaseSpec, Outcome, What
from harness.scenario.matrix import Device
from harness.store import RunFolder

CONFIDENCE = 0.95
Locate = Callable[[RunFolder, CaseSpec], Location]
"""Where the failure of a case of a folder entered."""


@dataclass(frozen=True, kw_only=True)
class Alarm(Json):
    """A clean cell that did not pass: a false alarm, or no verdict where there must be one."""

    case: str
    outcome: Outcome
    what: What
    message: str


@dataclass(frozen=True, kw_only=True)
class Matrix(Json):
    """What was found.

    Attributes:
        device: where.
        rows: one a fault, in the order of the catalogue.
        clean: ids of the clean cells that have a verdict.
        skipped: clean cells that cannot be run here.
        alarms: those of `clean` that did not pass.
        wall_s: of the runs of the campaign.
    """

    device: str
    rows: tuple[Row, ...]
    clean: tuple[str, ...]
    skipped: int
    alarms: tuple[Alarm, ...]
    wall_s: float = 0.0

    @property
    def ran(self) -> tuple[Row, ...]:
        """Rows of the faults that can be planted here."""
        return tuple(row for row in self.rows if can_run(row))

    @property
    def missed(self) -> tuple[Row, ...]:
        """Those that were not detected."""
        return tuple(row for row in self.ran if row.status != "detected")

    def rates(self) -> dict[str, Bounds]:
        """Detected, localised and wronged, each with its exact bounds."""
        detected = [row for row in self.ran if row.status == "detected"]
        asked = [row for row in detected if row.localised]
        exactly = sum(row.localised == "exactly" for row in asked)
        near = sum(row.localised == "near" for row in asked)
        found = {"detected": bounds(len(detected), len(self.ran), CONFIDENCE)}
        if asked:
            named = sum(row.is_named for row in asked)
            found["phase, module and tensor right"] = bounds(named, len(asked), CONFIDENCE)
            found["localised exactly, with step and rank"] = bounds(exactly, len(asked), CONFIDENCE)
            found["localised exactly or near"] = bounds(exactly + near, len(asked), CONFIDENCE)
        found["false alarms on clean cells"] = bounds(len(self.alarms), len(self.clean), CONFIDENCE)
        return found

    def to_json(self) -> dict[str, Any]:
        """With the rates, for whoever reads the file."""
        rates = {name: rate.to_json() for name, rate in self.rates().items()}
        return {**super().to_json(), "rates": rates}


def merged(parts: Sequence[Matrix]) -> tuple[Matrix, ...]:
    """One matrix for each device: rows of later parts in place of earlier ones, cells once.

    Shards have rows and cells of their own; a fault that was run again has its last row.
    """
    found = []
    for device in dict.fromkeys(part.device for part in parts):
        held = [part for part in parts if part.device == device]
        rows = {row.fault: row for part in held for row in part.rows}
        order = [*CATALOGUE, *(name for name in rows if name not in CATALOGUE)]
        alarms = {alarm.case: alarm for part in held for alarm in part.alarms}
        found.append(
            Matrix(
                device=device,
                rows=tuple(rows[name] for name in order if name in rows),
                clean=tuple(dict.fromkeys(name for part in held for name in part.clean)),
                skipped=sum(part.skipped for part in held),
                alarms=tuple(alarms.values()),
                wall_s=sum(part.wall_s for part in held),
            )
        )
    return tuple(found)


def plan_cases(
    faults: Iterable[Fault], clean: int, device: Device, seed: int | None = None
) -> tuple[CaseSpec, ...]:
    """The cases of a campaign: those of each fault together, clean cells after them.

    With a seed, each fault in one cell that was drawn with it, and no barer ones.
    """
    chosen = tuple(faults)
    if seed is not None:
        return tuple(_moved_case(fault, seed, device) for fault in chosen)
    cases = [
        fault_case(fault, variant, device)
        for fault in chosen
        for variant in variants(fault, device)
    ]
    return (*cases, *clean_cells(chosen, clean, device))


def _moved_case(fault: Fault, seed: int, device: Device) -> CaseSpec:
    moved = elsewhere(fault, seed, device)
    case = fault_case(moved, variants(moved, device)[-1], device)
    return dataclasses.replace(case, labels={**case.labels, ELSEWHERE_LABEL: str(seed)})


def _fault_of(case: CaseSpec) -> Fault:
    """The entry with the cell that the case was made of."""
    fault = CATALOGUE[case.labels[FAULT_LABEL]]
    seed = case.labels.get(ELSEWHERE_LABEL)
    return fault if seed is None else elsewhere(fault, int(seed), case.candidate.device)


def judged(folder: RunFolder, case: CaseSpec) -> Judged | None:
    """A case of a folder with its runs; None while it has no verdict."""
    verdict = folder.load_verdict(case.id)
    if verdict is None:
        return None
    if verdict.outcome == "skipped":
        return Judged(case=case, verdict=verdict)
    legs = (case.reference, case.control, case.candidate)
    reference, control, candidate = (folder.load_run(spec) for spec in legs)
    return Judged(
        case=case, verdict=verdict, reference=reference, control=control, candidate=candidate
    )


def cases_of_fault(cases: Iterable[CaseSpec], name: str) -> tuple[CaseSpec, ...]:
    """Those that plant it, the barest first."""
    return tuple(case for case in cases if case.labels.get(FAULT_LABEL) == name)


def row_in(folder: RunFolder, name: str) -> Row | None:
    """The row of a fault, None while a case of it has no verdict."""
    cases = cases_of_fault(folder.cases, name)
    held = [judged(folder, case) for case in cases]
    whole = [each for each in held if each is not None]
    if not whole or len(whole) < len(held):
        return None
    return row_of(_fault_of(cases[0]), whole)


def place(folder: RunFolder, row: Row, locate: Locate) -> Row:
    """The row with where the bisector says that the fault is; as it was if there is none."""
    if row.status != "detected":
        return row
    fault = _fault_of(cases_of_fault(folder.cases, row.fault)[0])
    case = next(c for c in folder.cases if c.id == to_locate(row, fault))
    layers = case.candidate.config["model"]["layers"]
    return located(row, fault, locate(folder, case), num_layers=layers)


def read_matrix(folder: RunFolder, rows: Sequence[Row], wall_s: float) -> Matrix:
    """The matrix of a folder, with rows that were made of it."""
    held = [(c, folder.load_verdict(c.id)) for c in folder.cases if CLEAN_LABEL in c.labels]
    verdicts = [verdict for _, verdict in held if verdict is not None]
    answered = [verdict for verdict in verdicts if verdict.outcome != "skipped"]
    return Matrix(
        device=folder.cases[0].candidate.device if folder.cases else "",
        rows=tuple(rows),
        clean=tuple(verdict.case_id for verdict in answered),
        skipped=len(verdicts) - len(answered),
        alarms=tuple(
            Alarm(case=v.case_id, outcome=v.outcome, what=v.what, message=v.message)
            for v in answered
            if v.outcome != "passed"
        ),
        wall_s=wall_s,
    )


def fault_names(cases: Iterable[CaseSpec]) -> tuple[str, ...]:
    """Of all faults that cases plant, each once, in their order."""
    labels = (case.labels.get(FAULT_LABEL, "") for case in cases)
    return tuple(dict.fromkeys(name for name in labels if name))
