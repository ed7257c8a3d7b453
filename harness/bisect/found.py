"""What a search for a cause has found: a place, level by level, with the evidence for each."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from harness.checks.evidence import show_ranks
from harness.codec import Json
from harness.faults.fault import Phase

Near = Literal["", "before", "in", "after"]
"""Where an origin lies about a collective: before it on the ranks named, in it, or after it."""


@dataclass(frozen=True, kw_only=True)
class Element(Json):
    """The first element, in the order of the whole tensor, that is not the same in both runs.

    Attributes:
        index: in the whole tensor, as the model without any sharding has it.
        local: flat place in what the rank holds.
        reference_bits, candidate_bits: hex of the stored bits.
        reference, candidate: `repr` of the number.
        num_different, numel, shape: of the rank's part.
        ulps: steps between the two on the grid of their dtype; None for NaN, or other signs.
        lows, highs: the least and the greatest index in each axis of it at which any differs.
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
        element: first differing one, once somebody looked.
        evidence: a sentence for each conclusion, in the order in which they were drawn.
        unknown: a sentence for each level that could not be decided, and why.
        before_is_equal: whether every step before `step` is equal on every rank.
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
    evidence: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    before_is_equal: bool = False

    def saying(self, *evidence: str, unknown: str = "", **fields: Any) -> "Location":
        """The place with more evidence, with one more thing that is unknown, and other fields."""
        doubts = (*self.unknown, unknown) if unknown else self.unknown
        return replace(self, evidence=(*self.evidence, *evidence), unknown=doubts, **fields)

    def __str__(self) -> str:
        """`step 7, backward, microbatch 1, layers.0.attn.wq, rank 3`; "" if nothing is known."""
        parts = [
            "" if self.step is None else "before step 0" if self.step < 0 else f"step {self.step}",
            self.phase or "",
            "" if self.microbatch is None else f"microbatch {self.microbatch}",
            self.module,
            show_ranks(set(self.ranks)) if self.ranks else "",
        ]
        return ", ".join(part for part in parts if part)
