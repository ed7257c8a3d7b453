"""From a run folder to a `Report`. Runs are read once, however many cases share them."""

import shlex
from collections.abc import Iterable, Mapping
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
from harness.records import CaseSpec, RunResult, Verdict
from harness.runner.estimates import Timeline, cost
from harness.runner.retries import Attempt, earlier_attempts
from harness.store import LEGS as ROLES
from harness.store import VERDICT_FILE, RunFolder, load_run_folder
from harness.store.files import read_tail
from harness.store.verify import bisect_line, verified
from reports.compared import loss_curve, losses, state_map
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
MOST_NAMES = 4
Runs = Mapping[str, RunResult]
"""Of a case, by role."""


def summarise(path: Path, history: Path | None = None) -> Report:
    """Read a run folder into a `Report` (`UsageError`: it is none, or damaged beyond reading).

    `history` is where earlier runs are looked up; None for the database next to the folder.
    """
    read = _Reading(RunFolder.open(path))
    folder, manifest = read.folder, read.folder.manifest
    planned = [read.case(spec) for spec in folder.cases]
    scenario = _scenario(folder.scenario_text)
    name = scenario.get("name") or (planned[0].spec.scenario if planned else "scenario")
    name, created = one_line(str(name), 200), one_line(str(manifest.get("created", "")), 60)
    outcomes = [case.outcome for case in planned]
    attempts = {one_line(key, 100): run.outcome.attempt for key, run in read.runs.items()}
    notes = manifest.get("notes")
    return Report(
        folder=folder.path,
        scenario=name,
        why=one_line(str(scenario.get("why", ""))),
        created=created,
        commit=one_line(str(manifest.get("commit") or ""), 80),
        machine=one_line(_machine(manifest), 120),
        wall_s=_wall_s(read.runs.values()),
        command_line=_command_line(manifest),
        exit_code=int(exit_code([case.verdict for case in planned])),
        counts={outcome: outcomes.count(outcome) for outcome in OUTCOME_ORDER},
        cases=tuple(sorted(planned, key=lambda case: OUTCOME_ORDER.index(case.outcome))),
        matrix=_matrix(planned, _compare_axis(scenario, planned)),
        environments=read.environments,
        attempts={key: number for key, number in attempts.items() if number},
        history_note=history_note(folder.path),
        notes=tuple(one_line(str(n), 400) for n in notes) if isinstance(notes, list) else (),
        past=look_back(folder.path, name, created, history),
    )


class _Reading:
    """A run folder in memory: its runs and attempts by key, its environments by letter."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.runs: dict[str, RunResult] = {}
        self.environments: dict[str, Mapping[str, Any]] = {}
        for case in folder.cases:
            for role in ROLES:
                spec = getattr(case, role)
                if spec.key not in self.runs:
                    sealed = folder.case_folder(case.id) / role
                    # A folder from which only the cases were kept can still be reported.
                    kept = not folder.run_folder(spec.key).is_dir() and sealed.is_dir()
                    run = load_run_folder(sealed, spec) if kept else folder.load_run(spec)
                    self.runs[spec.key] = run
        self._timeline = Timeline(self.runs.values())
        self._losses: dict[str, pd.DataFrame] = {}
        self._attempts: dict[str, tuple[Attempt, ...]] = {
            key: earlier_attempts(folder, run.spec) for key, run in self.runs.items()
        }

    def case(self, spec: CaseSpec) -> CaseReport:
        """What is shown of one case."""
        runs = {role: self.runs[getattr(spec, role).key] for role in ROLES}
        place, verdict = self.folder.case_folder(spec.id), self._verdict(spec)
        command = f"harness rerun {shlex.quote(str(place))}"
        attempts = {role: self._attempts[run.spec.key] for role, run in runs.items()}
        environments = {role: self._letters(run) for role, run in runs.items()}
        other = "control" if verdict.what == "nondeterministic_reference" else "candidate"
        rank = verdict.difference.rank if verdict.difference is not None else 0
        green = verdict.outcome in GREEN
        return CaseReport(
            spec=spec,
            verdict=verdict,
            message=one_line(verdict.message),
            # Recorded runs of other programs are recorded again.
            command=_command_line(self.folder.manifest) if spec.reference.recorded else command,
            bisect=bisect_line(spec, place) if verdict.outcome == "failed" else "",
            curve=loss_curve(
                *(self._table(spec, role) for role in ("reference", "candidate")), rank
            ),
            state=None if green else state_map(runs["reference"], runs[other], other),
            peaks={role: _peaks(run) for role, run in runs.items()},
            addresses={role: addresses(run) for role, run in runs.items()},
            environments=environments,
            environment_note=_environment_note(runs.values(), set(environments.values())),
            output=None if green else self._output(place, runs),
            cost=cost(runs, self._timeline),
            attempts={role: found for role, found in attempts.items() if found},
        )

    def _verdict(self, case: CaseSpec) -> Verdict:
        if (found := self.folder.load_verdict(case.id)) is not None:
            return verified(self.folder, case, found)
        damaged = (self.folder.case_folder(case.id) / VERDICT_FILE).exists()
        why = "the harness stopped before this case was judged; --resume goes on"
        return Verdict(
            case_id=case.id, outcome="error", what="corrupt_record" if damaged else "not_run",
            message=f"no verdict: {f'its {VERDICT_FILE} does not decode' if damaged else why}",
            checks=(), runs={role: getattr(case, role).key for role in ROLES}, wall_s=0.0,
        )  # fmt: skip

    def _table(self, case: CaseSpec, role: str) -> pd.DataFrame:
        key = getattr(case, role).key
        if key not in self._losses:
            self._losses[key] = losses(self.runs[key])
        return self._losses[key]

    def _letters(self, run: RunResult) -> str:
        seen = [self._letter(r.start.environment) for r in run.ranks if r.start is not None]
        return ", ".join(dict.fromkeys(seen)) or NOT_RECORDED

    def _letter(self, environment: Mapping[str, Any]) -> str:
        values = fingerprint(environment)
        for letter, known in self.environments.items():
            if not different_leaves(known, values):
                return letter
        number = len(self.environments)
        letter = chr(ord("A") + number) if number < 26 else f"E{number + 1}"
        self.environments[letter] = values
        return letter

    def _output(self, place: Path, runs: Runs) -> Output | None:
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


# --- of the folder ----------------------------------------------------------------------------


def history_note(folder: Path) -> str:
    """Why the run is not in the history; "" if nothing says that it is not."""
    return one_line(read_tail(folder / NOT_WRITTEN_FILE, TAIL_BYTES).decode(errors="replace"), 400)


def _machine(manifest: Mapping[str, Any]) -> str:
    """'8 cores, 4 x NVIDIA H200', or the processor where there is no GPU."""
    machine, processor = manifest.get("machine"), manifest.get("processor")
    kind = machine_kind(machine) if _is_map(machine) else ""
    return ", ".join(filter(None, [kind, str(processor or "") if "," not in kind else ""]))


def _wall_s(runs: Iterable[RunResult]) -> float:
    """Seconds with runs under way."""
    outcomes = [run.outcome for run in runs if run.outcome.wall_s > 0]
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


def _peaks(run: RunResult) -> dict[int, int]:
    found = {records.rank: peak_bytes(records) for records in run.ranks}
    return {rank: peak for rank, peak in found.items() if peak > 0}


def addresses(run: RunResult) -> Addresses:
    """What graphs of a run hold on to, whatever of it was recorded; a file may say anything."""
    details = [e.detail for records in run.ranks for e in records.events if e.name == "graphs"]
    moved: dict[int, int] = {}
    for record in (record for records in run.ranks for record in records.steps):
        if record.pointer_changes is not None:
            moved[record.step] = max(moved.get(record.step, 0), record.pointer_changes)

    def most(key: str) -> int:
        found = [detail.get(key) for detail in details]
        counts = [len(value) if isinstance(value, list) else value for value in found]
        return max((n for n in counts if isinstance(n, int) and n is not True), default=0)

    listed = [d["moved"] for d in details if isinstance(d.get("moved"), list)]
    names = [one_line(str(name), 120) for held in listed for name in held]
    return Addresses(
        captured=most("captured"), by_owner=most("ledger_names"), by_place=most("ledger_places"),
        unnamed=most("ledger_unnamed"),
        moved={str(step): count for step, count in sorted(moved.items())},
        names=tuple(dict.fromkeys(names))[:MOST_NAMES],
    )  # fmt: skip


def _environment_note(runs: Iterable[RunResult], letters: set[str]) -> str:
    if len(letters) == 1 and NOT_RECORDED not in letters:
        return "the same in every run and rank"
    starts = [r.start for run in runs for r in run.ranks if r.start is not None]
    prints = [fingerprint(start.environment) for start in starts]
    keys = sorted({key for other in prints[1:] for key, *_ in different_leaves(prints[0], other)})
    return f"differs in {one_line(', '.join(keys), 400)}" if keys else "not recorded in every run"


# --- the matrix -------------------------------------------------------------------------------


def _is_map(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _compare_axis(scenario: Mapping[str, Any], cases: list[CaseReport]) -> str:
    """The compared axis, of several scenarios the one that all compare; else the last axis."""
    joined, members = scenario.get("scenarios"), [scenario]
    if isinstance(joined, list):
        members = [_scenario(str(part.get("text", ""))) for part in joined if _is_map(part)]
    compared = [member.get("compare") for member in members]
    found = {str(each.get("axis", "")) if _is_map(each) else "" for each in compared}
    labels = [name for case in cases for name in case.spec.labels]
    axis = found.pop() if len(found) == 1 else ""
    return axis if axis in labels else (labels[-1] if labels else "")


def _matrix(cases: list[CaseReport], axis: str) -> Matrix:
    """Rows are values alone, of the axes that vary, where every case has the same axes."""
    names = {tuple(name for name in case.spec.labels if name != axis) for case in cases}
    varying: tuple[str, ...] = ()
    if len(names) == 1:
        varying = tuple(
            name for name in names.pop() if len({case.spec.labels[name] for case in cases}) > 1
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
