"""Calls of tapped modules as a step recorded them, and the order in which a program makes them.

    record -> rows of one rank, named by the start record -> which microbatch each is of
      -> both legs, all ranks -> program order

Without a pipeline, program order is the place in the step, which every rank counts alike. With one,
ranks work at other microbatches at a time: forward passes come before backward passes; then
microbatches in order; then stages as data flows through them; then places.

A module that is called more often than once a microbatch, as one that layers share, fills its rows
with its first calls, whatever microbatch they are of, and folds what is left over into the last:
a row past the microbatches. Such a row says that something differs, not when, so it comes last;
unless what it returned differs and all that it was given does not, which is its own work. Gradients
of such a module come last, too: backward makes its calls in another order.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.records import (
    DIGEST_HEX_CHARS,
    NEVER_RAN,
    TAP_HEX_CHARS,
    RunSpec,
    StartRecord,
    StepRecord,
)

INPUT, OUTPUT, GRADIENT = "input", "output", "gradient"
KINDS = (INPUT, OUTPUT, GRADIENT)
_LATE = "~"
"""After every place."""


@dataclass(frozen=True)
class Call:
    """One row of one rank.

    Attributes:
        tap: `layers.0.attn:output`.
        number: of the row among those of its tap.
        stage: of the pipeline.
        digest: of what went through.
        place: in the step; "" if it never ran.
        microbatch: that it is of; None of a row that stands for several calls.
    """

    tap: str
    number: int
    stage: int
    digest: str
    place: str
    microbatch: int | None

    @property
    def name(self) -> str:
        """`layers.0.attn:output[1]`."""
        return f"{self.tap}[{self.number}]"

    @property
    def module(self) -> str:
        """`layers.0.attn`."""
        return self.tap.partition(":")[0]

    @property
    def kind(self) -> str:
        """`output`."""
        return self.tap.partition(":")[2]

    @property
    def is_folded(self) -> bool:
        """Whether it stands for several calls, the place being that of the first of them."""
        return self.microbatch is None

    @property
    def seen(self) -> tuple[str, bool]:
        """What two legs must have in common: its digest, and whether it ran."""
        return (self.digest, bool(self.place))


@dataclass(frozen=True)
class Both:
    """One row of one rank, as both legs have it."""

    rank: int
    reference: Call
    candidate: Call

    @property
    def call(self) -> Call:
        """Where it stands in the program: as the reference ran it, if it did."""
        return self.reference if self.reference.place else self.candidate

    @property
    def differs(self) -> bool:
        """Whether the legs saw something else."""
        return self.reference.seen != self.candidate.seen


def calls(record: StepRecord, start: StartRecord, spec: RunSpec) -> list[Call]:
    """The rows of a step of a run, in the order in which the start record names them."""
    rows = list(_rows(record, start, spec.config.get("microbatches")))
    begins = {kind: _begins(row for row in rows if row.kind == kind) for kind in KINDS}
    return [_placed(row, begins[row.kind]) if row.kind in begins else row for row in rows]


def _rows(record: StepRecord, start: StartRecord, microbatches: object) -> Iterator[Call]:
    most = microbatches if isinstance(microbatches, int) else len(start.taps)
    for index, (name, stage) in enumerate(zip(start.taps, start.tap_stages, strict=False)):
        row = record.taps[index * TAP_HEX_CHARS : (index + 1) * TAP_HEX_CHARS]
        tap, _, text = name.rstrip("]").rpartition("[")
        number = int(text) if text.isdigit() else 0
        place = row[DIGEST_HEX_CHARS:]
        yield Call(
            tap, number, stage, row[:DIGEST_HEX_CHARS], "" if place == NEVER_RAN else place,
            number if number < most else None,
        )  # fmt: skip


def _begins(of_kind: Iterable[Call]) -> dict[int, str]:
    """Where each microbatch begins: at the call of the tap that is the first in the step."""
    ran = [call for call in of_kind if call.place]
    if not ran:
        return {}
    first = min(ran, key=lambda call: call.place).tap
    return {
        call.microbatch: call.place
        for call in ran
        if call.tap == first and call.microbatch is not None
    }


def _placed(call: Call, begins: dict[int, str]) -> Call:
    """A call that comes before the microbatch of its number is of an earlier one."""
    if call.microbatch is None or not call.place or call.place >= begins.get(call.microbatch, ""):
        return call
    begun = [number for number, place in begins.items() if place <= call.place]
    return replace(call, microbatch=max(begun, default=call.microbatch))


def shared_rows(
    ours: StepRecord, theirs: StepRecord, start: StartRecord, specs: Sequence[RunSpec]
) -> tuple[list[Both], frozenset[str]]:
    """The rows of a step of one rank, side by side, and taps that a graph scope took apart.

    Those ran in one leg only; their rows are left out. Others that did are rows that differ.

    Args:
        ours, theirs: the record of the reference and of the candidate.
        start: of both.
        specs: of both runs.
    """
    legs = [calls(record, start, spec) for record, spec in zip((ours, theirs), specs, strict=True)]
    rows = [Both(ours.rank, a, b) for a, b in zip(*legs, strict=True)]
    ran = [{call.tap for call in leg if call.place} for leg in legs]
    unseen = frozenset(
        tap
        for taps, other in ((ran[0] - ran[1], specs[1]), (ran[1] - ran[0], specs[0]))
        for tap in taps
        if _takes_apart(other, tap.partition(":")[0])
    )
    return [row for row in rows if row.call.tap not in unseen], unseen


def _takes_apart(spec: RunSpec, module: str) -> bool:
    """Whether a run calls what is inside of a module, and not the module.

    The router's graph holds a part of `mlp.moe`. Of another program nothing is known: modules
    inside of what its graphs hold are not called by a replay.
    """
    if not spec.is_builtin:
        return True
    layer, _, part = module.removeprefix("layers.").partition(".")
    first, last = spec.config.get("graph_layers") or (0, math.inf)
    is_captured = layer.isdecimal() and first <= int(layer) <= last
    return part == "mlp.moe" and "moe_router" in spec.config.get("graph", ()) and is_captured


def in_program_order(rows: Sequence[Both]) -> list[Both]:
    """Rows of one step, of all ranks, as the program makes them."""
    is_staged = any(row.call.stage for row in rows)
    shared = {row.call.module for row in rows if row.call.microbatch != row.call.number
              and row.call.place}  # fmt: skip
    equal = {
        (row.rank, row.call.module, row.call.number)
        for row in rows
        if row.call.kind == INPUT and not row.differs
    }

    def order(row: Both) -> tuple[object, ...]:
        call = row.call
        own = call.kind == OUTPUT and (row.rank, call.module, call.number) in equal
        is_last = call.is_folded and not (own and row.differs)
        is_last |= call.kind == GRADIENT and call.module in shared
        return (is_last, *(_staged(call) if is_staged else ()), call.place or _LATE, row.rank)

    return sorted(rows, key=order)


def _staged(call: Call) -> tuple[bool, int, int]:
    is_backward = call.kind == GRADIENT
    number = call.number if call.microbatch is None else call.microbatch
    return (is_backward, number, -call.stage if is_backward else call.stage)
