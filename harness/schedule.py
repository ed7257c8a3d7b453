"""When runs start: the largest first, every slot busy, and no run waits for ever.

    cases -> unique runs, those that share a reference together -> two orders are tried:
        the widest first, then the longest       narrow runs fill the end
        the longest first, then the widest       no long run is left for the end
    -> the order whose packing on the slots is expected to end first -> `Queue`

`Queue` starts runs in that order. A run that does not fit reserves its slots: it is to start when
the runs under way are expected to have ended, and until then others may overtake it that will be
over by then, or that fit beside it. So a run that needs all slots starts as soon as those have
ended that were under way or overtook it by their expected seconds. This is aggressive backfilling
(D. Lifka, "The ANL/IBM SP scheduling system", 1995; A. Mu'alem and D. Feitelson, IEEE TPDS 12(6),
2001). Where expectations are off, all by the same factor for a loaded machine, those that have
ended say by how much; a run that takes longer than expected lets none pass any more.

Expected seconds order the work and decide nothing else: no verdict depends on them.
"""

import bisect
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from harness.records import CaseSpec, RunSpec
from harness.repeats import runs_of, untimed_runs

Seconds = Callable[[RunSpec], float]
"""What a run is expected to take."""

MAX_TRIED = 4000
"""Runs up to which both orders are tried; beyond, any order has small ones left to fill gaps."""


class Job(NamedTuple):
    """A run to be started. `longest_s` is of the runs that share its reference."""

    spec: RunSpec
    seconds: float
    longest_s: float


def unique_runs(cases: Iterable[CaseSpec]) -> dict[str, RunSpec]:
    """The runs that `cases` need, by key, in the order in which they are first needed."""
    runs: dict[str, RunSpec] = {}
    for case in cases:
        if not case.skip_reason:
            for spec in runs_of(case):
                runs.setdefault(spec.key, spec)
    return runs


def arrange(
    cases: Iterable[CaseSpec],
    seconds: Seconds,
    *,
    slots: int,
    jobs: int | None = None,
    left: Callable[[str], bool] = lambda key: True,
) -> tuple[Job, ...]:
    """The runs of `cases` in the order in which they are to start, each once, but timed repeats.

    Args:
        cases: what is to be answered; those that are skipped need no run.
        seconds: what a run is expected to take.
        slots: ranks that may run at a time.
        jobs: runs that may run at a time; None for no limit.
        left: whether the run of a key is still to be made.
    """
    groups = _groups(cases, seconds, left)
    wide = [job for group in sorted(groups, key=lambda g: (-_width(g), -g[0].longest_s))
            for job in group]  # fmt: skip
    if len(wide) > MAX_TRIED:
        return tuple(wide)
    long = [job for group in sorted(groups, key=lambda g: (-g[0].longest_s, -_width(g)))
            for job in group]  # fmt: skip
    ends_s = [makespan_s(order, slots=slots, jobs=jobs) for order in (wide, long)]
    return tuple(long if ends_s[1] < ends_s[0] else wide)


def _width(group: Sequence[Job]) -> int:
    return max(job.spec.world_size for job in group)


def _groups(
    cases: Iterable[CaseSpec], seconds: Seconds, left: Callable[[str], bool]
) -> list[list[Job]]:
    """Runs by the reference that they are compared with: one verdict does not wait for all."""
    grouped: dict[str, dict[str, RunSpec]] = {}
    seen: set[str] = set()
    for case in cases:
        if case.skip_reason:
            continue
        group = grouped.setdefault(case.reference.key, {})
        for spec in untimed_runs(case):
            if spec.key not in seen:
                seen.add(spec.key)
                if left(spec.key):
                    group[spec.key] = spec
    found = []
    for group in filter(None, grouped.values()):
        times = [max(0.0, seconds(spec)) for spec in group.values()]
        longest_s = max(times)
        found.append([Job(s, t, longest_s) for s, t in zip(group.values(), times, strict=True)])
    return found


class Queue:
    """Runs that wait for slots, in their order, each with the slots that it will need."""

    def __init__(
        self,
        order: Iterable[Job],
        *,
        slots: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Queue runs.

        Args:
            order: as `arrange` gives it.
            slots: ranks that may run at a time.
            clock: seconds; time goes on.
        """
        self._slots = slots
        self._clock = clock
        self._places = itertools.count()
        self._by_width: dict[int, list[tuple[int, Job]]] = {}
        for job in order:
            width = min(job.spec.world_size, slots)
            self._by_width.setdefault(width, []).append((next(self._places), job))
        self._again: list[Job] = []
        self._running: dict[str, tuple[float, Job]] = {}
        self._known: dict[str, Job] = {}
        self._taken_s = self._expected_s = 0.0

    def put_back(self, spec: RunSpec) -> None:
        """Queue a run that was started once more, before all others: cases wait for it already."""
        self._again.append(self._known[spec.key])

    def push(self, spec: RunSpec, seconds: float) -> None:
        """Queue a run that nobody planned, before all others: a case waits for it already."""
        self._again.append(Job(spec, seconds, seconds))

    def ended(self, key: str) -> None:
        """Give the slots of a run back."""
        if key in self._running:
            began_s, job = self._running.pop(key)
            self._taken_s += self._clock() - began_s
            self._expected_s += job.seconds

    def next(self, can_start: Callable[[RunSpec], bool]) -> RunSpec | None:
        """Take the run to start now, None if none may.

        Args:
            can_start: whether the engine has room for a run now.
        """
        if self._again:
            head, width = self._again[0], self._wide(self._again[0])
        else:
            waiting = [(held[0], width) for width, held in self._by_width.items() if held]
            if not waiting:
                return None
            (_, head), width = min(waiting, key=lambda entry: entry[0][0])
        if can_start(head.spec):
            if self._again:
                self._again.pop(0)
            else:
                self._by_width[width].pop(0)
            return self._start(head)
        return self._overtaking(width, can_start)

    def _overtaking(self, wanted: int, can_start: Callable[[RunSpec], bool]) -> RunSpec | None:
        """Take a run that does not keep one that waits for `wanted` slots from starting."""
        free = self._slots - sum(self._wide(job) for _, job in self._running.values())
        if free >= wanted or not free:
            return None  # it is not slots that are missing, or nothing fits
        within_s, beside = self._reservation(free, wanted)
        for width in sorted(self._by_width, reverse=True):
            held = self._by_width[width]
            if width > free or not held:
                continue
            place = 0
            if width > beside:
                place = bisect.bisect_left(held, -within_s, key=lambda entry: -entry[1].longest_s)
                if place == len(held):
                    continue
            if can_start(held[place][1].spec):
                return self._start(held.pop(place)[1])
        return None

    def _reservation(self, free: int, wanted: int) -> tuple[float, int]:
        """Expected seconds until `wanted` slots are free, and how many more will be free then.

        In the seconds of `Job.seconds`: what the machine makes of them is taken into account.
        """
        now_s = self._clock()
        slower = self._taken_s / self._expected_s if self._expected_s else 1.0
        ends = sorted(
            (max(began_s + job.seconds * slower, now_s), self._wide(job))
            for began_s, job in self._running.values()
        )
        for end_s, width in ends:
            free += width
            if free >= wanted:
                return (end_s - now_s) / slower if slower else 0.0, free - wanted
        return 0.0, 0

    def _wide(self, job: Job) -> int:
        return min(job.spec.world_size, self._slots)

    def _start(self, job: Job) -> RunSpec:
        self._running[job.spec.key] = self._clock(), job
        self._known[job.spec.key] = job
        return job.spec


def makespan_s(order: Sequence[Job], *, slots: int, jobs: int | None = None) -> float:
    """When the last run ends if each takes what is expected, by the rules of `Queue`."""
    now_s, free = 0.0, slots
    queue = Queue(order, slots=slots, clock=lambda: now_s)
    running: list[tuple[float, str, int]] = []

    def can_start(spec: RunSpec) -> bool:
        return spec.world_size <= free and (jobs is None or len(running) < jobs)

    seconds = {job.spec.key: job.seconds for job in order}
    while True:
        while (spec := queue.next(lambda s: can_start(s) or not running)) is not None:
            width = min(spec.world_size, slots)
            free -= width
            bisect.insort(running, (now_s + seconds[spec.key], spec.key, width))
        if not running:
            return now_s
        now_s, key, width = running.pop(0)
        free += width
        queue.ended(key)
