"""A run folder read into one `Report`, which every format shows.

Runs are read once, however many cases share them, and texts are cleaned for showing. The order of
cases is failures first; within an outcome, the plan's. A case that was planned and has no verdict
gets one that says so: a report must not be green because something is missing from it.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from harness.bisect.render import known_of
from harness.checks import exit_code
from harness.checks.evidence import count, different_leaves
from harness.checks.judge import confirmation_words
from harness.checks.memory import peak_bytes
from harness.errors import HarnessError
from harness.history.ledger import HISTORY_FOLDER, NOT_WRITTEN_FILE, History, machine_kind
from harness.history.trend import (
    CaseTrend,
    Flaky,
    flaky_cases,
    letter_of,
    shift_text,
    trends,
    turning_point,
)
from harness.provenance import fingerprint
from harness.records import CaseSpec, CheckResult, Json, Outcome, RunResult, Verdict
from harness.runner.plan import MIB, Cost, Timeline, cost
from harness.runner.run import Attempt, earlier_attempts
from harness.store import LEGS as ROLES
from harness.store import VERDICT_FILE, RunFolder, load_run_folder
from harness.store.files import read_tail
from harness.store.folder import bisect_line, verified
from harness.terminal import duration
from reports.compared import LossCurve, StateMap, loss_curve, losses, state_map
from reports.text import TAIL_BYTES, clean, one_line, tail

OUTCOME_ORDER: tuple[Outcome, ...] = ("failed", "error", "incomparable", "passed", "skipped")
SYMBOLS: dict[Outcome, str] = {
    "passed": "✓", "failed": "✗", "error": "!", "incomparable": "≠", "skipped": "–",
}  # fmt: skip
GREEN: tuple[Outcome, ...] = ("passed", "skipped")
NOT_RECORDED = "not recorded"
MAX_CAUSE_CHARS, MAX_SCENARIO_CHARS, MOST_NAMES = 160, 1_000_000, 4
_SEPARATORS = re.compile(r"[-_.]+")  # all the same in the name of a package


# --- what the history says of the cases: only runs up to the report's own are looked at, so that
# a report made again says the same

MAX_RUNS = 14
"""Runs of a strip and of a sparkline: two weeks of nightly runs say whether it is new."""
MOST_DAYS, MOST_ANSWERS = 60, 14_000
"""That are looked at for lasting changes: days, and answers of all cases, which take seconds."""
LETTERS = {outcome: outcome[0] for outcome in OUTCOME_ORDER}


@dataclass(frozen=True, kw_only=True)
class CasePast:
    """One case over the last runs, oldest first."""

    letters: str  # one an outcome, see `LETTERS`
    step_us: tuple[int | None, ...]  # None where nothing was measured
    peak_kib: tuple[int | None, ...]
    words: tuple[str, ...]  # since when it fails, lasting changes, what the machine failed


@dataclass(frozen=True, kw_only=True)
class Past:
    """The history of a report's cases; `note` says why it cannot be read, "" if it can."""

    cases: dict[str, CasePast]
    flaky: tuple[Flaky, ...]
    note: str = ""


NOTHING = Past(cases={}, flaky=())


def look_back(place: Path, scenario: str, created: str, num_cases: int) -> Past:
    """The last runs of a scenario's cases, up to when a folder of so many was `created`."""
    if not place.exists():
        return NOTHING
    days = min(MOST_DAYS, max(MAX_RUNS, MOST_ANSWERS // max(1, num_cases)))
    try:
        found = trends(History.open(place), scenario, days=days, until=created)
    except HarnessError as error:
        return Past(cases={}, flaky=(), note=one_line(f"no history is shown: {error}"))
    cases = {trend.case_id: _past_of(trend) for trend in found}
    return Past(cases=cases, flaky=flaky_cases(found))


def _past_of(trend: CaseTrend) -> CasePast:
    answers = trend.answers[-MAX_RUNS:]
    words = [turning_point(trend)[0]] * (trend.first_bad is not None)
    words += map(shift_text, trend.shifts)
    if again := [answer for answer in answers if answer.retried]:
        tried = ", ".join(again[-1].retried)
        words.append(f"tried again in {count(len(again), 'run')}: {tried}")
    steps, peaks = ([getattr(a, name) for a in answers] for name in ("step_s", "peak_bytes"))
    return CasePast(
        letters="".join(LETTERS[answer.outcome] for answer in answers),
        step_us=tuple(None if step is None else round(step * 1e6) for step in steps),
        peak_kib=tuple(None if peak is None else round(peak / 1024) for peak in peaks),
        words=tuple(one_line(text, 300) for text in words),
    )


# --- one case -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Output(Json):
    """The end of what one rank of a run printed."""

    role: str
    rank: int
    text: str


@dataclass(frozen=True, kw_only=True)
class About(Json):
    """What a case is about; the version is the one that its candidate recorded, "" if none."""

    package: str
    version: str
    combination: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CaseReport:
    """One case, ready to be shown. Mappings are by role: reference, control, candidate."""

    spec: CaseSpec
    verdict: Verdict
    message: str
    command: str  # runs the case again
    bisect: str  # finds the cause of a failure, "" where there is none to find
    curve: LossCurve | None
    state: StateMap | None  # what differs by step and rank, of a case that did not pass
    peaks: dict[str, dict[int, int]]  # peak memory in bytes, by rank
    addresses: dict[str, str]  # what graphs hold on to, and which tensors moved, in words
    environments: dict[str, str]  # letters of the environments of the ranks
    environment_note: str
    output: Output | None
    cost: Cost
    attempts: dict[str, tuple[Attempt, ...]] = field(default_factory=dict)  # but the one judged
    about: About | None = None
    known: tuple[tuple[str, str], ...] = ()  # what `harness bisect` has found of it: name, text

    @property
    def outcome(self) -> Outcome:
        return self.verdict.outcome

    @property
    def checks(self) -> tuple[CheckResult, ...]:
        """Results of the checks, worst first."""
        return tuple(sorted(self.verdict.checks, key=lambda c: OUTCOME_ORDER.index(c.outcome)))

    @property
    def attempt_words(self) -> str:
        """'passed on attempt 2 (candidate: port_in_use)'; "" if none was failed or killed."""
        causes = {role: [a.cause for a in own if a.cause] for role, own in self.attempts.items()}
        told = [f"{role}: {f'{number} x ' * (number > 1)}{cause}" for role, own in causes.items()
                for cause, number in Counter(own).items()]  # fmt: skip
        most = max(map(len, causes.values()), default=0)
        return f"{self.outcome} on attempt {most + 1} ({', '.join(told)})" if most else ""

    @property
    def confirmation(self) -> str:
        """Whether the difference came again, on one line; "" if nobody asked."""
        found = self.verdict.confirmation
        return "" if found is None else one_line(confirmation_words(found))

    @property
    def place(self) -> list[str]:
        """The first difference in lines: where, both values, distance; [] if there is none."""
        if (place := self.verdict.difference) is None:
            return []
        when = f"step {place.step}" if place.step >= 0 else "before step 0"
        at = f"{when}, rank {place.rank}, {place.quantity}{place.tensor and ' of ' + place.tensor}"
        told = [at, f"reference {place.reference}", f"candidate {place.candidate}"]
        return [*told, *[f"distance  {place.ulps} ulp"] * (place.ulps is not None)]

    @property
    def where(self) -> str:
        """Place of the first difference, on one line; "" if there is none."""
        return one_line(next(iter(self.place), ""), 300)

    @property
    def cause(self) -> str:
        """What cases that fail for one reason share: fields of the verdict, or its message.

        `layers.3.attn` and `layers.7.attn` that both differ are one cause until somebody looked.
        """
        return re.sub(r"\d+", "N", self.reason) if self._fields else self.reason

    @property
    def reason(self) -> str:
        """`cause` with its numbers: ranks, steps, layers and lines."""
        return one_line(self._fields or self.message, MAX_CAUSE_CHARS)

    @property
    def _fields(self) -> str:
        place, ended = self.verdict.difference, self.verdict.ending
        if ended is not None and (ended.exception or ended.signal or ended.collective):
            due = "" if ended.collective is None else f"in {ended.collective.expected}"
            told = (ended.exception or ended.signal, due, ended.phase and f"in {ended.phase}")
            at = ended.raised_at and f"at {ended.raised_at}"
            return " ".join(filter(None, (*told, ended.module, at))).removeprefix("in ")
        if ended is not None or place is None:
            return ""
        return f"{place.quantity} of {place.tensor}" if place.tensor else place.quantity


class Cause(NamedTuple):
    """Cases that seem to have failed for one reason; `words` is what they share."""

    outcome: Outcome
    what: str
    words: str
    cases: tuple[CaseReport, ...]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Cases by axes: a column for each compared value, a row for the values of the other axes."""

    axis: str  # the compared one
    row_axes: tuple[str, ...]  # of the others that vary; () if cases have other axes each
    columns: tuple[str, ...]  # values of `axis`
    rows: tuple[str, ...]  # in the plan's order
    cases: dict[tuple[str, str], tuple[CaseReport, ...]]  # by row and column


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole run folder; "" for what is unknown."""

    folder: Path
    scenario: str
    why: str
    created: str  # ISO 8601
    commit: str  # of the code under test
    machine: str  # '8 cores, 4 x NVIDIA H200'
    wall_s: float  # seconds with runs under way, however many at a time
    command_line: str
    exit_code: int
    counts: dict[Outcome, int]
    cases: tuple[CaseReport, ...]
    matrix: Matrix
    environments: dict[str, Mapping[str, Any]]  # every distinct fingerprint by its letter
    history_note: str  # why the run is not in the history
    notes: tuple[str, ...]  # what selections left out
    past: Past = NOTHING  # what the history says of the cases

    @property
    def headline(self) -> str:
        """Counts in words, worst first, or that there was nothing."""
        return ", ".join(f"{n} {o}" for o, n in self.counts.items() if n) or "nothing ran"

    @property
    def wall(self) -> str:
        """The seconds in words; "" if none are known."""
        return duration(self.wall_s) if 0 < self.wall_s < float("inf") else ""

    @property
    def causes(self) -> tuple[Cause, ...]:
        """What did not pass, by cause: those of failures first, then by how many cases have it."""
        causes, found = list[Cause](), dict[tuple[Outcome, str, str], list[CaseReport]]()
        for case in (case for case in self.cases if case.outcome not in GREEN):
            found.setdefault((case.outcome, case.verdict.what, case.cause), []).append(case)
        for (outcome, what, words), cases in found.items():
            same = all(case.reason == cases[0].reason for case in cases)
            causes.append(Cause(outcome, what, cases[0].reason if same else words, tuple(cases)))
        return tuple(sorted(causes, key=lambda c: (OUTCOME_ORDER.index(c.outcome), -len(c.cases))))

    @property
    def caution(self) -> str:
        """Why times are not those of the programs alone; "" if nothing is known."""
        if any(case.cost.shares_gpus for case in self.cases):
            return "Ranks shared GPUs: step times mean nothing."
        if any(case.cost.concurrent for case in self.cases):
            return "Several runs were under way at a time: step times are those of a busy machine."
        return ""


# --- the table of costs -----------------------------------------------------------------------

COST_HEAD = (
    "case", "losses", "digests", "peak, MiB", "peak ratio", "step, ms", "speed", "A/A speed",
)  # fmt: skip


def cost_rows(report: Report) -> list[tuple[str, ...]]:
    """A row for each case whose candidate was measured, as text, in the report's order."""
    rows, both = [], ("reference", "candidate")
    for case in report.cases:
        found = case.cost
        if not found.peak_bytes.get("candidate"):
            continue
        peaks = [found.peak_bytes.get(role) for role in both]
        steps = [found.step_s.get(role) for role in both]
        ratios = (found.memory, found.speed, found.control_speed)
        memory, *speeds = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        rows.append((
            case.spec.id, _compared(case, "loss", "pairs"), _compared(case, "state", "digests"),
            " → ".join(f"{peak / MIB:.1f}" if peak else "?" for peak in peaks), memory,
            " → ".join(f"{s * 1e3:.4g}" if s else "?" for s in steps) if any(steps) else "",
            *speeds,
        ))  # fmt: skip
    return rows


def _compared(case: CaseReport, check: str, what: str) -> str:
    """'25,600 equal', '3 of 48 pairs differ', or what the check said; "" if it was not asked."""
    result = next((r for r in case.verdict.checks if r.check == check), None)
    if result is None:
        return ""
    number, differing = result.figures.get(what), result.figures.get("differing_pairs")
    if result.outcome == "passed" and number is not None and differing == 0:
        return f"{number:,.0f} equal"
    if not differing:
        return result.what or result.outcome
    pairs = result.figures.get("pairs")
    return f"{differing:,.0f}{f' of {pairs:,.0f}' if pairs else ''} pairs differ"


def summarise(path: Path, history: Path | None = None) -> Report:
    """Read a run folder into a `Report` (`UsageError`: it is none, or damaged beyond reading).

    `history` is where earlier runs are looked up; None for the history next to the folder.
    """
    read = _Reading(RunFolder.open(path))
    folder, manifest = read.folder, read.folder.manifest
    planned = [read.case(spec) for spec in folder.cases]
    name = read.scenario.get("name") or (planned[0].spec.scenario if planned else "scenario")
    name, created = one_line(str(name), 200), one_line(str(manifest.get("created", "")), 60)
    outcomes = [case.outcome for case in planned]
    unwritten = read_tail(folder.path / NOT_WRITTEN_FILE, TAIL_BYTES)
    return Report(
        folder=folder.path, scenario=name, why=one_line(str(read.scenario.get("why", ""))),
        created=created, commit=one_line(str(manifest.get("commit") or ""), 80),
        machine=one_line(_machine(manifest), 120), wall_s=read.timeline.wall_s,
        command_line=_command_line(manifest),
        exit_code=int(exit_code([case.verdict for case in planned])),
        counts={outcome: outcomes.count(outcome) for outcome in OUTCOME_ORDER},
        cases=tuple(sorted(planned, key=lambda case: OUTCOME_ORDER.index(case.outcome))),
        matrix=_matrix(planned, _compare_axis(read.scenarios, planned)),
        environments=read.environments,
        history_note=one_line(unwritten.decode(errors="replace"), 400),
        notes=tuple(one_line(str(note), 400) for note in manifest.get("notes") or ()),
        past=look_back(history or folder.path.parent / HISTORY_FOLDER, name, created, len(planned)),
    )  # fmt: skip


class _Reading:
    """A run folder in memory: its runs and attempts by key, its environments by letter."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.runs: dict[str, RunResult] = {}
        self.environments: dict[str, Mapping[str, Any]] = {}
        self.scenario = _scenario(folder.scenario_text)
        parts = [_scenario(str(part["text"])) for part in self.scenario.get("scenarios", ())]
        self.scenarios = parts or [self.scenario]
        for case in folder.cases:
            for role in ROLES:
                spec = getattr(case, role)
                if spec.key not in self.runs:
                    self.runs[spec.key] = load_run_folder(folder.leg_folder(case, role), spec)
        self.timeline = Timeline(self.runs.values())
        self._losses = {key: losses(run) for key, run in self.runs.items()}
        self._attempts = {key: earlier_attempts(folder, run.spec) for key, run in self.runs.items()}

    def case(self, spec: CaseSpec) -> CaseReport:
        """What is shown of one case."""
        runs = {role: self.runs[getattr(spec, role).key] for role in ROLES}
        place, verdict = self.folder.case_folder(spec.id), self._verdict(spec)
        command = f"harness rerun {shlex.quote(str(place))}"
        attempts = {role: self._attempts[run.spec.key] for role, run in runs.items()}
        environments = {role: self._letters(run) for role, run in runs.items()}
        other = "control" if verdict.what == "nondeterministic_reference" else "candidate"
        rank = verdict.difference.rank if verdict.difference is not None else 0
        left, right = (self._losses[runs[role].spec.key] for role in ("reference", "candidate"))
        green = verdict.outcome in GREEN
        return CaseReport(
            spec=spec, verdict=verdict, message=one_line(verdict.message),
            # Recorded runs of other programs are recorded again.
            command=_command_line(self.folder.manifest) if spec.reference.recorded else command,
            bisect=bisect_line(spec, verdict, place),
            curve=loss_curve(left, right, rank),
            state=None if green else state_map(runs["reference"], runs[other], other),
            peaks={role: {r.rank: peak for r in run.ranks if (peak := peak_bytes(r)) > 0}
                   for role, run in runs.items()},
            addresses={role: addresses(run) for role, run in runs.items()},
            environments=environments, cost=cost(runs, self.timeline),
            environment_note=_environment_note(runs.values(), set(environments.values())),
            output=None if green else self._output(place, runs),
            attempts={role: found for role, found in attempts.items() if found},
            about=self._about(spec, runs["candidate"]),
            known=() if green else known_of(spec, self.folder.path),
        )  # fmt: skip

    def _about(self, spec: CaseSpec, candidate: RunResult) -> About | None:
        abouts = {part.get("name"): part.get("about") for part in self.scenarios}
        said = abouts.get(spec.scenario)
        if not isinstance(said, dict):
            return None
        package = one_line(str(said.get("package", "")), 80)
        words = sorted(_feature(str(word), spec) for word in said.get("combination") or ())
        found = {_version(package, r.start.environment, self.folder.manifest)
                 for r in candidate.ranks if r.start is not None}  # fmt: skip
        # Ranks with different ones prove nothing about either.
        version = one_line(found.pop(), 80) if len(found) == 1 else ""
        return About(package=package, version=version, combination=tuple(words))

    def _verdict(self, case: CaseSpec) -> Verdict:
        if (found := self.folder.load_verdict(case.id)) is not None:
            return verified(self.folder, case, found)
        damaged = (self.folder.case_folder(case.id) / VERDICT_FILE).exists()
        why = "the harness stopped before this case was judged; --resume goes on"
        return Verdict(
            case_id=case.id, outcome="error", what="corrupt_record" if damaged else "not_run",
            message=f"no verdict: {f'its {VERDICT_FILE} does not decode' if damaged else why}",
            runs={role: getattr(case, role).key for role in ROLES},
        )  # fmt: skip

    def _letters(self, run: RunResult) -> str:
        seen = []
        for values in (fingerprint(r.start.environment) for r in run.ranks if r.start is not None):
            known = (n for n, k in self.environments.items() if not different_leaves(k, values))
            seen.append(next(known, letter_of(len(self.environments))))
            self.environments.setdefault(seen[-1], values)
        return ", ".join(dict.fromkeys(seen)) or NOT_RECORDED

    def _output(self, place: Path, runs: Mapping[str, RunResult]) -> Output | None:
        """What the rank at fault printed last, of the first run that did not end well."""
        for role, run in runs.items():
            if not run.outcome.what or run.outcome.what == "not_run":
                continue
            crashed = [state.rank for state in run.outcome.ranks if state.code != 0]
            culprit = run.outcome.culprit_rank
            rank = culprit if culprit is not None else next(iter(crashed), 0)
            for folder in (self.folder.run_folder(run.spec.key), place / role):
                if text := tail(folder / f"rank{rank}.stderr"):
                    return Output(role=role, rank=rank, text=text)
        return None


def _machine(manifest: Mapping[str, Any]) -> str:
    """'8 cores, 4 x NVIDIA H200', or the processor where there is no GPU."""
    kind, processor = machine_kind(manifest.get("machine") or {}), manifest.get("processor")
    return ", ".join(filter(None, [kind, str(processor or "") if "," not in kind else ""]))


def _scenario(text: str) -> dict[str, Any]:
    if len(text) > MAX_SCENARIO_CHARS:
        return {}
    try:
        plain = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _command_line(manifest: Mapping[str, Any]) -> str:
    return one_line(shlex.join(map(str, manifest.get("command") or ())))


def _feature(word: str, spec: CaseSpec) -> str:
    """A feature that every case has, or of an axis the value of this case: 'engine fsdp2'."""
    label = spec.labels.get(word)
    return one_line(word if label is None else f"{word.rpartition('.')[2]} {label}", 80)


def _version(
    package: str, environment: Mapping[str, Any], manifest: Mapping[str, Any]
) -> str:  # fmt: skip
    """What a rank recorded of a package, else the version beside the harness, which it shares."""
    own = fingerprint(environment)
    for held in (own.get("packages"), {"torch": own.get("torch")}, manifest.get("packages")):
        versions = {_SEPARATORS.sub("-", str(n).lower()): v for n, v in (held or {}).items()}
        if (name := _SEPARATORS.sub("-", package.lower())) in versions:
            return str(versions[name] or "")
    return ""


def addresses(run: RunResult) -> str:
    """What graphs hold on to and which long-lived tensors moved, on the rank that has most."""
    details = [detail for records in run.ranks for detail in records.said("graphs")]
    moved: dict[int, int] = {}
    for record in (record for records in run.ranks for record in records.steps):
        if record.pointer_changes is not None:
            moved[record.step] = max(moved.get(record.step, 0), record.pointer_changes)

    def most(key: str) -> int:
        found = [detail.get(key, 0) for detail in details]
        return max((len(n) if isinstance(n, list) else n for n in found), default=0)

    parts = [
        f"{most('captured')} graphs rely on {most('ledger_names')} named tensors, "
        f"{most('ledger_places')} storages known by place and {most('ledger_unnamed')} unnamed"
    ] * bool(most("captured"))
    if any(moved.values()):
        numbers, last = moved.values(), max(step for step in moved if moved[step])
        parts.append(f"{sum(numbers)} pointers moved, at most {max(numbers)} in a step, last in "
                     f"step {last}")  # fmt: skip
        names = [*dict.fromkeys(one_line(n, 120) for d in details for n in d.get("moved", ()))]
        parts += [f"the first of them {', '.join(names[:MOST_NAMES])}"] if names else []
    else:
        parts.append("no pointer moved" if moved else "moved pointers were not counted")
    return "; ".join(parts)


def _environment_note(runs: Iterable[RunResult], letters: set[str]) -> str:
    if len(letters) == 1 and NOT_RECORDED not in letters:
        return "the same in every run and rank"
    starts = [r.start for run in runs for r in run.ranks if r.start is not None]
    prints = [fingerprint(start.environment) for start in starts]
    keys = sorted({key for other in prints[1:] for key, *_ in different_leaves(prints[0], other)})
    return f"differs in {one_line(', '.join(keys), 400)}" if keys else "not recorded in every run"


def _compare_axis(scenarios: list[dict[str, Any]], cases: list[CaseReport]) -> str:
    """The compared axis, of several scenarios the one that all compare; else the last axis."""
    found = {each.get("compare", {}).get("axis", "") for each in scenarios}
    labels = [name for case in cases for name in case.spec.labels]
    axis = found.pop() if len(found) == 1 else ""
    return axis if axis in labels else (labels[-1] if labels else "")


def _matrix(cases: list[CaseReport], axis: str) -> Matrix:
    """Rows are values alone, of the axes that vary, where every case has the same axes."""
    names = {tuple(name for name in case.spec.labels if name != axis) for case in cases}
    varying: tuple[str, ...] = ()
    if len(names) == 1:
        varying = tuple(n for n in names.pop() if len({c.spec.labels[n] for c in cases}) > 1)
    found: dict[tuple[str, str], list[CaseReport]] = {}
    for case in cases:
        labels = dict(case.spec.labels)
        column = one_line(labels.pop(axis, "(none)"), 60)
        words = ([labels[name] for name in varying] if varying
                 else [f"{name}={value}" for name, value in labels.items()])  # fmt: skip
        row = one_line(" · ".join(words), 240) or clean(case.spec.scenario, 60)
        found.setdefault((row, column), []).append(case)
    return Matrix(
        axis=one_line(axis, 60), row_axes=tuple(one_line(name, 60) for name in varying),
        columns=tuple(dict.fromkeys(column for _, column in found)),
        rows=tuple(dict.fromkeys(row for row, _ in found)),
        cases={place: tuple(held) for place, held in found.items()},
    )  # fmt: skip
