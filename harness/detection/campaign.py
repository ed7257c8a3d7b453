"""A campaign: the cases of a matrix run in one folder, its rows told as they are known.

request -> cases -> (shard) -> launch.carry_out -> rows with places -> Matrix -> files
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from harness.bisector.found import Location
from harness.bisector.locate import locate
from harness.detection.cells import FAULT_LABEL
from harness.detection.clean import CLEAN_LABEL
from harness.detection.matrix import (
    Locate,
    Matrix,
    fault_names,
    judged,
    place,
    plan_cases,
    read_matrix,
    row_in,
)
from harness.detection.rows import Row
from harness.errors import NothingSelected, UsageError
from harness.faults.fault import Fault
from harness.launch import Prepared, Request, carry_out, prepare, prepare_cases
from harness.machine import describe, resolve_device
from harness.plan import Plan
from harness.records import CaseSpec, RunOutcome, RunSpec, Verdict
from harness.scenario.matrix import Device
from harness.scenario.shards import parse_shard
from harness.store import LEGS, CaseRuns, RunFolder
from harness.store.find import DEFAULT_OUT, unused

PATIENCE: Mapping[Device, float] = {"cpu": 1.0, "cuda": 4.0}
"""Limits of cells that end in one are for the CPU: a GPU takes seconds to begin."""
WHY = "Every planted fault must be seen, and nothing said where none is."


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a campaign is to do.

    Attributes:
        faults: to plant.
        clean: number of clean cells.
        device: auto, cpu or cuda.
        shard: I/N, None for all.
        locate: whether to ask the bisector.
        elsewhere: seed of other cells to plant them in; None for their own.
        patience: factor of the time limits of all runs; None for `PATIENCE`.
    """

    faults: tuple[Fault, ...] = ()
    clean: int = 0
    device: str = "auto"
    shard: str | None = None
    locate: bool = True
    elsewhere: int | None = None
    patience: float | None = None
    out: Path | None = None
    resume: Path | None = None
    slots: int | None = None
    ranks_per_gpu: int | None = None
    jobs: int | None = None


class Teller(Protocol):
    """Who is told of a campaign as it goes."""

    def planned(self, plan: Plan) -> None:
        """Runs follow."""
        ...

    def run_finished(self, outcome: RunOutcome) -> None:
        """A run has ended."""
        ...

    def row(self, row: Row) -> None:
        """A fault has its row."""
        ...

    def clean(self, verdict: Verdict) -> None:
        """A clean cell has its verdict."""
        ...


def by_records(folder: RunFolder, case: CaseSpec) -> Location:
    """Where the bisector places a failure without a run of its own: every module was tapped."""
    held = judged(folder, case)
    assert held is not None
    assert held.reference is not None
    assert held.control is not None
    assert held.candidate is not None
    runs = CaseRuns(
        case=case, reference=held.reference, control=held.control, candidate=held.candidate
    )
    return locate(runs, held.verdict)


def carry_out_campaign(asked: Asked, teller: Teller, *, argv: Sequence[str]) -> tuple[Path, Matrix]:
    """Run what is asked; the run folder, and the matrix.

    Raises:
        HarnessError: it cannot be carried out, or was interrupted: `--resume` goes on.
    """
    prepared = _prepared(asked)
    out = asked.resume or asked.out or unused(DEFAULT_OUT / "faults")
    view = _View(out, teller, by_records if asked.locate else None)
    done = carry_out(prepared, view, out=out, exit_first=False, argv=argv)
    folder = RunFolder.open(done.folder)
    rows = [view.rows[name] for name in fault_names(folder.cases)]
    return done.folder, read_matrix(folder, rows, done.wall_s)


def _prepared(asked: Asked) -> Prepared:
    if asked.resume is not None:
        request = Request(
            resume=asked.resume, slots=asked.slots, ranks_per_gpu=asked.ranks_per_gpu,
            jobs=asked.jobs,
        )  # fmt: skip
        prepared = prepare(request)
        if not any({FAULT_LABEL, CLEAN_LABEL} & set(c.labels) for c in prepared.plan.cases):
            raise UsageError(f"--resume {asked.resume}: expected the folder of a matrix of faults")
        return prepared
    device = resolve_device(asked.device, describe())
    cases = plan_cases(asked.faults, asked.clean, device, asked.elsewhere)
    patience = asked.patience or PATIENCE[device]
    if patience != 1:
        cases = tuple(_patient(case, patience) for case in cases)
    if asked.shard is not None:
        cases = _of_shard(cases, asked.shard)
    if not cases:
        raise NothingSelected("no fault and no clean cell was asked for")
    return prepare_cases(
        cases, name="faults", why=WHY, slots=asked.slots, ranks_per_gpu=asked.ranks_per_gpu,
        jobs=asked.jobs,
    )  # fmt: skip


def _patient(case: CaseSpec, factor: float) -> CaseSpec:
    legs = {leg: getattr(case, leg) for leg in LEGS}
    longer = {
        leg: dataclasses.replace(spec, timeout_s=spec.timeout_s * factor)
        for leg, spec in legs.items()
    }
    return dataclasses.replace(case, **longer)


def _of_shard(cases: Sequence[CaseSpec], text: str) -> tuple[CaseSpec, ...]:
    """The cases of a shard: those of a fault stay together, neighbours share references."""
    shard = parse_shard(text)
    units: dict[str, list[CaseSpec]] = {}
    for case in sorted(cases, key=lambda case: case.reference.key):
        units.setdefault(case.labels.get(FAULT_LABEL) or case.id, []).append(case)
    ordered = list(units.values())
    first, last = (len(ordered) * n // shard.number for n in (shard.index - 1, shard.index))
    chosen = {case.id for unit in ordered[first:last] for case in unit}
    if not chosen:
        raise NothingSelected(f"--shard {text}: this shard holds no case")
    return tuple(case for case in cases if case.id in chosen)


class _View:
    """Turns verdicts into rows as soon as all cases of a fault are judged."""

    def __init__(self, out: Path, teller: Teller, locate: Locate | None) -> None:
        self._out, self._teller, self._locate = out, teller, locate
        self._folder: RunFolder | None = None
        self._labels: dict[str, str] = {}
        self._due: dict[str, set[str]] = {}
        self.rows: dict[str, Row] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def planned(self, plan: Plan) -> None:
        """Note which cases a row needs."""
        for case in plan.cases:
            name = case.labels.get(FAULT_LABEL, "")
            self._labels[case.id] = name
            if name:
                self._due.setdefault(name, set()).add(case.id)
        self._teller.planned(plan)

    def run_started(self, spec: RunSpec) -> None:
        """Nothing."""

    def run_finished(self, outcome: RunOutcome) -> None:
        """Pass it on."""
        self._teller.run_finished(outcome)

    def judged(self, verdict: Verdict) -> None:
        """Tell a clean cell at once, a fault with its last case."""
        name = self._labels.get(verdict.case_id, "")
        if not name:
            self._teller.clean(verdict)
            return
        due = self._due[name]
        due.discard(verdict.case_id)
        if due:
            return
        if self._folder is None:
            self._folder = RunFolder.open(self._out)
        row = row_in(self._folder, name)
        assert row is not None
        if self._locate is not None:
            row = place(self._folder, row, self._locate)
        self.rows[name] = row
        self._teller.row(row)
