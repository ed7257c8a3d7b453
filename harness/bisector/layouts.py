"""Two runs of one model and data on other layouts: which tensor is farther apart than rounding.

layout_runs    the two, and runs that round at random; all keep one step
whole          their tensors, put together
apart          how far rounding may take two of them
layouts        this file: the first tensor that is farther apart, its element, its ranks
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.bisector.apart import (
    FLOOR_ROUNDINGS,
    LEAST_ROW,
    MOST_FLIPS,
    ROUNDOFF,
    Apart,
    Units,
    bound_of,
    distances,
    norms,
    units_of,
)
from harness.bisector.elements import shown, ulps
from harness.bisector.found import Element, Location
from harness.bisector.whole import Floats, Whole, whole_tensors
from harness.records import RunResult
from harness.store.contents import Contents

ROUTED = (
    "routing: in bf16 a router may send a token to another expert for a rounding's sake, which no "
    "bound covers; compare in fp32 to tell that from a fault"
)
STATE = ("loss", "grads", "weights")
"""Groups of what is compared; all others are calls."""
_REDUCED = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A run that was made, with what it has kept."""

    result: RunResult
    contents: Contents


@dataclass(frozen=True, kw_only=True)
class LayoutAnswer:
    """What comparing two layouts has shown.

    Attributes:
        location: of the first tensor that is wrong; None if all are within their bounds, or
            nothing could be compared, which `message` says.
        tensors: all that were compared: the loss, gradients as backward makes them, weights.
        message: one sentence.
    """

    location: Location | None
    tensors: tuple[Apart, ...]
    message: str

    @property
    def wrong(self) -> tuple[Apart, ...]:
        """Those that are."""
        return tuple(each for each in self.tensors if each.is_wrong)


def compare_layouts(reference: Leg, candidate: Leg, samples: Sequence[Leg]) -> LayoutAnswer:
    """Say which tensor of two layouts is first farther apart than rounding takes it.

    Args:
        reference, candidate, samples: of the runs of `runs_to_compare`, in any state.
    """
    legs = [reference, candidate, *samples]
    problems = [problem for leg in legs for problem in _problems(leg)]
    if len(samples) < 2:
        problems.append(f"expected samples, got {len(samples)}")
    if problems:
        return LayoutAnswer(
            location=None, tensors=(), message=f"nothing was compared: {'; '.join(problems[:4])}"
        )
    comparison = _Comparison([dict(whole_tensors(leg.contents)) for leg in legs], legs)
    tensors = tuple(comparison.tensors())
    wrong = next((each for each in tensors if each.is_wrong), None)
    if wrong is None:
        worst = max(tensors, key=lambda each: each.units.both)
        message = (
            f"all {len(tensors)} tensors of step {comparison.step} are within their bounds; "
            f"the farthest apart is {worst.name}, {worst.units.both:.2f} of its bound"
        )
        return LayoutAnswer(location=None, tensors=tensors, message=message)
    # What a forward pass made is no evidence of a fault, but of where one began: see `calls`.
    first = next((each for each in comparison.calls() if each.is_wrong), wrong)
    location = comparison.locate(first, tensors)
    return LayoutAnswer(location=location, tensors=tensors, message=location.evidence[0])


def _problems(leg: Leg) -> Iterator[str]:
    outcome = leg.result.outcome
    if outcome.what:
        yield f"run {outcome.key}: {outcome.what}: {outcome.message}"
    else:
        yield from (f"run {outcome.key}: {problem}" for problem in leg.contents.problems)


class _Comparison:
    """Whole tensors of the reference, the candidate and the samples, in this order."""

    def __init__(self, wholes: Sequence[Mapping[str, Whole]], legs: Sequence[Leg]) -> None:
        self._wholes, self._legs = wholes, legs
        self.step = legs[0].contents.step
        config = legs[0].result.spec.config
        self._lr = float(config["optim"]["lr"])
        self._may_route_otherwise = config["dtype"] == "bf16" and config["model"]["experts"] > 0
        self._reduced = ROUNDOFF[_REDUCED[config["fsdp"]["reduce_dtype"]]]

    def tensors(self) -> Iterator[Apart]:
        yield self._loss()
        names = sorted(
            {name for held in self._wholes for name in held if _group(name) in STATE}, key=_in_model
        )
        grads = [name for name in names if name.startswith("grads:")]
        for name in [*reversed(grads), *(name for name in names if name not in set(grads))]:
            if not name.endswith(".expert_bias"):  # moves by steps, as counts of tokens say
                yield self._apart(name)

    def calls(self) -> Iterator[Apart]:
        """What branches of layers returned, in the order of forward.

        Weights that AdamW has moved the other way for a rounding's sake show in them with no bound,
        so they tell where a difference begins, once another tensor has told that there is one.
        """
        names = {name for held in self._wholes for name in held if _group(name) not in STATE}
        yield from (self._apart(name) for name in sorted(names, key=_in_forward))

    def _loss(self) -> Apart:
        losses = [
            np.array([_number(step.loss.value if step.loss is not None else None)])
            for leg in self._legs
            for step in leg.result.ranks[0].steps
            if step.step == self.step
        ]
        floor = FLOOR_ROUNDINGS * ROUNDOFF["float32"] * abs(float(losses[0][0]))
        return Apart(name="loss", units=units_of(losses, np.array([floor])))

    def _apart(self, name: str) -> Apart:
        found = [held.get(name) for held in self._wholes]
        lacking = [i for i, whole in enumerate(found) if whole is None or whole.num_missing]
        wholes = [whole for whole in found if whole is not None]
        if lacking or len({whole.bits.shape for whole in wholes}) > 1:
            why = f"{_leg(lacking[0])} has not all of it" if lacking else "its shapes differ"
            return _certain(name, why)
        for number, whole in enumerate(wholes):
            if whole.disagreeing:
                rank, index = next(iter(whole.disagreeing.items()))
                others = ", ".join(str(r) for r in whole.ranks_of(index) if r < rank)
                why = f"{_leg(number)}: rank {rank} has other bits of {list(index)} than {others}"
                return _certain(name, why)
        values = [whole.values for whole in wholes]
        flat = [value.reshape(1, -1) for value in values]
        both = units_of(flat, self._floor(name, wholes[0].dtype, flat[0]))
        row = None
        rows = values[0].reshape(values[0].shape[0], -1) if values[0].ndim > 1 else flat[0]
        if values[0].ndim > 1 and rows.shape[1] >= LEAST_ROW:
            by_row = [value.reshape(rows.shape) for value in values]
            floor = self._floor(name, wholes[0].dtype, by_row[0])
            worst = units_of(by_row, floor)
            if worst.both > both.both:
                row = int(np.argmax(distances(by_row, floor)))
                both = worst
        return Apart(name=name, row=row if both.both > 1 else None, units=both)

    def _floor(self, name: str, dtype: str, rows: Floats) -> Floats:
        """What rows may be apart beyond what samples show."""
        steps = self.step + 1
        roundoff = self._reduced if name.startswith("grads:") else ROUNDOFF[dtype]
        rounded = FLOOR_ROUNDINGS * steps * max(roundoff, ROUNDOFF[dtype]) * norms(rows)
        flips = 0.0
        if name.startswith("weights:"):
            flips = 2 * self._lr * math.sqrt(MOST_FLIPS * steps)
        floor: Floats = rounded + flips
        return floor

    # ---- the answer

    def locate(self, wrong: Apart, tensors: Sequence[Apart]) -> Location:
        group, _, tensor = wrong.name.rpartition(":")
        is_call = _group(wrong.name) not in STATE
        element, ranks, sentence = self._element(wrong)
        count = sum(each.is_wrong for each in tensors)
        evidence = [
            f"{wrong.name} is the first of {count + is_call} tensors that are farther apart than "
            f"rounding takes them: {wrong.why or f'{wrong.units.both:.3g} times its bound'}",
            *([sentence] if sentence else []),
        ]
        if not wrong.why:
            evidence.append(
                f"from the mean of {len(self._legs) - 2} runs without the layouts, the reference "
                f"is {wrong.units.reference:.3g} and the candidate {wrong.units.candidate:.3g} "
                "times its bound away"
            )
        phases: dict[str, Any] = {"": "forward", "grads": "backward", "weights": "optimizer"}
        unknown = []
        if group == "grads":
            unknown.append("backward or reduce: gradients are kept once both are over")
        if self._may_route_otherwise and not wrong.why:
            unknown.append(ROUTED)
        if is_call:
            found = Location(phase="forward", module=group, tensor=wrong.name, microbatch=0)
            found = replace(found, quantity="taps.output")
        else:
            module = tensor.rpartition(".")[0] if group else ""
            found = Location(phase=phases[group], module=module, tensor=tensor if group else "")
            found = replace(found, quantity=group or "loss")
        return replace(
            found, step=self.step,
            rank=min(ranks) if ranks else None, ranks=ranks, element=element,
            evidence=tuple(evidence), unknown=tuple(unknown),
        )  # fmt: skip

    def _element(self, wrong: Apart) -> tuple[Element | None, tuple[int, ...], str]:
        """The first element that is by itself past the bound of its row, or the farthest apart."""
        a, b = (held.get(wrong.name) for held in self._wholes[:2])
        if a is None or b is None or a.bits.shape != b.bits.shape:
            return None, (), ""
        index = next(iter(b.disagreeing.values()), next(iter(a.disagreeing.values()), None))
        if index is None:
            index = self._first_apart(wrong, a, b)
        if not (a.ranks_of(index) and b.ranks_of(index)):
            return None, (), ""
        element = self._as_element(index, a, b)
        ranks = b.ranks_of(index)
        name = wrong.name if _group(wrong.name) not in STATE else wrong.name.partition(":")[2]
        sentence = (
            f"{name}[{', '.join(map(str, index))}] is {element.reference} "
            f"on rank {_listed(a.ranks_of(index))} of the reference and {element.candidate} on "
            f"rank {_listed(ranks)} of the candidate"
        )
        return element, ranks, sentence

    def _first_apart(self, wrong: Apart, a: Whole, b: Whole) -> tuple[int, ...]:
        wholes = [held[wrong.name] for held in self._wholes]
        shape = a.bits.shape
        rows = (shape[0], -1) if len(shape) > 1 and wrong.row is not None else (1, -1)
        values = [whole.values.reshape(rows) for whole in wholes]
        bound = bound_of(values, self._floor(wrong.name, a.dtype, values[0]), math.sqrt(2))
        apart = np.abs(values[0] - values[1])
        apart = np.where(np.isnan(apart), np.inf, apart)
        past = np.flatnonzero(apart > bound[:, None])
        flat = int(past[0]) if past.size else int(np.argmax(apart))
        return tuple(int(at) for at in np.unravel_index(flat, shape))

    def _as_element(self, index: tuple[int, ...], a: Whole, b: Whole) -> Element:
        held = b.holding_of(index)
        mine = [int(whole.bits[index]) for whole in (a, b)]
        if b.disagreeing:  # of the rank that is at odds with a lower one
            rank = next(iter(b.disagreeing))
            held = next(each for each in b.holdings if each.rank == rank and each.has(index))
            mine[1] = int(held.bits[tuple(
                at - first for at, first in zip(index, held.place.offsets, strict=True)
            )])  # fmt: skip
        box = tuple(
            slice(at, at + size)
            for at, size in zip(held.place.offsets, held.place.sizes, strict=True)
        )
        digits = {"float64": 16, "float32": 8}.get(b.dtype, 4)
        return Element(
            index=index, local=held.local(index), dtype=b.dtype,
            reference_bits=f"{mine[0]:0{digits}x}", candidate_bits=f"{mine[1]:0{digits}x}",
            reference=shown(mine[0], a.dtype), candidate=shown(mine[1], b.dtype),
            num_different=int((a.bits[box] != held.bits).sum()), numel=int(held.bits.size),
            ulps=ulps(mine[0], mine[1], b.dtype) if a.dtype == b.dtype else None,
        )  # fmt: skip


def _certain(name: str, why: str) -> Apart:
    """Wrong whatever rounding does."""
    return Apart(name=name, why=why, units=Units(math.inf, math.nan, math.nan))


def _leg(number: int) -> str:
    return ("the reference", "the candidate")[number] if number < 2 else f"sample {number - 2}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _group(name: str) -> str:
    return name.partition(":")[0]


def _in_forward(name: str) -> tuple[int, bool]:
    """Order of branches: layers by number, attention first."""
    _, layer, branch = _group(name).split(".")
    return int(layer), branch != "attn"


def _in_model(name: str) -> tuple[Any, ...]:
    """Order of forward: the embedding, layers by number with attention first, what follows them."""
    group, _, path = name.partition(":")
    parts = path.split(".")
    if parts[0] == "layers" and len(parts) > 2:
        return group, 1, int(parts[1]), parts[2] != "attn", parts[3:] != ["norm", "weight"], parts
    return group, 0 if parts[0] == "embedding" else 2, 0, parts[0] == "head", False, parts
