"""What every format of the report says: one `Report`, made once, already cleaned for showing.

The order of cases is failures first; within an outcome, the plan's.
"""

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from harness.cost import Beside, Timeline, beside
from harness.checks import confirmation, exit_code
from harness.checks.environment import different_keys
from harness.disk import read_tail
from harness.history import NOT_WRITTEN_FILE
from harness.lookup import bisect_line
from harness.provenance import fingerprint
from harness.records import CaseSpec, Outcome, RunResult, Verdict
from harness.runner.retries import Attempt, earlier_attempts
from harness.store import LEGS
from reports.addresses import LegAddresses, leg_addresses
from reports.frames import Frames, load
from reports.loss_curve import LossCurve, loss_curve
from reports.text import TAIL_BYTES, clean, one_line, tail

OUTCOME_ORDER: tuple[Outcome, ...] = ("failed", "error", "incomparable", "passed", "skipped")
SYMBOLS: dict[Outcome, str] = {
    "passed": "✓", "failed": "✗", "error": "!", "incomparable": "≠", "skipped": "–",
}  # fmt: skip
NOT_RECORDED = "not recorded"
MAX_SCENARIO_CHARS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class LegMemory:
    """Peak memory of one leg, in bytes by rank."""

    leg: str
    peaks: dict[int, int]

    @property
    def worst(self) -> int:
        """Highest peak of any rank; 0 if nothing was recorded."""
        return max(self.peaks.values(), default=0)


@dataclass(frozen=True, kw_only=True)
class Output:
    """The end of what one rank printed."""

    leg: str
    rank: int
    text: str


@dataclass(frozen=True, kw_only=True)
class CaseReport:
    """One case, ready to be shown.

    Attributes:
        bisect: the command that finds the cause of a failure, "" where there is none to find.
        environments: the letters of the environments of each leg's ranks.
        beside: memory and step time of the legs.
        attempts: of each leg that was made more than once: every attempt but the one judged.
    """

    spec: CaseSpec
    verdict: Verdict
    message: str
    command: str
    bisect: str
    curve: LossCurve | None
    memory: tuple[LegMemory, ...]
    addresses: tuple[LegAddresses, ...]
    environments: dict[str, str]
    environment_note: str
    output: Output | None
    beside: Beside
    attempts: dict[str, tuple[Attempt, ...]] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        """The verdict's outcome."""
        return self.verdict.outcome

    @property
    def attempt_words(self) -> str:
        """'passed on attempt 2 (candidate: port_in_use)'; "" if none was failed or killed."""
        failed = {leg: [a.cause for a in own if a.cause] for leg, own in self.attempts.items()}
        told = [
            f"{leg}: {cause}" if number == 1 else f"{leg}: {number} x {cause}"
            for leg, causes in failed.items()
            for cause, number in Counter(causes).items()
        ]
        most = max(map(len, failed.values()), default=0)
        return f"{self.outcome} on attempt {most + 1} ({', '.join(told)})" if most else ""

    @property
    def confirmation(self) -> str:
        """Whether the difference came again, on one line; "" if nobody asked."""
        found = self.verdict.confirmation
        return "" if found is None else one_line(confirmation.words(found))

    @property
    def where(self) -> str:
        """Place of the first difference, on one line; "" if there is none."""
        place = self.verdict.difference
        if place is None:
            return ""
        of = f" of {place.tensor}" if place.tensor else ""
        return one_line(f"step {place.step}, rank {place.rank}, {place.quantity}{of}", 300)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Cases by axes: a row for each setting of the other axes, a column for each compared value."""

    axis: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: dict[tuple[str, str], tuple[CaseReport, ...]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole run folder.

    `environments` holds every distinct fingerprint by its letter; `history_note` says why the run
    is not in the history, "" if nothing says that it is not; `notes` say what selections left out.
    """

    folder: Path
    scenario: str
    why: str
    created: str
    command_line: str
    exit_code: int
    counts: dict[Outcome, int]
    cases: tuple[CaseReport, ...]
    matrix: Matrix
    environments: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    history_note: str = ""
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """Counts in words, worst first, or that there was nothing."""
        counted = [f"{n} {outcome}" for outcome, n in self.counts.items() if n]
        return ", ".join(counted) if counted else "nothing ran"


def summarise(path: Path) -> Report:
    """Read a run folder into a `Report`.

    Raises:
        UsageError: it is not a run folder, or damaged beyond reading.
    """
    frames = load(path)
    letters = _Environments()
    attempts = {
        key: found
        for key, run in frames.runs.items()
        if (found := earlier_attempts(frames.folder, run.spec))
    }
    timeline = Timeline(frames.runs.values())
    planned = [
        _case(frames, letters, attempts, timeline, spec, verdict)
        for spec, verdict in zip(frames.folder.cases, frames.verdicts, strict=True)
    ]
    manifest, scenario = frames.folder.manifest, _scenario(frames.folder.scenario_text)
    name = scenario.get("name") or (planned[0].spec.scenario if planned else "scenario")
    counts = frames.verdict_frame["outcome"].value_counts()
    return Report(
        folder=frames.folder.path,
        scenario=one_line(str(name), 200),
        why=one_line(str(scenario.get("why", ""))),
        created=one_line(str(manifest.get("created", "")), 60),
        command_line=_command_line(manifest),
        exit_code=int(exit_code(frames.verdicts)),
        counts={outcome: int(counts.get(outcome, 0)) for outcome in OUTCOME_ORDER},
        cases=tuple(sorted(planned, key=lambda case: OUTCOME_ORDER.index(case.outcome))),
        matrix=_matrix(planned, _compare_axis(scenario, planned)),
        environments=letters.known(),
        attempts={
            one_line(key, 100): run.outcome.attempt
            for key, run in frames.runs.items()
            if run.outcome.attempt
        },
        history_note=_history_note(frames.folder.path),
        notes=_notes(manifest.get("notes")),
    )


def _notes(stored: object) -> tuple[str, ...]:
    return tuple(one_line(str(n), 400) for n in stored) if isinstance(stored, list) else ()


def _history_note(folder: Path) -> str:
    return one_line(read_tail(folder / NOT_WRITTEN_FILE, TAIL_BYTES).decode(errors="replace"), 400)


def _scenario(text: str) -> dict[str, Any]:
    if len(text) > MAX_SCENARIO_CHARS:
        return {}
    try:
        plain = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _command_line(manifest: Mapping[str, Any]) -> str:
    for key in ("command_line", "command", "argv"):
        if value := manifest.get(key):
            words = value if isinstance(value, list) else [value]
            text = shlex.join(map(str, words)) if isinstance(value, list) else str(words[0])
            return one_line(text)
    return ""


class _Environments:
    """Letters for distinct fingerprints, in the order in which they are met."""

    def __init__(self) -> None:
        self._found: list[Mapping[str, Any]] = []

    def letter(self, environment: Mapping[str, Any]) -> str:
        values = fingerprint(environment)
        for place, known in enumerate(self._found):
            if not different_keys(known, values):
                return _letter(place)
        self._found.append(values)
        return _letter(len(self._found) - 1)

    def known(self) -> dict[str, Mapping[str, Any]]:
        return {_letter(place): values for place, values in enumerate(self._found)}


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else f"E{place + 1}"


def _repeat(frames: Frames, spec: CaseSpec) -> str:
    """The command that answers the case again; runs that were recorded by hand are not made."""
    if spec.reference.recorded:
        return _command_line(frames.folder.manifest)
    return f"harness rerun {shlex.quote(str(frames.folder.case_folder(spec.id)))}"


def _case(
    frames: Frames,
    letters: _Environments,
    attempts: Mapping[str, tuple[Attempt, ...]],
    timeline: Timeline,
    spec: CaseSpec,
    verdict: Verdict,
) -> CaseReport:
    runs = {leg: frames.runs[getattr(spec, leg).key] for leg in LEGS}
    place = verdict.difference
    rank = place.rank if place is not None else 0
    environments = {leg: _letters(letters, run) for leg, run in runs.items()}
    return CaseReport(
        spec=spec,
        verdict=verdict,
        message=one_line(verdict.message),
        command=_repeat(frames, spec),
        bisect=bisect_line(spec, frames.folder.case_folder(spec.id))
        if verdict.outcome == "failed"
        else "",
        curve=loss_curve(
            frames.steps_of(spec.reference.key), frames.steps_of(spec.candidate.key), rank
        ),
        memory=tuple(_leg_memory(frames, leg, run) for leg, run in runs.items()),
        addresses=tuple(leg_addresses(leg, run) for leg, run in runs.items()),
        environments=environments,
        environment_note=_environment_note(runs, environments),
        output=_output(frames, spec, verdict, runs),
        beside=beside(runs, timeline),
        attempts={
            leg: attempts[run.spec.key] for leg, run in runs.items() if run.spec.key in attempts
        },
    )


def _letters(letters: _Environments, run: RunResult) -> str:
    seen = [letters.letter(r.start.environment) for r in run.ranks if r.start is not None]
    return ", ".join(dict.fromkeys(seen)) or NOT_RECORDED


def _environment_note(runs: Mapping[str, RunResult], letters: Mapping[str, str]) -> str:
    known = set(letters.values()) - {NOT_RECORDED}
    if len(known) < 2:
        whole = len(known) == 1 and NOT_RECORDED not in letters.values()
        return "the same on every leg and rank" if whole else "not recorded on every leg"
    starts = [r.start for run in runs.values() for r in run.ranks if r.start is not None]
    prints = [fingerprint(start.environment) for start in starts]
    keys = sorted({key for other in prints[1:] for key in different_keys(prints[0], other)})
    return f"differs in {one_line(', '.join(keys), 400)}" if keys else "not recorded on every leg"


def _leg_memory(frames: Frames, leg: str, run: RunResult) -> LegMemory:
    return LegMemory(leg=leg, peaks={r: n for r, n in frames.peaks_of(run.spec.key) if n > 0})


def _output(
    frames: Frames, spec: CaseSpec, verdict: Verdict, runs: Mapping[str, RunResult]
) -> Output | None:
    """What the rank at fault printed last, of the first leg that did not end well."""
    if verdict.outcome in ("passed", "skipped"):
        return None
    for leg, run in runs.items():
        if not run.outcome.what or run.outcome.what == "not_run":
            continue
        crashed = [state.rank for state in run.outcome.ranks if state.code != 0]
        culprit = run.outcome.culprit_rank
        rank = culprit if culprit is not None else next(iter(crashed), 0)
        for folder in (
            frames.folder.run_folder(run.spec.key), frames.folder.case_folder(spec.id) / leg
        ):  # fmt: skip
            if text := tail(folder / f"rank{rank}.stderr"):
                return Output(leg=leg, rank=rank, text=text)
    return None


def _compare_axis(scenario: Mapping[str, Any], cases: list[CaseReport]) -> str:
    """The compared axis, of several scenarios the one that all compare; else the last axis."""
    joined = scenario.get("scenarios")
    members = [scenario]
    if isinstance(joined, list):
        members = [_scenario(str(part.get("text", ""))) for part in joined if _is_map(part)]
    labels = [name for case in cases for name in case.spec.labels]
    found = {_axis_of(member) for member in members}
    axis = found.pop() if len(found) == 1 else ""
    return axis if axis in labels else (labels[-1] if labels else "")


def _axis_of(scenario: Mapping[str, Any]) -> str:
    compare = scenario.get("compare")
    return str(compare.get("axis", "")) if _is_map(compare) else ""


def _is_map(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _matrix(cases: list[CaseReport], axis: str) -> Matrix:
    cells: dict[tuple[str, str], list[CaseReport]] = {}
    for case in cases:
        labels = dict(case.spec.labels)
        column = one_line(labels.pop(axis, "(none)"), 60)
        row = one_line(" ".join(f"{name}={value}" for name, value in labels.items()), 240)
        cells.setdefault((row or clean(case.spec.scenario, 60), column), []).append(case)
    return Matrix(
        axis=one_line(axis, 60),
        columns=tuple(dict.fromkeys(column for _, column in cells)),
        rows=tuple(dict.fromkeys(row for row, _ in cells)),
        cells={place: tuple(held) for place, held in cells.items()},
    )
