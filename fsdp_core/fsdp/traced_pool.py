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
  - Keys of several intervals make the fewest slots NP-hard to find and greedy can be far off, so
    the assignment that pool `double` would have ended with is made too, and the smaller one is
    taken. So a plan never holds more bytes than `double` with `persistent_on_miss` after the same
    pass (two buffers a class and one a miss), nor more than one buffer a key; and never fewer than
    the keys alive at any one time need.

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
    """Give each key a slot of its role, so that no two keys of a slot are ever held at once.

    Returns:
        For each role the smaller, in bytes, of two assignments. See the module's docstring.
    """
    planned: list[PlannedSlot] = []
    for role in sorted({interval.key.role for interval in intervals}):
        arena = [interval for interval in intervals if interval.key.role == role]
        # Ties go to the first, so equal timelines give equal plans.
        planned += min((_left_edge(arena), _as_double(arena)), key=planned_bytes)
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


def _as_double(intervals: Sequence[Interval]) -> tuple[PlannedSlot, ...]:
    """Where the keys would live after `double` with `persistent_on_miss` served these intervals.

    It is a valid assignment: of two keys in one slot that overlap, the later one finds it taken
    and moves into a slot of its own.
    """
    sizes: list[int] = []
    busy_until: list[int] = []
    num_keys: list[int] = []
    homes: dict[Key, int] = {}
    classes: dict[tuple[torch.dtype, int], list[int]] = {}

    def new_slot(nbytes: int) -> int:
        sizes.append(nbytes)
        busy_until.append(0)
        num_keys.append(0)
        return len(sizes) - 1

    for interval in sorted(intervals, key=lambda interval: interval.start):
        home = homes.get(interval.key)
        if home is None:
            pair = classes.setdefault((interval.dtype, interval.numel), [])
            free = [slot for slot in pair if busy_until[slot] <= interval.start]
            if len(pair) < 2:
                free = [new_slot(interval.nbytes)]
                pair.extend(free)
            home = min(free, key=num_keys.__getitem__, default=None)
        if home is None or busy_until[home] > interval.start:
            home = new_slot(interval.nbytes)
        if homes.get(interval.key) != home:
            num_keys[home] += 1
        homes[interval.key], busy_until[home] = home, interval.stop
    members: list[list[Key]] = [[] for _ in sizes]
    for key, home in homes.items():
        members[home].append(key)
    return tuple(
        PlannedSlot(nbytes, tuple(keys))
        for nbytes, keys in zip(sizes, members, strict=True)
        if keys
    )
