"""Which collective each rank entered last: written as it goes, read once a run has hung.

    rank<R>.place    one JSON object in a file that the rank maps into its memory: a write is a copy
                     of some hundred bytes, and what was written is there whatever ends the rank
    rank<R>.answer   the same of a rank of a program, when the leader gives the run up and asks
                     (`harness.recorder.collectives`): with what C++ called, and from where

Of two ranks of one group the one that entered fewer is the one that the other waits for; at fault
are those that wait in no other collective themselves. Ranks that have entered equally many, but are
in different ones, wait in vain: one has called another collective, or has left one out.
"""

import json
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.codec import Json, RecordError, dumps
from harness.records import CollectiveFault, Entered
from harness.store.files import read_plain

SIZE_BYTES = 1 << 14
IN_CAPTURE = "a capture"
"""Label of collectives that belong to no unit and are called while graphs are captured."""


@dataclass(frozen=True, kw_only=True)
class Recorded(Json):
    """A collective that a rank has entered, over or not, the `number`-th of the group `key`."""

    key: str
    number: int
    operator: str
    step: int = -1
    sizes: str = ""
    called_at: str = ""


@dataclass(frozen=True, kw_only=True)
class Place(Json):
    """Where a rank is. What is not known is "", a step -1.

    The collective that it entered last: `operator` as torch calls it; `label`, whose it is; the
    global ranks of its `group`, whose `name` is "" if it is the one of all ranks; whether the rank
    `is_inside` still; `sizes` of tensors, where all ranks must have the same; the line that called
    it, as `train.py:7 in main`. `entered`: how many of each group, by ranks as `0,1`. The innermost
    `module` of the step that captures graphs; the `phase` (forward, ...) and the line that the rank
    was `at`; `recent`: what torch's flight recorder has of the last collectives of all groups.
    """

    step: int
    operator: str
    label: str
    group: tuple[int, ...]
    is_inside: bool
    entered: dict[str, int] = field(default_factory=dict)
    module: str = ""
    name: str = ""
    sizes: str = ""
    called_at: str = ""
    phase: str = ""
    at: str = ""
    recent: tuple[Recorded, ...] = ()

    @property
    def key(self) -> str:
        """The group as `entered` names it."""
        return group_key(self.group, self.name)

    @property
    def number(self) -> int:
        """Which of its group's collectives it is."""
        return self.entered.get(self.key, 0)

    @property
    def as_entered(self) -> Entered:
        """The collective, as an outcome names it."""
        in_capture = self.label == IN_CAPTURE
        return Entered(
            operator=self.operator.rpartition("::")[2].strip("_"),
            label="" if in_capture else self.label, in_capture=in_capture, sizes=self.sizes,
            called_at=self.called_at,
        )  # fmt: skip

    @property
    def collective(self) -> str:
        """The collective in words: `all_reduce of layers.1`, `all_reduce in a capture`."""
        return str(self.as_entered)


def group_key(ranks: tuple[int, ...], name: str = "") -> str:
    """A group of ranks as text, with its name unless it is the one of all ranks."""
    key = ",".join(map(str, ranks))
    return f"{key} {name}" if name else key


def answer_path(folder: Path, rank: int) -> Path:
    """Where a rank of a program writes its place when it is asked."""
    return folder / f"rank{rank}.answer"


def place_path(folder: Path, rank: int) -> Path:
    """Where a rank writes its place."""
    return folder / f"rank{rank}.place"


class PlaceFile:
    """Writes one rank's place."""

    def __init__(self, path: Path) -> None:
        """Make the file (`OSError`: the disk refused)."""
        self._path = path
        path.write_bytes(bytes(SIZE_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE_BYTES)

    def write(self, place: Place) -> None:
        """Replace what is there; what does not fit is left out."""
        text = dumps(place).encode() + b"\n"
        if len(text) <= SIZE_BYTES:
            self._map[: len(text)] = text

    def remove(self) -> None:
        """Take the file away: a run that ended well has no need of it."""
        self._map.close()
        self._path.unlink(missing_ok=True)


def read_place(path: Path) -> Place | None:
    """Where a rank was last; None if it did not say, or nothing that decodes."""
    try:
        return Place.from_json(json.loads(read_plain(path, SIZE_BYTES).partition(b"\n")[0]))
    except (OSError, ValueError, RecordError, RecursionError):
        return None


def odd_one(fault: CollectiveFault) -> int | None:
    """The rank at fault, None if it cannot be told which of two sides is."""
    is_known = fault.entered is None or len(fault.ranks) < len(fault.others)
    return fault.ranks[0] if is_known else None


def fault_words(fault: CollectiveFault) -> str:
    """Why ranks waited in vain, in a sentence."""
    mine, due = fault.entered, fault.expected
    when = "" if fault.step is None else f" in step {fault.step}"
    called = f", called at {due.called_at}" if due.called_at else ""
    words = f"{due}{when} (collective {fault.number} of ranks {group_key(fault.group)}{called})"
    if mine is None:
        return f"{rank_names(fault.ranks)} never entered {words}"
    differs = str(mine) == str(due) and mine.sizes != due.sizes
    more = f" of sizes {mine.sizes}, not {due.sizes}" if differs else ""
    more += f", called at {mine.called_at}" if mine.called_at else ""
    others = f"{',' if more else ''} where {rank_names(fault.others)} entered {words}"
    return f"{rank_names(fault.ranks)} entered {mine}{more}{others}"


def rank_names(ranks: Iterable[int]) -> str:
    """`rank 1`, or `ranks 0, 2`."""
    numbers = list(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"


def _fault(
    ranks: Iterable[int], others: Iterable[int], expected: Place, place: Place | None = None
) -> CollectiveFault:
    """Of `ranks`, the first of them in `place`; the fewer, or the first if there are as many."""
    return CollectiveFault(
        ranks=tuple(ranks), entered=None if place is None else place.as_entered,
        others=tuple(others), expected=expected.as_entered, group=expected.group,
        number=expected.number, step=expected.step if expected.step >= 0 else None,
    )  # fmt: skip


def find_mismatch(places: Mapping[int, Place]) -> CollectiveFault | None:
    """Which ranks of a group entered different collectives as their n-th; None if all agree.

    NCCL enqueues: a rank goes on after a collective that can never end, and is found in a later
    one. So the first that ranks recorded differently counts before those they wait in.
    """
    ranked = sorted(places.items())
    recorded = [(rank, _as_place(each)) for rank, place in ranked for each in place.recent]
    waiting = [(rank, place) for rank, place in ranked if place.is_inside and place.group]
    for entered in (recorded, waiting):
        met: dict[tuple[int, str], dict[int, Place]] = {}
        for rank, place in entered:
            met.setdefault((place.number, place.key), {})[rank] = place
        for _, there in sorted(met.items(), key=lambda item: item[0][0]):
            if (mismatch := _mismatch(there)) is not None:
                return mismatch
    return None


def _as_place(each: Recorded) -> Place:
    """Without its label: ranks whose modules differ in name have met, if operators agree."""
    ranks, _, name = each.key.partition(" ")
    return Place(
        step=each.step, operator=each.operator, label="", is_inside=True, name=name,
        group=tuple(map(int, ranks.split(","))) if ranks else (), sizes=each.sizes,
        entered={each.key: each.number}, called_at=each.called_at,
    )  # fmt: skip


def _mismatch(places: Mapping[int, Place]) -> CollectiveFault | None:
    """Of ranks that are in the collective of one number of one group."""
    # Whose a collective is, and its sizes, may be unknown: that is no difference.
    known = all(place.label for place in places.values())
    sized = all(place.sizes for place in places.values())
    sides: dict[tuple[str, str, str], list[int]] = {}
    for rank, place in places.items():
        what = (place.operator, place.label if known else "", place.sizes if sized else "")
        sides.setdefault(what, []).append(rank)
    if len(sides) < 2:
        return None
    most = max(sides.values(), key=len)
    fewest = min((ranks for ranks in sides.values() if ranks is not most), key=len)
    return _fault(fewest, most, places[most[0]], places[fewest[0]])


def find_missing(places: Mapping[int, Place]) -> CollectiveFault | None:
    """Who never entered a collective that others wait in; None if places do not tell."""
    lacking: dict[int, list[Place]] = {}
    for place in places.values():
        for other in place.group if place.is_inside else ():
            there = places.get(other)
            if there is not None and there.entered.get(place.key, 0) < place.number:
                lacking.setdefault(other, []).append(place)
    at_fault = [rank for rank in lacking if not places[rank].is_inside]
    if not at_fault:
        return None
    # The earliest that is lacking: what comes after it in the same group only follows.
    first = min(lacking[at_fault[0]], key=lambda place: (place.step, place.number))
    late = (r for r in at_fault if places[r].entered.get(first.key, 0) < first.number)
    ranks = sorted(rank for rank in late if rank in first.group)
    return _fault(ranks, (rank for rank in first.group if rank not in ranks), first)
