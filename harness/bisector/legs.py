"""Two runs side by side: rows of taps in program order, floats and digests, step by step.

    records of both legs -> shared (step, rank) pairs -> rows, floats, tensors -> what differs

Program order is that of the check `taps`; where no pipeline moves microbatches between ranks it is
the place in the step, which every rank counts alike. A module that is called more often in a step
than it has rows, as one that layers share, folds what is left over into its last row: such a row
says that something differs, not when, so it comes last.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from harness.checks.loss import quantities
from harness.checks.steps import StepTable, rank_table, shared_pairs, step_table
from harness.checks.taps import GRADIENT, Call, calls
from harness.records import (
    DIGEST_HEX_CHARS,
    FloatBits,
    RunResult,
    StartRecord,
    StepRecord,
)

INPUT, OUTPUT = "input", "output"


@dataclass(frozen=True)
class Row:
    """One call of a tap on one rank, as both legs saw it.

    Attributes:
        number: of the call in the step, which is the microbatch unless `is_folded`.
        place: in the step, as the reference counted; "" if it never ran there.
        is_folded: stands for several calls, this one the first of them.
    """

    rank: int
    module: str
    kind: str
    number: int
    stage: int
    place: str
    reference: str
    candidate: str
    is_folded: bool = False

    @property
    def differs(self) -> bool:
        """Whether the legs saw something else."""
        return self.reference != self.candidate

    @property
    def tap(self) -> str:
        """`layers.0.attn:output`."""
        return f"{self.module}:{self.kind}"

    @property
    def name(self) -> str:
        """`layers.0.attn:output[1]`."""
        return f"{self.tap}[{self.number}]"

    @property
    def is_backward(self) -> bool:
        """Whether the backward pass computed it."""
        return self.kind == GRADIENT

    @property
    def microbatch(self) -> int | None:
        """Which one, if the row stands for one."""
        return None if self.is_folded else self.number


@dataclass(frozen=True)
class Tensor:
    """One digested tensor of one rank."""

    rank: int
    group: str
    name: str
    reference: str
    candidate: str

    @property
    def differs(self) -> bool:
        """Whether its bits differ."""
        return self.reference != self.candidate


class Legs:
    """What both runs hold.

    Attributes:
        reference, candidate: the runs.
        ours, theirs: their step records.
        pairs: the (step, rank) keys that both have.
        starts: start records of the reference by rank, of ranks on which the legs name the same
            tensors and taps.
    """

    def __init__(self, reference: RunResult, candidate: RunResult) -> None:
        self.reference, self.candidate = reference, candidate
        self.ours: StepTable = step_table(reference)
        self.theirs: StepTable = step_table(candidate)
        self.starts = _same_starts(reference, candidate)
        self.pairs = [key for key in shared_pairs(self.ours, self.theirs) if key[1] in self.starts]
        self._rows: dict[int, list[Row]] = {}

    @cached_property
    def has_taps(self) -> bool:
        """Whether anything was looked into."""
        return any(start.taps for start in self.starts.values())

    def ranks(self, step: int) -> list[int]:
        """Ranks of which both legs have the step."""
        return [rank for at, rank in self.pairs if at == step]

    def first_step(self) -> int | None:
        """The first step in which any record differs on any rank; None if none does."""
        for step in sorted({step for step, _ in self.pairs}):
            if any(self._is_different(step, rank) for rank in self.ranks(step)):
                return step
        return None

    def _is_different(self, step: int, rank: int) -> bool:
        ours, theirs = self.ours[step, rank], self.theirs[step, rank]
        if ours.digests != theirs.digests or _bits(ours) != _bits(theirs):
            return True
        return ours.taps != theirs.taps and any(
            row.differs for row in self.rows(step) if row.rank == rank
        )

    def rows(self, step: int) -> list[Row]:
        """Rows of all ranks in program order; without modules that ran in one leg only."""
        if step not in self._rows:
            self._rows[step] = self._ordered(step)
        return self._rows[step]

    def _ordered(self, step: int) -> list[Row]:
        rows = []
        for rank in self.ranks(step):
            key = (step, rank)
            rows += _rows(self.ours[key], self.theirs[key], self.starts[rank])
        staged = any(row.stage for row in rows)

        def order(row: Row) -> tuple[object, ...]:
            if not staged:
                return (row.is_folded and row.number > 0, row.place or "~", row.rank)
            call = Call(row.tap, row.number, row.stage, "", row.place)
            return (row.is_folded and row.number > 0, *call.order, row.rank)

        return sorted(rows, key=order)

    def floats(self, step: int) -> list[tuple[str, int, FloatBits, FloatBits]]:
        """Losses and norm of the step: quantity, rank, both values; only those that differ."""
        found = []
        for rank in self.ranks(step):
            theirs = dict(quantities(self.theirs[step, rank]))
            for name, value in quantities(self.ours[step, rank]):
                other = theirs.get(name)
                if other is not None and other.bits != value.bits:
                    found.append((name, rank, value, other))
        return found

    def tensors(self, step: int, group: str) -> list[Tensor]:
        """Every digest of a group, in the order of the reference, then ranks."""
        found = [
            tensor
            for rank in self.ranks(step)
            for tensor in _tensors(
                self.ours[step, rank], self.theirs[step, rank], self.starts[rank], group
            )
        ]
        order = {name: place for place, name in enumerate(dict.fromkeys(t.name for t in found))}
        return sorted(found, key=lambda tensor: (order[tensor.name], tensor.rank))


def _same_starts(reference: RunResult, candidate: RunResult) -> dict[int, StartRecord]:
    others = rank_table(candidate)
    found = {}
    for rank, records in rank_table(reference).items():
        other = others.get(rank)
        if records.start is None or other is None or other.start is None:
            continue
        if (records.start.tensors, records.start.taps) == (other.start.tensors, other.start.taps):
            found[rank] = records.start
    return found


def _bits(record: StepRecord) -> tuple[str, ...]:
    return tuple(value.bits for _, value in quantities(record))


def _rows(ours: StepRecord, theirs: StepRecord, start: StartRecord) -> list[Row]:
    pairs = list(zip(calls(ours, start), calls(theirs, start), strict=True))
    ran = [{a.tap for a, _ in pairs if a.place}, {b.tap for _, b in pairs if b.place}]
    both = [(a, b) for a, b in pairs if a.tap not in ran[0] ^ ran[1]]
    begins = {kind: _begins(a for a, _ in both if a.tap.endswith(f":{kind}")) for kind in _KINDS}
    rows = []
    for a, b in both:
        if not a.place and not b.place:
            continue
        module, _, kind = a.tap.partition(":")
        begin = begins.get(kind, {}).get(a.number, "")
        rows.append(
            Row(
                ours.rank, module, kind, a.number, a.stage, a.place,
                a.digest if a.place else "", b.digest if b.place else "",
                is_folded=bool(a.place) and a.place < begin,
            )
        )  # fmt: skip
    return rows


_KINDS = (INPUT, OUTPUT, GRADIENT)


def _begins(of_kind: Iterator[Call]) -> dict[int, str]:
    """Where each microbatch begins: at the call of the tap that is the first in the step.

    A call of a number that comes before its microbatch is no call of that microbatch.
    """
    ran = [call for call in of_kind if call.place]
    if not ran:
        return {}
    first = min(ran, key=lambda call: call.place).tap
    return {call.number: call.place for call in ran if call.tap == first}


def _tensors(
    ours: StepRecord, theirs: StepRecord, start: StartRecord, group: str
) -> Iterator[Tensor]:
    left, right = ours.digests.get(group, ""), theirs.digests.get(group, "")
    for place, name in enumerate(start.tensors.get(group, ())):
        window = slice(place * DIGEST_HEX_CHARS, (place + 1) * DIGEST_HEX_CHARS)
        yield Tensor(ours.rank, group, name, left[window], right[window])
