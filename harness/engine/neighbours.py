"""Whose end may have been the doing of another run: under CUDA's MPS, of one on the same GPU.

    runs under way -> who was beside whom -> ends that were not good -> which may explain which

Where MPS runs, processes on one GPU share a server: a rank that faults there, or is killed, takes
the ranks of other runs with it, and all of them get CUDA's words for it. Ends are *tied* if their
runs were on one GPU at the same time and failed at about the same time; what is tied to something
tied is in the same group. An end is certain where the rank at fault recorded an error that is none
of the device, before any other of its group failed.

This module knows no processes and no files: it is told, and asked what is in question.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from harness.records import What

NOTICE_S = 30.0
"""How much later than its GPU was lost a rank may see that: it looks when it waits for the device.
"""
FIRST_S = 1.0
"""By how much two processes may be late in telling when something failed."""
LOST: tuple[What, ...] = ("interrupted", "not_run")
"""Ends that say nothing: neither whose doing they were, nor what else they ended."""
OF_COMPANY: tuple[What, ...] = ("hang", "oom")
"""What company alone can bring about: kernels that wait for each other, memory that is taken."""


@dataclass(frozen=True, kw_only=True)
class End:
    """An end that was not good. Times are monotonic seconds.

    Attributes:
        first_s: when it failed; of a hang, when it last showed signs of life.
        last_s: when its last rank was gone.
        own: nothing of the device is in it.
    """

    key: str
    what: What
    first_s: float
    last_s: float
    own: bool = False


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is known of runs that did not end well.

    Attributes:
        stand: keys of those whose end is their own.
        asked: of the others, which runs may have ended each; none where only company may have.
    """

    stand: tuple[str, ...]
    asked: dict[str, tuple[str, ...]]


class Neighbours:
    """Runs on shared GPUs, from their start until it is known whose their end was."""

    def __init__(self) -> None:
        self._gpus: dict[str, frozenset[str]] = {}
        self._beside: dict[str, set[str]] = {}
        self._ends: dict[str, End] = {}

    def started(self, key: str, gpus: Collection[str]) -> None:
        """Take note of a run and of who is on its GPUs."""
        if not self._gpus and not self._ends:
            self._beside.clear()
        mine = frozenset(gpus)
        self._beside[key] = {other for other, theirs in self._gpus.items() if theirs & mine}
        for other in self._beside[key]:
            self._beside[other].add(key)
        self._gpus[key] = mine

    def left(self, key: str) -> None:
        """Take note that no rank of the run is left."""
        self._gpus.pop(key, None)

    def had_company(self, key: str) -> bool:
        """Whether another run was on a GPU of this one while it ran."""
        return bool(self._beside.get(key))

    def ended(self, end: End) -> None:
        """Take note of an end that was not good, of a run that had company."""
        self._ends[end.key] = end

    def due_s(self, now_s: float) -> float | None:
        """Until when more ends may be tied to those so far; None if none can, or none is known."""
        return max(self._until(now_s), default=None)

    def _until(self, now_s: float) -> Iterator[float]:
        for end in self._ends.values():
            until_s = end.last_s + NOTICE_S
            if until_s > now_s and not self._gpus.keys().isdisjoint(self._beside[end.key]):
                yield until_s

    def decide(self) -> Decision:
        """Whose the ends so far were, which are forgotten; `due_s` must have been None."""
        ties = {end.key: set(self._tied(end)) for end in self._ends.values()}
        stand: list[str] = []
        asked: dict[str, tuple[str, ...]] = {}
        for end in self._ends.values():
            if end.what in LOST or (end.own and self._was_first(end, ties[end.key])):
                stand.append(end.key)
            elif ties[end.key] or end.what in OF_COMPANY:
                group = _reached(end.key, ties) - {end.key}
                asked[end.key] = tuple(k for k in self._ends if k in group and not self._lost(k))
            else:
                stand.append(end.key)
        self._ends.clear()
        return Decision(stand=tuple(stand), asked=asked)

    def _lost(self, key: str) -> bool:
        return self._ends[key].what in LOST

    def _tied(self, end: End) -> Iterator[str]:
        for other in self._ends.values():
            near = end.first_s <= other.last_s + NOTICE_S and other.first_s <= end.last_s + NOTICE_S
            if near and other.key in self._beside[end.key]:
                yield other.key

    def _was_first(self, end: End, tied: Iterable[str]) -> bool:
        """Whether no other failed before; a hang began at a time that nobody knows."""
        others = [self._ends[key] for key in tied]
        return all(
            other.what == "hang" or other.first_s >= end.first_s - FIRST_S for other in others
        )


def _reached(key: str, ties: dict[str, set[str]]) -> set[str]:
    """All that is tied to a run, or to what is."""
    found, left = {key}, [key]
    while left:
        new = ties[left.pop()] - found
        found |= new
        left += new
    return found
