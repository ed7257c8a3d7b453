"""Two runs side by side: rows of taps in program order, floats and digests, step by step.

    records of both legs -> shared (step, rank) pairs -> rows, floats, tensors -> what differs

Program order is that of `harness.checks.taps`, and so is what a row that stands for several calls
of a module means. Who made what is read off the digests of what went through modules: what one
returns and another is given has one digest, so the reference's rows tell who consumed whose output;
a gradient was computed by whoever consumed the output that it belongs to.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from harness.checks.evidence import (
    BEFORE,
    StepTable,
    rank_table,
    shared_pairs,
    state_table,
    step_table,
    with_groups,
    with_same_copies,
)
from harness.checks.exact import quantities
from harness.checks.taps import GRADIENT, INPUT, OUTPUT, Both, in_program_order, shared_rows
from harness.program.spec import capabilities_of
from harness.records import (
    DIGEST_HEX_CHARS,
    FloatBits,
    InitialRecord,
    NamesRecord,
    RunResult,
    StartRecord,
    StepRecord,
)
from harness.store.streams import with_all_names

RNG = "rng"
STEP_COUNT = "step_count"
"""Of the optimizer, in its group."""


@dataclass(frozen=True)
class Row:
    """One call of a tap on one rank, as both legs saw it.

    Attributes:
        number: of the row among those of its tap.
        stage: of the pipeline.
        place: in the step, as the reference counted; "" if it never ran there.
        microbatch: that it is of; None where it stands for several calls, this one the first.
    """

    rank: int
    module: str
    kind: str
    number: int
    stage: int
    place: str
    reference: str
    candidate: str
    microbatch: int | None

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
    def is_folded(self) -> bool:
        """Whether it stands for several calls."""
        return self.microbatch is None


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
        has_layouts: whether it is known how a program distributes its work over ranks.
        shares_state: whether ranks hold the same parts of tensors. Those of two engines do not:
            of their digests these tables have the random states alone.
    """

    def __init__(self, reference: RunResult, candidate: RunResult) -> None:
        self.has_layouts = capabilities_of(reference.spec.config).layouts
        if not self.has_layouts:
            reference, candidate = _with_names_of_both(reference, candidate)
        self.reference, self.candidate = reference, candidate
        engines = [run.spec.config.get("engine") for run in (reference, candidate)]
        self.shares_state = engines[0] == engines[1]
        if not self.shares_state:
            reference, candidate = _without_state(reference), _without_state(candidate)
        reference, candidate = with_same_copies(reference, candidate)
        self._states = state_table(reference), state_table(candidate)
        self.ours: StepTable = step_table(reference)
        self.theirs: StepTable = step_table(candidate)
        self.starts = _same_starts(reference, candidate)
        self.pairs = [key for key in shared_pairs(self.ours, self.theirs) if key[1] in self.starts]
        self._rows: dict[int, list[Row]] = {}

    @cached_property
    def has_taps(self) -> bool:
        """Whether anything was looked into."""
        return any(start.taps for start in self.starts.values())

    @property
    def has_initial(self) -> bool:
        """Whether both runs recorded their state before the first step."""
        return all(any(step == BEFORE for step, _ in states) for states in self._states)

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
        rows: list[Both] = []
        for rank in self.ranks(step):
            key = (step, rank)
            legs = self.ours[key], self.theirs[key]
            specs = (self.reference.spec, self.candidate.spec)
            rows += shared_rows(*legs, self.starts[rank], specs)[0]
        return [_row(row) for row in in_program_order(rows) if row.call.place]

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
        """Every digest of a group, in the order of the reference, then ranks.

        Step `BEFORE` is the state before the first one.
        """
        ours, theirs = self._states
        found = [
            tensor
            for rank, start in self.starts.items()
            if (step, rank) in ours and (step, rank) in theirs
            for tensor in _tensors(ours[step, rank], theirs[step, rank], start, group)
        ]
        order = {name: place for place, name in enumerate(dict.fromkeys(t.name for t in found))}
        return sorted(found, key=lambda tensor: (order[tensor.name], tensor.rank))


def _with_names_of_both(*runs: RunResult) -> list[RunResult]:
    """The runs with the tensors and taps of all: what one lacks differs, under its name."""
    tables = [rank_table(run) for run in runs]
    made = []
    for run, table in zip(runs, tables, strict=True):
        ranks = []
        for rank, records in table.items():
            starts = [start for t in tables if rank in t and (start := t[rank].start) is not None]
            own = records.start
            if own and any((s.tensors, s.taps) != (own.tensors, own.taps) for s in starts):
                # Before the initial state, in the order of the runs; the rank's own come last.
                names = [
                    NamesRecord(rank=rank, step=BEFORE - 2 + i, tensors=s.tensors, taps=s.taps)
                    for i, s in enumerate((*starts, own))
                ]
                records = with_all_names(records, names)
            ranks.append(records)
        made.append(replace(run, ranks=tuple(ranks)))
    return made


def _without_state(run: RunResult) -> RunResult:
    alone = with_groups(run, lambda group: group == RNG)
    return replace(alone, ranks=tuple(replace(records, initial=None) for records in alone.ranks))


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


def _row(row: Both) -> Row:
    call, a, b = row.call, row.reference, row.candidate
    return Row(
        row.rank, call.module, call.kind, call.number, call.stage, a.place,
        a.digest if a.place else "", b.digest if b.place else "", call.microbatch,
    )  # fmt: skip


def _tensors(
    ours: StepRecord | InitialRecord, theirs: StepRecord | InitialRecord, start: StartRecord,
    group: str,
) -> Iterator[Tensor]:  # fmt: skip
    left, right = ours.digests.get(group, ""), theirs.digests.get(group, "")
    for place, name in enumerate(start.tensors.get(group, ())):
        window = slice(place * DIGEST_HEX_CHARS, (place + 1) * DIGEST_HEX_CHARS)
        yield Tensor(ours.rank, group, name, left[window], right[window])


_PARTS_OF_STATE = (".exp_avg_sq", ".exp_avg", ".main_weight", ".model_weight")


def module_of(tensor: str) -> str:
    """The module that holds a tensor of the records: `norm.weight` is `norm`'s.

    Words behind the name, as the ledger and the race detector have them, say what of it is meant.
    """
    name, _, words = tensor.partition(" ")
    if words and (name == "root" or name.rpartition(".")[2].isdigit()):
        return "" if name == "root" else name  # a unit's own buffer
    for part in _PARTS_OF_STATE:
        name = name.removesuffix(part)
    return name.rpartition(".")[0]


def unit_of(tensor: str) -> str:
    """The FSDP unit whose buffers a parameter travels in: its layer, or the root.

    Experts are sharded over other ranks than the rest of their layer.
    """
    parts = tensor.split(".")
    if parts[0] != "layers" or len(parts) < 2:
        return "root"
    unit = ".".join(parts[:2])
    return f"{unit} experts" if "experts" in parts[2:] else unit


def parent_of(module: str, known: Iterable[str]) -> str:
    """The closest module around it that was looked into; "" if there is none."""
    names = set(known)
    while module := module.rpartition(".")[0]:
        if module in names:
            return module
    return ""


def is_inside(module: str, other: str) -> bool:
    """Whether `module` is a part of `other`."""
    return module.startswith(f"{other}.")


def innermost(modules: Iterable[str]) -> list[str]:
    """Without those that hold another of them."""
    names = list(dict.fromkeys(modules))
    return [name for name in names if not any(is_inside(other, name) for other in names)]


def consumers(row: Row, rows: Sequence[Row]) -> list[str]:
    """The modules that were given what `row`'s module returned, by the reference's digests."""
    given = next((r.reference for r in rows if _is_output_of(r, row)), "")
    if not given:
        return []
    return innermost(
        other.module
        for other in rows
        if other.kind == INPUT
        and (other.rank, other.microbatch, other.reference) == (row.rank, row.microbatch, given)
        and not is_inside(row.module, other.module)
        and not is_inside(other.module, row.module)
        and other.module != row.module
    )


def returned_by(row: Row, rows: Sequence[Row]) -> str:
    """The outermost module that returns just what `row`'s module does, as the last of its parts."""
    given = next((r.reference for r in rows if _is_output_of(r, row)), "")
    around = [
        other.module
        for other in rows
        if other.kind == OUTPUT
        and (other.rank, other.microbatch, other.reference) == (row.rank, row.microbatch, given)
        and is_inside(row.module, other.module)
    ]
    return min(around, key=len, default=row.module) if given else row.module


def _is_output_of(other: Row, row: Row) -> bool:
    return (other.module, other.kind, other.number, other.rank) == (
        row.module, OUTPUT, row.number, row.rank
    )  # fmt: skip


def common(modules: Sequence[str], known: Iterable[str]) -> str:
    """The module itself, or of several the closest known one that holds all of them."""
    if len(modules) == 1:
        return modules[0]
    if not modules:
        return ""
    shared = []
    for parts in zip(*(module.split(".") for module in modules), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    path = ".".join(shared)
    names = set(known)
    return path if path in names else parent_of(path, names)


MOST_NAMES = 3


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:MOST_NAMES])
    more = len(names) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def differ(number: int) -> str:
    """The verb."""
    return "differs" if number == 1 else "differ"


def ranks_of(tensors: Iterable[Tensor], name: str) -> tuple[int, ...]:
    """Ranks on which the tensor of that name is among these."""
    return tuple(sorted({tensor.rank for tensor in tensors if tensor.name == name}))
