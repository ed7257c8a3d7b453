"""What memory held at its peak, and whose it was. No torch: the same for every allocator.

    made, resized, freed  ->  Ledger  ->  at_peak  ->  explain: bytes of each owner
                                                         by the object that still has the memory,
                                                         else by the code that asked for it

Owners, in the order in which a table shows them:

    parameters       at rest: main weights, and copies of them in the dtype of compute
    gradients        at rest
    optimizer        moments, and what an update makes in between
    gather buffers   full weights, from an all-gather to the end of their use
    reduce buffers   full gradients, and what a reduction makes of them
    activations      what forward and backward passes leave for later, gradients of it included
    graph pools      what graphs hold: their private memory, static inputs and outputs
    digests          what comparing costs: digests, taps, records
    data             tokens, targets, positions; tables of the model
    building         made before the first step
    rest             asked for by none of these
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OWNERS = (
    "parameters", "gradients", "optimizer", "gather buffers", "reduce buffers", "activations",
    "graph pools", "digests", "data", "building", "rest",
)  # fmt: skip

_CAPTURES = ("fsdp_core/graph/host_graph.py", "fsdp_core/graph/cuda_graph.py")
"""Whatever is made inside of these is a graph's."""
_INSIDE = (
    ("fsdp_core/train/build.py", "building"),
    ("fsdp_core/model/sharding.py:clip_grads", "optimizer"),
)
"""Callers that decide, wherever below them memory is asked for."""
_REDUCING = ("_take_full", "reduce", "_make_rows")
_BY_CODE = (
    *((f"fsdp_core/fsdp/param_group.py:{name}", "reduce buffers") for name in _REDUCING),
    ("fsdp_core/fsdp/param_group.py", "gather buffers"),
    ("fsdp_core/fsdp/row_sharded.py:_before_step", "optimizer"),
    ("fsdp_core/optim.py", "optimizer"),
    ("fsdp_core/graph/digest", "digests"),
    ("fsdp_core/train/taps.py", "digests"),
    ("fsdp_core/train/trainer.py:mean_loss", "digests"),
    ("fsdp_core/train/trainer.py:update", "digests"),
    ("harness/worker/observe.py", "digests"),
    ("fsdp_core/graph/", "graph pools"),
    ("fsdp_core/train/inputs.py", "data"),
    ("fsdp_core/data.py", "data"),
    ("fsdp_core/model/attention.py:rope_tables", "data"),
    ("fsdp_core/model/", "activations"),
    ("fsdp_core/parallel/", "activations"),
    ("fsdp_core/train/", "building"),
)
"""Of a stack, the innermost place that begins so tells the owner; the first that fits."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that somebody asked for.

    Attributes:
        number: of the request, from 0; an address or a storage may come again, a number does not.
        nbytes: its size now.
        owner: by the code that asked for it.
        place: the innermost file and function of ours that did; "" if none of ours is known.
    """

    number: int
    nbytes: int
    owner: str
    place: str


def owner_of(places: Sequence[str]) -> str:
    """Whose memory it is that was asked for here.

    Args:
        places: `file:function` of each frame of ours, innermost first. None where autograd runs
            operators on threads of its own: these are activations and gradients of them.
    """
    if not places:
        return "activations"
    if any(place.startswith(_CAPTURES) for place in places):
        return "graph pools"
    for prefix, owner in _INSIDE:
        if any(place.startswith(prefix) for place in places):
            return owner
    for place in places:
        for prefix, owner in _BY_CODE:
            if place.startswith(prefix):
                return owner
    return "rest"


@dataclass
class Ledger:
    """Follows what is live, and remembers what was when it was most.

    Since the last peak every change is noted so that it can be undone; where the notes get longer
    than the list of what was live, the list is made and the notes are dropped. So a change costs
    the same however long the run is.
    """

    live_bytes: int = 0
    peak_bytes: int = 0
    _live: dict[int, Allocation] = field(default_factory=dict)
    _undo: list[tuple[int, Allocation | None]] = field(default_factory=list)
    _at_peak: dict[int, Allocation] | None = None
    _number: int = 0

    def made(self, key: int, nbytes: int, places: Sequence[str]) -> None:
        """`nbytes` were given out under `key`, an address or a storage's identity."""
        place = places[0] if places else ""
        self._set(key, Allocation(self._number, nbytes, owner_of(places), place))
        self._number += 1

    def resized(self, key: int, nbytes: int) -> None:
        """What `key` stands for has another size."""
        old = self._live.get(key)
        if old is not None:
            self._set(key, Allocation(old.number, nbytes, old.owner, old.place))

    def holds(self, key: int) -> bool:
        """Whether `key` stands for something now."""
        return key in self._live

    def freed(self, key: int) -> None:
        """What `key` stands for is gone; nothing happens if it never was."""
        if key in self._live:
            self._set(key, None)

    def at_peak(self) -> dict[int, Allocation]:
        """What was live when most was, by key."""
        if self._at_peak is not None:
            return dict(self._at_peak)
        held = dict(self._live)
        for key, before in reversed(self._undo):
            if before is None:
                held.pop(key, None)
            else:
                held[key] = before
        return held

    def now(self) -> dict[int, Allocation]:
        """What is live, by key."""
        return dict(self._live)

    def _set(self, key: int, value: Allocation | None) -> None:
        before = self._live.get(key)
        if value is None:
            self._live.pop(key, None)
        else:
            self._live[key] = value
        self.live_bytes += (value.nbytes if value else 0) - (before.nbytes if before else 0)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self._at_peak = self.live_bytes, None
            self._undo.clear()
        elif self._at_peak is None:
            self._undo.append((key, before))
            if len(self._undo) > len(self._live) + 1000:
                self._at_peak = self.at_peak()
                self._undo.clear()


@dataclass(frozen=True)
class Explanation:
    """A peak of memory, taken apart.

    Attributes:
        peak_bytes: as the allocator counted it.
        owners: bytes of each of `OWNERS`. What the allocator counts and no allocation says, such as
            its rounding, is in `rest`, so the sum is the peak.
        largest_rest: places of what is in `rest`, with their bytes, the largest first.
    """

    peak_bytes: int
    owners: dict[str, int]
    largest_rest: tuple[tuple[str, int], ...]


def explain(ledger: Ledger, owners: Mapping[int, str], peak_bytes: int) -> Explanation:
    """Who held the memory when most of it was held.

    Args:
        ledger: followed every change since the first.
        owners: key to owner, of what objects hold now.
        peak_bytes: the allocator's own count.
    """
    table = dict.fromkeys(OWNERS, 0)
    now, places = ledger.now(), dict[str, int]()
    for key, each in ledger.at_peak().items():
        is_same = key in now and now[key].number == each.number
        owner = owners.get(key, each.owner) if is_same else each.owner
        table[owner] += each.nbytes
        if owner == "rest":
            places[each.place] = places.get(each.place, 0) + each.nbytes
    table["rest"] += peak_bytes - ledger.peak_bytes
    largest = sorted(places.items(), key=lambda item: (-item[1], item[0]))[:8]
    return Explanation(peak_bytes, table, tuple(largest))
