"""How long the Slurm engine waits for what: jobs that do not start, jobs that do not leave."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.engine.slurm_calls import JobState


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait, in seconds.

    Attributes:
        poll_s: between two looks at the jobs.
        late_s: for files of a job that is over, or a job that squeue does not know (yet).
        answer_s: for one command.
        away_s: for a controller that does not answer.
        cancel_s: for cancelled jobs to be gone.
        full_s: between two tries to submit while Slurm takes no more jobs of ours.
        leave_s: for a job to leave when every node has reported.
    """

    poll_s: float = 1.0
    late_s: float = 75.0
    answer_s: float = 60.0
    away_s: float = 900.0
    cancel_s: float = 30.0
    full_s: float = 10.0
    leave_s: float = 60.0


class Queued:
    """Since when jobs wait in the queue, as far as this harness has seen."""

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s, self._clock = most_s, clock
        self._since_s: dict[str, float] = {}

    def why_never(self, name: str, state: JobState) -> str:
        """Why a job is not waited for any longer; "" if it has started, or may still."""
        if state.state != "PENDING":
            self._since_s.pop(name, None)
            return ""
        if state.stuck:
            return f"Slurm will not start job {state.job_id} by itself: {state.reason}"
        waited_s = self._clock() - self._since_s.setdefault(name, self._clock())
        if waited_s <= self._most_s:
            return ""
        return (
            f"Slurm did not start job {state.job_id} in {self._most_s:g} s "
            f"(launch.slurm.pending_s): {state.reason}"
        )


class Leftovers:
    """Jobs whose runs are concluded: their nodes are free only once they have left, too.

    They do so by themselves. One that does not, as the process that Slurm had watch a step was
    killed, would hold its nodes until its time is up.
    """

    def __init__(self, leave_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._leave_s, self._clock = leave_s, clock
        self._since_s: dict[str, float] = {}

    def add(self, name: str) -> None:
        """A run is concluded whose job may be in the queue still."""
        self._since_s[name] = self._clock()

    def update(self, states: Mapping[str, JobState]) -> list[int]:
        """Forget those that have left; ids of jobs that have had their time, each told once."""
        overdue = []
        for name, since_s in list(self._since_s.items()):
            state = states.get(name)
            if state is None or state.leaving:
                del self._since_s[name]
            elif self._clock() - since_s > self._leave_s:
                del self._since_s[name]
                overdue.append(state.job_id)
        return overdue

    def __bool__(self) -> bool:
        return bool(self._since_s)
