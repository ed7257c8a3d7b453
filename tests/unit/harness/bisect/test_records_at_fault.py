"""Where the training was right and its records, or its environment, were not."""

import dataclasses

import pytest

from harness.bisect.locate import between, locate
from harness.records import SAMPLES, CaseSpec, RankRecords, RunResult, StepRecord
from harness.store import CaseRuns
from tests.unit.harness.bisect.small_model import (
    OTHER,
    STEPS,
    WEIGHTS,
    Edit,
    calls_from,
    digests,
    edited,
    run_of,
)


def rewritten(run: RunResult, **fields: object) -> RunResult:
    """The run with fields of rank 1's records replaced."""
    last: RankRecords = dataclasses.replace(run.ranks[1], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(run, ranks=(run.ranks[0], last))


@pytest.mark.parametrize("order", [(0, 1, 2, 2, 3), (0, 1, 3, 2), (0, 1, 3)])
def test_the_step_of_a_damaged_file_is_the_first_that_is_not_in_its_place(
    order: tuple[int, ...],
) -> None:
    """A record that stands twice, after that of the next step, or nowhere."""
    candidate = run_of(graph=("attn",))
    steps = tuple(candidate.ranks[1].steps[step] for step in order)
    problems = ("line 5: step 2 follows step 3",) if len(order) >= STEPS else ()
    found = between(run_of(), rewritten(candidate, steps=steps, problems=problems))
    assert (found.phase, found.step, found.rank) == ("outside", 2, 1)


def of_step(step: int) -> StepRecord:
    """The reference's record on rank 1."""
    return run_of().ranks[1].steps[step]


def old_state(record: StepRecord) -> StepRecord:
    """A record of what step 1 left, though the step has read its own data."""
    read = {SAMPLES: record.digests[SAMPLES]}
    return dataclasses.replace(record, digests=of_step(1).digests | read)


def test_a_record_with_the_digests_of_the_step_before_is_not_the_programs_fault() -> None:
    """All of them, with the losses of its own step, and the next step is right again."""
    old = {1: lambda record: dataclasses.replace(record, digests=of_step(1).digests)}
    found = between(run_of(), edited(run_of(graph=("attn",)), old))
    assert (found.phase, found.module, found.quantity) == ("outside", "", "digests")
    assert (found.step, found.ranks) == (2, (1,))


def test_state_that_stays_wrong_is_the_programs() -> None:
    """A step that was not taken leaves old state, too, and the step after it is wrong as well."""
    old: dict[int, Edit] = {1: old_state}
    candidate = edited(run_of(graph=("attn",)), old)
    candidate = edited(candidate, {1: digests(weights=WEIGHTS)}, step=3)
    assert between(run_of(), candidate).phase == "reduce"


def test_old_digests_beside_another_loss_are_the_programs() -> None:
    """Something was computed otherwise in the step: its record says so."""
    old = {1: lambda record: dataclasses.replace(old_state(record), loss=OTHER)}
    assert between(run_of(), edited(run_of(graph=("attn",)), old)).phase == "reduce"


def legs(candidate: RunResult, control: RunResult) -> CaseRuns:
    """A case of these runs."""
    reference = run_of()
    case = CaseSpec(
        id="x", scenario="s", labels={}, reference=reference.spec, control=control.spec,
        candidate=candidate.spec, expect="bitwise", checks={"state": {}},
    )  # fmt: skip
    return CaseRuns(case=case, reference=reference, control=control, candidate=candidate)


def in_other_environment(run: RunResult) -> RunResult:
    """The run, with another library on rank 1."""
    assert run.ranks[1].start is not None
    other = {"fingerprint": {"torch": "y"}}
    return rewritten(run, start=dataclasses.replace(run.ranks[1].start, environment=other))


def test_another_environment_comes_before_any_difference() -> None:
    """What differs is named, on which rank, and of which leg, whatever the records show."""
    control, candidate = run_of(replica=1), in_other_environment(run_of(graph=("attn",)))
    found = locate(legs(candidate, control))
    assert (found.phase, found.rank, found.quantity) == ("outside", 1, "environment.torch")
    assert "the candidate ran in another environment" in found.evidence[0]
    assert found.evidence[1:] == (
        "torch: x became y", "every bit of the legs is equal nevertheless",
    )  # fmt: skip
    wrong = edited(candidate, {0: calls_from("norm:output")})
    found = locate(legs(wrong, control))
    assert (found.phase, found.rank, found.module) == ("outside", 1, "")
    assert "part in step 2, forward, norm" in found.evidence[-1]
    found = locate(legs(wrong, in_other_environment(control)))
    assert "the control ran in another environment" in found.evidence[0]
