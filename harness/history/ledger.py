"""The history: a folder of files, one a run folder, final once recorded, entries only ever added.

    FolderEntry      one `harness run`: scenario, commit, environment, shard, tier
      CaseEntry      one answer for one case: outcome, causes, first difference
      RunEntry       one attempt of one training run: how it ended, times, memory, bits

"", None or 0 where nothing was recorded. Files are those of `harness.store.files`: whole or not
there, whoever is killed, and with a checksum. A damaged one is never written to. Their names have
the time, the id and the scenario, so that what is not asked for is not read:

    20310203T030000+0000_3f1c0a9d..._nightly.v7.json
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from msgspec import Meta

from harness.errors import Infrastructure, UsageError
from harness.records import Difference, Json, Outcome, RecordError, RunSpec, What
from harness.store.files import make_folder, read_object, told, write_object

SUFFIX = ".v7.json"
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
        """In its folder."""
        return self.case_id, self.attempt

    @property
    def verdict(self) -> str:
        """'failed diverged'."""
        return f"{self.outcome} {self.what}".strip()


@dataclass(frozen=True, kw_only=True)
class RunEntry(Json):
    """One attempt of one training run; times and memory are those of the worst rank."""

    key: str
    attempt: Attempt
    work: str  # see `work_of`
    what: What
    device: Literal["cpu", "cuda"]
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
    loss_bits: str = ""  # digest of every loss and gradient norm of every step and rank
    state_bits: str = ""  # digest of every tensor's digest of every step and rank

    @property
    def name(self) -> tuple[str, int]:
        """In its folder."""
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

    @property
    def environment_id(self) -> str:
        """Names the environment; "" if it is unknown, which equals nothing."""
        return name_of(self.environment) if self.environment else ""


def name_of(value: object) -> str:
    """A short name for a JSON value: equal names mean equal values."""
    return hashlib.sha256(ENCODER.encode(value).encode()).hexdigest()[:16]


def work_of(spec: RunSpec) -> str:
    """Names the work that a run does: its key without time limit and replica."""
    plant = spec.plant.to_json() if spec.plant is not None else None
    return name_of([spec.config, spec.device, spec.world_size, plant, spec.rounding])


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
    """A text as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.+-]", "-", text)[:80]
