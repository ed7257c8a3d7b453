"""What a search for a cause has found: a place, level by level, and names of places."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from harness.checks.evidence import show_ranks
from harness.faults.catalogue import Phase
from harness.records import OperatorCall
from harness.values import Json

MOST_NAMES = 3
ROOT = "(root)"
"""As `harness.recorder.hooks` names a module that is part of no other."""
Near = Literal["", "before", "in", "after"]
"""Where an origin lies about a collective: before it on the ranks named, in it, or after it."""


@dataclass(frozen=True, kw_only=True)
class Element(Json):
    """The first element, in the order of the whole tensor, that is not the same in both runs.

    `index` is in the tensor of the model without any sharding; all else is of what the rank holds.
    `ulps` are steps on the grid of the dtype, None for NaN, or other signs.
    """

    index: tuple[int, ...]
    local: int
    dtype: str
    reference_bits: str
    candidate_bits: str
    reference: str
    candidate: str
    num_different: int
    numel: int
    ulps: int | None = None
    shape: tuple[int, ...] = ()
    lows: tuple[int, ...] = ()
    highs: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Numbers(Json):
    """What a tensor held: least, greatest and mean of its finite elements, None without any."""

    dtype: str
    shape: tuple[int, ...]
    least: float | None = None
    greatest: float | None = None
    mean: float | None = None
    num_infinite: int = 0  # NaN as well

    def __str__(self) -> str:
        """`float32[3, 4] from -1 to 2, mean 0.25`."""
        told = f"{self.dtype}{list(self.shape)}"
        if self.least is not None:
            told += f" from {self.least:.6g} to {self.greatest:.6g}, mean {self.mean:.6g}"
        return told + f", {self.num_infinite} not finite" * bool(self.num_infinite)


@dataclass(frozen=True, kw_only=True)
class Value(Json):
    """A tensor that the operators of two runs took or gave, None in a run that has none there.

    `of` says which one of the module's, "" if that is not known. `element` is the first that
    differs: None where all are equal, and where shape or dtype is another.
    """

    name: str
    of: str
    is_equal: bool
    reference: Numbers | None
    candidate: Numbers | None
    element: Element | None


@dataclass(frozen=True, kw_only=True)
class Operator(Json):
    """The first operator of a module's call that does otherwise; None in a run that has none such.

    `outside` are inputs that differ and that no operator of the call has made: the operator itself
    is right; without any, its inputs are equal. `values`: of inputs and outputs, once they were
    kept; not of what lies in memory that was never written as a whole.
    """

    reference: OperatorCall | None
    candidate: OperatorCall | None
    outside: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()

    @property
    def numbers(self) -> list[int | None]:
        """Which of the operators that were written down it is, in both runs."""
        return [None if x is None else x.number for x in (self.reference, self.candidate)]

    def __str__(self) -> str:
        """`aten.mul.Tensor() at a.py:7, in the reference aten.add.Tensor(alpha=1) at a.py:7`."""
        if self.outside:
            return f"{self.candidate}, given another {', '.join(self.outside)} from outside of it"
        if self.candidate is None or self.reference is None:
            run = "reference" if self.candidate is None else "candidate"
            return f"{self.candidate or self.reference}, in the {run} alone"
        same = str(self.reference) == str(self.candidate)
        return f"{self.candidate}, in the reference {'as well' if same else self.reference}"

    @property
    def told(self) -> str:
        if self.candidate is None:
            return f"the candidate has nothing that gives what {self.reference} gives"
        what, ours, theirs = "", self.reference, self.candidate
        if ours is not None and ours.operator == theirs.operator and not self.outside:
            if not all((*ours.inputs, *theirs.inputs)):
                what = ": not all that it was given has a digest, and it returned something else"
            elif ours.inputs == theirs.inputs:
                what = ": it was given the same, and it returned something else"
        return (
            f"operator {self.candidate.number} of the call is the first that differs, {self}{what}"
        )


@dataclass(frozen=True, kw_only=True)
class Location(Json):
    """Where a fault entered, as far as it is known; "" and None where a level is not.

    Attributes:
        step: first step in which anything differs; -1 before the first one.
        microbatch: of forward and backward.
        module: dotted name of the module whose own work is wrong.
        tensor: first wrong tensor: a parameter's name, or a tap (`layers.0.attn:output`).
        quantity: what of it: `grads`, `weights`, `optim`, `rng`, `loss`, `taps.output`, ...
        rank: where it entered; the lowest of `ranks`, on which it is wrong at that place.
        near, collective: the side of the collective that spread or computed it.
        element, operator: first differing ones, once somebody looked.
        evidence, unknown: a sentence for each conclusion, and for each level without one.
        before_is_equal: whether every step before `step` is equal on every rank.
        rank_is_hidden: whether a sum over ranks hides who added what is wrong.
    """

    step: int | None = None
    phase: Phase | None = None
    microbatch: int | None = None
    module: str = ""
    tensor: str = ""
    quantity: str = ""
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    near: Near = ""
    collective: str = ""
    element: Element | None = None
    operator: Operator | None = None
    evidence: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    before_is_equal: bool = False
    rank_is_hidden: bool = False

    @property
    def not_known(self) -> tuple[str, ...]:
        """A sentence for each level that is unknown."""
        hidden = "rank: the sum over ranks does not show who added what is wrong"
        return (*[hidden] * self.rank_is_hidden, *self.unknown)

    def saying(self, *evidence: str, unknown: str = "", **fields: Any) -> "Location":
        """The place with more evidence, with one more thing that is unknown, and other fields."""
        doubts = (*self.unknown, unknown) if unknown else self.unknown
        return replace(self, evidence=(*self.evidence, *evidence), unknown=doubts, **fields)

    def __str__(self) -> str:
        """`step 7, backward, microbatch 1, layers.0.attn.wq, rank 3`; "" if nothing is known."""
        parts = [
            "" if self.step is None else "before step 0" if self.step < 0 else f"step {self.step}",
            self.phase, "" if self.microbatch is None else f"microbatch {self.microbatch}",
            self.module, show_ranks(set(self.ranks)) if self.ranks else "",
        ]  # fmt: skip
        return ", ".join(part for part in parts if part)


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
    """The FSDP unit whose buffers a parameter travels in: its layer, its experts, or the root."""
    parts = tensor.split(".")
    if parts[0] != "layers" or len(parts) < 2:
        return "root"
    return ".".join(parts[:2]) + (" experts" if "experts" in parts[2:] else "")


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown, more = ", ".join(names[:MOST_NAMES]), len(names) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def parent_of(module: str, known: Collection[str]) -> str:
    """The closest module around it that was looked into; "" if there is none."""
    around = module
    while around := around.rpartition(".")[0]:
        if around in known:
            return around
    return ROOT if ROOT in known and module != ROOT else ""


def is_in(module: str, outer: str) -> bool:
    """Whether a module is a part of another one, at any depth."""
    return module.startswith(f"{outer}.") or (outer == ROOT != module)
