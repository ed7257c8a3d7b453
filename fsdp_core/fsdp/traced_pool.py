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

Cost: O(intervals ** 2) Python steps, once.
"""

from collections.abc import Sequence
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


def plan_slots(intervals: Sequence[Interval]) -> tuple[PlannedSlot, ...]:
    """Give each key a slot of its role, so that no two keys of a slot are ever held at once."""
    held: dict[Key, list[Interval]] = {}
    for interval in sorted(intervals, key=lambda interval: interval.start):
        held.setdefault(interval.key, []).append(interval)
    slots: list[list[Interval]] = []
    # Sorting is stable, and `held` is in the order of first acquires.
    for mine in sorted(held.values(), key=lambda mine: (mine[0].key.role, -mine[0].nbytes)):
        shared = next((slot for slot in slots if _can_share(slot, mine)), None)
        if shared is None:
            slots.append([*mine])
        else:
            shared.extend(mine)
    return tuple(
        PlannedSlot(slot[0].nbytes, tuple(dict.fromkeys(each.key for each in slot)))
        for slot in slots
    )


def _can_share(slot: list[Interval], mine: list[Interval]) -> bool:
    """Whether a slot is of the role of `mine`, and free whenever those are held."""
    return slot[0].key.role == mine[0].key.role and not any(
        a.start < b.stop and b.start < a.stop for a in slot for b in mine
    )
