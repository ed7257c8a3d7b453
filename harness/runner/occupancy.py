"""How busy the slots were while a run folder was worked on.

    share = sum over runs that ended of (ranks x seconds) / (slots x seconds from start to end)

Every execution of a folder, `--resume` among them, adds its figures to `occupancy.json` there: they
are told, and no verdict depends on them.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.checks.evidence import count
from harness.errors import HarnessError
from harness.records import Json, RecordError, RunOutcome, RunSpec, Verdict
from harness.runner.plan import Plan
from harness.runner.progress import duration
from harness.runner.run import Progress
from harness.store.files import MAX_FILE_BYTES, read_plain, write_atomic

OCCUPANCY_FILE = "occupancy.json"


@dataclass(frozen=True, kw_only=True)
class Occupancy(Json):
    """Of one execution of a run folder.

    Attributes:
        slots: ranks that could run at a time.
        num_runs: runs that ended.
        wall_s: from the first start, that of the engine included, to the last end.
        busy_slot_s: seconds that ended runs took, each times its ranks.
        expected_s: what the plan said `wall_s` would be.
    """

    slots: int
    num_runs: int
    wall_s: float
    busy_slot_s: float
    expected_s: float

    @property
    def share(self) -> float:
        """Busy slot seconds of those that there were; 0 if nothing ran."""
        there_s = self.slots * self.wall_s
        return self.busy_slot_s / there_s if there_s else 0.0

    def line(self) -> str:
        """For people: how busy, and whether the plan was right."""
        return (
            f"{count(self.slots, 'slot')} {100 * self.share:.0f} % busy: "
            f"{count(self.num_runs, 'run')} in "
            f"{duration(self.wall_s)}, expected {duration(self.expected_s)}"
        )


class Metered:
    """Passes on what happens, and measures how busy the slots are."""

    def __init__(
        self,
        told: Progress,
        ranks: Mapping[str, int],
        *,
        slots: int,
        expected_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to measure.

        Args:
            told: who is told next.
            ranks: of each run, by key.
            slots: ranks that may run at a time.
            expected_s: what the plan says that it will take.
            clock: seconds; time goes on.
        """
        self._told, self._ranks, self._clock = told, dict(ranks), clock
        self._slots, self._expected_s = slots, expected_s
        self._began_s = self._ended_s = clock()
        self._busy_slot_s, self._num_runs = 0.0, 0

    def run_started(self, spec: RunSpec) -> None:
        """A run was handed to the engine."""
        self._ranks[spec.key] = spec.world_size  # it may be none that was planned
        self._told.run_started(spec)

    def run_finished(self, outcome: RunOutcome) -> None:
        """A run ended."""
        self._num_runs += 1
        self._busy_slot_s += self._ranks.get(outcome.key, 0) * outcome.wall_s
        self._ended_s = self._clock()
        self._told.run_finished(outcome)

    def judged(self, verdict: Verdict) -> None:
        """A case has its answer."""
        self._told.judged(verdict)

    def read(self) -> Occupancy:
        """What has been measured so far."""
        return Occupancy(
            slots=self._slots, num_runs=self._num_runs, wall_s=self._ended_s - self._began_s,
            busy_slot_s=self._busy_slot_s, expected_s=self._expected_s,
        )  # fmt: skip


def metered(told: Progress, plan: Plan) -> Metered:
    """Begin to measure how a plan is carried out."""
    ranks = {run.key: run.spec.world_size for run in plan.runs}
    return Metered(told, ranks, slots=plan.slots, expected_s=plan.estimate_s)


def keep(folder: Path, occupancy: Occupancy) -> None:
    """Add the figures of one execution to a run folder; a disk that refuses costs the figures."""
    if not occupancy.num_runs:
        return
    kept = [*load(folder), occupancy]
    text = json.dumps([entry.to_json() for entry in kept], sort_keys=True)
    try:
        write_atomic(folder / OCCUPANCY_FILE, text + "\n")
    except HarnessError:
        return


def load(folder: Path) -> tuple[Occupancy, ...]:
    """The figures of every execution of a run folder; none if there are none that decode."""
    try:
        plain = json.loads(read_plain(folder / OCCUPANCY_FILE, MAX_FILE_BYTES).decode())
        return tuple(Occupancy.from_json(entry) for entry in plain)
    except (OSError, RecordError, ValueError, TypeError, RecursionError):
        return ()
