"""From a run folder to a `Report`. Runs are read once, however many cases share them."""

import shlex
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeGuard

import pandas as pd
import yaml

from harness.checks import exit_code
from harness.checks.evidence import different_leaves
from harness.checks.memory import peak_bytes
from harness.history import NOT_WRITTEN_FILE, machine_kind
from harness.provenance import fingerprint
from harness.records import CaseSpec, EventRecord, RunResult, RunSpec, Verdict
from harness.runner.estimates import Timeline, cost
from harness.runner.retries import Attempt, earlier_attempts
from harness.store import LEGS as ROLES
from harness.store import VERDICT_FILE, RunFolder, load_run_folder
from harness.store.files import read_tail
from harness.store.verify import bisect_line, verified
from reports.compared import LossCurve, StateMap, loss_curve, losses, state_map
from reports.history import look_back
from reports.report import (
    GREEN,
    OUTCOME_ORDER,
    Addresses,
    CaseReport,
    Matrix,
    Output,
    Report,
)
from reports.text import TAIL_BYTES, clean, one_line, tail

NOT_RECORDED = "not recorded"
MAX_SCENARIO_CHARS = 1_000_000
GRAPHS = "graphs"
"""Name of the event in which a rank tells of its graphs."""
MOST_NAMES = 4


def summarise(path: Path, history: Path | None = None) -> Report:
    """Read a run folder into a `Report`.

    Args:
        path: the folder.
        history: database in which earlier runs are looked up; None for the one next to the folder.

    Raises:
        UsageError: it is not a run folder, or damaged beyond reading.
    """
    read = _Reading(RunFolder.open(path))
    folder, manifest = read.folder, read.folder.manifest
    planned = [read.case(spec, verdict)
               for spec, verdict in zip(folder.cases, read.verdicts, strict=True)]  # fmt: skip
    scenario = _scenario(folder.scenario_text)
    name = scenario.get("name") or (planned[0].spec.scenario if planned else "scenario")
    name, created = one_line(str(name), 200), one_line(str(manifest.get("created", "")), 60)
    outcomes = [case.outcome for case in planned]
    return Report(
        folder=folder.path,
        scenario=name,
        why=one_line(str(scenario.get("why", ""))),
        created=created,
        commit=one_line(str(manifest.get("commit") or ""), 80),
        machine=one_line(_machine(manifest), 120),
        wall_s=_wall_s(read.runs),
        command_line=_command_line(manifest),
        exit_code=int(exit_code(read.verdicts)),
        counts={outcome: outcomes.count(outcome) for outcome in OUTCOME_ORDER},
        cases=tuple(sorted(planned, key=lambda case: OUTCOME_ORDER.index(case.outcome))),
        matrix=_matrix(planned, _compare_axis(scenario, planned)),
        environments=read.environments(),
        attempts={
            one_line(key, 100): run.outcome.attempt
            for key, run in read.runs.items()
            if run.outcome.attempt
        },
        history_note=history_note(folder.path),
        notes=_notes(manifest.get("notes")),
        past=look_back(folder.path, name, created, history),
    )


class _Reading:
    """A run folder in memory: its runs by key, a verdict for every planned case, in order."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.runs: dict[str, RunResult] = {}
        for case in folder.cases:
            for role in ROLES:
                spec: RunSpec = getattr(case, role)
                if spec.key not in self.runs:
                    self.runs[spec.key] = self._run(case, role, spec)
        self.verdicts = tuple(self._verdict(case) for case in folder.cases)
        self._fingerprints: list[Mapping[str, Any]] = []
        self._losses: dict[str, pd.DataFrame] = {}

    def _run(self, case: CaseSpec, role: str, spec: RunSpec) -> RunResult:
        sealed = self.folder.case_folder(case.id) / role
        # A folder from which only the cases were kept can still be reported.
        if not self.folder.run_folder(spec.key).is_dir() and sealed.is_dir():
            return load_run_folder(sealed, spec)
        return self.folder.load_run(spec)

    def _verdict(self, case: CaseSpec) -> Verdict:
        found = self.folder.load_verdict(case.id)
        if found is not None:
            return verified(self.folder, case, found)
        damaged = (self.folder.case_folder(case.id) / VERDICT_FILE).exists()
        message = (
            f"no verdict: its {VERDICT_FILE} does not decode"
            if damaged
            else "no verdict: the harness stopped before this case was judged; --resume goes on"
        )
        return Verdict(
            case_id=case.id, outcome="error", what="corrupt_record" if damaged else "not_run",
            message=message, checks=(), runs={role: getattr(case, role).key for role in ROLES},
            wall_s=0.0,
        )  # fmt: skip

    @cached_property
    def _attempts(self) -> dict[str, tuple[Attempt, ...]]:
        found = {key: earlier_attempts(self.folder, run.spec) for key, run in self.runs.items()}
        return {key: attempts for key, attempts in found.items() if attempts}

    @cached_property
    def _timeline(self) -> Timeline:
        return Timeline(self.runs.values())

    def case(self, spec: CaseSpec, verdict: Verdict) -> CaseReport:
        """What is shown of one case."""
        runs = {role: self.runs[getattr(spec, role).key] for role in ROLES}
        place = self.folder.case_folder(spec.id)
        environments = {role: self._letters(run) for role, run in runs.items()}
        return CaseReport(
            spec=spec,
            verdict=verdict,
            message=one_line(verdict.message),
            command=self._repeat(spec),
            bisect=bisect_line(spec, place) if verdict.outcome == "failed" else "",
            curve=self._curve(spec, verdict),
            state=_state(verdict, runs),
            peaks={role: _peaks(run) for role, run in runs.items()},
            addresses={role: addresses(run) for role, run in runs.items()},
            environments=environments,
            environment_note=_environment_note(runs, environments),
            output=self._output(spec, verdict, runs),
            cost=cost(runs, self._timeline),
            attempts={role: self._attempts[run.spec.key] for role, run in runs.items()
                      if run.spec.key in self._attempts},
        )  # fmt: skip

    def _repeat(self, spec: CaseSpec) -> str:
        """The command that runs the case again; recorded runs of other programs are recorded so."""
        if spec.reference.recorded:
            return _command_line(self.folder.manifest)
        return f"harness rerun {shlex.quote(str(self.folder.case_folder(spec.id)))}"

    def _curve(self, spec: CaseSpec, verdict: Verdict) -> LossCurve | None:
        rank = verdict.difference.rank if verdict.difference is not None else 0
        left, right = (self._loss_table(run.key) for run in (spec.reference, spec.candidate))
        return loss_curve(left, right, rank)

    def _loss_table(self, key: str) -> pd.DataFrame:
        if key not in self._losses:
            self._losses[key] = losses(self.runs[key])
        return self._losses[key]

    def _letters(self, run: RunResult) -> str:
        seen = [self._letter(r.start.environment) for r in run.ranks if r.start is not None]
        return ", ".join(dict.fromkeys(seen)) or NOT_RECORDED

    def _letter(self, environment: Mapping[str, Any]) -> str:
        values = fingerprint(environment)
        for place, known in enumerate(self._fingerprints):
            if not different_leaves(known, values):
                return _letter(place)
        self._fingerprints.append(values)
        return _letter(len(self._fingerprints) - 1)

    def environments(self) -> dict[str, Mapping[str, Any]]:
        """Every distinct fingerprint by its letter, in the order in which they were met."""
        return {_letter(place): values for place, values in enumerate(self._fingerprints)}

    def _output(
        self, spec: CaseSpec, verdict: Verdict, runs: Mapping[str, RunResult]
    ) -> Output | None:
        """What the rank at fault printed last, of the first run that did not end well."""
        if verdict.outcome in GREEN:
            return None
        for role, run in runs.items():
            if not run.outcome.what or run.outcome.what == "not_run":
                continue
            crashed = [state.rank for state in run.outcome.ranks if state.code != 0]
            culprit = run.outcome.culprit_rank
            rank = culprit if culprit is not None else next(iter(crashed), 0)
            places = (self.folder.run_folder(run.spec.key), self.folder.case_folder(spec.id) / role)
            for folder in places:
                if text := tail(folder / f"rank{rank}.stderr"):
                    return Output(role=role, rank=rank, text=text)
        return None


# --- of the folder ----------------------------------------------------------------------------


def history_note(folder: Path) -> str:
    """Why the run is not in the history; "" if nothing says that it is not."""
    return one_line(read_tail(folder / NOT_WRITTEN_FILE, TAIL_BYTES).decode(errors="replace"), 400)


def _notes(stored: object) -> tuple[str, ...]:
    return tuple(one_line(str(n), 400) for n in stored) if isinstance(stored, list) else ()


def _machine(manifest: Mapping[str, Any]) -> str:
    """'8 cores, 4 x NVIDIA H200', or the processor where there is no GPU."""
    machine, processor = manifest.get("machine"), manifest.get("processor")
    kind = machine_kind(machine) if _is_map(machine) else ""
    return ", ".join(filter(None, [kind, str(processor or "") if "," not in kind else ""]))


def _wall_s(runs: Mapping[str, RunResult]) -> float:
    """Seconds with runs under way."""
    outcomes = [run.outcome for run in runs.values() if run.outcome.wall_s > 0]
    spans = sorted((o.started_unix_s, o.started_unix_s + o.wall_s) for o in outcomes)
    latest = list(accumulate((end for _, end in spans), max))
    idle = sum(max(0.0, begun - end) for end, (begun, _) in zip(latest, spans[1:], strict=False))
    return latest[-1] - spans[0][0] - idle if spans else 0.0


def _scenario(text: str) -> dict[str, Any]:
    if len(text) > MAX_SCENARIO_CHARS:
        return {}
    try:
        plain = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _command_line(manifest: Mapping[str, Any]) -> str:
    value = manifest.get("command_line") or manifest.get("command") or manifest.get("argv") or ""
    return one_line(shlex.join(map(str, value)) if isinstance(value, list) else str(value))


# --- of a case --------------------------------------------------------------------------------


def _state(verdict: Verdict, runs: Mapping[str, RunResult]) -> StateMap | None:
    if verdict.outcome in GREEN:
        return None
    role = "control" if verdict.what == "nondeterministic_reference" else "candidate"
    return state_map(runs["reference"], runs[role], role)


def _peaks(run: RunResult) -> dict[int, int]:
    found = {records.rank: peak_bytes(records) for records in run.ranks}
    return {rank: peak for rank, peak in found.items() if peak > 0}


def addresses(run: RunResult) -> Addresses:
    """What graphs of a run hold on to, whatever of it was recorded."""
    events = [e for records in run.ranks for e in records.events if e.name == GRAPHS]
    moved: dict[int, int] = {}
    for record in (record for records in run.ranks for record in records.steps):
        if record.pointer_changes is not None:
            moved[record.step] = max(moved.get(record.step, 0), record.pointer_changes)
    names = [one_line(str(name), 120) for event in events for name in _listed(event, "moved")]
    return Addresses(
        captured=_most(events, "captured"),
        by_owner=_most(events, "ledger_names"),
        by_place=max((len(_listed(event, "ledger_places")) for event in events), default=0),
        unnamed=_most(events, "ledger_unnamed"),
        moved={str(step): count for step, count in sorted(moved.items())},
        names=tuple(dict.fromkeys(names))[:MOST_NAMES],
    )


def _most(events: list[EventRecord], key: str) -> int:
    """The largest count; a file may say anything."""
    values = [event.detail.get(key) for event in events]
    return max((v for v in values if isinstance(v, int) and not isinstance(v, bool)), default=0)


def _listed(event: EventRecord, key: str) -> list[object]:
    value = event.detail.get(key)
    return value if isinstance(value, list) else []


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else f"E{place + 1}"


def _environment_note(runs: Mapping[str, RunResult], letters: Mapping[str, str]) -> str:
    known = set(letters.values()) - {NOT_RECORDED}
    if len(known) < 2:
        whole = len(known) == 1 and NOT_RECORDED not in letters.values()
        return "the same in every run and rank" if whole else "not recorded in every run"
    starts = [r.start for run in runs.values() for r in run.ranks if r.start is not None]
    prints = [fingerprint(start.environment) for start in starts]
    keys = sorted({key for other in prints[1:] for key, *_ in different_leaves(prints[0], other)})
    return f"differs in {one_line(', '.join(keys), 400)}" if keys else "not recorded in every run"


# --- the matrix -------------------------------------------------------------------------------


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
    """Rows are values alone, of the axes that vary, where every case has the same axes."""
    names = [tuple(name for name in case.spec.labels if name != axis) for case in cases]
    varying: tuple[str, ...] = ()
    if len(set(names)) == 1:
        varying = tuple(
            name for name in names[0] if len({case.spec.labels[name] for case in cases}) > 1
        )
    found: dict[tuple[str, str], list[CaseReport]] = {}
    for case in cases:
        labels = dict(case.spec.labels)
        column = one_line(labels.pop(axis, "(none)"), 60)
        words = ([labels[name] for name in varying] if varying
                 else [f"{name}={value}" for name, value in labels.items()])  # fmt: skip
        row = one_line(" · ".join(words), 240) or clean(case.spec.scenario, 60)
        found.setdefault((row, column), []).append(case)
    return Matrix(
        axis=one_line(axis, 60),
        row_axes=tuple(one_line(name, 60) for name in varying),
        columns=tuple(dict.fromkeys(column for _, column in found)),
        rows=tuple(dict.fromkeys(row for row, _ in found)),
        cases={place: tuple(held) for place, held in found.items()},
    )
