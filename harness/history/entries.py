"""What the history keeps of a run folder. An entry is final once it is recorded.

    FolderEntry      one `harness run`: scenario, commit, environment, shard, tier
      CaseEntry      one answer for one case: outcome, causes, first difference
      RunEntry       one attempt of one training run: how it ended, times, memory, bits

Fields are the columns of the tables; "", None or 0 where nothing was recorded.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.records import CaseSpec, Difference, Json, Outcome, RecordError, RunSpec, What

NAME_CHARS = 16
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class _Attempt(Json):
    """`attempt` is 0 for the first that the folder ever held; `commit` made it, "" if the folder's.

    Raises:
        RecordError: an attempt below 0.
    """

    attempt: int
    commit: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attempt < 0:
            raise RecordError(f"attempt: expected an integer >= 0, got {self.attempt}")


@dataclass(frozen=True, kw_only=True)
class CaseEntry(_Attempt):
    """One answer for one case.

    Attributes:
        causes: answers that were not `passed`, as 'check: outcome what'; 'confirmation: outcome'.
        reference: key of the run; the same for `control` and `candidate`; "" for a skipped case.
        inputs: see `inputs_of`.
        retried: earlier attempts of its runs that the machine failed, as 'role: failure'.
    """

    case_id: str
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

    @property
    def verdict(self) -> str:
        """'failed diverged'."""
        return f"{self.outcome} {self.what}".strip()


@dataclass(frozen=True, kw_only=True)
class RunEntry(_Attempt):
    """One attempt of one training run.

    Attributes:
        work: see `work_of`.
        fingerprint: names the environment of its ranks, in `FolderEntry.fingerprints`.
        problems: lines of its records that cannot be trusted.
        startup_s: from process start to first step, of the slowest rank.
        step_s: median over steps of the slowest rank's time, the first fifth of the steps left out.
        step_spread_s: median distance of these times from their median.
        timed_steps: how many steps `step_s` is the median of.
        peak_bytes: of the highest rank.
        loss_bits: digest of the bits of every loss and gradient norm of every step and rank.
        state_bits: digest of every tensor's digest of every step and rank.
    """

    key: str
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


@dataclass(frozen=True, kw_only=True)
class FolderEntry(Json):
    """One run folder, wherever it is copied to.

    Attributes:
        created: UTC, ISO 8601: the order of runs.
        commit: of the program under test, with a hash of uncommitted changes.
        machine: kind of machine: those on which a run takes about as long.
        slots: ranks that could run at a time, which times depend on.
        environment: what verdicts may depend on.
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
    return hashlib.sha256(_ENCODER.encode(value).encode()).hexdigest()[:NAME_CHARS]


def inputs_of(case: CaseSpec) -> str:
    """Names what a case asks: its runs, expectation and limits of checks."""
    keys = [case.reference.key, case.control.key, case.candidate.key]
    return name_of([keys, case.expect, case.checks])


def work_of(spec: RunSpec) -> str:
    """Names the work that a run does: its key without time limit and replica."""
    plant = spec.plant.to_json() if spec.plant is not None else None
    return name_of([spec.config, spec.device, spec.world_size, plant, spec.rounding])
