"""Two cells of a scenario against each other: bit for bit on one layout, within bounds on two.

    same layout    the candidate of one against that of the other, as a case like any other
    two layouts    contents of one step of both, and of runs that round at random; two engines too

Layouts add in other orders, so their bits differ: how far they may be apart is a bound out of runs
that round at random. It is probabilistic and measured on the
program itself: `NUM_SAMPLES` runs X_i that round at random (`fsdp_core.rounding`), with no axis but
that of the data, take the same steps. Roundings are independent with mean zero (N. J. Higham and
T. Mary, SIAM J. Sci. Comput. 41, 2019); to first order the error of a tensor is a sum over all of
them, and E |e|^2 <= s^2, where random rounding has 2/3 of that at most on average, so

    s^2 = 3/2 * max_i |X_i - mean X|^2 * n / (n - 1)

and errors of two runs, which are independent, have 2 s^2. Changing one rounding changes |e| by at
most 2 h_i |c_i| (McDiarmid, 1989): |e| > (1 + k) sqrt(2) s has a probability of at most
exp(-k^2 / 2), 1.5e-8 a tensor for k = 6. The largest of the samples stands for their mean, as few
samples of few independent errors may all be small.

Rows of `LEAST_ROW` elements and more are looked at alone, too: a fault of one row is small in a
tensor of many. What random rounding leaves as it is (sums of collectives, AdamW's kernel) may round
a few times: `FLOOR_ROUNDINGS` unit roundoffs of the tensor a step. Weights may also lie apart by
twice the learning rate where a gradient is nearly zero, as AdamW goes by its sign: `MOST_FLIPS`
elements a step beyond what samples show.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fsdp_core.config import ParallelConfig, TrainConfig
from harness.bisect.elements import Floats, Whole, shown, ulps, whole_tensors
from harness.bisect.experiments import Asker, judged_by, message
from harness.bisect.found import Element, Location
from harness.bisect.least import first_failing
from harness.errors import UsageError
from harness.program.spec import capabilities_of
from harness.records import MAX_KEPT_BYTES, CaseSpec, KeepSpec, RunResult, RunSpec, Verdict
from harness.store.contents import Contents, read_contents

NAMES = ("grads:*", "weights:*")
BRANCHES = ("layers.*.attn:output", "layers.*.mlp:output")
"""Taps of a forward pass; of its first microbatch, as contents take memory."""
NUM_SAMPLES = 6
_MAY_DIFFER = ("parallel", "fsdp", "graph", "compile", "compile_backend", "stress", "stress_seed",
               "taps", "flush_every", "graph_warmup_steps", "graph_optimizer", "ledger", "steps",
               "backend", "engine")  # fmt: skip
"""Keys of a configuration that decide how a step is computed, and not what."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What a comparison of two layouts needs.

    Attributes:
        reference, candidate: the two, which keep gradients and weights of one step.
        samples: runs that round at random.
    """

    reference: RunSpec
    candidate: RunSpec
    samples: tuple[RunSpec, ...]


def runs_to_compare(
    reference: RunSpec, candidate: RunSpec, step: int, max_bytes: int = MAX_KEPT_BYTES
) -> Runs:
    """The runs that tell where two layouts are farther apart than rounding, at one step.

    Args:
        step: of the gradients and weights that are compared.
        max_bytes: that a rank may keep.

    Raises:
        UsageError: they do not compute the same, or a layout decides more than rounding.
    """
    refuse_incomparable(reference, candidate)
    for spec in (reference, candidate):
        if step >= int(spec.config["steps"]):
            raise UsageError(f"expected a step below {spec.config['steps']}, got {step}")
    looks = all(spec.config.get("engine") == "ours" for spec in (reference, candidate))
    taps = BRANCHES if looks else ()
    names = (*NAMES, *(f"{tap}[0]" for tap in taps))
    keep = KeepSpec(step=step, names=names, max_bytes=max_bytes)
    config = TrainConfig.from_dict(reference.config)
    dp, outer = config.parallel.dp, config.parallel.dp_outer
    plain = replace(
        config, parallel=ParallelConfig(dp=dp, dp_outer=outer), graph=(), compile=(), stress=(),
        taps=taps, backend="torch", engine="ours", steps=step + 1,
    )  # fmt: skip
    # One process holds the whole model: rounding at random takes more time, and more memory.
    samples = tuple(
        RunSpec(
            config=plain.to_dict(), device="cpu", world_size=dp * outer,
            timeout_s=10 * reference.timeout_s, keep=keep, rounding=number + 1,
        )
        for number in range(NUM_SAMPLES)
    )  # fmt: skip
    first, second = (
        replace(spec, keep=keep, config=spec.config | ({"taps": list(taps)} if taps else {}))
        for spec in (reference, candidate)
    )
    return Runs(reference=first, candidate=second, samples=samples)


def refuse_incomparable(reference: RunSpec, candidate: RunSpec) -> None:
    """See that two runs compute the same but for rounding (`UsageError`: what does not)."""
    legs = [TrainConfig.from_dict(spec.config) for spec in (reference, candidate)]
    plain = [leg.to_dict() for leg in legs]
    for key in sorted(plain[0].keys() - set(_MAY_DIFFER)):
        if plain[0][key] != plain[1][key]:
            _refuse(f"the same {key}", f"{plain[0][key]!r:.60} and {plain[1][key]!r:.60}")
    if legs[0].fsdp.reduce_dtype != legs[1].fsdp.reduce_dtype:
        found = " and ".join(leg.fsdp.reduce_dtype for leg in legs)
        _refuse("the same fsdp.reduce_dtype", found)
    ranks = [leg.parallel.dp * leg.parallel.dp_outer for leg in legs]
    if ranks[0] != ranks[1]:
        # Each has sequences of its own.
        _refuse("the same data, so as many dp x dp_outer ranks", f"{ranks[0]} and {ranks[1]}")
    for leg in legs:
        if leg.parallel.dynamic_cp:
            _refuse("no parallel.dynamic_cp, whose packs depend on the layout", "it")
        if leg.model.dropout:
            _refuse("model.dropout 0, as layouts draw other masks", f"{leg.model.dropout}")
        if leg.fp8 != "none":
            _refuse("fp8 none, as scales of eight bits depend on the layout", leg.fp8)


def _refuse(expected: str, got: str) -> None:
    raise UsageError(f"between layouts: expected {expected}, got {got}")


CONFIDENCE = 6.0
LEAST_ROW = 16
FLOOR_ROUNDINGS = 8
MOST_FLIPS = 8
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff, half the gap between 1 and the next number."""


class Units(NamedTuple):
    """Distances over their bounds: between both legs, and of each to the mean of the samples."""

    both: float
    reference: float
    candidate: float


@dataclass(frozen=True, kw_only=True)
class Apart:
    """How far one tensor of both legs is apart.

    Attributes:
        name: with its group; "loss" alone.
        units: of the whole tensor, or of its worst row; above 1 is wrong.
        row: the worst of those that are wrong; None where only the whole tensor is, or nothing.
        why: what is wrong whatever rounding does; "" else.
    """

    name: str
    units: Units
    row: int | None = None
    why: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether rounding does not explain it."""
        return not self.units.both <= 1


def norms(rows: Floats) -> Floats:
    """Of each row."""
    found: Floats = np.sqrt(np.square(rows).sum(-1))
    return found


def bound_of(values: Sequence[Floats], floor: Floats, legs: float) -> Floats:
    """The bound of each row, for a distance whose error is `legs` times that of one run."""
    samples = np.stack(values[2:])
    count = len(samples)
    power = np.square(samples - samples.mean(0)).sum(-1).max(0) * count / (count - 1)
    found: Floats = (1 + CONFIDENCE) * legs * np.sqrt(1.5 * power) + floor
    return found


def distances(values: Sequence[Floats], floor: Floats) -> Floats:
    """Of both legs, in units of the bound of each row; infinite for a NaN."""
    return _in_units(norms(values[0] - values[1]), bound_of(values, floor, math.sqrt(2)))


def _in_units(distance: Floats, bound: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        units: Floats = np.where(distance == 0, 0.0, distance / bound)
    return np.where(np.isnan(units), np.inf, units)


def units_of(values: Sequence[Floats], floor: Floats) -> Units:
    """Of the worst row; values are of the reference, the candidate and samples."""
    if values[0].ndim == 1:
        values = [value[None] for value in values]
    mean = np.mean(np.stack(values[2:]), 0)
    alone = bound_of(values, floor, math.sqrt(1 + 1 / len(values[2:])))
    return Units(
        float(distances(values, floor).max()),
        float(_in_units(norms(values[0] - mean), alone).max()),
        float(_in_units(norms(values[1] - mean), alone).max()),
    )


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


WORDS = "are they apart by more than rounding, in step {}? Runs {} to {} of {}"
LEGS_ASKED = 3
"""Runs of a question."""


def is_one_layout(one: CaseSpec, other: CaseSpec) -> bool:
    """Whether the candidates of two cases can be compared bit for bit."""
    specs = [case.candidate for case in (one, other)]
    configs = [spec.config for spec in specs]
    if not all(capabilities_of(config).layouts for config in configs):
        if specs[0].world_size != specs[1].world_size:
            numbers = " and ".join(str(spec.world_size) for spec in specs)
            raise UsageError(f"--against: expected programs of as many ranks, got {numbers}")
        return True
    return all(configs[0][key] == configs[1][key] for key in ("parallel", "engine"))


def case_of_two(one: CaseSpec, other: CaseSpec) -> CaseSpec:
    """The candidate of `one` against that of `other`, which also runs against its own control.

    Raises:
        UsageError: layouts differ, and more than rounding with them.
    """
    if not is_one_layout(one, other):
        refuse_incomparable(other.candidate, one.candidate)
    reference = replace(other.candidate, replica=0)
    return replace(
        one, id=f"{one.id}-against-{other.id}"[:180], reference=reference,
        control=replace(reference, replica=1), repeats=0,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One step of two layouts: what comparing it has shown, as an answer and as a verdict."""

    answer: LayoutAnswer
    verdict: Verdict


def first_apart(
    case: CaseSpec, steps: Sequence[int], asker: Asker, *, seen: Callable[[Compared], None]
) -> Compared:
    """The first of some steps in which both layouts of `case_of_two` are apart.

    The first step is asked first: most faults are there from the beginning, and nothing has spread
    yet. Else the last, as what comes later stays; if that is apart, too, the steps between by
    halving. Which step it is costs runs of its own, as a run keeps the contents of one.

    Args:
        case: of two layouts.
        steps: to choose from, ascending, at least one.
        asker: makes the runs.
        seen: is told of each step that is apart, the next one nearer to the beginning.

    Raises:
        UsageError: there is no such step.
        OutOfBudget: the runs cost more than is left.
    """
    found: dict[int, Compared] = {}

    def is_apart(step: int) -> bool:
        found[step] = compared = _compare(case, step, asker)
        if compared.answer.location is not None:
            seen(_with_step_before(compared, found.get(step - 1)))
        return compared.answer.location is not None

    first, last = steps[0], steps[-1]
    if is_apart(first) or first == last or not found[first].answer.tensors:
        return found[first]
    if not is_apart(last):
        return _with_step_before(found[last], found[first])
    step = first_failing(steps[1:-1], is_apart)
    step = last if step is None else step
    return _with_step_before(found[step], found[step - 1])


def _with_step_before(compared: Compared, before: Compared | None) -> Compared:
    """With what was seen of an earlier step, as far as there is one."""
    if before is None or not compared.answer.tensors:
        return compared
    place, told = compared.answer.location, before.answer.message
    if place is None:
        verdict = replace(compared.verdict, message=f"{compared.verdict.message}; before, {told}")
        return replace(compared, verdict=verdict)
    if before.answer.tensors:
        place = replace(place, evidence=(told, *place.evidence))
    else:
        place = replace(place, unknown=(*place.unknown, f"the step before: {told}"))
    return replace(compared, answer=replace(compared.answer, location=place))


def _compare(case: CaseSpec, step: int, asker: Asker) -> Compared:
    """Run both layouts and the samples, and compare one step of them."""
    runs = runs_to_compare(case.reference, case.candidate, step)
    specs = (runs.reference, runs.candidate, *runs.samples)
    answers: list[LayoutAnswer] = []

    def compared(_: Verdict) -> str:
        legs = [
            Leg(
                result=asker.folder.load_run(spec),
                contents=read_contents(asker.folder.run_folder(spec.key), spec),
            )
            for spec in specs
        ]
        answers.append(compare_layouts(legs[0], legs[1], legs[2:]))
        return answers[-1].message

    for begin in range(0, len(specs), LEGS_ASKED):
        trio = specs[begin : begin + LEGS_ASKED]
        end = begin + len(trio)
        asker.ask(
            # A trio that is cut short is filled up with its last run, which costs nothing.
            _question(case, (*trio, *trio[-1:] * (LEGS_ASKED - len(trio))), begin // LEGS_ASKED),
            WORDS.format(step, begin + 1, end, len(specs)),
            judge=judged_by(_kept),
            answer=compared if end == len(specs) else message,
        )
    (answer,) = answers
    return Compared(answer=answer, verdict=_verdict(case, answer))


def _kept(*_: object) -> str:
    return "contents are kept"


def _question(case: CaseSpec, trio: Sequence[RunSpec], number: int) -> CaseSpec:
    reference, control, candidate = trio
    return replace(
        case, id=f"layouts-{number}-{candidate.key}", labels={"question": "layouts"},
        reference=reference, control=control, candidate=candidate, checks={},
    )  # fmt: skip


def _verdict(case: CaseSpec, answer: LayoutAnswer) -> Verdict:
    compared = bool(answer.tensors)
    is_apart = answer.location is not None
    return Verdict(
        case_id=case.id,
        outcome="failed" if is_apart else "passed" if compared else "error",
        what="diverged" if is_apart else "" if compared else "not_run",
        message=answer.message, checks=(), runs={}, wall_s=0.0,
    )  # fmt: skip
