"""What the history keeps: an entry a run folder, with its cases and every attempt of its runs.

An entry is final once it is recorded: nothing in the history is ever changed, so two histories are
merged by union. Its digest covers every field that differs from its default; a field that a later
schema adds has a default, so that digests of older entries stand.

    FolderEntry      one `harness run`: scenario, commit, environment, shard, tier
      CaseEntry      one answer for one case: outcome, causes, first difference
      RunEntry       one attempt of one training run: how it ended, times, memory, bits
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.records import CaseSpec, Difference, Json, Outcome, RecordError, RunSpec, What

ID_CHARS = 16
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
MAX_INTEGER = 2**63 - 1
"""The largest integer that SQLite stores."""


def _check_attempt(attempt: int) -> None:
    if attempt < 0:
        raise RecordError(f"attempt: expected an integer >= 0, got {attempt}")


@dataclass(frozen=True, kw_only=True)
class CaseEntry(Json):
    """One answer for one case.

    Attributes:
        attempt: 0 for the first answer that the folder ever held for the case.
        causes: answers that were not `passed`, as 'check: outcome what'; 'confirmation: outcome'.
        inputs: names what the answer is for: runs, expectation, limits of checks; see `inputs_of`.
        reference: key of the run; the same for `control` and `candidate`, "" for a skipped case.
        retried: earlier attempts of its runs that the machine failed, as 'leg: failure'.
        commit: that made its candidate, where it is not the folder's.
    """

    case_id: str
    attempt: int
    outcome: Outcome
    what: What
    message: str
    labels: dict[str, str]
    causes: tuple[str, ...] = ()
    difference: Difference | None = None
    reference: str = ""
    control: str = ""
    candidate: str = ""
    wall_s: float = 0.0
    inputs: str = ""
    retried: tuple[str, ...] = ()
    commit: str = ""

    def __post_init__(self) -> None:
        _check_attempt(self.attempt)


@dataclass(frozen=True, kw_only=True)
class RunEntry(Json):
    """One attempt of one training run. None and "" where nothing was measured.

    Attributes:
        work: equal for runs that do equal work, whatever their time limit and replica.
        fingerprint: names the environment that its ranks recorded, in `FolderEntry.fingerprints`.
        problems: lines of its records that cannot be trusted.
        startup_s: from process start to first step, of the slowest rank.
        step_s: median over steps of the slowest rank's time, the first fifth of the steps left out.
        step_spread_s: median distance of these times from their median.
        timed_steps: how many steps `step_s` is the median of.
        peak_bytes: of the highest rank.
        loss_bits: digest of the bits of every loss and gradient norm of every step and rank.
        state_bits: digest of every tensor's digest of every step and rank.
        commit: that made it, where it is not the folder's.
    """

    key: str
    attempt: int
    work: str
    what: What
    device: Literal["cpu", "cuda"]
    world_size: int
    preset: str
    steps: int
    started_unix_s: float
    wall_s: float
    fingerprint: str = ""
    problems: int = 0
    startup_s: float | None = None
    step_s: float | None = None
    step_spread_s: float | None = None
    timed_steps: int = 0
    peak_bytes: int | None = None
    replays: int = 0
    loss_bits: str = ""
    state_bits: str = ""
    commit: str = ""

    def __post_init__(self) -> None:
        _check_attempt(self.attempt)


@dataclass(frozen=True, kw_only=True)
class FolderEntry(Json):
    """One run folder.

    Attributes:
        id: of the folder, wherever it is copied to.
        created: UTC, ISO 8601; nights are in this order.
        commit: of the program under test, with a hash of what was changed on top; "" if unknown.
        machine: kind of machine, as the cost model groups them.
        slots: ranks that could run at a time, which times depend on.
        environment: what verdicts may depend on; empty if it was not recorded.
        fingerprints: environments that ranks recorded, by name.
        num_cases: planned, answered or not.
    """

    id: str
    scenario: str
    created: str
    num_cases: int
    commit: str = ""
    shard: str = ""
    tier: str = ""
    device: str = ""
    machine: str = ""
    slots: int = 0
    environment: dict[str, Any] = field(default_factory=dict)
    fingerprints: dict[str, dict[str, Any]] = field(default_factory=dict)
    cases: tuple[CaseEntry, ...] = ()
    runs: tuple[RunEntry, ...] = ()

    @property
    def environment_id(self) -> str:
        """Names the environment; "" if it is unknown, which equals nothing."""
        return name_of(self.environment) if self.environment else ""


def name_of(value: object) -> str:
    """A short name for a JSON value: equal names mean equal values."""
    text = _ENCODER.encode(value)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_CHARS]


def inputs_of(case: CaseSpec) -> str:
    """Names what a case asks: equal for cases whose answers are worth the same."""
    keys = [case.reference.key, case.control.key, case.candidate.key]
    return name_of([keys, case.expect, case.checks])


def work_of(spec: RunSpec) -> str:
    """Names the work that a run does: its key without time limit and replica."""
    plant = spec.plant.to_json() if spec.plant is not None else None
    # Names of runs that round as usual are older than the others.
    rounding = [spec.rounding] if spec.rounding else []
    return name_of([spec.config, spec.device, spec.world_size, plant, *rounding])


def digest_of(entry: Json) -> str:
    """Names everything that an entry says; fields at their defaults are left out."""
    return name_of(_told(entry))


def _told(entry: object) -> object:
    if isinstance(entry, CaseEntry | RunEntry | FolderEntry):
        told = {}
        for name, default in _DEFAULTS[type(entry)]:
            value = getattr(entry, name)
            if value != default:
                told[name] = value if type(value) in (str, int, float) else _told(value)
        return told
    if isinstance(entry, Json):
        return entry.to_json()
    if isinstance(entry, tuple | list):
        return [_told(item) for item in entry]
    return entry


def default_of(entry: "dataclasses.Field[Any]") -> object:
    """A field's default; `dataclasses.MISSING`, which equals no value, if it has none."""
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return entry.default


# Looked up once: rows are checked by the hundred thousand.
_DEFAULTS: dict[type[Json], tuple[tuple[str, object], ...]] = {
    kind: tuple((f.name, default_of(f)) for f in dataclasses.fields(kind))
    for kind in (CaseEntry, RunEntry, FolderEntry)
}
