"""Two cells of a scenario against each other: bit for bit on one layout, within bounds on two.

same layout    the candidate of one against that of the other, as a case like any other
two layouts    contents of one step of both, and of runs that round at random     layouts
two engines    the same
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.bisector.asking import Asker, judged_by, message
from harness.bisector.halving import first_failing
from harness.bisector.layout_runs import refuse_incomparable, runs_to_compare
from harness.bisector.layouts import LayoutAnswer, Leg, compare_layouts
from harness.errors import UsageError
from harness.program.spec import capabilities_of
from harness.records import CaseSpec, RunSpec, Verdict
from harness.store.contents import read_contents

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
            seen(_beside(compared, found.get(step - 1)))
        return compared.answer.location is not None

    first, last = steps[0], steps[-1]
    if is_apart(first) or first == last or not found[first].answer.tensors:
        return found[first]
    if not is_apart(last):
        return _beside(found[last], found[first])
    step = first_failing(steps[1:-1], is_apart)
    step = last if step is None else step
    return _beside(found[step], found[step - 1])


def _beside(compared: Compared, before: Compared | None) -> Compared:
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
