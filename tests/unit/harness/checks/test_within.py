"""A case whose `expect` is a tolerance: what is within it, what is told, what still holds."""

import dataclasses
import math
import struct
from typing import Any

import pytest

from harness.checks.judge import judge
from harness.records import CaseSpec, CheckResult, FloatBits, RecordError, RunResult, Verdict
from harness.tolerance import Close
from tests.unit.harness.checks.conftest import Lab, edit_step

RTOL = 2.0**-10


def bits(number: float) -> FloatBits:
    return FloatBits.from_bits(struct.unpack(">I", struct.pack(">f", number))[0])


def answer(
    expect: dict[str, float], change: dict[str, Any], *, step: int = 1, lab: Lab | None = None
) -> tuple[Verdict, CheckResult]:
    """The verdict, and what the check `loss` says, of a candidate with rank 1's `step` changed."""
    lab = lab or Lab()
    reference, control, candidate = lab.legs()
    case = lab.case(expect=expect, checks={"loss": {}, "state": {}, "finite": {}})
    verdict = judge(case, reference, control, edit_step(candidate, 1, step, **change))
    return verdict, next(each for each in verdict.checks if each.check == "loss")


def test_a_gap_at_the_relative_bound_passes_and_one_ulp_more_fails() -> None:
    """The bound itself is within; beyond it the first place and the largest gap are named."""
    inside, _ = answer({"rtol": RTOL}, {"loss": bits(2.0 * (1 + RTOL))}, lab=Flat())
    assert inside.outcome == "passed"
    outside, loss = answer({"rtol": RTOL}, {"loss": bits(2.0 * (1 + RTOL) + 2.0**-22)}, lab=Flat())
    assert outside.outcome == "failed"
    assert outside.what == "diverged"
    assert outside.difference is not None
    assert (outside.difference.step, outside.difference.rank) == (1, 1)
    assert outside.difference.quantity == "loss"
    assert loss.figures["beyond"] == 1
    assert 1 < loss.figures["largest_gap"] < 1.01


class Flat(Lab):
    """Every loss and norm is 2."""

    def step(self, rank: int, step: int) -> Any:
        two = bits(2.0)
        record = super().step(rank, step)
        return dataclasses.replace(
            record, loss=two, microbatch_losses=(two,) * self.microbatches, grad_norm=two
        )


@pytest.mark.parametrize(("gap", "outcome"), [(0.25, "passed"), (0.2500002, "failed")])
def test_atol_bounds_each_microbatch_and_the_norm(gap: float, outcome: str) -> None:
    """`atol` alone is absolute, and holds for norms and microbatches as for losses."""
    for change in (
        {"grad_norm": bits(2 + gap)},
        {"microbatch_losses": (bits(2.0), bits(2 + gap))},
    ):
        verdict, _ = answer({"atol": 0.25}, change, lab=Flat())
        assert verdict.outcome == outcome


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("expect", [{"rtol": 1e9, "atol": 1e9}, {"loss_gap": 1e9, "over": 4}])
def test_nan_is_within_no_tolerance_not_even_of_itself(
    value: float, expect: dict[str, float]
) -> None:
    """A NaN or infinity in both runs at the same place is a failure of the check `loss`."""
    lab = Flat()
    reference, control, candidate = (edit_step(run, 1, 2, loss=bits(value)) for run in lab.legs())
    case = lab.case(expect=expect, checks={"loss": {}})
    verdict = judge(case, reference, control, candidate)
    assert verdict.outcome == "failed"
    assert verdict.difference is not None
    assert (verdict.difference.step, verdict.difference.quantity) == (2, "loss")


def test_a_missing_value_differs_within_any_tolerance() -> None:
    """A norm that one run lacks is no agreement."""
    verdict, _ = answer({"atol": 1e9}, {"grad_norm": None})
    assert verdict.outcome == "failed"
    assert verdict.difference is not None
    assert verdict.difference.candidate == "missing"


def test_a_value_that_only_the_candidate_has_differs() -> None:
    """Its norm is within no tolerance of none, either."""
    lab = Lab()
    reference, control, candidate = lab.legs()
    reference, control = (edit_step(run, 1, 1, grad_norm=None) for run in (reference, control))
    case = lab.case(expect={"atol": 1e9}, checks={"loss": {}})
    verdict = judge(case, reference, control, candidate)
    assert verdict.outcome == "failed"
    assert verdict.difference is not None
    assert (verdict.difference.quantity, verdict.difference.reference) == ("grad_norm", "missing")


@pytest.mark.parametrize(
    ("reference", "candidate", "excess"),
    [
        (2.0, 1.0, 4.0), (1.0, 2.0, 8.0), (-2.0, -1.0, 4.0), (-2.0, -2.25, 1.0),
        (0.0, 0.0, 0.0), (0.0, -1e-30, math.inf), (math.nan, math.nan, math.inf),
        (math.inf, math.inf, math.inf), (1.0, -math.inf, math.inf),
    ],
)  # fmt: skip
def test_a_gap_counts_in_both_directions(reference: float, candidate: float, excess: float) -> None:
    """In units of the bound: below as above, of negative values, and of 0, where nothing is."""
    assert Close(rtol=0.125, atol=0.0).excess(reference, candidate) == excess


@pytest.mark.parametrize("leg", [0, 2])
def test_the_place_of_a_loss_that_is_no_number(leg: int) -> None:
    """It is named whichever run has it, and not the place of the largest gap."""
    lab = Flat()
    runs = [*lab.legs()]
    for place in (0, 1) if leg == 0 else (2,):
        runs[place] = edit_step(runs[place], 1, 3, loss=bits(math.nan))
    runs[2] = edit_step(runs[2], 0, 2, loss=bits(9.0))
    verdict = judge(lab.case(expect={"loss_gap": 1e9, "over": 4}, checks={"loss": {}}), *runs)
    (loss,) = (each for each in verdict.checks if each.check == "loss")
    assert loss.outcome == "failed"
    assert loss.difference is not None
    assert (loss.difference.step, loss.difference.rank) == (3, 1)


def test_state_is_counted_and_not_demanded() -> None:
    """Digests that differ do not fail the case; the answer of `state` says where they do."""
    lab = Lab()
    digests = dict(lab.step(1, 2).digests) | {"weights": "0" * 64}
    verdict, _ = answer({"atol": 1.0}, {"digests": digests}, step=2, lab=lab)
    assert verdict.outcome == "passed"
    (state,) = (each for each in verdict.checks if each.check == "state")
    assert state.outcome == "passed"
    assert state.difference is not None
    assert state.difference.step == 2
    assert state.figures["differing_tensors"] == 2


def test_the_control_stays_bitwise_and_finite_holds() -> None:
    """A reference that repeats within the tolerance only is still not to be judged against."""
    lab = Lab()
    reference, control, candidate = lab.legs()
    case = lab.case(expect={"atol": 1.0}, checks={"loss": {}, "finite": {}})
    verdict = judge(case, reference, edit_step(control, 0, 1, loss=bits(2.001)), candidate)
    assert (verdict.outcome, verdict.what) == ("incomparable", "nondeterministic_reference")
    bad = edit_step(candidate, 0, 1, nonfinite={"grads": ("embed.weight",)})
    verdict = judge(case, reference, control, bad)
    assert (verdict.outcome, verdict.what) == ("failed", "nonfinite")


@pytest.mark.parametrize(
    ("gap", "outcome"), [(0.25, "passed"), (0.2500002, "failed"), (-0.3, "failed")]
)
def test_loss_gap_is_of_the_mean_over_the_last_steps_and_all_ranks(
    gap: float, outcome: str
) -> None:
    """One of 2 steps x 2 ranks off by 4 gaps moves the mean by one gap; earlier steps count not."""
    expect = {"loss_gap": 0.25, "over": 2}
    verdict, loss = answer(expect, {"loss": bits(2 + 4 * gap)}, step=2, lab=Flat())
    assert verdict.outcome == outcome
    assert loss.figures["gap"] == pytest.approx(abs(gap), abs=1e-6)
    verdict, _ = answer(expect, {"loss": bits(200.0)}, step=1, lab=Flat())
    assert verdict.outcome == "passed"


def test_a_tolerance_over_more_steps_than_there_are_is_no_pass() -> None:
    """Nobody can say what the mean of 5 steps is of a run of 4."""
    verdict, _ = answer({"loss_gap": 1.0, "over": 5}, {})
    assert (verdict.outcome, verdict.what) == ("error", "unsupported")


@pytest.mark.parametrize(
    "expect",
    [
        {}, {"rtol": 0.0}, {"rtol": -1.0}, {"rtol": math.nan}, {"rtol": 1.0, "over": 2},
        {"loss_gap": 1.0}, {"loss_gap": 0.0, "over": 1}, {"loss_gap": 1.0, "over": 1.5},
        {"ulps": 1.0},
    ],
)  # fmt: skip
def test_what_is_no_tolerance_is_refused(expect: dict[str, float]) -> None:
    """A case cannot hold a bound that bounds nothing."""
    with pytest.raises(RecordError):
        Lab().case(expect=expect)


@pytest.mark.parametrize("expect", ["bitwise", {"rtol": 1e-5, "atol": 0.0}])
def test_a_case_keeps_its_tolerance_in_its_file(expect: Any) -> None:
    """Written and read again, the case is the same; another word is refused."""
    case = Lab().case(expect=expect)
    assert CaseSpec.from_json(case.to_json()) == case
    with pytest.raises(RecordError):
        CaseSpec.from_json(case.to_json() | {"expect": "about"})


def legs_without_control(lab: Lab) -> tuple[CaseSpec, RunResult, RunResult]:
    case = lab.case(checks={"loss": {}, "state": {}, "finite": {}})
    reference = dataclasses.replace(case.reference, recorded="by-hand")
    candidate = dataclasses.replace(case.candidate, recorded="by-hand-too")
    case = dataclasses.replace(case, reference=reference, control=reference, candidate=candidate)
    return case, lab.run(reference), lab.run(candidate)


def test_without_a_control_equality_passes_and_a_difference_is_no_verdict() -> None:
    """A difference is named and incomparable; a NaN of the candidate is a failure all the same."""
    lab = Lab()
    case, reference, candidate = legs_without_control(lab)
    assert judge(case, reference, reference, candidate).outcome == "passed"
    differs = edit_step(candidate, 1, 2, loss=bits(3.0))
    verdict = judge(case, reference, reference, differs)
    assert (verdict.outcome, verdict.what) == ("incomparable", "no_control")
    assert verdict.difference is not None
    assert (verdict.difference.step, verdict.difference.rank) == (2, 1)
    verdict = judge(case, reference, reference, edit_step(candidate, 1, 2, loss=bits(math.nan)))
    assert (verdict.outcome, verdict.what) == ("failed", "nonfinite")


def test_a_planned_case_cannot_do_without_its_control() -> None:
    """Only runs that were recorded by hand may lack one."""
    lab = Lab()
    reference, _, candidate = lab.legs()
    case = lab.case(control=reference.spec)
    verdict = judge(case, reference, reference, candidate)
    assert (verdict.outcome, verdict.what) == ("error", "not_run")
