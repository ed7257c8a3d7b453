"""A campaign: every planted fault next to many clean cases, with bounds on both rates.

    asked -> cases -> (shard) -> launch.carry_out -> a row for each fault, with its place -> Matrix

A row says what became of one fault:

    detected    a check of a case of it failed, in one of the words that its entry expects
    misjudged   something failed, or gave no verdict, in other words: entry or harness is wrong
    missed      every case of it passed
    not run     it cannot be planted here, and why

It is of the barest case that detects it: no stressor before one, one before several. Everything is
read back from the run folder, so a campaign that was killed goes on with `--resume`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from harness.bisect.experiments import Bounds, bounds
from harness.bisect.found import Location
from harness.bisect.locate import locate
from harness.campaign.cases import (
    BARE,
    BROKEN,
    CLEAN_LABEL,
    FAULT_LABEL,
    RACES,
    VARIANT_LABEL,
    WHOLE,
    fault_of,
    plan_cases,
)
from harness.campaign.scoring import (
    STRESSED,
    Localised,
    Sight,
    is_named,
    localised,
    seen_plain,
    seen_stressed,
)
from harness.codec import Json
from harness.errors import NothingSelected, UsageError
from harness.faults.catalogue import CATALOGUE
from harness.faults.fault import Fault
from harness.machine import describe, resolve_device
from harness.records import CaseSpec, Outcome, RunOutcome, RunResult, RunSpec, Verdict, What
from harness.runner.launch import Prepared, Request, carry_out, prepare, prepare_cases
from harness.runner.plan import Plan
from harness.runner.shards import parse_shard
from harness.scenario.matrix import Device
from harness.store import LEGS, CaseRuns, RunFolder
from harness.store.verify import DEFAULT_OUT, unused

# ---- rows

Status = Literal["detected", "misjudged", "missed", "not run"]
BY_NAME: Mapping[What, str] = {"stale_address": "ledger", "stale_guards": "guards", "race": "races"}
"""What says it, where no check compares anything."""
OF_ANYTHING: tuple[What, ...] = ("crashed", "hang")
"""What a run may end with before anything was planted in it."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A case with its verdict and the runs that it was judged by; no runs if it was skipped."""

    case: CaseSpec
    verdict: Verdict
    runs: CaseRuns | None = None

    @property
    def variant(self) -> str:
        """Name of the variant."""
        return self.case.labels.get(VARIANT_LABEL, WHOLE)

    @property
    def each(self) -> tuple[RunResult, ...]:
        """The runs."""
        runs = self.runs
        return () if runs is None else (runs.reference, runs.control, runs.candidate)


@dataclass(frozen=True, kw_only=True)
class Answer(Json):
    """What one variant of a fault's setup said.

    Attributes:
        stress: stressors of the candidate.
        check: that decided; "" if it passed.
        step: of the first difference, or in which the run ended.
        acted: whether a rank says that it planted the fault.
    """

    variant: str
    case: str
    stress: tuple[str, ...]
    outcome: Outcome
    what: What
    check: str
    message: str
    step: int | None
    acted: bool


@dataclass(frozen=True, kw_only=True)
class Row(Json):
    """What became of one fault.

    Attributes:
        reason: why it was not run, or not detected; "" for a detected one.
        case: id of the case that the row is of.
        under: its stressors.
        check, what, message: of its verdict.
        planted_step, planted_rank: None where the fault has none.
        detected_step: in which its verdict sees it.
        localised: how well the bisector found it; "" if nobody asked.
        is_named: whether phase, module and tensor are right, whatever the step and the rank.
        location: what it said.
        runs, seconds: of all its cases, shared references included, and of the search.
        alone: what each cheap check would have seen, by column.
        answers: of all its cases.
    """

    fault: str
    kind: str
    source: str
    status: Status
    reason: str = ""
    case: str = ""
    under: tuple[str, ...] = ()
    check: str = ""
    what: What = ""
    message: str = ""
    planted_step: int | None = None
    planted_rank: int | None = None
    detected_step: int | None = None
    localised: Localised = ""
    is_named: bool = False
    location: Location | None = None
    runs: int = 0
    seconds: float = 0.0
    alone: dict[str, Sight] = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()

    @property
    def later(self) -> int | None:
        """Steps from the plant to its detection; None if either is not known."""
        if self.planted_step is None or self.detected_step is None:
            return None
        return self.detected_step - self.planted_step

    @property
    def counts(self) -> bool:
        """Whether it can run here; one whose setup is no scenario counts, as one missed."""
        return self.status != "not run" or self.reason.startswith(BROKEN)


def row_of(fault: Fault, held: Sequence[Judged]) -> Row:
    """The row of a fault from its cases, the barest first; not localised yet."""
    blank = Row(fault=fault.name, kind=fault.kind, source=fault.source, status="not run")
    whole = next(each for each in held if each.variant == WHOLE)
    if whole.verdict.outcome == "skipped":
        return replace(blank, reason=whole.verdict.message)
    answers = tuple(map(_answer, held))
    shown = next((a for a in answers if _is_detected(fault, a)), None)
    status: Status = "detected"
    reason = ""
    if shown is None:
        shown = next((a for a in answers if a.outcome != "passed"), answers[-1])
        status, reason = _undetected(fault, shown)
        if (status, whole.case.candidate.device) == ("missed", "cuda") and (
            RACES in fault.setup.stress
        ):
            # Its own stressor cannot be had here, so this says nothing of what that sees.
            status, reason = "not run", f"the stressor {RACES} needs cpu, and no other sees it here"
    runs = {run.outcome.key: run for each in held for run in each.each}
    step, rank = planted_at(fault, whole.case)
    return replace(
        blank, status=status, reason=reason, case=shown.case, under=shown.stress,
        check=shown.check, what=shown.what, message=shown.message, planted_step=step,
        planted_rank=rank, detected_step=shown.step, runs=len(runs), answers=answers,
        seconds=sum(run.outcome.wall_s for run in runs.values()), alone=_alone(held),
    )  # fmt: skip


def planted_at(fault: Fault, case: CaseSpec) -> tuple[int | None, int | None]:
    """Step and rank of a plant, None for what it does not have."""
    specs = (case.candidate, case.reference, case.control)
    plant = next((spec.plant for spec in specs if spec.plant is not None), None)
    if plant is None:
        return None, None
    rank = None if fault.everywhere else plant.rank % case.candidate.world_size
    return plant.step if "step" in fault.takes else None, rank


def located(row: Row, fault: Fault, found: Location, *, num_layers: int) -> Row:
    """The row with what the bisector said of it."""
    if row.detected_step is None:
        row = replace(row, detected_step=found.step)
    how = localised(
        found, fault.points_at, step=row.planted_step, rank=row.planted_rank, num_layers=num_layers
    )
    named = is_named(found, fault.points_at)
    return replace(row, location=found, localised=how, is_named=named)


def to_locate(row: Row, fault: Fault) -> str:
    """The case that a search starts from: the whole setup where it fails, as that says most."""
    whole = [a for a in row.answers if a.variant == WHOLE and _is_detected(fault, a)]
    return whole[0].case if whole else row.case


def _is_detected(fault: Fault, answer: Answer) -> bool:
    if answer.what in OF_ANYTHING and "step" in fault.takes and not answer.acted:
        # It ended of something else: of a mistake in the plant, or a slow machine. What has no step
        # may act after the last record, where nothing can be said.
        return False
    return answer.outcome in ("failed", "incomparable") and answer.what in fault.expects


def _undetected(fault: Fault, shown: Answer) -> tuple[Status, str]:
    if shown.outcome == "passed":
        return "missed", "planted, and no check failed" if shown.acted else "never planted"
    acted = "" if shown.acted else ", before it was planted"
    got = f"{shown.outcome} {shown.what}{acted}: {shown.message}"
    return "misjudged", f"expected {' or '.join(fault.expects)}, got {got}"


def _answer(each: Judged) -> Answer:
    verdict = each.verdict
    check, step = BY_NAME.get(verdict.what) or verdict.check.partition(":")[0], None
    if verdict.difference is not None:
        step = verdict.difference.step
    elif each.runs is not None:
        ended = [r.error.step for r in each.runs.candidate.ranks if r.error is not None]
        step = min(ended, default=None)
    passed = verdict.outcome == "passed"
    return Answer(
        variant=each.variant, case=each.case.id, outcome=verdict.outcome, what=verdict.what,
        stress=tuple(each.case.candidate.config.get("stress", ())), message=verdict.message,
        check="" if passed else check, step=None if passed else step,
        acted=any(e.name == "planted" for run in each.each for r in run.ranks for e in r.events),
    )  # fmt: skip


def _alone(held: Sequence[Judged]) -> dict[str, Sight]:
    """The columns, the plain ones from the barest case."""
    pairs = {
        each.variant: (each.runs.reference, each.runs.candidate)
        for each in held
        if each.runs is not None
    }
    plain = pairs.get(BARE) or pairs.get(WHOLE)
    if plain is None:
        return {}
    return seen_plain(*plain) | {STRESSED: seen_stressed(pairs.values())}


def judged(folder: RunFolder, case: CaseSpec) -> Judged | None:
    """A case of a folder with its runs; None while it has no verdict."""
    verdict = folder.load_verdict(case.id)
    if verdict is None or verdict.outcome == "skipped":
        return None if verdict is None else Judged(case=case, verdict=verdict)
    runs = {leg: folder.load_run(getattr(case, leg)) for leg in LEGS}
    return Judged(case=case, verdict=verdict, runs=CaseRuns(case=case, **runs))


def read_row(folder: RunFolder, name: str, *, search: bool) -> Row:
    """The row of a fault, all of whose cases have a verdict; searched for if it was detected."""
    cases = [case for case in folder.cases if case.labels.get(FAULT_LABEL) == name]
    fault = fault_of(cases[0])
    held = {case.id: each for case in cases if (each := judged(folder, case)) is not None}
    row = row_of(fault, list(held.values()))
    if not search or row.status != "detected":
        return row
    chosen = held[to_locate(row, fault)]
    assert chosen.runs is not None
    # Without a run of its own: every module was tapped.
    found = locate(chosen.runs, chosen.verdict)
    layers = chosen.case.candidate.config["model"]["layers"]
    return located(row, fault, found, num_layers=layers)


# ---- the matrix

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Alarm(Json):
    """A clean case that did not pass: a false alarm, or no verdict where there must be one."""

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
        clean: ids of the clean cases that have a verdict.
        skipped: clean cases that cannot be run here.
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
        return tuple(row for row in self.rows if row.counts)

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
        counted = {"detected": (len(detected), len(self.ran))}
        if asked:
            counted |= {
                "phase, module and tensor right": (sum(r.is_named for r in asked), len(asked)),
                "localised exactly, with step and rank": (exactly, len(asked)),
                "localised exactly or near": (exactly + near, len(asked)),
            }
        counted["false alarms on clean cases"] = (len(self.alarms), len(self.clean))
        return {name: bounds(*count, CONFIDENCE) for name, count in counted.items()}

    def to_json(self) -> dict[str, Any]:
        """With the rates, for whoever reads the file."""
        rates = {name: rate.to_json() for name, rate in self.rates().items()}
        return {**super().to_json(), "rates": rates}


def merged(parts: Sequence[Matrix]) -> tuple[Matrix, ...]:
    """One matrix for each device: rows of later parts in place of earlier ones, cases once.

    Shards have rows and cases of their own; a fault that was run again has its last row.
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


def read_matrix(folder: RunFolder, rows: Sequence[Row], wall_s: float) -> Matrix:
    """The matrix of a folder, with rows that were made of it."""
    held = [folder.load_verdict(c.id) for c in folder.cases if CLEAN_LABEL in c.labels]
    verdicts = [verdict for verdict in held if verdict is not None]
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


# ---- the campaign

PATIENCE: Mapping[Device, float] = {"cpu": 1.0, "cuda": 4.0}
"""Limits of setups that end in one are for the CPU: a GPU takes seconds to begin."""
WHY = "Every planted fault must be seen, and nothing said where none is."


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a campaign is to do.

    Attributes:
        faults: to plant.
        clean: number of clean cases.
        device: auto, cpu or cuda.
        shard: I/N, None for all.
        locate: whether to ask the bisector.
        elsewhere: seed of other setups to plant them in; None for their own.
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


def carry_out_campaign(
    asked: Asked, view: "CampaignView", *, argv: Sequence[str]
) -> tuple[Path, Matrix]:
    """Run what is asked; the run folder, and the matrix.

    Raises:
        HarnessError: it cannot be carried out, or was interrupted: `--resume` goes on.
    """
    prepared = _prepared(asked)
    out = asked.resume or asked.out or unused(DEFAULT_OUT / "faults")
    view.out, view.search = out, asked.locate
    done = carry_out(prepared, view, out=out, exit_first=False, argv=argv)
    folder = RunFolder.open(done.folder)
    names = dict.fromkeys(case.labels.get(FAULT_LABEL, "") for case in folder.cases)
    rows = [view.rows[name] for name in names if name]
    return done.folder, read_matrix(folder, rows, done.wall_s)


def _prepared(asked: Asked) -> Prepared:
    slots: dict[str, Any] = {
        "slots": asked.slots, "ranks_per_gpu": asked.ranks_per_gpu, "jobs": asked.jobs,
    }  # fmt: skip
    if asked.resume is not None:
        prepared = prepare(Request(resume=asked.resume, **slots))
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
        raise NothingSelected("no fault and no clean case was asked for")
    return prepare_cases(cases, name="faults", why=WHY, **slots)


def _patient(case: CaseSpec, factor: float) -> CaseSpec:
    specs = {leg: getattr(case, leg) for leg in LEGS}
    longer = {leg: replace(s, timeout_s=s.timeout_s * factor) for leg, s in specs.items()}
    return replace(case, **longer)


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


class CampaignView:
    """Makes a row of verdicts as soon as all cases of a fault are judged; a terminal shows more."""

    out = Path()
    search = True

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self._folder: RunFolder | None = None
        self._due: dict[str, set[str]] = {}
        self._faults: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        return None

    def planned(self, plan: Plan) -> None:
        """Note which cases a row needs."""
        for case in plan.cases:
            if name := case.labels.get(FAULT_LABEL, ""):
                self._faults[case.id] = name
                self._due.setdefault(name, set()).add(case.id)

    def run_started(self, spec: RunSpec) -> None:
        """Nothing."""

    def run_finished(self, outcome: RunOutcome) -> None:
        """Nothing."""

    def judged(self, verdict: Verdict) -> None:
        """Hand on a clean case at once, a fault with its last case."""
        name = self._faults.get(verdict.case_id, "")
        if not name:
            self.clean(verdict)
            return
        self._due[name].discard(verdict.case_id)
        if not self._due[name]:
            self._folder = self._folder or RunFolder.open(self.out)
            self.rows[name] = read_row(self._folder, name, search=self.search)
            self.row(self.rows[name])

    def row(self, row: Row) -> None:
        """A fault has its row."""

    def clean(self, verdict: Verdict) -> None:
        """A clean case has its verdict."""
