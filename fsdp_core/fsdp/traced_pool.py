"""What pool `traced` knows: the timeline of one training pass, and the plan of slots made of it.

    pass 1, forward and backward      its end      every later pass, training or evaluation
    [trace: served as by dynamic  ]   [plan]       [replay: a key always gets its slot        ]
    [and the timeline is written  ]                [else a miss: a buffer of its own          ]

    timeline                                     plan of one arena
    A |=======|               |=====|            slot 0 | A  C  A  |  bytes of the largest key
    B      |======|        |======|              slot 1 | B  D  B  |
    C           |=====|                          Every interval of a key lies in the one slot of
    D               |========|                   the key, since a key must keep its address.

One arena a role, that is a stream: memory never changes hands between roles, so no arena's stream
waits for another's work. `plan_slots` is a pure function of the intervals. In each arena:

  - Left-edge greedy: keys by size, largest first, then by first acquire; each goes into the first
    slot in which it overlaps nobody. A slot is as large as its first key, so sharing never makes
    one larger. With equal sizes and one interval a key this is the classical left-edge algorithm
    (Hashimoto and Stevens, 1971), which uses as many slots as keys are alive at once, the fewest.
  - Keys of several intervals make the fewest slots NP-hard to find. A plan never holds more than
    one buffer a key, nor less than the keys alive at any one time need.

Cost: O(intervals x slots) Python steps, once.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Key(NamedTuple):
    """Identity of a buffer: whose it is and what it is for (gather or grad)."""

    owner: int
    role: str


class Interval(NamedTuple):
    """One holding of a key's buffer: from tick `start` up to, but without, tick `stop`.

    `numel` and `dtype` are the same in every interval of a key.
    """

    key: Key
    numel: int
    dtype: torch.dtype
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedSlot:
    """Memory of `nbytes` that `keys` share; no two of them are ever held at once."""

    nbytes: int
    keys: tuple[Key, ...]


@dataclass
class Timeline:
    """Who held a buffer when, in ticks: each acquire and each release is one tick."""

    intervals: list[Interval] = field(default_factory=list)
    _open: dict[Key, tuple[int, torch.dtype, int]] = field(default_factory=dict)
    _tick: int = 0

    @property
    def at_rest(self) -> bool:
        """Whether every buffer was given back."""
        return not self._open

    @property
    def has_begun(self) -> bool:
        """Whether any buffer was ever handed out."""
        return self._tick > 0

    def acquired(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        """Note an acquire; one of a key that is held already changes nothing."""
        self._tick += 1
        self._open.setdefault(key, (numel, dtype, self._tick))

    def released(self, key: Key) -> None:
        """Note the release of a held key."""
        self._tick += 1
        numel, dtype, start = self._open.pop(key)
        self.intervals.append(Interval(key, numel, dtype, start, self._tick))

    def clear(self) -> None:
        """Forget the intervals that have ended."""
        self.intervals.clear()


def plan_slots(intervals: Sequence[Interval]) -> tuple[PlannedSlot, ...]:
    """Give each key a slot of its role, so that no two keys of a slot are ever held at once."""
    planned: list[PlannedSlot] = []
    for role in sorted({interval.key.role for interval in intervals}):
        planned += _left_edge([each for each in intervals if each.key.role == role])
    return tuple(planned)


def planned_bytes(slots: Iterable[PlannedSlot]) -> int:
    """Memory of a plan."""
    return sum(slot.nbytes for slot in slots)


def _left_edge(intervals: Sequence[Interval]) -> tuple[PlannedSlot, ...]:
    """Largest key first, then first acquired; into the first slot in which it overlaps nobody."""
    spans: dict[Key, list[tuple[int, int]]] = {}
    sizes: dict[Key, int] = {}
    for interval in sorted(intervals, key=lambda interval: interval.start):
        spans.setdefault(interval.key, []).append((interval.start, interval.stop))
        sizes[interval.key] = interval.nbytes
    busy: list[list[tuple[int, int]]] = []
    members: list[list[Key]] = []
    # Sorting is stable, and `sizes` is in the order of first acquires.
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        number = 0
        while number < len(busy) and any(_overlaps(busy[number], span) for span in spans[key]):
            number += 1
        if number == len(busy):
            busy.append([])
            members.append([])
        members[number].append(key)
        for span in spans[key]:
            insort(busy[number], span)
    return tuple(PlannedSlot(sizes[keys[0]], tuple(keys)) for keys in members)


def _overlaps(taken: list[tuple[int, int]], span: tuple[int, int]) -> bool:
    """Whether a span overlaps one of those in `taken`, which are sorted and disjoint."""
    after = bisect_left(taken, span)
    return (after < len(taken) and taken[after][0] < span[1]) or (
        after > 0 and taken[after - 1][1] > span[0]
    )
