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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from harness.bisect.experiments import Bounds, bounds
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
    settings_of,
    variants,
)
from harness.campaign.scoring import Localised, is_named, localised
from harness.codec import Json
from harness.errors import NothingSelected, UsageError, one_line
from harness.faults.catalogue import BASE, CATALOGUE
from harness.faults.fault import Fault, Kind
from harness.machine import describe, resolve_device
from harness.records import CaseSpec, Outcome, RunOutcome, RunSpec, Verdict, What
from harness.runner.launch import Prepared, Request, carry_out, prepare, prepare_cases
from harness.runner.plan import Plan, parse_shard
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
        case: id of the case that the row is of; `under` are its stressors.
        check, what, message: of its verdict.
        planted_step, planted_rank: None where the fault has none.
        detected_step: in which its verdict sees it.
        localised: how well the bisector found it; "" if nobody asked. `location` is what it said.
        is_named: whether phase, module and tensor are right, whatever the step and the rank.
        runs, seconds: of all its cases, shared references included.
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
    answers: tuple[Answer, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it can run here; one whose setup is no scenario counts, as one missed."""
        return self.status != "not run" or self.reason.startswith(BROKEN)


def row_of(fault: Fault, held: Sequence[Judged]) -> Row:
    """The row of a fault from its cases, the barest first; not localised yet."""
    blank = Row(fault=fault.name, kind=fault.kind, source=fault.source, status="not run")
    whole = next(each for each in held if _variant(each.case) == WHOLE)
    if whole.verdict.outcome == "skipped":
        return replace(blank, reason=whole.verdict.message)
    answers = tuple(map(_answer, held))
    shown = next((a for a in answers if _is_detected(fault, a)), None)
    status: Status = "detected"
    reason = ""
    if shown is None:
        shown = next((a for a in answers if a.outcome != "passed"), answers[-1])
        status, reason = _undetected(fault, shown)
        on_gpu = whole.case.candidate.device == "cuda"
        if status == "missed" and on_gpu and RACES in fault.setup.stress:
            # Its own stressor cannot be had here, so this says nothing of what that sees.
            status, reason = "not run", f"the stressor {RACES} needs cpu, and no other sees it here"
    each_run = (getattr(each.runs, leg) for each in held if each.runs is not None for leg in LEGS)
    runs = {run.outcome.key: run.outcome.wall_s for run in each_run}
    step, rank = planted_at(fault, whole.case)
    return replace(
        blank, status=status, reason=reason, case=shown.case, under=shown.stress,
        check=shown.check, what=shown.what, message=shown.message, planted_step=step,
        planted_rank=rank, detected_step=shown.step, runs=len(runs), answers=answers,
        seconds=sum(runs.values()),
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
    how = localised(
        found, fault.points_at, step=row.planted_step, rank=row.planted_rank, num_layers=num_layers
    )
    seen = found.step if row.detected_step is None else row.detected_step
    named = is_named(found, fault.points_at)
    return replace(row, detected_step=seen, location=found, localised=how, is_named=named)


def to_locate(row: Row, fault: Fault) -> str:
    """The case that a search starts from: the whole setup where it fails, as that says most."""
    whole = (a.case for a in row.answers if a.variant == WHOLE and _is_detected(fault, a))
    return next(whole, row.case)


def _variant(case: CaseSpec) -> str:
    return case.labels.get(VARIANT_LABEL, WHOLE)


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
    verdict, runs, candidate = each.verdict, each.runs, each.case.candidate
    step = None if verdict.difference is None else verdict.difference.step
    if step is None and runs is not None:
        ended = [r.error.step for r in runs.candidate.ranks if r.error is not None]
        step = min(ended, default=None)
    ranks = [] if runs is None else [r for leg in LEGS for r in getattr(runs, leg).ranks]
    passed = verdict.outcome == "passed"
    check = BY_NAME.get(verdict.what) or verdict.check.partition(":")[0]
    return Answer(
        variant=_variant(each.case), case=each.case.id, outcome=verdict.outcome, what=verdict.what,
        stress=tuple(candidate.config.get("stress", ())), message=verdict.message,
        check="" if passed else check, step=None if passed else step,
        acted=any(event.name == "planted" for rank in ranks for event in rank.events),
    )  # fmt: skip


def read_row(folder: RunFolder, name: str, *, search: bool) -> Row:
    """The row of a fault, all of whose cases have a verdict; searched for if it was detected."""
    fault, held = CATALOGUE[name], dict[str, Judged]()
    for case in folder.cases:
        verdict = folder.load_verdict(case.id) if case.labels.get(FAULT_LABEL) == name else None
        if verdict is not None:
            runs = None
            if verdict.outcome != "skipped":
                legs = {leg: folder.load_run(getattr(case, leg)) for leg in LEGS}
                runs = CaseRuns(case=case, **legs)
            held[case.id] = Judged(case=case, verdict=verdict, runs=runs)
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
        exact, near = (sum(r.localised == how for r in asked) for how in ("exactly", "near"))
        counted = {"detected": (len(detected), len(self.ran))}
        if asked:
            counted |= {
                "phase, module and tensor right": (sum(r.is_named for r in asked), len(asked)),
                "localised exactly, with step and rank": (exact, len(asked)),
                "localised exactly or near": (exact + near, len(asked)),
            }
        counted["false alarms on clean cases"] = (len(self.alarms), len(self.clean))
        return {name: bounds(*count, CONFIDENCE) for name, count in counted.items()}

    def to_json(self) -> dict[str, Any]:
        """With the rates, for whoever reads the file."""
        rates = {name: rate.to_json() for name, rate in self.rates().items()}
        return {**super().to_json(), "rates": rates}


def merged(parts: Sequence[Matrix]) -> tuple[Matrix, ...]:
    """One matrix for each device: rows of later parts in place of earlier ones, cases once."""
    found = []
    for device in dict.fromkeys(part.device for part in parts):
        held = [part for part in parts if part.device == device]
        rows = {row.fault: row for part in held for row in part.rows}
        order = dict.fromkeys((*CATALOGUE, *rows))
        alarms = {alarm.case: alarm for part in held for alarm in part.alarms}
        found.append(
            Matrix(
                device=device, rows=tuple(rows[name] for name in order if name in rows),
                clean=tuple(dict.fromkeys(name for part in held for name in part.clean)),
                skipped=sum(part.skipped for part in held), alarms=tuple(alarms.values()),
                wall_s=sum(part.wall_s for part in held),
            )
        )  # fmt: skip
    return tuple(found)


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
        patience: factor of the time limits of all runs; None for `PATIENCE`.
    """

    faults: tuple[Fault, ...] = ()
    clean: int = 0
    device: str = "auto"
    shard: str | None = None
    locate: bool = True
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
    held = [folder.load_verdict(c.id) for c in folder.cases if CLEAN_LABEL in c.labels]
    clean = [v for v in held if v is not None and v.outcome != "skipped"]
    alarms = [v for v in clean if v.outcome != "passed"]
    return done.folder, Matrix(
        device=folder.cases[0].candidate.device, rows=tuple(view.rows[n] for n in names if n),
        clean=tuple(verdict.case_id for verdict in clean), wall_s=done.wall_s,
        skipped=sum(verdict is not None for verdict in held) - len(clean),
        alarms=tuple(
            Alarm(case=v.case_id, outcome=v.outcome, what=v.what, message=v.message) for v in alarms
        ),
    )  # fmt: skip


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
    factor = asked.patience or PATIENCE[device]
    cases = plan_cases(asked.faults, asked.clean, device)
    if factor != 1:
        cases = tuple(
            replace(case, **{
                leg: replace(spec, timeout_s=spec.timeout_s * factor)
                for leg in LEGS for spec in [getattr(case, leg)]
            })
            for case in cases
        )  # fmt: skip
    if asked.shard is not None:
        cases = _of_shard(cases, asked.shard)
    if not cases:
        raise NothingSelected("no fault and no clean case was asked for")
    return prepare_cases(cases, name="faults", why=WHY, **slots)


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
    """Makes a row as soon as all cases of a fault are judged.

    Args:
        say: shows a row, or a clean case's verdict, with the numbers of runs made and planned.
    """

    out = Path()
    search = True

    def __init__(self, say: Callable[[Row | Verdict | Plan, int, int], None]) -> None:
        self._say, self._done, self._num_runs = say, 0, 0
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
        self._num_runs = len(plan.runs)
        for case in plan.cases:
            if name := case.labels.get(FAULT_LABEL, ""):
                self._faults[case.id] = name
                self._due.setdefault(name, set()).add(case.id)
        self._say(plan, 0, self._num_runs)

    def run_started(self, spec: RunSpec) -> None:
        """Nothing."""

    def run_finished(self, outcome: RunOutcome) -> None:
        """Count it."""
        self._done += 1

    def judged(self, verdict: Verdict) -> None:
        """Hand on a clean case at once, a fault with its last case."""
        name, said = self._faults.get(verdict.case_id, ""), verdict
        if name:
            self._due[name].discard(verdict.case_id)
            if self._due[name]:
                return
            self._folder = self._folder or RunFolder.open(self.out)
            self.rows[name] = read_row(self._folder, name, search=self.search)
        self._say(self.rows[name] if name else said, self._done, max(self._num_runs, self._done))


# ---- as text: lines, a table in Markdown, and docs/FAULTS.md

HEADERS = ("fault", "class", "source", "seen by", "stressors", "step", "place", "runs", "seconds")
LEGEND = (
    "step: planted in, and how many steps later it was seen. place: how well the bisector found "
    "phase, module, tensor, step and rank."
)
HEAD = """# Planted faults

Every fault below can be planted by name: in a scenario, `plant: {fault: ulp, step: 3, rank: last}`,
or with `harness faults run ulp`. `harness faults show ulp` prints all of its entry and a scenario
to copy. Classes, places and words are those of `harness/faults`; `F` and a number is a known
failure mode of sharded training under graphs.

    harness faults list -k 'streams or F31'
    harness faults run                                   all that this machine can run, minutes
    harness faults table RUN... --write docs/FAULTS.md   makes this page, of runs or their shards
"""
MEASURED = "## Measured"
CATALOGUE_HEADERS = ("fault", "class", "source", "what it is", "shows in", "caught as", "points at")


def fields_of(row: Row) -> tuple[str, ...]:
    """A row's fields, as `HEADERS`; `3 +1` is a step and how much later it was seen."""
    step = ""
    if row.planted_step is not None:
        late = None if row.detected_step is None else row.detected_step - row.planted_step
        step = f"{row.planted_step}" + (" ?" if late is None else f" +{late}" if late else "")
    return (
        row.fault, row.kind, row.source, seen_by(row), "+".join(row.under), step, row.localised,
        str(row.runs), f"{row.seconds:.1f}",
    )  # fmt: skip


def seen_by(row: Row) -> str:
    """`state: diverged`; in capitals what should not be."""
    if row.status != "detected":
        return row.status.upper()
    return row.what if row.check in ("", "records", row.what) else f"{row.check}: {row.what}"


def places_of(row: Row) -> str:
    """Where it is, and what the bisector said, in a line."""
    entry, found = CATALOGUE.get(row.fault), row.location
    due = got = ""
    if entry is not None:
        pointer = entry.points_at
        step = None if row.planted_step is None else row.planted_step + pointer.later
        due = _place(step, pointer.phase, pointer.module, pointer.tensor, row.planted_rank)
    if found is not None:
        tensor = ":".join(filter(None, (found.quantity, found.tensor)))
        got = _place(found.step, found.phase or "", found.module, tensor, found.rank)
        got = got or "; ".join(found.unknown)
    return f"expected {due}; got {got}"


def _place(step: int | None, phase: str, module: str, tensor: str, rank: int | None) -> str:
    parts = {"step": step, "phase": phase, "module": module, "tensor": tensor, "rank": rank}
    return ", ".join(f"{key} {value}" for key, value in parts.items() if value not in (None, ""))


def summary_lines(matrix: Matrix) -> list[str]:
    """The rates with their bounds, what was missed and what was wronged."""
    lines = [f"{name}: {rate}" for name, rate in matrix.rates().items()]
    lines[0] += f"; exact bounds at {CONFIDENCE:.0%} of each rate in brackets"
    lines += [f"not detected: {row.fault}: {one_line(row.reason)}" for row in matrix.missed]
    lines += [
        f"{alarm.outcome} without a fault: {alarm.case}: {alarm.what}: {one_line(alarm.message)}"
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
    return "\n".join([f"# Detection matrix ({matrix.device})", "", *_measured(matrix)]) + "\n"


def _measured(matrix: Matrix) -> list[str]:
    points = [f"- {line}" for line in summary_lines(matrix)]
    return [*points, "", LEGEND, "", *table(HEADERS, map(fields_of, matrix.ran))]


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    lines = ["| " + " | ".join(headers) + " |", "|" + " --- |" * len(headers)]
    shown = ([text.replace("|", "\\|") for text in row] for row in rows)
    return lines + ["| " + " | ".join(row) + " |" for row in shown]


def document(matrices: Sequence[Matrix]) -> str:
    """docs/FAULTS.md: the catalogue as it is, and what matrices measured."""
    kinds = [fault.kind for fault in CATALOGUE.values()]
    count = ", ".join(f"{kinds.count(kind)} of {kind}" for kind in get_args(Kind))
    lines = [HEAD, f"{len(CATALOGUE)} faults: {count}.", ""]
    lines += table(CATALOGUE_HEADERS, map(entry_of, CATALOGUE.values()))
    for matrix in matrices:
        lines += ["", f"{MEASURED} ({matrix.device})", "", *_measured(matrix)]
    return "\n".join(lines) + "\n"


def measured_in(text: str) -> str:
    """The part of a page that says what was measured."""
    start = text.find(f"\n{MEASURED}")
    return "" if start < 0 else text[start:]


def entry_of(fault: Fault) -> tuple[str, ...]:
    """A fault's fields, as `CATALOGUE_HEADERS`; what it shows in is its setup, over `BASE`."""
    settings, setup = settings_of(fault, variants(fault)[-1], taps=False), fault.setup
    other = [
        f"{key} {_short(value)}"
        for key, value in settings.items()
        if key != "parallel" and (key not in BASE or BASE[key] != value)
    ]
    stress = [f"under {'+'.join(setup.stress)}"] if setup.stress else []
    graph = "+".join(setup.graph) or "eager"
    shows = ", ".join([_short(settings["parallel"]), graph, *other, *stress])
    devices = "" if "cpu" in fault.devices else f" ({', '.join(fault.devices)})"
    pointer = fault.points_at
    return (
        fault.name, fault.kind, fault.source, fault.description, shows + devices,
        ", ".join(fault.expects),
        ": ".join(filter(None, (pointer.phase, pointer.tensor or pointer.module))),
    )  # fmt: skip


def _short(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {inner}" for key, inner in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
