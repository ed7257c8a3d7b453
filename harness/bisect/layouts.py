"""Two cases of a scenario against each other: bit for bit on one layout, within bounds on two.

Layouts add in other orders, so their bits differ. How far rounding may take loss, gradients and
weights of one step is measured on samples X_i: the same steps with no axis but that of the data,
rounded at random (`harness.recorder.rounding`). Rounding to nearest errs at most s = sqrt(3/2 max
|X_i - mean X|^2 n / (n - 1)) in the mean square; a tensor is wrong, and so is a row of it, beyond
BOUND sqrt(2) s and what samples cannot show: `FLOOR_ROUNDINGS` unit roundoffs a step, and of
weights the flips of AdamW's sign where a gradient is nearly zero (`MOST_FLIPS` elements a step).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_core.config import ParallelConfig, TrainConfig
from harness.bisect.causes import first_failing
from harness.bisect.experiments import Asker, judged_by, question_of
from harness.bisect.found import Location
from harness.bisect.operators import Bits, Floats, bits_of, numbers
from harness.checks.bits import FLOOR_ROUNDINGS
from harness.checks.evidence import show_ranks
from harness.errors import UsageError
from harness.records import MAX_KEPT_BYTES, CaseSpec, KeepSpec, RunResult, RunSpec, Verdict
from harness.repeats import NUM_SAMPLES, SLOWDOWN
from harness.store.contents import Contents, Loaded, Place, read_contents

BRANCHES = ("layers.*.attn:output", "layers.*.mlp:output")
"""Taps of a forward pass; of its first microbatch, as contents take memory."""
_MAY_DIFFER = ("parallel", "fsdp", "graph", "capture_by", "compile", "compile_backend", "stress",
               "stress_seed", "taps", "flush_every", "graph_warmup_steps", "graph_optimizer",
               "ledger", "steps", "resume_at", "resume_from", "backend", "engine", "recompute",
               "fused_experts", "fused_rope")  # fmt: skip
"""Keys of a configuration that decide how a step is computed, and not what."""
BOUND, LEAST_ROW, MOST_FLIPS = 7.0, 16, 8
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_REDUCED = {"fp32": "float32", "bf16": "bfloat16"}
STATE = ("loss", "grads", "weights")
"""Groups of what is compared; all others are calls."""
ROUTED = (
    "routing: in bf16 a router may send a token to another expert for a rounding's sake, which no "
    "bound covers; compare in fp32 to tell that from a fault"
)
_LEGS = ("the reference", "the candidate")
_PHASES: dict[str, Any] = {"loss": "forward", "grads": "backward", "weights": "optimizer"}


def runs_to_compare(reference: RunSpec, candidate: RunSpec, step: int) -> list[RunSpec]:
    """Both runs, keeping gradients and weights of a step, then samples that round at random.

    `UsageError`: they differ by more than rounding.
    """
    refuse_incomparable(reference, candidate)
    pair = reference, candidate
    taps = BRANCHES if {spec.config.get("engine") for spec in pair} == {"ours"} else ()
    names = ("grads:*", "weights:*", *(f"{tap}[0]" for tap in taps))
    keep = KeepSpec(step=step, names=names, max_bytes=MAX_KEPT_BYTES)
    config = TrainConfig.from_dict(reference.config)
    data = ParallelConfig(dp=config.parallel.dp, dp_outer=config.parallel.dp_outer)
    plain = replace(
        config, parallel=data, graph=(), compile=(), stress=(), taps=taps, backend="torch",
        engine="ours", steps=step + 1,
    )  # fmt: skip
    sample = RunSpec(
        config=plain.to_dict(), device="cpu", world_size=data.world_size, keep=keep,
        timeout_s=SLOWDOWN * reference.timeout_s,
    )  # fmt: skip
    given = {"taps": list(taps)} if taps else {}
    runs = [replace(spec, keep=keep, config=spec.config | given) for spec in pair]
    return runs + [replace(sample, rounding=seed) for seed in range(1, NUM_SAMPLES + 1)]


def refuse_incomparable(reference: RunSpec, candidate: RunSpec) -> None:
    """See that two runs compute the same but for rounding (`UsageError`: what does not)."""
    ours, theirs = (TrainConfig.from_dict(spec.config) for spec in (reference, candidate))
    a, b = ours.to_dict(), theirs.to_dict()
    due = {f"the same {key}": (a[key], b[key]) for key in sorted(a.keys() - set(_MAY_DIFFER))}
    due["the same fsdp.reduce_dtype"] = ours.fsdp.reduce_dtype, theirs.fsdp.reduce_dtype
    ranks = [c.parallel.dp * c.parallel.dp_outer for c in (ours, theirs)]
    due["the same data, so as many dp x dp_outer ranks"] = ranks[0], ranks[1]
    for c in (ours, theirs):
        packs = c.parallel.dynamic_cp
        due |= {
            "no parallel.dynamic_cp, whose packs depend on the layout": (packs, type(packs)()),
            "model.dropout 0, as layouts draw other masks": (c.model.dropout, 0.0),
            "fp8 none, as its scales depend on the layout": (c.fp8, "none"),
        }
        for what, (got, other) in due.items():
            if got != other:
                said = f"between layouts: expected {what}, got {got!r:.60} and {other!r:.60}"
                raise UsageError(said)


# --- whole tensors, of the pieces that ranks have kept ----------------------------------------


@dataclass
class Whole:
    """A tensor of the whole model: bits by the lowest rank that has an element, and whose boxes.

    `disagreeing` has the first place at which a rank has other bits than a lower one.
    """

    dtype: str
    bits: Bits
    covered: npt.NDArray[np.bool_]
    boxes: list[tuple[int, Place]] = field(default_factory=list)
    disagreeing: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def ranks_of(self, index: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(
            rank for rank, box in self.boxes
            if all(a <= at < a + n for at, a, n in zip(index, box.offsets, box.sizes, strict=True))
        ))  # fmt: skip


def whole_tensors(contents: Contents) -> Mapping[str, Whole]:
    """Every tensor of the model that some rank has kept a piece of, of floating-point numbers."""
    found: dict[str, Whole] = {}
    for rank, loaded in ((rank, each) for rank, held in enumerate(contents.ranks) for each in held):
        about = loaded.about
        for place in about.places if about.dtype in ROUNDOFF else ():
            # A row of taps has its kind in its name.
            name = place.name if ":" in place.name else f"{_group(about.name)}:{place.name}"
            if min(place.sizes, default=1):
                empty = np.zeros(place.shape, np.uint64), np.zeros(place.shape, np.bool_)
                _add(found.setdefault(name, Whole(about.dtype, *empty)), rank, place, loaded)
    return found


def _add(whole: Whole, rank: int, place: Place, loaded: Loaded) -> None:
    mine = bits_of(loaded).reshape(loaded.about.shape)[_box(place.local_offsets, place.sizes)]
    box = _box(place.offsets, place.sizes)
    seen = whole.covered[box]
    other = seen & (whole.bits[box] != mine)
    if other.any():
        at = np.argwhere(other)[0] if other.ndim else ()
        index = tuple(int(a) + b for a, b in zip(at, place.offsets, strict=True))
        whole.disagreeing.setdefault(rank, index)
    whole.bits[box] = np.where(seen, whole.bits[box], mine)
    whole.covered[box] = True
    whole.boxes.append((rank, place))


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))


# --- one step --------------------------------------------------------------------------------


class Apart(NamedTuple):
    """How far a tensor, or its worst row, is apart in units of its bound; `why` if for certain."""

    name: str
    units: float
    row: int | None = None
    why: str = ""

    @property
    def is_wrong(self) -> bool:
        return not self.units <= 1


class Leg(NamedTuple):
    """A run that was made, with what it has kept."""

    result: RunResult
    contents: Contents


class LayoutAnswer(NamedTuple):
    """The place of the first tensor that is wrong, and all that were compared.

    Without a place all are within their bounds; without tensors nothing was compared.
    """

    location: Location | None
    tensors: tuple[Apart, ...]
    message: str

    @property
    def wrong(self) -> tuple[Apart, ...]:
        return tuple(each for each in self.tensors if each.is_wrong)


def compare_layouts(reference: Leg, candidate: Leg, samples: Sequence[Leg]) -> LayoutAnswer:
    """Say which tensor is first farther apart than rounding takes it, of `runs_to_compare`."""
    problems = [] if len(samples) > 1 else [f"expected samples, got {len(samples)}"]
    for leg in (reference, candidate, *samples):
        outcome = leg.result.outcome
        told = (f"{outcome.what}: {outcome.message}",) if outcome.what else leg.contents.problems
        problems += [f"run {outcome.key}: {problem}" for problem in told]
    if problems:
        return LayoutAnswer(None, (), f"nothing was compared: {'; '.join(problems[:4])}")
    comparison = _Comparison([reference, candidate, *samples])
    tensors = tuple(comparison.state())
    wrong = [each for each in tensors if each.is_wrong]
    if not wrong:
        worst = max(tensors, key=lambda each: each.units)
        message = (
            f"all {len(tensors)} tensors of step {comparison.step} are within their bounds; "
            f"the farthest apart is {worst.name}, {worst.units:.2f} of its bound"
        )
        return LayoutAnswer(None, tensors, message)
    # What a forward pass made tells where a fault began, and is no evidence of one: weights that
    # AdamW has moved the other way for a rounding's sake show in it with no bound.
    first = next((each for each in comparison.calls() if each.is_wrong), wrong[0])
    location = comparison.locate(first, len(wrong))
    return LayoutAnswer(location, tensors, location.evidence[0])


class _Comparison:
    """Whole tensors of the reference, the candidate and the samples, in this order."""

    def __init__(self, legs: Sequence[Leg]) -> None:
        self._legs, self.step = legs, legs[0].contents.step
        self._wholes = [whole_tensors(leg.contents) for leg in legs]
        self._config = legs[0].result.spec.config

    def _names(self) -> list[str]:
        return sorted({name for wholes in self._wholes for name in wholes}, key=_order)

    def state(self) -> Iterator[Apart]:
        """The loss, gradients in the order of backward, weights."""
        ranks = (leg.result.ranks[0] for leg in self._legs)
        losses = (next(s.loss for s in rank.steps if s.step == self.step) for rank in ranks)
        values = [math.nan if x is None or x.value is None else x.value for x in losses]
        units = self._measured("loss", "float32", [np.array([[value]]) for value in values])
        yield Apart("loss", float(units[0]))
        # Biases of experts move by steps, as counts of tokens say.
        names = [name for name in self._names() if not name.endswith(".expert_bias")]
        grads, weights = ([n for n in names if _group(n) == g] for g in ("grads", "weights"))
        yield from map(self._apart, (*reversed(grads), *weights))

    def calls(self) -> Iterator[Apart]:
        yield from map(self._apart, (name for name in self._names() if _group(name) not in STATE))

    def _apart(self, name: str) -> Apart:
        found = list[Whole]()
        for number, wholes in enumerate(self._wholes):
            leg = (*_LEGS, f"sample {number - 2}")[min(number, 2)]
            whole = wholes.get(name)
            if whole is None or not whole.covered.all():
                return Apart(name, math.inf, why=f"{leg} has not all of it")
            if whole.disagreeing:
                rank, index = next(iter(whole.disagreeing.items()))
                others = ", ".join(str(r) for r in whole.ranks_of(index) if r < rank)
                why = f"{leg}: rank {rank} has other bits of {list(index)} than {others}"
                return Apart(name, math.inf, why=why)
            found.append(whole)
        if len({whole.bits.shape for whole in found}) > 1:
            return Apart(name, math.inf, why="its shapes differ")
        values = [numbers(whole.bits, whole.dtype) for whole in found]
        dtype = found[0].dtype
        units = self._measured(name, dtype, [value.reshape(1, -1) for value in values])
        apart = Apart(name, float(units[0]))
        if values[0].ndim > 1 and values[0][0].size >= LEAST_ROW:
            # A fault of one row is small in a tensor of many.
            units = self._measured(name, dtype, [v.reshape(len(v), -1) for v in values])
            if (worst := float(units.max())) > apart.units:
                return Apart(name, worst, int(units.argmax()) if worst > 1 else None)
        return apart

    def _measured(self, name: str, dtype: str, rows: Sequence[Floats]) -> Floats:
        """Of each row its distance in units of its bound; infinite for a NaN."""
        samples, steps = np.stack(rows[2:]), self.step + 1
        power = np.square(samples - samples.mean(0)).sum(-1).max(0) * 1.5
        roundoff = ROUNDOFF[dtype]
        if _group(name) == "grads":
            roundoff = max(roundoff, ROUNDOFF[_REDUCED[self._config["fsdp"]["reduce_dtype"]]])
        bound = BOUND * np.sqrt(2 * power * len(samples) / (len(samples) - 1))
        bound = bound + FLOOR_ROUNDINGS * steps * roundoff * np.linalg.norm(rows[0], axis=-1)
        if _group(name) == "weights":
            bound = bound + 2 * float(self._config["optim"]["lr"]) * math.sqrt(MOST_FLIPS * steps)
        distance = np.linalg.norm(rows[0] - rows[1], axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            units = np.where(distance == 0, 0.0, distance / bound)
        return np.asarray(np.where(np.isnan(units), np.inf, units), np.float64)

    def locate(self, wrong: Apart, num_wrong: int) -> Location:
        group, _, tensor = wrong.name.partition(":")
        is_call, ranks = group not in STATE, self._ranks(wrong)
        evidence = [
            f"{wrong.name} is the first of {num_wrong + is_call} tensors that are farther apart "
            f"than rounding takes them: {wrong.why or f'{wrong.units:.3g} times its bound'}"
        ]
        if wrong.row is not None:
            evidence.append(f"its worst row is {wrong.row}, on {show_ranks(set(ranks))}")
        unknown = []
        if group == "grads":
            unknown.append("backward or reduce: gradients are kept once both are over")
        if self._config["dtype"] == "bf16" and self._config["model"]["experts"] and not wrong.why:
            unknown.append(ROUTED)
        return Location(
            step=self.step, phase=_PHASES.get(group, "forward"), ranks=ranks,
            module=group if is_call else tensor.rpartition(".")[0],
            tensor=wrong.name if is_call else tensor, microbatch=0 if is_call else None,
            quantity="taps.output" if is_call else group, rank=min(ranks, default=None),
            evidence=tuple(evidence), unknown=tuple(unknown),
        )  # fmt: skip

    def _ranks(self, wrong: Apart) -> tuple[int, ...]:
        """Ranks of the candidate that have the element that is farthest apart, or disagree."""
        mine, theirs = (held.get(wrong.name) for held in self._wholes[:2])
        if mine is None or theirs is None or mine.bits.shape != theirs.bits.shape:
            return ()
        if theirs.disagreeing:
            return tuple(theirs.disagreeing)
        gaps = np.abs(numbers(theirs.bits, theirs.dtype) - numbers(mine.bits, mine.dtype))
        first = wrong.row or 0
        gaps = np.nan_to_num(gaps if wrong.row is None else gaps[first : first + 1], nan=np.inf)
        index = tuple(map(int, np.unravel_index(int(gaps.argmax()), gaps.shape)))
        return theirs.ranks_of((index[0] + first, *index[1:]) if index else ())


def _group(name: str) -> str:
    return name.partition(":")[0]


def _order(name: str) -> tuple[Any, ...]:
    """Order of forward: the embedding, layers by number with attention first, what follows them."""
    group, _, path = name.partition(":")
    parts = (path if group in STATE else group).split(".")
    if parts[0] == "layers" and len(parts) > 2:
        return group if group in STATE else "", 1, int(parts[1]), parts[2] != "attn", parts[3:]
    return group, 0 if parts[0] == "embedding" else 2, 0, parts[0] == "head", parts


# --- two cases -------------------------------------------------------------------------------


def is_one_layout(one: CaseSpec, other: CaseSpec) -> bool:
    """Whether the candidates of two cases can be compared bit for bit."""
    a, b = one.candidate, other.candidate
    if all(spec.is_builtin for spec in (a, b)):
        return all(a.config[key] == b.config[key] for key in ("parallel", "engine"))
    if a.world_size != b.world_size:
        got = f"{a.world_size} and {b.world_size}"
        raise UsageError(f"--against: expected programs of as many ranks, got {got}")
    return True


def case_of_two(one: CaseSpec, other: CaseSpec) -> CaseSpec:
    """The candidate of `one` against that of `other` (`UsageError`: other training)."""
    if not is_one_layout(one, other):
        refuse_incomparable(other.candidate, one.candidate)
    reference = replace(other.candidate, replica=0)
    return replace(
        one, id=f"{one.id}-against-{other.id}"[:180], reference=reference,
        control=replace(reference, replica=1), repeats=0,
    )  # fmt: skip


def first_apart(case: CaseSpec, asker: Asker, seen: Callable[[LayoutAnswer], None]) -> LayoutAnswer:
    """The first step in which both layouts of `case_of_two` are apart; `seen` is told of each.

    Step 0 is asked first, then the last, as faults stay, then those between by halving.
    """
    found: dict[int, LayoutAnswer] = {}

    def is_apart(step: int) -> bool:
        found[step] = answer = _compare(case, step, asker)
        if answer.location is not None:
            seen(answer)
        return answer.location is not None

    last = int(case.candidate.config["steps"]) - 1
    if is_apart(0) or not last or not found[0].tensors or not is_apart(last):
        return found[max(found)]
    step = first_failing(range(1, last), is_apart)
    return found[last if step is None else step]


def _compare(case: CaseSpec, step: int, asker: Asker) -> LayoutAnswer:
    """Make the runs of both layouts and the samples, and compare one step of them."""
    specs = runs_to_compare(case.reference, case.candidate, step)
    cases = []
    for first in range(0, len(specs), 3):  # questions of three runs; the last repeats its last
        one, two, three = (*specs[first : first + 3], specs[-1], specs[-1])[:3]
        named = f"layouts-{first}-{three.key}"
        cases.append(question_of(case, "layouts", one, three, control=two, checks={}, id=named))
    answers: list[LayoutAnswer] = []

    def told(_: Verdict) -> str:
        if not answers:
            folder = asker.folder
            held = [read_contents(folder.run_folder(spec.key), spec) for spec in specs]
            legs = [Leg(folder.load_run(s), kept) for s, kept in zip(specs, held, strict=True)]
            answers.append(compare_layouts(legs[0], legs[1], legs[2:]))
        return answers[0].message

    words = f"are they apart by more than rounding, in step {step}?"
    asker.ask_all(cases, words, judge=judged_by(lambda *_: "contents are kept"), answer=told)
    return answers[0]


def verdict_of(case: CaseSpec, answer: LayoutAnswer) -> Verdict:
    """The answer as that of a case."""
    is_apart = answer.location is not None
    return Verdict(
        case_id=case.id, message=answer.message, checks=(), runs={}, wall_s=0.0,
        outcome="failed" if is_apart else "passed" if answer.tensors else "error",
        what="diverged" if is_apart else "" if answer.tensors else "not_run",
    )  # fmt: skip
