"""The first operator of a module's call that does otherwise, of two runs that wrote them down.

    which call         the module whose own work is wrong, forward or backward   `operators_for`
    both runs again    `harness.recorder.operators`, in that call of that step alone
    which operator     the first that returned what no operator of the reference did
    once more          with the tensors of that operator kept

As long as both run the same operators, results are held against each other one by one: an input
that differs where nothing before it did came from outside of the call. From where the sequences
part, values are looked for: an operator that one run has in addition, as a copy, is no fault.
"""

from collections.abc import Sequence
from dataclasses import replace

from harness.bisect.elements import values_of
from harness.bisect.found import Location, Operator
from harness.checks.evidence import count, rank_table
from harness.checks.taps import INPUT
from harness.program.spec import capabilities_of
from harness.records import (
    KeepSpec,
    OperatorCall,
    OperatorCalls,
    OperatorSpec,
    RunResult,
    RunSpec,
    operators_in,
)
from harness.store import RunFolder
from harness.store.contents import read_contents

ROOT = "(root)"
"""As `harness.recorder.hooks` names a module that is part of no other."""


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
    if kind != "taps" or (module != own and not capabilities_of(run.spec.config).layouts):
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


def with_operator(found: Location, spec: OperatorSpec, pair: Sequence[RunResult]) -> Location:
    """The place with its first wrong operator, or with the reason why there is none."""
    seen = []
    for name, run in zip(("reference", "candidate"), pair, strict=True):
        records = rank_table(run).get(found.rank or 0)
        seen.append(held := operators_in(records) if records is not None else OperatorCalls())
        if not held.calls or held.why:
            why = held.why or (
                f"it did not call {spec.module} so in step {spec.step}: compiled code and replays "
                "of graphs dispatch no operators"
            )
            return found.saying(unknown=f"operator: of the {name} they cannot be seen: {why}")
    operator = first_operator(seen[0].calls, seen[1].calls)
    whole = f"all {count(len(seen[0].calls), 'operator')} of the call of {spec.module}"
    if operator is None:
        cut = ", as far as they were written down" if any(each.is_cut for each in seen) else ""
        if not cut and found.quantity == "grads":
            cut = (
                ": a gradient that differs was changed after them, by a hook, clipping or the loop"
            )
        return found.saying(unknown=f"operator: {whole} are equal{cut}")
    return replace(found.saying(operator.told), operator=operator)


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
