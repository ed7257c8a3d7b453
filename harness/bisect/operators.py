"""The first operator of a module's call that does otherwise, and the first element of a tensor.

    which call         the module whose own work is wrong, forward or backward   `operators_for`
    both runs again    `harness.recorder.operators`, in that call of that step alone
    which operator     the first that returned what no operator of the reference did
    once more          with the tensors of that operator kept

As long as both run the same operators, results are held against each other one by one: an input
that differs where nothing before it did came from outside of the call. From where the sequences
part, values are looked for: an operator that one run has in addition, as a copy, is no fault.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.bisect.found import ROOT, Element, Location, Numbers, Operator, Value
from harness.checks.evidence import count, rank_table
from harness.checks.taps import INPUT
from harness.records import (
    DIGEST_GROUPS,
    CaseSpec,
    KeepSpec,
    OperatorCall,
    OperatorCalls,
    OperatorSpec,
    RunResult,
    RunSpec,
    operators_in,
)
from harness.store import RunFolder
from harness.store.contents import ITEM_BYTES, Contents, Loaded, read_contents


def operators_for(found: Location, run: RunResult) -> OperatorSpec | None:
    """Whose operators can tell more of a place; None if no module's work is wrong there."""
    kind, _, what = found.quantity.partition(".")
    is_call = kind == "taps" or (kind == "grads" and found.phase == "backward")
    if found.step is None or not is_call or found.phase not in ("forward", "backward"):
        return None
    if not found.module or found.near == "in":
        return None
    tapped, _, number = found.tensor.rstrip("]").partition("[")
    module, own = found.module, tapped.rpartition(":")[0]
    if what == INPUT and module == own:
        # It changed on its way, in whatever calls the module.
        module = module.rpartition(".")[0] or ROOT
    call = int(number) if number else found.microbatch
    if kind != "taps" or (module != own and not run.spec.is_builtin):
        call = None  # modules of a program need not be called equally often
    is_backward = found.phase == "backward"
    return OperatorSpec(step=found.step, module=module, call=call, backward=is_backward)


def why_unseen(spec: OperatorSpec, runs: Sequence[RunResult]) -> str:
    """Why a run dispatches no operators one by one, as its configuration says; "" if it does."""
    for name, run in zip(("reference", "candidate"), runs, strict=True):
        config = run.spec.config
        is_graphed = config.get("graph") and spec.step >= config.get("graph_warmup_steps", 0)
        does = "replays graphs" * bool(is_graphed) or "runs compiled code" * bool(
            config.get("compile")
        )
        if does:
            return f"operator: the {name} {does}, which dispatches no operators of {spec.module}"
    return ""


class _Look(NamedTuple):
    """What the operators of one rank show: the first wrong one, or why none is seen."""

    operator: Operator | None = None
    why: str = ""
    num: int = 0
    is_cut: bool = False


def with_operator(found: Location, spec: OperatorSpec, pair: Sequence[RunResult]) -> Location:
    """The place with its first wrong operator, or with the reason why there is none.

    Where a sum over ranks hides who is wrong, operators of all ranks are looked at, and tell.
    """
    is_hidden = found.rank_is_hidden
    ranks = sorted(rank_table(pair[0])) if is_hidden else [found.rank or 0]
    looks = {rank: _look(rank, spec, pair) for rank in ranks}
    seen = [look for look in looks.values() if not look.why]
    if not seen:
        return found.saying(unknown=f"operator: {looks[ranks[0]].why}")
    wrong = {rank: look.operator for rank, look in looks.items() if look.operator is not None}
    is_whole = len(seen) == len(looks) and not any(look.is_cut for look in seen)
    if wrong:
        if is_hidden:
            found = replace(found, rank=min(wrong), ranks=(*wrong,), rank_is_hidden=not is_whole)
        operator, *_ = wrong.values()
        return replace(found.saying(operator.told), operator=operator)
    cut = ", as far as they were written down" if any(look.is_cut for look in seen) else ""
    if not cut and found.quantity == "grads":
        cut = (
            ": a gradient that differs was not cleared before them, or changed after them by a "
            "hook, clipping or the loop"
        )
    whole = f"all {count(seen[0].num, 'operator')} of the call of {spec.module}"
    return found.saying(unknown=f"operator: {whole} are equal{cut}")


def _look(rank: int, spec: OperatorSpec, pair: Sequence[RunResult]) -> _Look:
    held = []
    for name, run in zip(("reference", "candidate"), pair, strict=True):
        records = rank_table(run).get(rank)
        held.append(seen := operators_in(records) if records is not None else OperatorCalls())
        if not seen.calls or seen.why:
            why = seen.why or (
                f"it did not call {spec.module} so in step {spec.step}: compiled code and replays "
                "of graphs dispatch no operators"
            )
            return _Look(why=f"of the {name} they cannot be seen: {why}")
    ours, theirs = held
    is_cut = ours.is_cut or theirs.is_cut
    return _Look(first_operator(ours.calls, theirs.calls), "", len(ours.calls), is_cut)


def keeping(found: Operator, spec: OperatorSpec, runs: Sequence[RunSpec]) -> list[RunSpec]:
    """Runs in which both do keep the tensors of what was found."""
    keep = KeepSpec(step=spec.step, names=("operator:*",))
    specs = [replace(spec, kept=number) for number in found.numbers]
    return [replace(run, operators=each, keep=keep) for run, each in zip(runs, specs, strict=True)]


def with_values(
    found: Location, spec: OperatorSpec, pair: Sequence[RunResult], folder: RunFolder
) -> Location:
    """The place, whose operator has the values that it took and gave in runs that kept them."""
    again, before = with_operator(found, spec, pair).operator, found.operator
    if again is None or before is None or again.numbers != before.numbers:
        return found.saying(unknown="values of the operator: it did not come back")
    ours, theirs = (read_contents(folder.run_folder(run.spec.key), run.spec) for run in pair)
    named = again.candidate or again.reference
    values = values_of(ours, theirs, found.rank or 0, named.names if named is not None else ())
    first = next((each.name for each in values if not each.is_equal), "")
    if not first:
        why = next(iter((*ours.problems, *theirs.problems)), "all are equal")
        return found.saying(unknown=f"values of the operator: {why}")
    told = f"of what it took and gave, {first} is the first that differs"
    return found.saying(told, operator=replace(again, values=values))


def first_operator(
    reference: Sequence[OperatorCall], candidate: Sequence[OperatorCall]
) -> Operator | None:
    """The first of a call that does otherwise; None if all that is returned is equal."""
    parted = 0
    for ours, theirs in zip(reference, candidate, strict=False):
        if (ours.operator, ours.settings) != (theirs.operator, theirs.settings):
            break
        if not _equal(ours.outputs, theirs.outputs):
            pairs = zip(ours.inputs, theirs.inputs, strict=False)
            return _operator(ours, theirs, [not _equal(pair[:1], pair[1:]) for pair in pairs])
        parted += 1
    ours_known, theirs_known = _values(reference), _values(candidate)
    gone = next((call for call in reference if _new(call.outputs, theirs_known)), None)
    wrong = [n for n, call in enumerate(candidate) if _new(call.outputs, ours_known)]
    if not wrong:
        return None if gone is None else Operator(reference=gone, candidate=None)
    if wrong[0] == parted < len(reference):
        gone = reference[parted]  # up to here the two did the same
    come = candidate[wrong[0]]
    return _operator(gone, come, [_new((text,), ours_known) for text in come.inputs])


def _operator(ours: OperatorCall | None, theirs: OperatorCall, other: Sequence[bool]) -> Operator:
    """Of the candidate's inputs, those that are `other` ones come from outside."""
    named = enumerate(zip(theirs.names, other, strict=False))
    outside = tuple(name or f"argument {place}" for place, (name, is_other) in named if is_other)
    return Operator(reference=ours, candidate=theirs, outside=outside)


def _values(calls: Sequence[OperatorCall]) -> frozenset[str]:
    """Digests of all that operators were given and returned."""
    return frozenset(text for call in calls for text in (*call.inputs, *call.outputs))


def _new(texts: Sequence[str], known: frozenset[str]) -> bool:
    return any(text and text not in known for text in texts)


def _equal(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether digests are equal, as far as both have them."""
    return len(ours) == len(theirs) and all(
        a == b or not (a and b) for a, b in zip(ours, theirs, strict=True)
    )


Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint64]
FORMS = {
    "float64": (0, 8), "float32": (0, 4), "float16": (0, 2), "bfloat16": (16, 4),
    "float8_e5m2": (8, 2),
}  # fmt: skip
"""Floats that are the upper bits of an IEEE one: how far they are shifted, and its bytes."""


class Compared(NamedTuple):
    """What comparing one tensor has shown: the first element, or why there is none; and doubts."""

    message: str
    element: Element | None = None
    notes: tuple[str, ...] = ()


def compare(reference: Contents, candidate: Contents, name: str) -> Compared:
    """The first differing element of a tensor, in the order of the whole tensor, over all ranks.

    Of what lies nowhere in the model, as a row of taps, in the order of ranks.
    """
    runs = {"reference": reference, "candidate": candidate}
    if reference.step != candidate.step:
        return Compared(f"kept at other steps: {reference.step} and {candidate.step}")
    notes = [f"{run}: {problem}" for run, kept in runs.items() for problem in kept.problems]
    ours, theirs = (
        {(rank, each.about.part): each for rank, each in kept.held(name)} for kept in runs.values()
    )
    for run, loaded in zip(runs, (ours, theirs), strict=True):
        bad = dict.fromkeys(str(rank) for (rank, _), e in loaded.items() if not e.about.as_digested)
        if bad:
            notes.append(
                f"the copy of {name} in the {run} does not give the digest of its step on rank "
                f"{', '.join(bad)}: it was written between the two, or is of one of several calls"
            )
    refusals, firsts = list[str](), list[_First]()
    for key in sorted(ours.keys() | theirs.keys()):
        sides = ours.get(key), theirs.get(key)
        about = [f"{x.about.dtype} {list(x.about.shape)}" if x else "absent" for x in sides]
        if about[0] != about[1]:
            part = f"tensor {key[1]} of {name}" if key[1] else name
            told = f"{about[0]} in the reference and {about[1]} in the candidate"
            refusals.append(f"{part} on rank {key[0]} is {told}")
        elif (first := _first(key, ours[key], theirs[key])) is not None:
            firsts.append(first)
    if not firsts:
        message = f"{name} has the same bits in both runs on every rank: the difference did not "
        message = message + "come back" if ours else f"no rank has kept {name} in both runs"
        return Compared("; ".join(refusals) or message, notes=tuple(notes))
    _, rank, tensor, e = min(firsts, key=lambda first: first[:2])
    return Compared(
        f"{tensor}{list(e.index) if e.index else ''} on rank {rank}: "
        f"{e.reference} ({e.reference_bits}) became {e.candidate} ({e.candidate_bits})",
        e, (*notes, *refusals),
    )  # fmt: skip


def values_of(
    reference: Contents, candidate: Contents, rank: int, names: Sequence[str]
) -> tuple[Value, ...]:
    """What an operator of each run took and gave on a rank, whose inputs have these `names`."""
    sides = [{each.about.name.partition(":")[2]: each for each in kept.ranks[rank]}
             for kept in (reference, candidate)]  # fmt: skip
    of = {f"input {number}": name for number, name in enumerate(names)}
    found = list[Value]()
    for name in dict.fromkeys(itertools.chain(*sides)):
        ours, theirs = (side.get(name) for side in sides)
        element, is_equal = None, False
        if ours is not None and theirs is not None:
            is_equal = ours == theirs
            if (ours.about.dtype, ours.about.shape) == (theirs.about.dtype, theirs.about.shape):
                first = _first((rank, 0), ours, theirs)
                element = first and first[-1]
        found.append(Value(
            name=name, of=of.get(name, ""), is_equal=is_equal, element=element,
            reference=_numbers_of(ours), candidate=_numbers_of(theirs),
        ))  # fmt: skip
    return tuple(found)


def bits_of(loaded: Loaded) -> Bits:
    """The patterns of a tensor, flat."""
    return np.frombuffer(loaded.data, f"<u{ITEM_BYTES[loaded.about.dtype]}").astype(np.uint64)


_First = tuple[tuple[int, ...], int, str, Element]
"""The first element that differs on a rank: its order in the whole model, the rank, its tensor."""


def _first(key: tuple[int, int], ours: Loaded, theirs: Loaded) -> _First | None:
    about, sides = ours.about, (bits_of(ours), bits_of(theirs))
    places = np.flatnonzero(sides[0] != sides[1])
    if not places.size:
        return None
    axes = np.unravel_index(places, about.shape) if about.shape else ()
    # Of none of the model's, it is the rank's own: ranks in their order, then parts.
    local, name = int(places[0]), about.name
    order: tuple[int, ...] = (*key, local)
    index = _unravelled(local, about.shape)
    for number, box in enumerate(about.places):
        inside, whole = np.ones(places.shape, bool), np.zeros(places.shape, np.int64)
        for at, first, size, offset, length in zip(
            axes, box.local_offsets, box.sizes, box.offsets, box.shape, strict=True
        ):
            inside &= (at >= first) & (at < first + size)
            whole = whole * length + (at - first + offset)
        if inside.any():
            chosen = np.flatnonzero(inside)[np.argmin(whole[inside])]
            flat, local, name = int(whole[chosen]), int(places[chosen]), box.name
            order, index = (number, flat), _unravelled(flat, box.shape)
            break
    a, b = (int(side[local]) for side in sides)
    width = 2 * ITEM_BYTES[about.dtype]
    element = Element(
        index=index, local=local, dtype=about.dtype, ulps=ulps(a, b, about.dtype),
        reference_bits=f"{a:0{width}x}", candidate_bits=f"{b:0{width}x}",
        reference=shown(a, about.dtype), candidate=shown(b, about.dtype),
        num_different=int(places.size), numel=math.prod(about.shape), shape=about.shape,
        lows=tuple(int(axis.min()) for axis in axes),
        highs=tuple(int(axis.max()) for axis in axes),
    )  # fmt: skip
    return order, key[0], name, element


def _unravelled(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(at) for at in np.unravel_index(flat, shape)) if shape else ()


# --- numbers ----------------------------------------------------------------------------------


def numbers(bits: Bits, dtype: str) -> Floats:
    """What patterns of one of `FORMS` stand for."""
    shift, size = FORMS[dtype]
    with np.errstate(invalid="ignore"):  # a NaN that signals
        return (bits << np.uint64(shift)).astype(f"<u{size}").view(f"<f{size}").astype(np.float64)


def value(bits: int, dtype: str) -> float | None:
    """What a pattern stands for; None of integers, and of formats that numpy does not read."""
    return float(numbers(np.array([bits], np.uint64), dtype)[0]) if dtype in FORMS else None


def shown(bits: int, dtype: str) -> str:
    """A stored number for people, as `repr` has it; the bits of a format that is not known."""
    if dtype == "bool" and bits < 2:
        return repr(bool(bits))
    if dtype.startswith(("int", "uint")):
        size = ITEM_BYTES[dtype]
        return repr(int.from_bytes(bits.to_bytes(size, "little"), "little", signed=dtype[0] == "i"))
    number = value(bits, dtype)
    if dtype == "float32" and number is not None and math.isfinite(number):
        return repr(float(str(np.float32(number))))
    return hex(bits) if number is None else repr(number)


def ulps(a: int, b: int, dtype: str) -> int | None:
    """Steps between two patterns on the grid of a float's dtype; None for NaN, or other signs."""
    sides = [value(bits, dtype) for bits in (a, b)]
    is_number = all(number is not None and not math.isnan(number) for number in sides)
    sign = 8 * ITEM_BYTES[dtype] - 1
    return abs(a - b) if is_number and a >> sign == b >> sign else None


def _numbers_of(loaded: Loaded | None) -> Numbers | None:
    if loaded is None:
        return None
    about, held = loaded.about, np.zeros(0)
    if about.dtype in FORMS:
        held = numbers(bits_of(loaded), about.dtype)
    elif about.dtype.startswith(("int", "uint", "bool")):
        held = np.frombuffer(loaded.data, about.dtype).astype(np.float64)
    finite = held[np.isfinite(held)]
    told: dict[str, float] = {}
    if finite.size:
        mean = float((finite / finite.size).sum())  # whose sum may be too large
        told = {"least": float(finite.min()), "greatest": float(finite.max()), "mean": mean}
    num_infinite = held.size - finite.size
    return Numbers(dtype=about.dtype, shape=about.shape, num_infinite=num_infinite, **told)


# --- questions --------------------------------------------------------------------------------


def kept_name(found: Location) -> str:
    """What to keep, as `KeepSpec.names` has it; "" where nothing can be kept.

    Moments of a tensor go by its name alone: both are kept.
    """
    if found.quantity.startswith("taps."):
        is_numbered = found.tensor.endswith("]") or found.microbatch is None
        name = found.tensor if is_numbered else f"{found.tensor}[{found.microbatch}]"
        return "" if found.microbatch is None else name
    if found.quantity not in DIGEST_GROUPS:
        return ""
    star = "*" if found.quantity == "optim" and found.tensor != "step_count" else ""
    return f"{found.quantity}:{found.tensor}{star}"


def with_element(found: Location, question: CaseSpec, folder: RunFolder) -> Location:
    """The place with its first differing element, or with the reason why there is none."""
    ours, theirs = (
        read_contents(folder.run_folder(spec.key), spec)
        for spec in (question.reference, question.candidate)
    )
    named = dict.fromkeys((*ours.names, *theirs.names)) or {kept_name(found): None}
    answers = [compare(ours, theirs, name) for name in named]
    best = next((each for each in answers if each.element is not None), answers[0])
    found = replace(found, unknown=(*found.unknown, *best.notes))
    if best.element is None:
        return found.saying(unknown=f"element: {best.message}")
    return found.saying(best.message, element=best.element)
