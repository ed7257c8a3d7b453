"""What the history keeps of a run folder. An entry is final once it is recorded.

    FolderEntry      one `harness run`: scenario, commit, environment, shard, tier
      CaseEntry      one answer for one case: outcome, causes, first difference
      RunEntry       one attempt of one training run: how it ended, times, memory, bits

Fields are the columns of the tables; "", None or 0 where nothing was recorded. `attempt` is 0 for
the first that the folder ever held; `commit` of an answer or a run is "" if it is the folder's.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from harness.records import Difference, Json, Outcome, RunSpec, What

ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
Attempt = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class CaseEntry(Json):
    """One answer for one case; `reference`, `control` and `candidate` are keys of its runs."""

    case_id: str
    attempt: Attempt
    outcome: Outcome
    what: What
    message: str
    labels: dict[str, str]
    commit: str = ""
    causes: tuple[str, ...] = ()  # 'check: outcome what', 'confirmation: outcome'
    difference: Difference | None = None
    reference: str = ""
    control: str = ""
    candidate: str = ""
    wall_s: float = 0.0
    retried: tuple[str, ...] = ()  # attempts of its runs that the machine failed: 'role: failure'

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
    commit: str = ""
    fingerprint: str = ""  # names the environment of its ranks, in `FolderEntry.fingerprints`
    startup_s: float | None = None  # from process start to first step
    step_s: float | None = None  # median over the steps but the first fifth
    peak_bytes: int | None = None
    loss_bits: str = ""  # digest of every loss and gradient norm of every step and rank
    state_bits: str = ""  # digest of every tensor's digest of every step and rank


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
