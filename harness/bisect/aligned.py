"""Two runs, record by record: calls in program order, floats and digests, step by step.

    records of both runs -> shared (step, rank) pairs -> rows, floats, tensors -> what differs

Program order, and rows that stand for several calls, are those of `harness.checks.taps`. What one
module returns and another is given has one digest, so the reference's rows tell who consumed whose
output; a gradient was computed by whoever consumed the output that it belongs to.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

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
from harness.checks.taps import INPUT, OUTPUT, Both, Call, in_program_order, shared_rows
from harness.program.spec import capabilities_of
from harness.records import (
    DIGEST_HEX_CHARS,
    FloatBits,
    NamesRecord,
    RunResult,
    StartRecord,
    StepRecord,
)
from harness.store.streams import with_all_names

RNG = "rng"
MOST_NAMES = 3


@dataclass(frozen=True)
class Row(Call):
    """One call of a tap on one rank: its digest in both runs, "" in one that did not make it."""

    rank: int
    reference: str
    candidate: str

    @property
    def differs(self) -> bool:
        """Whether the runs saw something else."""
        return self.reference != self.candidate

    @property
    def is_whole(self) -> bool:
        """Whether both runs made the call."""
        return bool(self.reference and self.candidate)


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
        starts: start records of the reference by rank, of ranks on which both name the same
            tensors and taps.
        has_layouts: whether it is known how a program distributes its work over ranks.
        shares_state: whether ranks hold the same parts of tensors. Those of two engines do not:
            of their digests the random states alone are compared.
    """

    def __init__(self, reference: RunResult, candidate: RunResult) -> None:
        self.has_layouts = capabilities_of(reference.spec.config).layouts
        if not self.has_layouts:
            reference, candidate = _with_names_of_both(reference, candidate)
        self.reference, self.candidate = reference, candidate
        engines = [run.spec.config.get("engine") for run in (reference, candidate)]
        self.shares_state = engines[0] == engines[1]
        if not self.shares_state:
            reference, candidate = _random_states_of(reference), _random_states_of(candidate)
        reference, candidate = with_same_copies(reference, candidate)
        self._states = state_table(reference), state_table(candidate)
        self.ours: StepTable = step_table(reference)
        self.theirs: StepTable = step_table(candidate)
        others = rank_table(candidate)
        self.starts: dict[int, StartRecord] = {
            rank: ours
            for rank, records in rank_table(reference).items()
            if rank in others and (ours := records.start) and (theirs := others[rank].start)
            if (ours.tensors, ours.taps) == (theirs.tensors, theirs.taps)
        }
        self.pairs = [key for key in shared_pairs(self.ours, self.theirs) if key[1] in self.starts]
        self._rows: dict[int, list[Row]] = {}

    @property
    def has_taps(self) -> bool:
        """Whether anything was looked into."""
        return any(start.taps for start in self.starts.values())

    @property
    def has_initial(self) -> bool:
        """Whether both runs recorded their state before the first step."""
        return all(any(step == BEFORE for step, _ in states) for states in self._states)

    @property
    def world_size(self) -> int:
        """Ranks of the reference."""
        return self.reference.spec.world_size

    def ranks(self, step: int) -> list[int]:
        """Ranks of which both runs have the step."""
        return [rank for at, rank in self.pairs if at == step]

    def first_step(self) -> int | None:
        """The first step in which any record differs on any rank; None if none does."""
        return next((step for step, rank in self.pairs if self._is_different(step, rank)), None)

    def _is_different(self, step: int, rank: int) -> bool:
        ours, theirs = self.ours[step, rank], self.theirs[step, rank]
        if ours.digests != theirs.digests or bits(ours) != bits(theirs):
            return True
        rows = self.rows(step) if ours.taps != theirs.taps else ()
        return any(row.differs for row in rows if row.rank == rank)

    def rows(self, step: int) -> list[Row]:
        """Rows of all ranks in program order; without modules that ran in one run only."""
        if step not in self._rows:
            specs, rows = (self.reference.spec, self.candidate.spec), list[Both]()
            for key in ((step, rank) for rank in self.ranks(step)):
                rows += shared_rows(self.ours[key], self.theirs[key], self.starts[key[1]], specs)[0]
            ordered = in_program_order(rows)
            self._rows[step] = [_row(row) for row in ordered if row.call.place]
        return self._rows[step]

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
        found = []
        for rank, start in self.starts.items():
            states = [held[step, rank] for held in self._states if (step, rank) in held]
            texts = [state.digests.get(group, "") for state in states]
            for place, name in enumerate(start.tensors.get(group, ()) if len(texts) == 2 else ()):
                window = slice(place * DIGEST_HEX_CHARS, (place + 1) * DIGEST_HEX_CHARS)
                found.append(Tensor(rank, group, name, texts[0][window], texts[1][window]))
        order = {name: place for place, name in enumerate(dict.fromkeys(t.name for t in found))}
        return sorted(found, key=lambda tensor: (order[tensor.name], tensor.rank))

    def different(self, step: int, group: str) -> list[Tensor]:
        """Those of a group that differ."""
        return [tensor for tensor in self.tensors(step, group) if tensor.differs]

    def names(self, group: str) -> set[str]:
        """Of all tensors of a group, on any rank."""
        return {name for start in self.starts.values() for name in start.tensors.get(group, ())}


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


def _random_states_of(run: RunResult) -> RunResult:
    alone = with_groups(run, lambda group: group == RNG)
    return replace(alone, ranks=tuple(replace(records, initial=None) for records in alone.ranks))


def bits(record: StepRecord) -> list[tuple[str, str]]:
    """Losses and norm of a record by name, as bit patterns."""
    return [(name, value.bits) for name, value in quantities(record)]


def _row(row: Both) -> Row:
    ours, theirs = (c.digest if c.place else "" for c in (row.reference, row.candidate))
    return Row(**vars(row.call), rank=row.rank, reference=ours, candidate=theirs)


# --- names ------------------------------------------------------------------------------------


def stem_of(tensor: str) -> str:
    """The parameter that a tensor of the state belongs to."""
    for part in (".exp_avg_sq", ".exp_avg", ".main_weight", ".model_weight"):
        tensor = tensor.removesuffix(part)
    return tensor


def module_of(tensor: str) -> str:
    """The module that holds a tensor of the records: `norm.weight` is `norm`'s.

    Words behind the name, as the ledger and the race detector have them, say what of it is meant.
    """
    name, _, words = tensor.partition(" ")
    if words and (name == "root" or name.rpartition(".")[2].isdigit()):
        return "" if name == "root" else name  # a unit's own buffer
    return stem_of(name).rpartition(".")[0]


def unit_of(tensor: str) -> str:
    """The FSDP unit whose buffers a parameter travels in: its layer, or the root.

    Experts are sharded over other ranks than the rest of their layer.
    """
    parts = tensor.split(".")
    if parts[0] != "layers" or len(parts) < 2:
        return "root"
    unit = ".".join(parts[:2])
    return f"{unit} experts" if "experts" in parts[2:] else unit


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown, more = ", ".join(names[:MOST_NAMES]), len(names) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def parent_of(module: str, known: Collection[str]) -> str:
    """The closest module around it that was looked into; "" if there is none."""
    while module := module.rpartition(".")[0]:
        if module in known:
            return module
    return ""


def common(modules: Sequence[str], known: Collection[str]) -> str:
    """The module itself, or of several the closest known one that holds all of them."""
    if len(set(modules)) < 2:
        return next(iter(modules), "")
    shared = []
    for parts in zip(*(module.split(".") for module in modules), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    path = ".".join(shared)
    return path if path in known else parent_of(path, known)


def consumers(row: Row, rows: Sequence[Row]) -> tuple[str, list[str]]:
    """Whose output the gradient of a row belongs to, and the innermost modules that were given it.

    It is the outermost module that returns just what the row's does, as the last of its parts.
    """
    own = row.module
    given = next(
        (r.reference for r in rows
         if (r.module, r.kind, r.number, r.rank) == (own, OUTPUT, row.number, row.rank)), "",
    )  # fmt: skip
    if not given:
        return own, []
    same = [
        r for r in rows
        if (r.rank, r.microbatch, r.reference) == (row.rank, row.microbatch, given)
    ]  # fmt: skip
    around = [r.module for r in same if r.kind == OUTPUT and _is_inside(own, r.module)]
    users = dict.fromkeys(
        r.module for r in same
        if r.kind == INPUT and r.module != own
        and not _is_inside(own, r.module) and not _is_inside(r.module, own)
    )  # fmt: skip
    innermost = [name for name in users if not any(_is_inside(other, name) for other in users)]
    return min(around, key=len, default=own), innermost


def _is_inside(module: str, other: str) -> bool:
    return module.startswith(f"{other}.")


def ranks_of(tensors: Iterable[Tensor], name: str) -> tuple[int, ...]:
    """Ranks on which the tensor of that name is among these."""
    return tuple(sorted({tensor.rank for tensor in tensors if tensor.name == name}))
