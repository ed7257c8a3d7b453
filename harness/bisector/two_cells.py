"""Two cells of a scenario against each other: bit for bit on one layout, within bounds on two.

same layout    the candidate of one against that of the other, as a case like any other
two layouts    contents of one step of both, and of runs that round at random     layouts
"""

from collections.abc import Sequence
from dataclasses import replace

from harness.bisector.asking import Asker, judged_by
from harness.bisector.layout_runs import refuse_incomparable, runs_to_compare
from harness.bisector.layouts import LayoutAnswer, Leg, compare_layouts
from harness.contents import read_contents
from harness.records import CaseSpec, RunSpec, Verdict

WORDS = "are they apart by more than rounding, in step {}?"


def is_one_layout(one: CaseSpec, other: CaseSpec) -> bool:
    """Whether the candidates of two cases can be compared bit for bit."""
    layouts = [(c.candidate.world_size, c.candidate.config["parallel"]) for c in (one, other)]
    return layouts[0] == layouts[1]


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


def compare_cells(case: CaseSpec, step: int, asker: Asker) -> tuple[LayoutAnswer, Verdict]:
    """Run both layouts of `case_of_two`, and the samples, and compare one step of them.

    Raises:
        UsageError: there is no such step.
        OutOfBudget: the runs cost more than is left.
    """
    runs = runs_to_compare(case.reference, case.candidate, step)
    trios = [(runs.reference, runs.candidate, runs.samples[0])]
    rest = runs.samples[1:]
    trios += [(rest[i], rest[i - 1], rest[max(i - 2, 0)]) for i in range(len(rest) - 1, 0, -3)]
    for number, trio in enumerate(trios):
        asker.ask(_question(case, trio, number), WORDS.format(step), judge=judged_by(_kept))
    legs = [
        Leg(
            result=asker.folder.load_run(spec),
            contents=read_contents(asker.folder.run_folder(spec.key), spec),
        )
        for spec in (runs.reference, runs.candidate, *runs.samples)
    ]
    answer = compare_layouts(legs[0], legs[1], legs[2:])
    return answer, _verdict(case, answer)


def _kept(*_: object) -> str:
    return "its contents are kept"


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
