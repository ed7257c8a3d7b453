"""When runs start: the widest first, of these the longest, and every free slot is used.

    cases -> unique runs, those that share a reference together -> `arrange` -> `Queue`

Whenever slots are free, the first run of the order that fits starts: list scheduling, at most twice
as long as the best order takes (R. L. Graham, SIAM J. Appl. Math. 17(2), 1969; M. R. Garey and
R. L. Graham, SIAM J. Comput. 4(2), 1975, for runs that need several slots). A run that needs all
slots comes early, as it is wide; one that is queued again, because the machine failed it, is asked
first from then on.

Expected seconds order the work and decide nothing else: no verdict depends on them.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from harness.records import CaseSpec, RunSpec
from harness.repeats import untimed_runs

Seconds = Callable[[RunSpec], float]
"""What a run is expected to take."""


class Job(NamedTuple):
    """A run to be started."""

    spec: RunSpec
    seconds: float


def arrange(
    cases: Iterable[CaseSpec], seconds: Seconds, *, left: Callable[[str], bool] = lambda key: True
) -> tuple[Job, ...]:
    """The runs of `cases` in the order in which they are to start, each once, but timed repeats.

    Runs that are compared with one reference stay together: one verdict does not wait for all.

    Args:
        cases: what is to be answered; those that are skipped need no run.
        seconds: what a run is expected to take.
        left: whether the run of a key is still to be made.
    """
    groups: dict[str, list[Job]] = {}
    seen: set[str] = set()
    for case in cases:
        for spec in () if case.skip_reason else untimed_runs(case):
            if spec.key not in seen and left(spec.key):
                job = Job(spec, max(0.0, seconds(spec)))
                groups.setdefault(case.reference.key, []).append(job)
            seen.add(spec.key)

    def size(group: Sequence[Job]) -> tuple[int, float]:
        return max(job.spec.world_size for job in group), max(job.seconds for job in group)

    return tuple(itertools.chain(*sorted(groups.values(), key=size, reverse=True)))


class Queue:
    """Runs that wait for slots, in their order."""

    def __init__(self, order: Iterable[Job]) -> None:
        self._first: deque[RunSpec] = deque()
        self._by_width: dict[int, deque[tuple[int, RunSpec]]] = {}
        for place, job in enumerate(order):
            waiting = self._by_width.setdefault(job.spec.world_size, deque())
            waiting.append((place, job.spec))

    def push(self, spec: RunSpec) -> None:
        """Queue a run that a case waits for already, before all that were ordered."""
        self._first.append(spec)

    def next(self, can_start: Callable[[RunSpec], bool]) -> RunSpec | None:
        """Take the run to start now, None if none may.

        Args:
            can_start: whether the engine has room for a run now; it has for every run of a width
                or for none.
        """
        if self._first and can_start(self._first[0]):
            return self._first.popleft()
        waiting = filter(None, self._by_width.values())
        for held in sorted(waiting, key=lambda held: held[0][0]):
            if can_start(held[0][1]):
                return held.popleft()[1]
        return None


def makespan_s(order: Sequence[Job], *, slots: int, jobs: int | None = None) -> float:
    """When the last run ends if each takes what is expected, by the rules of `Queue`.

    Args:
        order: as `arrange` gives it.
        slots: ranks that may run at a time.
        jobs: runs that may run at a time; None for no limit.
    """
    now_s, free = 0.0, slots
    queue, seconds = Queue(order), {job.spec.key: job.seconds for job in order}
    running: list[tuple[float, int]] = []

    def can_start(spec: RunSpec) -> bool:
        fits = spec.world_size <= free and (jobs is None or len(running) < jobs)
        return fits or not running

    while True:
        while (spec := queue.next(can_start)) is not None:
            width = min(spec.world_size, slots)
            free -= width
            bisect.insort(running, (now_s + seconds[spec.key], width))
        if not running:
            return now_s
        now_s, width = running.pop(0)
        free += width
