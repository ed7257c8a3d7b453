"""From a run folder to its entry: what is final in it, and nothing that cannot be trusted.

A case without a verdict and a run without an outcome are not recorded: a later `--resume` may still
give them one. Attempts that were set aside are final. A verdict that says passed over records that
are not whole is recorded as `corrupt_record`; over whole ones that say otherwise, as what they say.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from harness.checks.complete import find_flaw
from harness.checks.memory import peak_bytes
from harness.errors import one_line
from harness.history.entries import (
    MAX_INTEGER,
    CaseEntry,
    FolderEntry,
    RunEntry,
    inputs_of,
    name_of,
    work_of,
)
from harness.infrastructure import machine_failure
from harness.provenance import facts, fingerprint
from harness.records import CaseSpec, RunResult, RunSpec, StepRecord, Verdict
from harness.rejudge import confirmed, confirmed_alone
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

MAX_TEXT_CHARS = 500
_NOT_COMPARED = ("code",)
"""Of fingerprints: values of two commits are compared all the same."""


@dataclass
class _Runs:
    """The runs of a folder, and which of them are whole."""

    entries: list[RunEntry] = field(default_factory=list)
    fingerprints: dict[str, dict[str, Any]] = field(default_factory=dict)
    flaws: dict[str, str] = field(default_factory=dict)
    """Of the last attempt of each run: why it is not whole, "" if it is."""
    failures: dict[str, list[str]] = field(default_factory=dict)
    """Of each run: what failure of the machine ended each of its attempts, "" for none."""
    last: dict[str, RunResult] = field(default_factory=dict)
    """The last attempt of each run, as read."""
    commit: str = ""
    """That made the folder."""

    def take(self, result: RunResult, key: str, attempt: int) -> None:
        """Enter one attempt; a later one decides whether the run is whole."""
        self.last[key] = result
        entry = _run(result, key, attempt, self.fingerprints)
        self.entries.append(dataclasses.replace(entry, commit=_made_by(result, self.commit)))
        flaw = find_flaw(result)
        self.flaws[key] = "" if flaw is None else flaw.message
        failure = machine_failure(result) if result.outcome.what else ""
        self.failures.setdefault(key, []).append(failure)

    def retried(self, keys: Mapping[str, str]) -> tuple[str, ...]:
        """Earlier attempts of a case's runs that the machine failed, as 'leg: failure'."""
        return tuple(
            f"{leg}: {failure}"
            for leg, key in keys.items()
            for failure in self.failures.get(key, [])[:-1]
            if failure
        )

    def doubt(self, verdict: Verdict, keys: Mapping[str, str]) -> str:
        """Why a verdict that says passed cannot be believed; "" if it can."""
        if verdict.outcome != "passed":
            return ""
        if not keys:
            return "its verdict says passed, but it was to be skipped"
        for leg, key in keys.items():
            if verdict.runs.get(leg) != key:
                return f"its verdict says passed, but of another {leg}"
            if why := self.flaws.get(key, "there is no such run"):
                return f"its verdict says passed, but of the {leg}: {why}"
        return ""


def gather(folder: RunFolder) -> FolderEntry:
    """Everything final that a run folder holds."""
    manifest = folder.manifest
    # A key is a hash of a whole specification, and specifications are shared: each made once.
    keys = [_keys(case) for case in folder.cases]
    runs = _read_runs(folder, keys)
    machine = _mapping(manifest.get("machine"))
    planned = zip(folder.cases, keys, strict=True)
    return FolderEntry(
        id=folder_id(folder),
        scenario=_text(manifest.get("scenario")) or _scenario(folder.cases),
        created=_text(manifest.get("created")),
        num_cases=len(folder.cases),
        commit=_text(manifest.get("commit")),
        shard=_text(manifest.get("shard")),
        tier=_text(manifest.get("tier")),
        device=_text(manifest.get("device")),
        machine=machine_kind(machine),
        slots=_count(manifest.get("slots")),
        environment=environment_of(manifest),
        fingerprints=runs.fingerprints,
        cases=tuple(entry for case, own in planned for entry in _answers(folder, case, own, runs)),
        runs=tuple(runs.entries),
    )


def _keys(case: CaseSpec) -> dict[str, str]:
    return {} if case.skip_reason else {leg: getattr(case, leg).key for leg in LEGS}


def _read_runs(folder: RunFolder, keys: Sequence[Mapping[str, str]]) -> _Runs:
    places: dict[str, tuple[RunSpec, Path]] = {}
    for case, own in zip(folder.cases, keys, strict=True):
        for leg, key in own.items():
            places.setdefault(key, (getattr(case, leg), folder.case_folder(case.id) / leg))
    runs = _Runs(commit=_text(folder.manifest.get("commit")))
    for key, (spec, sealed) in places.items():
        current = folder.run_folder(key)
        number = num_kept(current)
        for attempt in range(number):
            runs.take(load_run_folder(kept_folder(current, attempt), spec), key, attempt)
        # A folder from which only the cases were kept still tells of its runs.
        place = current if current.is_dir() else sealed
        outcome, _ = read_outcome(place, key)
        if outcome is not None:
            runs.take(load_run_folder(place, spec), key, number)
    return runs


def folder_id(folder: RunFolder) -> str:
    """Identity of a run folder, wherever it lies: from its manifest, or of all that it planned."""
    if stated := _text(folder.manifest.get("id")):
        return stated
    planned = [case.to_json() for case in folder.cases]
    return name_of(_plain([folder.manifest, planned]))


def machine_kind(machine: Mapping[str, Any]) -> str:
    """'8 cores, 4 x NVIDIA H200': machines on which a run takes about as long; "" if unknown."""
    cores, gpus = machine.get("cores"), machine.get("gpus")
    if not isinstance(cores, int):
        return ""
    names = [_text(_mapping(gpu).get("name")) for gpu in gpus] if isinstance(gpus, list) else []
    counted = [f"{names.count(name)} x {name}" for name in sorted(set(names))]
    return ", ".join([f"{cores} cores", *counted])


def _run(
    result: RunResult, key: str, attempt: int, fingerprints: dict[str, dict[str, Any]]
) -> RunEntry:
    spec, outcome = result.spec, result.outcome
    starts = [rank.start for rank in result.ranks if rank.start is not None]
    name = ""
    if starts and len(starts) == spec.world_size:
        told = {json.dumps(_plain(_compared(s.environment)), sort_keys=True) for s in starts}
        content = {"ranks": [json.loads(text) for text in sorted(told)]}
        name = name_of(content)
        fingerprints[name] = content
    ends = [rank.end for rank in result.ranks if rank.end is not None]
    whole = len(ends) == spec.world_size
    peak = max((peak_bytes(rank) for rank in result.ranks), default=0)
    times = _step_times(result)
    middle = median(times) if times else None
    return RunEntry(
        key=key,
        attempt=attempt,
        work=work_of(spec),
        what=outcome.what,
        device=spec.device,
        world_size=spec.world_size,
        # A run that rounds at random says nothing of how long those of its preset take.
        preset="" if spec.rounding else _text(_mapping(spec.config.get("model")).get("preset")),
        steps=_count(spec.config.get("steps")),
        started_unix_s=_seconds(outcome.started_unix_s),
        wall_s=_seconds(outcome.wall_s),
        fingerprint=name,
        problems=sum(len(rank.problems) for rank in result.ranks),
        startup_s=max(_seconds(end.startup_s) for end in ends) if whole else None,
        step_s=middle,
        step_spread_s=None if middle is None else median(abs(t - middle) for t in times),
        timed_steps=len(times),
        peak_bytes=peak if whole and 0 < peak <= MAX_INTEGER else None,
        replays=min((_count(end.replays) for end in ends), default=0) if whole else 0,
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
    digest = hashlib.sha256()
    for rank in result.ranks:
        if rank.problems:
            return ""
        for record in rank.steps:
            digest.update(f"{rank.rank} {record.step} {text(record)}\n".encode())
    return digest.hexdigest()[:32]


def _loss_text(record: StepRecord) -> str:
    micro = " ".join(loss.bits for loss in record.microbatch_losses)
    loss, norm = (v.bits if v is not None else "-" for v in (record.loss, record.grad_norm))
    return f"{loss} {norm} {micro}"


def _state_text(record: StepRecord) -> str:
    return " ".join(f"{group}={record.digests[group]}" for group in sorted(record.digests))


def _answers(
    folder: RunFolder, case: CaseSpec, keys: Mapping[str, str], runs: _Runs
) -> Iterator[CaseEntry]:
    current = folder.case_folder(case.id)
    number = num_kept(current)
    for attempt in range(number + 1):
        place = current if attempt == number else kept_folder(current, attempt)
        verdict = read_verdict(place, case.id)
        if verdict is not None:
            if attempt < number:
                # Of its own links: the runs of an earlier answer may since have been made again.
                yield _answer(case, confirmed_alone(place, case, verdict), attempt)
            elif why := runs.doubt(verdict, keys):
                answer = _damaged(case, attempt, why)
                yield dataclasses.replace(answer, retried=runs.retried(keys))
            else:
                answer = _answer(case, confirmed(folder, case, verdict, runs.last), attempt)
                candidate = runs.last.get(keys.get("candidate", ""))
                made_by = "" if candidate is None else _made_by(candidate, runs.commit)
                yield dataclasses.replace(answer, retried=runs.retried(keys), commit=made_by)
        elif (place / VERDICT_FILE).exists():
            yield _damaged(case, attempt, f"its {VERDICT_FILE} does not decode")


def _answer(case: CaseSpec, verdict: Verdict, attempt: int) -> CaseEntry:
    return CaseEntry(
        case_id=case.id,
        attempt=attempt,
        outcome=verdict.outcome,
        what=verdict.what,
        message=_text(verdict.message),
        labels=_labels(case),
        causes=tuple(
            _text(f"{answer.check}: {answer.outcome} {answer.what}".strip())
            for answer in verdict.checks
            if answer.outcome not in ("passed", "skipped")
        )
        + _confirmed(verdict),
        difference=verdict.difference,
        reference=_text(verdict.runs.get("reference")),
        control=_text(verdict.runs.get("control")),
        candidate=_text(verdict.runs.get("candidate")),
        wall_s=_seconds(verdict.wall_s),
        inputs=inputs_of(case),
    )


def _confirmed(verdict: Verdict) -> tuple[str, ...]:
    found = verdict.confirmation
    return () if found is None else (f"confirmation: {found.outcome}",)


def _damaged(case: CaseSpec, attempt: int, why: str) -> CaseEntry:
    return CaseEntry(
        case_id=case.id, attempt=attempt, outcome="error", what="corrupt_record",
        message=_text(why), labels=_labels(case),
    )  # fmt: skip


def _labels(case: CaseSpec) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in case.labels.items()}


def environment_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What verdicts may depend on, of a manifest as it is read from its file."""
    machine = _mapping(manifest.get("machine"))
    if not machine:
        return {}
    found = facts(manifest)
    environment: dict[str, Any] = _plain(
        {
            **found["hardware"],
            "variables": found.get("variables", {}),
            **{key: machine.get(key) for key in ("python", "versions", "gpu_driver")},
        }
    )
    return environment


def _compared(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in fingerprint(environment).items() if k not in _NOT_COMPARED}


def _made_by(result: RunResult, commit: str) -> str:
    """The commit that a run's ranks were started from, "" if it is the folder's or unknown."""
    starts = [rank.start for rank in result.ranks if rank.start is not None]
    found = {_text(start.environment.get("commit")) for start in starts} - {"", commit}
    return ", ".join(sorted(found))


def _scenario(cases: Iterable[CaseSpec]) -> str:
    return next((_text(case.scenario) for case in cases), "")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    text = one_line(str(value)) if value is not None else ""
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[: MAX_TEXT_CHARS - 1]}…"


def _count(value: object) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER
    return int(value) if whole else 0  # type: ignore[call-overload]


def _seconds(value: float) -> float:
    return float(value) if math.isfinite(value) and value >= 0 else 0.0


def _plain(value: object) -> Any:
    """The value as strict JSON has it; what JSON cannot say becomes text."""
    if isinstance(value, Mapping):
        return {_text(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else _text(value)
