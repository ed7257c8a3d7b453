"""From a run folder to its entry, and into the history.

    run folder -> runs, attempt by attempt -> answers, held against their runs -> entry -> history

Only what is final is entered: a case without a verdict and a run without an outcome may still get
one by `--resume`; attempts that were set aside are final. A verdict that says passed over records
that are not whole is entered as `corrupt_record`; over whole ones that say otherwise, as what they
say.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from harness.checks.memory import peak_bytes
from harness.errors import HarnessError, one_line
from harness.history.entries import CaseEntry, FolderEntry, RunEntry, inputs_of, name_of, work_of
from harness.history.ledger import History, Recorded
from harness.infrastructure import machine_failure
from harness.provenance import facts, fingerprint
from harness.records import CaseSpec, RunResult, RunSpec, StepRecord, Verdict
from harness.store import (
    LEGS,
    VERDICT_FILE,
    RunFolder,
    kept_folder,
    load_run_folder,
    num_kept,
    read_outcome,
    read_verdict,
)
from harness.store.files import write_atomic
from harness.store.verify import verified, verified_alone

DATABASE_FILE = "history.sqlite"
NOT_WRITTEN_FILE = "history_not_written.txt"
MAX_TEXT_CHARS = 500


def remember(folder: Path, database: Path) -> str:
    """Record a run folder whatever state the history is in; a warning of one line, or "".

    Raises nothing. What could not be written is noted in the folder, for its report.
    """
    note = folder / NOT_WRITTEN_FILE
    try:
        record_folder(folder, database)
        note.unlink(missing_ok=True)
        return ""
    except Exception as error:  # noqa: BLE001 - the run's verdicts stand, whatever is wrong here
        known = isinstance(error, HarnessError)
        why = str(error) if known else f"internal error: {type(error).__name__}: {error}"
        warning = one_line(f"not written to the history: {why}")
        try:
            write_atomic(note, warning + "\n")
        except HarnessError as unwritten:
            warning = f"{warning}; {unwritten}"
    return warning


def record_folder(folder: Path, database: Path) -> Recorded:
    """Record a run folder; what was added.

    Raises:
        HarnessError: not a run folder, or the history is damaged or cannot be written.
    """
    with RunFolder.open(folder) as opened:
        entry = gather(opened)
    with History.open(database, create=True) as history:
        return history.record(entry)


def gather(folder: RunFolder) -> FolderEntry:
    """Everything final that a run folder holds."""
    manifest = folder.manifest
    runs = _Runs(folder)
    answers = (answer for case in folder.cases for answer in _answers(folder, case, runs))
    said = {name: _text(manifest.get(name)) for name in ("created", "commit", "shard", "tier",
                                                         "device", "id", "scenario")}  # fmt: skip
    said["scenario"] = said["scenario"] or next((_text(c.scenario) for c in folder.cases), "")
    return FolderEntry(
        **said,
        num_cases=len(folder.cases),
        machine=machine_kind(manifest.get("machine") or {}),
        slots=manifest.get("slots", 0),
        environment=environment_of(manifest),
        cases=tuple(answers),
        fingerprints=runs.fingerprints,
        runs=tuple(runs.entries),
    )


def machine_kind(machine: Mapping[str, Any]) -> str:
    """'8 cores, 4 x NVIDIA H200': machines on which a run takes about as long; "" if unknown."""
    if "cores" not in machine:
        return ""
    names = [_text(gpu["name"]) for gpu in machine.get("gpus", ())]
    counted = [f"{names.count(name)} x {name}" for name in sorted(set(names))]
    return ", ".join([f"{machine['cores']} cores", *counted])


def environment_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What verdicts may depend on, of a manifest as it is read from its file."""
    machine = manifest.get("machine")
    if not machine:
        return {}
    found = facts(manifest)
    return {
        **found["hardware"],
        "variables": found.get("variables", {}),
        **{key: machine.get(key) for key in ("python", "versions", "gpu_driver")},
    }


class _Runs:
    """Every attempt of every run of a folder.

    Attributes:
        entries: of all attempts.
        fingerprints: environments of their ranks, by name.
        last: the last attempt of each run, by key.
        failures: of each run, what failure of the machine ended each attempt, "" for none.
        commit: that made the folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.entries: list[RunEntry] = []
        self.fingerprints: dict[str, dict[str, Any]] = {}
        self.last: dict[str, RunResult] = {}
        self.failures: dict[str, list[str]] = {}
        self.commit = _text(folder.manifest.get("commit"))
        # A key is a hash of a whole specification, and many cases share one.
        self.keys = {
            case.id: {} if case.skip_reason else {leg: getattr(case, leg).key for leg in LEGS}
            for case in folder.cases
        }
        places: dict[str, tuple[RunSpec, Path]] = {}
        for case in folder.cases:
            for leg, key in self.keys[case.id].items():
                places.setdefault(key, (getattr(case, leg), folder.case_folder(case.id) / leg))
        for key, (spec, sealed) in places.items():
            current = folder.run_folder(key)
            number = num_kept(current)
            for attempt in range(number):
                self._take(load_run_folder(kept_folder(current, attempt), spec), key, attempt)
            # A folder of which only the cases were kept still has its runs.
            place = current if current.is_dir() else sealed
            if read_outcome(place, key)[0] is not None:
                self._take(load_run_folder(place, spec), key, number)

    def _take(self, result: RunResult, key: str, attempt: int) -> None:
        self.last[key] = result
        ranks = _ranks_environment(result)
        name = name_of(ranks) if ranks else ""
        self.fingerprints |= {name: ranks} if ranks else {}
        self.entries.append(_run(result, key, attempt, name, self.made_by(key)))
        failure = machine_failure(result) if result.outcome.what else ""
        self.failures.setdefault(key, []).append(failure)

    def made_by(self, key: str) -> str:
        """The commit that a run's ranks were started from, "" if it is the folder's or unknown."""
        ranks = self.last[key].ranks if key in self.last else ()
        starts = [rank.start for rank in ranks if rank.start is not None]
        found = {_text(start.environment.get("commit")) for start in starts}
        return ", ".join(sorted(found - {"", self.commit}))

    def retried(self, keys: Mapping[str, str]) -> tuple[str, ...]:
        """Earlier attempts of a case's runs that the machine failed, as 'role: failure'."""
        return tuple(
            f"{leg}: {failure}"
            for leg, key in keys.items()
            for failure in self.failures.get(key, [])[:-1]
            if failure
        )


def _ranks_environment(result: RunResult) -> dict[str, Any]:
    """What every rank recorded of its environment, each once; empty if one did not."""
    starts = [rank.start for rank in result.ranks if rank.start is not None]
    if not starts or len(starts) != result.spec.world_size:
        return {}
    # Values of two commits are compared all the same.
    compared = (
        {name: value for name, value in fingerprint(start.environment).items() if name != "code"}
        for start in starts
    )
    told = {json.dumps(each, sort_keys=True) for each in compared}
    return {"ranks": [json.loads(text) for text in sorted(told)]}


def _run(result: RunResult, key: str, attempt: int, fingerprint: str, commit: str) -> RunEntry:
    spec, outcome = result.spec, result.outcome
    ends = [rank.end for rank in result.ranks if rank.end is not None]
    whole = len(ends) == spec.world_size
    peak = max((peak_bytes(rank) for rank in result.ranks), default=0)
    times = _step_times(result)
    middle = median(times) if times else None
    return RunEntry(
        key=key,
        attempt=attempt,
        commit=commit,
        work=work_of(spec),
        what=outcome.what,
        device=spec.device,
        world_size=spec.world_size,
        # A run that rounds at random says nothing of how long those of its preset take.
        preset="" if spec.rounding else _text(spec.config.get("model", {}).get("preset")),
        steps=spec.config.get("steps", 0),
        started_unix_s=_seconds(outcome.started_unix_s),
        wall_s=_seconds(outcome.wall_s),
        fingerprint=fingerprint,
        problems=sum(len(rank.problems) for rank in result.ranks),
        startup_s=max(_seconds(end.startup_s) for end in ends) if whole else None,
        step_s=middle,
        step_spread_s=None if middle is None else median(abs(t - middle) for t in times),
        timed_steps=len(times),
        peak_bytes=peak or None if whole else None,
        replays=min((end.replays for end in ends), default=0) if whole else 0,
        loss_bits=_bits(result, _loss_text) if whole else "",
        state_bits=_bits(result, _state_text) if whole else "",
    )


def _step_times(result: RunResult) -> list[float]:
    """Seconds of the slowest rank, step by step, warm-up left out; empty for an unfinished run."""
    if not result.ranks or any(rank.end is None or rank.problems for rank in result.ranks):
        return []
    slowest: dict[int, float] = {}
    for rank in result.ranks:
        for record in rank.steps:
            slowest[record.step] = max(slowest.get(record.step, 0.0), record.step_s)
    times = [slowest[step] for step in sorted(slowest)]
    kept = times[math.ceil(len(times) / 5) :] or times
    return kept if all(math.isfinite(t) and t >= 0 for t in kept) else []


def _bits(result: RunResult, text: Callable[[StepRecord], str]) -> str:
    """A digest of what `text` has of every step of every rank, "" if a line cannot be trusted."""
    if any(rank.problems for rank in result.ranks):
        return ""
    digest = hashlib.sha256()
    for rank in result.ranks:
        for record in rank.steps:
            digest.update(f"{rank.rank} {record.step} {text(record)}\n".encode())
    return digest.hexdigest()[:32]


def _loss_text(record: StepRecord) -> str:
    micro = " ".join(loss.bits for loss in record.microbatch_losses)
    loss, norm = (v.bits if v is not None else "-" for v in (record.loss, record.grad_norm))
    return f"{loss} {norm} {micro}"


def _state_text(record: StepRecord) -> str:
    return " ".join(f"{group}={record.digests[group]}" for group in sorted(record.digests))


def _answers(folder: RunFolder, case: CaseSpec, runs: _Runs) -> Iterator[CaseEntry]:
    current, keys = folder.case_folder(case.id), runs.keys[case.id]
    number = num_kept(current)
    for attempt in range(number + 1):
        place = current if attempt == number else kept_folder(current, attempt)
        verdict = read_verdict(place, case.id)
        if verdict is None:
            if (place / VERDICT_FILE).exists():
                yield _damaged(case, attempt, f"its {VERDICT_FILE} does not decode")
        elif attempt < number:
            # By its own links: the runs of an earlier answer may have been repeated since.
            yield _answer(case, verified_alone(place, case, verdict), attempt)
        else:
            last = _answer(case, verified(folder, case, verdict), attempt)
            made_by = runs.made_by(keys.get("candidate", ""))
            yield dataclasses.replace(last, retried=runs.retried(keys), commit=made_by)


def _answer(case: CaseSpec, verdict: Verdict, attempt: int) -> CaseEntry:
    causes = [
        _text(f"{answer.check}: {answer.outcome} {answer.what}".strip())
        for answer in verdict.checks
        if answer.outcome not in ("passed", "skipped")
    ]
    if verdict.confirmation is not None:
        causes.append(f"confirmation: {verdict.confirmation.outcome}")
    return CaseEntry(
        case_id=case.id,
        attempt=attempt,
        outcome=verdict.outcome,
        what=verdict.what,
        message=_text(verdict.message),
        labels=case.labels,
        causes=tuple(causes),
        difference=verdict.difference,
        wall_s=_seconds(verdict.wall_s),
        inputs=inputs_of(case),
        reference=_text(verdict.runs.get("reference")),
        control=_text(verdict.runs.get("control")),
        candidate=_text(verdict.runs.get("candidate")),
    )


def _damaged(case: CaseSpec, attempt: int, why: str) -> CaseEntry:
    return CaseEntry(
        case_id=case.id, attempt=attempt, outcome="error", what="corrupt_record",
        message=_text(why), labels=case.labels,
    )  # fmt: skip


def _text(value: object) -> str:
    text = one_line(str(value)) if value is not None else ""
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[: MAX_TEXT_CHARS - 1]}…"


def _seconds(value: float) -> float:
    return float(value) if math.isfinite(value) and value > 0 else 0.0
