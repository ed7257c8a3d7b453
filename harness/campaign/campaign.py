"""A campaign: every planted fault next to many clean cases, with bounds on both rates.

    asked -> cases -> launch.carry_out -> a row for each fault, with its place -> Matrix

A row says what became of one fault:

    detected    a check of a case of it failed, in one of the words that its entry expects
    misjudged   something failed, or gave no verdict, in other words: entry or harness is wrong
    missed      every case of it passed
    not run     it cannot be planted here, and why

It is of the barest case that detects it: no stressor before one, one before several. Everything is
read back from the run folder, so a campaign that was killed goes on with `--resume`.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harness.bisect.found import Location
from harness.bisect.locate import locate
from harness.campaign.cases import (
    BROKEN,
    CLEAN_LABEL,
    FAULT_LABEL,
    RACES,
    VARIANT_LABEL,
    WHOLE,
    plan_cases,
)  # fmt: skip
from harness.engine.machine import describe_machine, resolve_device
from harness.errors import NothingSelected, UsageError, one_line
from harness.faults.catalogue import CATALOGUE, Fault, Pointer
from harness.records import CaseSpec, Verdict, What
from harness.runner.launch import Prepared, Request, carry_out, prepare, prepare_cases
from harness.runner.plan import Plan
from harness.runner.run import View
from harness.store import LEGS, CaseRuns, RunFolder
from harness.store.folder import DEFAULT_OUT, unused
from harness.terminal import markdown_table
from harness.values import Json

# ---- where a search ended, against where the fault was planted

# exactly: phase, module and tensor match the entry's pointer, as far as it names them; the step is
# that of the plant, or `later` as the pointer says, and the rank too, where the plant has them.
# near: in the step of the plant, one later or none that is known, and in the same layer or outer
# module, if the pointer names one, else in the same phase, or on the plant's rank.
# no: anything else. A tensor may be named with or without its quantity (`grads:`), a call of a tap
# with or without its number (`[0]`).
Localised = Literal["", "exactly", "near", "no"]
"""Empty where nobody asked."""
_PART = re.compile(r"layers\.\d+|embedding|norm|head")


def localised(
    found: Location, pointer: Pointer, *, step: int | None, rank: int | None
) -> Localised:
    """Compare an answer with the truth.

    Args:
        found: the bisector's answer.
        pointer: of the catalogue's entry.
        step: in which the fault was planted, None if it has no step.
        rank: on which, None if it acts on all of them, or on none in particular.
    """
    step = None if step is None else step + pointer.later
    on_rank = rank is None or found.rank == rank
    named = (
        found.phase == pointer.phase
        and fnmatchcase(found.module, pointer.module or "*")
        and any(fnmatchcase(name, pointer.tensor or "*") for name in _names(found))
    )
    if named and on_rank and step in (None, found.step):
        return "exactly"
    if step is not None and found.step is not None and found.step not in (step, step + 1):
        return "no"
    if pointer.module or pointer.tensor:
        due = _PART.search(f"{pointer.module} {pointer.tensor}")
        got = _PART.search(f"{found.module} {found.tensor}")
        return "near" if due and got and due[0] == got[0] else "no"
    is_near = found.phase == pointer.phase or (rank is not None and on_rank)
    return "near" if is_near else "no"


def _names(found: Location) -> list[str]:
    plain = found.tensor.partition("[")[0]
    group, colon, rest = plain.partition(":")
    names = [found.tensor, plain]
    names += [rest] if colon and group in ("grads", "weights", "optim", "rng") else []
    return names + [f"{found.quantity}:{name}" for name in names[:2] if found.quantity]


# --- rates ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bounds(Json):
    """Exact (Clopper-Pearson) bounds on a rate of which `successes` in `trials` were seen."""

    low: float
    high: float
    successes: int
    trials: int

    def __str__(self) -> str:
        """As a table has it: `19/20 (75.1 to 99.9 %)`, rounded outwards."""
        low, high = math.floor(self.low * 1000) / 10, math.ceil(self.high * 1000) / 10
        return f"{self.successes}/{self.trials} ({low:g} to {high:g} %)"


@functools.cache
def bounds(successes: int, trials: int, confidence: float) -> Bounds:
    """The bounds between which the rate lies with a confidence, whatever it is."""

    def least(n: int) -> float:
        """The rate of which `n` successes or more are just too rare; 0 for none."""
        low, high, log = 0.0, 1.0, math.lgamma
        while n and low < (rate := (low + high) / 2) < high:
            tail = math.fsum(
                math.exp(log(trials + 1) - log(k + 1) - log(trials - k + 1)
                         + k * math.log(rate) + (trials - k) * math.log1p(-rate))
                for k in range(n, trials + 1)
            )  # fmt: skip
            low, high = (rate, high) if tail < (1 - confidence) / 2 else (low, rate)
        return low

    high = 1 - least(trials - successes)
    return Bounds(low=least(successes), high=high, successes=successes, trials=trials)


# ---- rows

BY_NAME: Mapping[What, str] = {"stale_address": "ledger", "stale_guards": "guards", "race": "races"}
"""What says it, where no check compares anything."""


class Judged(NamedTuple):
    """A case with its verdict and the runs that it was judged by; no runs if it was skipped."""

    case: CaseSpec
    verdict: Verdict
    runs: CaseRuns | None = None

    @property
    def acted(self) -> bool:
        """Whether a rank says that it planted the fault."""
        ranks = [rank for leg in LEGS if self.runs for rank in getattr(self.runs, leg).ranks]
        return any(rank.said("planted") for rank in ranks)

    @property
    def step(self) -> int | None:
        at, ranks = self.verdict.difference, self.runs.candidate.ranks if self.runs else ()
        if at is not None and at.step is not None:
            return at.step
        return min((r.error.step for r in ranks if r.error is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Row(Json):
    """What became of one fault.

    Attributes:
        reason: why it was not run, or not detected; "" for a detected one.
        case: id of the case that the row is of; `under` are its stressors.
        check, what, message: of its verdict.
        planted_step, planted_rank: None where the fault has none.
        detected_step: in which its verdict sees it.
        localised: how well the bisector found it; "" if nobody asked. `location` is what it said.
        runs, seconds: of all its cases, shared references included.
    """

    fault: str
    status: Literal["detected", "misjudged", "missed", "not run"]
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
    location: Location | None = None
    runs: int = 0
    seconds: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether it can run here; one whose setup is no scenario counts, as one missed."""
        return self.status != "not run" or self.reason.startswith(BROKEN)


def row_of(
    fault: Fault,
    held: Sequence[Judged],
    search: Callable[[CaseRuns, Verdict], Location] | None = None,
) -> Row:
    """The row of a fault from its cases, the barest first; searched for if it was detected."""
    whole = next(each for each in held if each.case.labels[VARIANT_LABEL] == WHOLE)
    if whole.verdict.outcome == "skipped":
        return Row(fault=fault.name, status="not run", reason=whole.verdict.message)
    seen = [each for each in held if _is_detected(fault, each)]
    failed = [each for each in held if each.verdict.outcome != "passed"]
    shown = (seen or failed or held[-1:])[0]
    verdict, candidate = shown.verdict, shown.case.candidate
    each_run = [getattr(e.runs, leg) for e in held if e.runs is not None for leg in LEGS]
    runs = {run.outcome.key: run.outcome.wall_s for run in each_run}
    plant = next(p for leg in LEGS if (p := getattr(whole.case, leg).plant) is not None)
    row = Row(
        fault=fault.name, status="detected", case=shown.case.id, what=verdict.what,
        under=tuple(candidate.config.get("stress", ())), message=verdict.message,
        check=BY_NAME.get(verdict.what) or verdict.check.partition(":")[0],
        planted_step=plant.step if "step" in fault.takes else None,
        planted_rank=None if fault.everywhere else plant.rank % candidate.world_size,
        detected_step=shown.step, runs=len(runs), seconds=sum(runs.values()),
    )  # fmt: skip
    if not seen:
        return replace(row, **_undetected(fault, shown))
    # From the whole setup where it fails, as that says most.
    start = whole if whole in seen else shown
    if search is None or start.runs is None:
        return row
    found = search(start.runs, start.verdict)
    how = localised(found, fault.points_at, step=row.planted_step, rank=row.planted_rank)
    step = found.step if row.detected_step is None else row.detected_step
    return replace(row, detected_step=step, location=found, localised=how)


def _is_detected(fault: Fault, each: Judged) -> bool:
    verdict = each.verdict
    if verdict.what in ("crashed", "hang") and "step" in fault.takes and not each.acted:
        # It ended of something else: of a mistake in the plant, or a slow machine. What has no step
        # may act after the last record, where nothing can be said.
        return False
    return verdict.outcome in ("failed", "incomparable") and verdict.what in fault.expects


def _undetected(fault: Fault, shown: Judged) -> dict[str, Any]:
    verdict, candidate = shown.verdict, shown.case.candidate
    if verdict.outcome != "passed":
        acted = "" if shown.acted else ", before it was planted"
        got = f"{verdict.outcome} {verdict.what}{acted}: {verdict.message}"
        reason = f"expected {' or '.join(fault.expects)}, got {got}"
        return {"status": "misjudged", "reason": reason}
    if candidate.device == "cuda" and RACES in fault.setup.stress:
        # Its own stressor cannot be had here, so this says nothing of what that sees.
        reason = f"the stressor {RACES} needs cpu, and no other sees it here"
        return {"status": "not run", "reason": reason}
    reason = "planted, and no check failed" if shown.acted else "never planted"
    return {"status": "missed", "reason": reason, "check": ""}


def read_row(folder: RunFolder, name: str, *, search: bool) -> Row:
    """The row of a fault, all of whose cases have a verdict."""
    held = []
    for case in folder.cases:
        verdict = folder.load_verdict(case.id) if case.labels.get(FAULT_LABEL) == name else None
        if verdict is not None:
            legs = {leg: folder.load_run(getattr(case, leg)) for leg in LEGS
                    if verdict.outcome != "skipped"}  # fmt: skip
            held.append(Judged(case, verdict, CaseRuns(case=case, **legs) if legs else None))
    # Without a run of its own: every module was tapped.
    return row_of(CATALOGUE[name], held, locate if search else None)


# ---- the matrix

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Matrix(Json):
    """What was found.

    Attributes:
        rows: one a fault, in the order of the catalogue.
        clean: ids of the clean cases that have a verdict; `skipped` more cannot be run here.
        alarms: verdicts of those of `clean` that did not pass: false alarms, or none where there
            must be one.
        wall_s: of the runs of the campaign.
    """

    device: str
    rows: tuple[Row, ...]
    clean: tuple[str, ...]
    skipped: int
    alarms: tuple[Verdict, ...]
    wall_s: float = 0.0

    @property
    def ran(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.counts)

    @property
    def missed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.ran if row.status != "detected")

    def rates(self) -> dict[str, Bounds]:
        """Detected, localised and wronged, each with its exact bounds."""
        detected = [row for row in self.ran if row.status == "detected"]
        asked = [row for row in detected if row.localised]
        exact, near = (sum(r.localised == how for r in asked) for how in ("exactly", "near"))
        counted = {"detected": (len(detected), len(self.ran))}
        if asked:
            counted |= {
                "localised exactly, with step and rank": (exact, len(asked)),
                "localised exactly or near": (exact + near, len(asked)),
            }
        counted["false alarms on clean cases"] = (len(self.alarms), len(self.clean))
        return {name: bounds(*count, CONFIDENCE) for name, count in counted.items()}

    def to_json(self) -> dict[str, Any]:
        """With the rates, for whoever reads the file."""
        rates = {name: rate.to_json() for name, rate in self.rates().items()}
        return {**super().to_json(), "rates": rates}


# ---- the campaign


def carry_out_campaign(
    faults: Sequence[Fault],
    clean: int,
    say: Callable[[Row | Verdict | Plan, int, int], None],
    *,
    argv: Sequence[str],
    **options: Any,
) -> tuple[Path, Matrix]:
    """Plant faults, and run so many cases without any; the run folder, and the matrix.

    Args:
        say: shows a row, or a clean case's verdict, with the numbers of runs made and planned.
        options: those of `harness faults run`, by their names; None for what was not given.

    Raises:
        HarnessError: it cannot be carried out, or was interrupted: `--resume` goes on.
    """
    out = options["resume"] or options["out"] or unused(DEFAULT_OUT / "faults")
    view = _View(out, say, search=not options["no_locate"])
    prepared = _prepared(faults, clean, **options)
    done = carry_out(prepared, view, out=out, exit_first=False, argv=argv)
    folder = RunFolder.open(done.folder)
    held = [folder.load_verdict(c.id) for c in folder.cases if CLEAN_LABEL in c.labels]
    judged = [v for v in held if v is not None and v.outcome != "skipped"]
    return done.folder, Matrix(
        device=folder.cases[0].candidate.device, rows=tuple(view.rows[name] for name in view.due),
        clean=tuple(verdict.case_id for verdict in judged), wall_s=done.wall_s,
        skipped=sum(verdict is not None for verdict in held) - len(judged),
        alarms=tuple(verdict for verdict in judged if verdict.outcome != "passed"),
    )  # fmt: skip


def _prepared(
    faults: Sequence[Fault], clean: int, *, device: str, patience: float | None,
    resume: Path | None, out: Path | None, no_locate: bool, **slots: Any,
) -> Prepared:  # fmt: skip
    if resume is not None:
        prepared = prepare(Request(resume=resume, **slots))
        if not any({FAULT_LABEL, CLEAN_LABEL} & set(c.labels) for c in prepared.plan.cases):
            raise UsageError(f"--resume {resume}: expected the folder of a matrix of faults")
        return prepared
    here = resolve_device(device, describe_machine())
    # Setups that end in a limit are for the CPU, and a GPU takes seconds to begin.
    factor = patience or (4.0 if here == "cuda" else 1.0)
    cases = [
        replace(case, **{
            leg: replace(spec, timeout_s=spec.timeout_s * factor)
            for leg in LEGS for spec in [getattr(case, leg)]
        })
        for case in plan_cases(faults, clean, here)
    ]  # fmt: skip
    if not cases:
        raise NothingSelected("no fault and no clean case was asked for")
    why = "Every planted fault must be seen, and nothing said where none is."
    return prepare_cases(cases, name="faults", why=why, **slots)


class _View(View):
    """Makes a row as soon as all cases of a fault are judged, and says clean cases at once."""

    def __init__(self, out: Path, say: Callable[..., None], *, search: bool) -> None:
        self._out, self._say, self._search = out, say, search
        self._done, self._num_runs = 0, 0
        self._folder: RunFolder | None = None
        self._faults: dict[str, str] = {}
        self.rows: dict[str, Row] = {}
        self.due: dict[str, set[str]] = {}

    def planned(self, plan: Plan) -> None:
        self._num_runs = len(plan.runs)
        for case in plan.cases:
            if name := case.labels.get(FAULT_LABEL, ""):
                self._faults[case.id] = name
                self.due.setdefault(name, set()).add(case.id)
        self._say(plan, 0, self._num_runs)

    def run_finished(self, outcome: object) -> None:
        self._done += 1

    def judged(self, verdict: Verdict) -> None:
        name, said = self._faults.get(verdict.case_id, ""), verdict
        if name:
            self.due[name].discard(verdict.case_id)
            if self.due[name]:
                return
            self._folder = self._folder or RunFolder.open(self._out)
            self.rows[name] = read_row(self._folder, name, search=self._search)
        self._say(self.rows[name] if name else said, self._done, max(self._num_runs, self._done))


# ---- as text: lines, and tables in Markdown

HEADERS = ("fault", "class", "source", "seen by", "stressors", "step", "place", "runs", "seconds")
LEGEND = (
    "step: planted in, and how many steps later it was seen. place: how well the bisector found "
    "phase, module, tensor, step and rank."
)
CATALOGUE_HEADERS = ("fault", "class", "source", "what it is", "shows in", "caught as", "points at")


def fields_of(row: Row) -> tuple[str, ...]:
    """A row's fields, as `HEADERS`; `3 +1` is a step and how much later it was seen."""
    step, fault = "", CATALOGUE[row.fault]
    if row.planted_step is not None:
        late = None if row.detected_step is None else row.detected_step - row.planted_step
        step = f"{row.planted_step}" + (" ?" if late is None else f" +{late}" if late else "")
    return (
        row.fault, fault.kind, fault.source, seen_by(row), "+".join(row.under), step,
        row.localised, str(row.runs), f"{row.seconds:.1f}",
    )  # fmt: skip


def seen_by(row: Row) -> str:
    """`state: diverged`; in capitals what should not be."""
    if row.status != "detected":
        return row.status.upper()
    return row.what if row.check in ("", "records", row.what) else f"{row.check}: {row.what}"


def places_of(row: Row) -> str:
    """Where it is, and what the bisector said, in a line."""
    pointer, found = CATALOGUE[row.fault].points_at, row.location or Location()
    step = None if row.planted_step is None else row.planted_step + pointer.later
    due = _place(step, pointer.phase, pointer.module, pointer.tensor, row.planted_rank)
    tensor = ":".join(filter(None, (found.quantity, found.tensor)))
    got = _place(found.step, found.phase or "", found.module, tensor, found.rank)
    return f"expected {due}; got {got or '; '.join(found.unknown)}"


def _place(step: int | None, phase: str, module: str, tensor: str, rank: int | None) -> str:
    parts = {"step": step, "phase": phase, "module": module, "tensor": tensor, "rank": rank}
    return ", ".join(f"{key} {value}" for key, value in parts.items() if value not in (None, ""))


def summary_lines(matrix: Matrix) -> list[str]:
    """The rates with their bounds, what was missed and what was wronged."""
    lines = [f"{name}: {rate}" for name, rate in matrix.rates().items()]
    lines[0] += f"; exact bounds at {CONFIDENCE:.0%} of each rate in brackets"
    lines += [f"not detected: {row.fault}: {one_line(row.reason)}" for row in matrix.missed]
    lines += [
        f"{alarm.outcome} without a fault: {alarm.case_id}: {alarm.what}: {one_line(alarm.message)}"
        for alarm in matrix.alarms
    ]
    unsure = [row for row in matrix.ran if row.localised in ("near", "no")]
    lines += [f"place {row.localised}: {row.fault}: {places_of(row)}" for row in unsure]
    left = [row for row in matrix.rows if not row.counts]
    lines += [f"not run: {row.fault}: {one_line(row.reason)}" for row in left]
    if matrix.skipped:
        lines.append(f"clean cases that cannot be run here: {matrix.skipped}")
    return lines


def markdown(matrix: Matrix) -> str:
    """The page of a run folder."""
    points = [f"- {line}" for line in summary_lines(matrix)]
    rows = markdown_table(HEADERS, map(fields_of, matrix.ran))
    heading = f"# Detection matrix ({matrix.device})"
    return "\n".join([heading, "", *points, "", LEGEND, "", *rows]) + "\n"


def entry_of(fault: Fault) -> tuple[str, ...]:
    """A fault's fields, as `CATALOGUE_HEADERS`."""
    pointer = fault.points_at
    place = ": ".join(filter(None, (pointer.phase, pointer.tensor or pointer.module)))
    return (
        fault.name, fault.kind, fault.source, fault.description, fault.setup.words,
        ", ".join(fault.expects), place,
    )  # fmt: skip
