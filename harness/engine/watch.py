"""When ranks are asked for their stacks, and when they are killed: a clock without processes.

    running --a rank fails--> grace --grace_s--> stacks --stacks_s--> killed
       '----- timeout_s is up, or told to stop ------^
       '----- no rank recorded anything for stall_s -'

In `stacks` every rank left gets SIGUSR1, which makes faulthandler print the stack of each thread.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from harness.engine.output import CAP_BYTES
from harness.records import RankExit


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How patient a leader is (seconds) and how much it stores of a rank's output (bytes).

    `leave_s` is for ranks that have only to exit.
    """

    grace_s: float = 3.0
    stacks_s: float = 1.0
    leave_s: float = 30.0
    output_cap_bytes: int = CAP_BYTES


WINDOWS = 2
"""Times the seconds between two writes of steps that ranks may be silent."""


class Phase(Enum):
    """Where a run is; it only moves forward."""

    RUNNING = 0
    GRACE = 1
    STACKS = 2
    KILLED = 3


@dataclass
class Watch:
    """Decides when ranks are asked for stacks and killed. Times are monotonic seconds.

    `stall_s` None: ranks may be silent for as long as they have time. A stall is seen between once
    and twice that long after the last record: it is looked for when it may be there, not all along.
    `window_s`: what the steps that ranks record together take; silence within it is no stall.
    """

    ranks: Sequence[int]
    timeout_s: float
    limits: Limits
    started_s: float
    stall_s: float | None = None
    window_s: float = 0.0
    phase: Phase = Phase.RUNNING
    timed_out: bool = False
    stalled: bool = False
    leaving: bool = False
    exits: dict[int, RankExit] = field(default_factory=dict)
    failed_s: dict[int, float] = field(default_factory=dict)
    deadline_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.progressed(self.started_s)

    @property
    def patience_s(self) -> float | None:
        """Seconds without a record that count as a stall; None if none do."""
        return None if self.stall_s is None else max(self.stall_s, WINDOWS * self.window_s)

    def progressed(self, now_s: float) -> None:
        """Take note that ranks do something, while none has failed."""
        if self.phase is Phase.RUNNING:
            end_s, patience_s = self.started_s + self.timeout_s, self.patience_s
            self.deadline_s = end_s if patience_s is None else min(end_s, now_s + patience_s)

    def leaves(self, now_s: float) -> None:
        """Take note that every rank left has written its end record, and has only to exit."""
        if self.phase is Phase.RUNNING and not self.leaving:
            self.leaving = True
            self.deadline_s = min(self.deadline_s, now_s + self.limits.leave_s)

    def may_stall(self, now_s: float) -> bool:
        """Whether it must be looked at what ranks have recorded, before `advance`."""
        waits = self.phase is Phase.RUNNING and not self.leaving
        return waits and self.stall_s is not None and now_s >= self.deadline_s

    @property
    def failed_order(self) -> list[int]:
        """Ranks that failed by themselves, in the order in which they were seen to."""
        return list(self.failed_s)

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank for rank in self.ranks if rank not in self.exits]

    def ended(
        self,
        rank: int,
        code: int | None,
        now_s: float,
        *,
        left_early: bool = False,
        number: int = 0,
    ) -> None:
        """Take note that a rank ended; the first failure starts the grace of the others.

        So does one that left with 0 and without an end record: the others may wait for it. `number`
        is the error number of one that could not be started.
        """
        ours = (self.phase is Phase.KILLED and code == -signal.SIGKILL) or (
            self.phase in (Phase.STACKS, Phase.KILLED) and code == -signal.SIGUSR1
        )
        self.exits[rank] = RankExit(rank=rank, code=code, killed_by_harness=ours, errno=number)
        if ours or (code == 0 and not left_early):
            return
        if code != 0:
            self.failed_s[rank] = now_s
        if self.phase is Phase.RUNNING:
            self.phase = Phase.GRACE
            self.deadline_s = min(self.deadline_s, now_s + self.limits.grace_s)

    def advance(self, now_s: float) -> int | None:
        """Move on if the time is up; the signal to send to every running rank now, if any."""
        if now_s < self.deadline_s or not self.running:
            return None
        if self.phase is Phase.KILLED:
            self.deadline_s = now_s + self.limits.stacks_s
            return signal.SIGKILL
        if self.phase is Phase.STACKS:
            self.phase = Phase.KILLED
            self.deadline_s = now_s + self.limits.stacks_s
            return signal.SIGKILL
        self.timed_out = now_s >= self.started_s + self.timeout_s
        self.stalled = self.phase is Phase.RUNNING and not (self.timed_out or self.leaving)
        self.phase = Phase.STACKS
        self.deadline_s = now_s + self.limits.stacks_s
        return signal.SIGUSR1

    def stop(self, now_s: float) -> None:
        """End every rank left now, stacks first, whatever time there was."""
        if self.phase in (Phase.RUNNING, Phase.GRACE):
            self.phase = Phase.GRACE
            self.deadline_s = now_s
