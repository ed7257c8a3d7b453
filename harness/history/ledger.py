"""The history: a folder of files, one a run folder, final once recorded, entries only ever added.

    FolderEntry      one `harness run`: scenario, commit, environment, shard, tier
      CaseEntry      one answer for one case: outcome, causes, first difference
      RunEntry       one attempt of one training run: how it ended, times, memory, bits

"", None or 0 where nothing was recorded. Files are those of `harness.store.files`: whole or not
there, whoever is killed, and with a checksum. A damaged one is never written to. Their names have
the time, the id and the scenario, so that what is not asked for is not read:

    20310203T030000+0000_3f1c0a9d..._nightly.v8.json
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from msgspec import Meta

from harness import store
from harness.checks.bits import quantities
from harness.checks.complete import machine_failure
from harness.checks.memory import peak_bytes
from harness.checks.speed import typical_step_s
from harness.errors import HarnessError, Infrastructure, UsageError, one_line
from harness.provenance import facts, fingerprint
from harness.records import (
    CaseSpec,
    Device,
    Difference,
    Json,
    Outcome,
    RecordError,
    RunResult,
    RunSpec,
    What,
)
from harness.store.files import make_folder, read_object, told, write_atomic, write_object
from harness.store.folder import verified, verified_alone

SUFFIX = ".v8.json"
"""With the version of these types: entries of another one are not read."""
ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
Attempt = Annotated[int, Meta(ge=0)]
"""0 for the first that the folder ever held."""


@dataclass(frozen=True, kw_only=True)
class CaseEntry(Json):
    """One answer for one case; `reference`, `control` and `candidate` are keys of its runs."""

    case_id: str
    attempt: Attempt
    outcome: Outcome
    what: What
    message: str
    labels: dict[str, str]
    commit: str = ""  # "" if it is the folder's
    causes: tuple[str, ...] = ()  # 'check: outcome what', 'confirmation: outcome'
    difference: Difference | None = None
    reference: str = ""
    control: str = ""
    candidate: str = ""
    wall_s: float = 0.0
    retried: tuple[str, ...] = ()  # attempts of its runs that the machine failed: 'role: failure'

    @property
    def name(self) -> tuple[str, int]:
        return self.case_id, self.attempt

    @property
    def verdict(self) -> str:
        return f"{self.outcome} {self.what}".strip()


@dataclass(frozen=True, kw_only=True)
class RunEntry(Json):
    """One attempt of one training run; times and memory are those of the worst rank."""

    key: str
    attempt: Attempt
    work: str  # see `work_of`
    what: What
    device: Device
    world_size: int
    preset: str
    steps: int
    started_unix_s: float
    wall_s: float
    commit: str = ""  # "" if it is the folder's
    fingerprint: str = ""  # names the environment of its ranks, in `FolderEntry.fingerprints`
    startup_s: float | None = None  # from process start to first step
    step_s: float | None = None  # median over the later half of the steps
    peak_bytes: int | None = None
    loss_bits: str = ""  # digest of all losses and norms of every step and rank
    state_bits: str = ""  # digest of all digests of tensors and calls, of every rank

    @property
    def name(self) -> tuple[str, int]:
        return self.key, self.attempt


@dataclass(frozen=True, kw_only=True)
class FolderEntry(Json):
    """One run folder, wherever it is copied to."""

    id: str
    scenario: str
    created: str  # UTC, ISO 8601: the order of runs
    num_cases: int  # planned, answered or not
    commit: str = ""  # of the program under test, with a hash of uncommitted changes
    shard: str = ""
    tier: str = ""
    device: str = ""
    machine: str = ""  # see `machine_kind`
    slots: int = 0  # ranks that could run at a time, which times depend on
    environment: dict[str, Any] = field(default_factory=dict)  # what verdicts may depend on
    fingerprints: dict[str, dict[str, Any]] = field(default_factory=dict)  # of ranks, by name
    cases: tuple[CaseEntry, ...] = ()
    runs: tuple[RunEntry, ...] = ()
    merged: tuple[str, ...] = ()  # ids of the run folders that this one was merged of

    @property
    def environment_id(self) -> str:
        """Names the environment; "" if it is unknown, which equals nothing."""
        return name_of(self.environment) if self.environment else ""


def name_of(value: object) -> str:
    """A short name for a JSON value: equal names mean equal values."""
    return hashlib.sha256(ENCODER.encode(value).encode()).hexdigest()[:16]


def work_of(spec: RunSpec) -> str:
    """Names the work that a run does: its key without time limit, replica and place on a disk."""
    plant = spec.plant.to_json() if spec.plant is not None else None
    config = spec.config
    if (program := config.get("program")) is not None:
        target, folder = program["target"], program["folder"]
        target = os.path.relpath(target, folder) if Path(target).is_absolute() else target
        config = config | {"program": program | {"target": target, "folder": ""}}
    return name_of([config, spec.device, spec.world_size, plant, spec.rounding])


# --- the files --------------------------------------------------------------------------------


class Damaged(Infrastructure):
    """An entry cannot be trusted. It is not written to."""


class History:
    """A history, whose folder is `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Self:
        """A history, made with `create` if there is none.

        `UsageError`: there is none, or a file. `Infrastructure`: the disk refused.
        """
        if create:
            make_folder(path)
        elif not path.is_dir():
            got = "a file" if path.exists() else "nothing"
            how = "`harness run` makes one, `harness history --add RUN` too"
            raise UsageError(f"{path}: expected a history, got {got}; {how}")
        return cls(path)

    def record(self, entry: FolderEntry) -> Counter[str]:
        """Add what is new of a run folder; what is there already stays as it is.

        How many `folders`, `cases` and `runs` are new, and how many of them the history holds with
        other contents (`differing`). `Infrastructure`: the disk refused; nothing is added.
        """
        held = next(self.entries(entry.id), replace(entry, cases=(), runs=()))
        is_new = not self._files(entry.id)
        cases, other_cases = _added(held.cases, entry.cases)
        runs, other_runs = _added(held.runs, entry.runs)
        other = replace(held, cases=(), runs=()) != replace(entry, cases=(), runs=())
        if is_new or cases or runs:
            whole = replace(held, cases=(*held.cases, *cases), runs=(*held.runs, *runs))
            parts = (entry.created.replace("-", "").replace(":", ""), entry.id, entry.scenario)
            write_object(self.path / f"{'_'.join(map(_plain, parts))}{SUFFIX}", whole)
        return Counter(folders=int(is_new), cases=len(cases), runs=len(runs),
                       differing=other + other_cases + other_runs)  # fmt: skip

    def entries(
        self, prefix: str = "", scenario: str | None = None, *, newest_first: bool = False
    ) -> Iterator[FolderEntry]:
        """Run folders, oldest first, or those whose id begins with `prefix`, or of a scenario.

        `Damaged`: one is not as it was written.
        """
        found = self._files(prefix, scenario)
        for path in reversed(found) if newest_first else found:
            try:
                entry = FolderEntry.from_json(read_object(path))
            except (OSError, RecordError) as error:
                raise Damaged(f"the history {self.path} is damaged: {told(error)}") from error
            if scenario in (None, entry.scenario):
                yield entry

    def _files(self, prefix: str, scenario: str | None = None) -> list[Path]:
        found = []
        for path in sorted(self.path.glob(f"*_*_*{SUFFIX}")):
            _, name, of = path.name.removesuffix(SUFFIX).split("_", 2)
            if name.startswith(prefix) and (scenario is None or of == _plain(scenario)):
                found.append(path)
        return found


Row = TypeVar("Row", CaseEntry, RunEntry)


def _added(held: Sequence[Row], given: Sequence[Row]) -> tuple[tuple[Row, ...], int]:
    """What is new of the rows that are given, and how many are held with other contents."""
    known = {row.name: row for row in held}
    new = tuple(row for row in given if row.name not in known)
    return new, sum(known.get(row.name, row) != row for row in given)


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]", "-", text)[:80]


# --- from a run folder to its entry -------------------------------------------------------------

# Only what is final is entered: what has no verdict or outcome may still get one by `--resume`. A
# verdict that says passed over records that are not whole is entered as `corrupt_record`.
HISTORY_FOLDER = "history"
NOT_WRITTEN_FILE = "history_not_written.txt"
MAX_TEXT_CHARS = 500
CODE = ("code", "program")
"""Of an environment: the code of the built-in trainer, and that of a program."""


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
        kind = (
            "" if isinstance(error, HarnessError) else f"internal error: {type(error).__name__}: "
        )
        warning = one_line(f"not written to the history: {kind}{error}")
        try:
            write_atomic(note, warning + "\n")
        except HarnessError as unwritten:
            warning = f"{warning}; {unwritten}"
    return warning


def record_folder(folder: Path, database: Path) -> Counter[str]:
    """Record a run folder, as `History.record` (`HarnessError`: it is none, or as there)."""
    # Locked until it is written: a process that read an earlier state must not write last.
    with store.RunFolder.open(folder) as opened:
        return History.open(database, create=True).record(gather(opened))


def gather(folder: store.RunFolder) -> FolderEntry:
    """Everything final that a run folder holds."""
    manifest, answers = folder.manifest, list[CaseEntry]()
    fingerprints: dict[str, dict[str, Any]] = {}
    runs: dict[str, list[_Attempt]] = {}
    for case in folder.cases:
        # A key is a hash of a whole specification, and many cases share a run.
        keys = {} if case.skip_reason else {leg: getattr(case, leg).key for leg in store.LEGS}
        for leg, key in keys.items():
            if key not in runs:
                runs[key] = list(_attempts(folder, case, leg, key, fingerprints))
        answers += _answers(folder, case, {leg: runs[key] for leg, key in keys.items()})
    machine, found = manifest.get("machine") or {}, facts(manifest)
    environment = {key: machine.get(key) for key in ("python", "versions", "gpu_driver")}
    environment |= {**found.get("hardware", {}), "variables": found.get("variables", {})}
    names = ("created", "commit", "shard", "tier", "device", "id", "scenario")
    said = {name: _text(manifest.get(name)) for name in names}
    said["scenario"] = said["scenario"] or next((_text(c.scenario) for c in folder.cases), "")
    return FolderEntry(
        **said, num_cases=len(folder.cases), machine=machine_kind(machine), cases=tuple(answers),
        slots=manifest.get("slots", 0), environment=environment if machine else {},
        fingerprints=fingerprints, runs=tuple(run for found in runs.values() for run, _ in found),
        merged=tuple(_text(part.get("id")) for part in manifest.get("merged", ())),
    )  # fmt: skip


def machine_kind(machine: Mapping[str, Any]) -> str:
    """'8 cores, 4 x NVIDIA H200': machines on which a run takes about as long; "" if unknown."""
    if "cores" not in machine:
        return ""
    names = [_text(gpu["name"]) for gpu in machine.get("gpus", ())]
    counted = [f"{names.count(name)} x {name}" for name in sorted(set(names))]
    return ", ".join([f"{machine['cores']} cores", *counted])


_Attempt = tuple[RunEntry, str]  # and what failure of the machine ended it, "" for none


def _attempts(
    folder: store.RunFolder, case: CaseSpec, leg: str, key: str, known: dict[str, dict[str, Any]]
) -> Iterator[_Attempt]:
    """Attempts of a run, the current one last; environments of their ranks are added to `known`."""
    spec, current = getattr(case, leg), folder.run_folder(key)
    places = store.kept_folders(current)
    # A folder of which only the cases were kept still has its runs.
    last = current if current.is_dir() else folder.case_folder(case.id) / leg
    places += [last] if store.read_outcome(last, key)[0] is not None else []
    for attempt, place in enumerate(places):
        result = store.load_run_folder(place, spec)
        found = [rank.start.environment for rank in result.ranks if rank.start is not None]
        commits = {_text(each.get("commit")) for each in found}
        name = ""
        if found and len(found) == spec.world_size:
            # Each once, but for their code: values of two commits are compared all the same.
            plain = ({k: v for k, v in fingerprint(e).items() if k not in CODE} for e in found)
            texts = sorted({json.dumps(each, sort_keys=True) for each in plain})
            ranks = {"ranks": [json.loads(text) for text in texts]}
            name = name_of(ranks)
            known[name] = ranks
        commit = ", ".join(sorted(commits - {"", _text(folder.manifest.get("commit"))}))
        entry = _run(result, spec, key=key, attempt=attempt, fingerprint=name, commit=commit)
        yield entry, machine_failure(result) if result.outcome.what else ""


def _run(result: RunResult, spec: RunSpec, **named: Any) -> RunEntry:
    outcome = result.outcome
    ends = [rank.end for rank in result.ranks if rank.end is not None]
    measured: dict[str, Any] = {}
    if len(ends) == spec.world_size:
        measured["startup_s"] = max(end.startup_s for end in ends)
        measured["peak_bytes"] = max(map(peak_bytes, result.ranks)) or None
        if not any(rank.problems for rank in result.ranks):
            measured |= {"step_s": typical_step_s(result), **_bits(result)}
    return RunEntry(
        **named, **measured, work=work_of(spec), what=outcome.what, device=spec.device,
        # A run that rounds at random says nothing of how long those of its preset take.
        preset="" if spec.rounding else _text(spec.config.get("model", {}).get("preset")),
        world_size=spec.world_size, steps=spec.config.get("steps", 0),
        started_unix_s=outcome.started_unix_s, wall_s=outcome.wall_s,
    )  # fmt: skip


def _bits(result: RunResult) -> dict[str, str]:
    loss, state = hashlib.sha256(), hashlib.sha256()
    for rank in result.ranks:
        if rank.initial is not None:
            state.update(f"{rank.rank} {sorted(rank.initial.digests.items())}\n".encode())
        for record in rank.steps:
            where, held = f"{rank.rank} {record.step}", sorted(record.digests.items())
            bits = [(name, value.bits) for name, value in quantities(record)]
            loss.update(f"{where} {bits}\n".encode())
            state.update(f"{where} {held} {record.taps}\n".encode())
    return {"loss_bits": loss.hexdigest()[:32], "state_bits": state.hexdigest()[:32]}


def _answers(
    folder: store.RunFolder, case: CaseSpec, runs: Mapping[str, list[_Attempt]]
) -> Iterator[CaseEntry]:
    current = folder.case_folder(case.id)
    for attempt, place in enumerate([*store.kept_folders(current), current]):
        answer, last = store.find_verdict(place, case.id)[0], place is current
        if answer is None:
            if (place / store.VERDICT_FILE).exists():
                why = f"its {store.VERDICT_FILE} does not decode"
                yield CaseEntry(case_id=case.id, attempt=attempt, outcome="error", message=why,
                                what="corrupt_record", labels=case.labels)  # fmt: skip
            continue
        # An earlier answer by its own links: its runs may have been repeated since.
        found = verified(folder, case, answer) if last else verified_alone(place, case, answer)
        causes = [
            _text(f"{result.check}: {result.outcome} {result.what}".strip())
            for result in found.checks if result.outcome not in ("passed", "skipped")
        ]  # fmt: skip
        if found.confirmation is not None:
            causes.append(f"confirmation: {found.confirmation.outcome}")
        ends = {leg: [why for _, why in attempts] for leg, attempts in runs.items() if last}
        candidate = runs.get("candidate")
        yield CaseEntry(
            case_id=case.id, attempt=attempt, outcome=found.outcome, what=found.what,
            message=_text(found.message), labels=case.labels, causes=tuple(causes),
            difference=found.difference, wall_s=found.wall_s,
            commit=candidate[-1][0].commit if candidate and last else "",
            retried=tuple(f"{leg}: {why}" for leg in ends for why in ends[leg][:-1] if why),
            **{leg: _text(found.runs.get(leg)) for leg in store.LEGS},
        )  # fmt: skip


def _text(value: object) -> str:
    text = one_line(str(value)) if value is not None else ""
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[: MAX_TEXT_CHARS - 1]}…"
