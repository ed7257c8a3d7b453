"""A case whose `expect` is a tolerance: stated bounds, and those of rounding."""

import dataclasses
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from harness.checks import within
from harness.checks.judge import judge
from harness.records import (
    CaseSpec,
    CheckResult,
    FloatBits,
    RecordError,
    RunResult,
    StepRecord,
    Verdict,
)
from harness.repeats import NUM_SAMPLES, samples_of
from harness.tolerance import Close
from tests.unit.harness.checks.conftest import Lab, edit_outcome, edit_rank, edit_step, place_of

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
    where = place_of(outside)
    assert (where.step, where.rank) == (1, 1)
    assert where.quantity == "loss"
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
    where = place_of(verdict)
    assert (where.step, where.quantity) == (2, "loss")


def test_a_missing_value_differs_within_any_tolerance() -> None:
    """A norm that one run lacks is no agreement."""
    verdict, _ = answer({"atol": 1e9}, {"grad_norm": None})
    assert verdict.outcome == "failed"
    where = place_of(verdict)
    assert where.candidate == "missing"


def test_a_value_that_only_the_candidate_has_differs() -> None:
    """Its norm is within no tolerance of none, either."""
    lab = Lab()
    reference, control, candidate = lab.legs()
    reference, control = (edit_step(run, 1, 1, grad_norm=None) for run in (reference, control))
    case = lab.case(expect={"atol": 1e9}, checks={"loss": {}})
    verdict = judge(case, reference, control, candidate)
    assert verdict.outcome == "failed"
    where = place_of(verdict)
    assert (where.quantity, where.reference) == ("grad_norm", "missing")


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
    where = place_of(loss)
    assert (where.step, where.rank) == (3, 1)


def test_state_is_counted_and_not_demanded() -> None:
    """Digests that differ do not fail the case; the answer of `state` says where they do."""
    lab = Lab()
    digests = dict(lab.step(1, 2).digests) | {"weights": "0" * 64}
    verdict, _ = answer({"atol": 1.0}, {"digests": digests}, step=2, lab=lab)
    assert verdict.outcome == "passed"
    (state,) = (each for each in verdict.checks if each.check == "state")
    assert state.outcome == "passed"
    where = place_of(state)
    assert where.step == 2
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
    where = place_of(verdict)
    assert (where.step, where.rank) == (2, 1)
    verdict = judge(case, reference, reference, edit_step(candidate, 1, 2, loss=bits(math.nan)))
    assert (verdict.outcome, verdict.what) == ("failed", "nonfinite")


def test_a_planned_case_cannot_do_without_its_control() -> None:
    """Only runs that were recorded by hand may lack one."""
    lab = Lab()
    reference, _, candidate = lab.legs()
    case = lab.case(control=reference.spec)
    verdict = judge(case, reference, reference, candidate)
    assert (verdict.outcome, verdict.what) == ("error", "not_run")


Change = Callable[[int, int, int], float]
"""From (step, rank, place of the value) to what is added to 2."""


def bits_of(number: float) -> FloatBits:
    return FloatBits.from_bits(struct.unpack(">I", struct.pack(">f", number))[0])


def rewritten(lab: Lab, run: RunResult, change: Change) -> RunResult:
    """The run with losses and norms of 2 and what `change` adds."""

    def step(record: StepRecord) -> StepRecord:
        number = [2 + change(record.step, record.rank, place) for place in range(4)]
        return dataclasses.replace(
            record, loss=bits_of(number[0]), grad_norm=bits_of(number[1]),
            microbatch_losses=tuple(map(bits_of, number[2 : 2 + lab.microbatches])),
        )  # fmt: skip

    ranks = tuple(
        dataclasses.replace(each, steps=tuple(map(step, each.steps))) for each in run.ranks
    )
    return dataclasses.replace(run, ranks=ranks)


class Case:
    """A case of `lab` whose candidate and samples differ from a flat reference as stated."""

    def __init__(
        self,
        candidate: Change,
        samples: Sequence[Change],
        reference: Change = lambda *_: 0.0,
        lab: Lab | None = None,
    ) -> None:
        self.lab = lab or Lab()
        checks: dict[str, dict[str, object]] = {"loss": {}, "state": {}, "finite": {}}
        self.case: CaseSpec = self.lab.case(expect="rounding", checks=checks)
        legs = zip(self.lab.legs(), (reference, reference, candidate), strict=True)
        self.legs = [rewritten(self.lab, run, change) for run, change in legs]
        self.samples = [
            rewritten(self.lab, self.lab.run(spec), change)
            for spec, change in zip(samples_of(self.case), samples, strict=True)
        ]

    def judged(self) -> tuple[Verdict, CheckResult]:
        verdict = judge(self.case, *self.legs, samples=self.samples)
        return verdict, next(each for each in verdict.checks if each.check == "loss")


SIGMA = 2.0**-12
"""Of the samples below; they are powers of two off 2, so that float32 holds them."""


def table(errors: "np.ndarray[Any, Any]") -> Change:
    """By step and place."""
    return lambda step, rank, place: float(errors[step, place])


def even(sigma: float = SIGMA) -> list[Change]:
    """Six samples whose standard deviation is `sigma` and whose mean is the reference."""
    at = sigma * math.sqrt((NUM_SAMPLES - 1) / NUM_SAMPLES)
    return [lambda *_, sign=sign: sign * at for sign in (1, -1) * (NUM_SAMPLES // 2)]


def bound(values: int, sigma: float = SIGMA) -> float:
    """The largest gap that is within: t sqrt(2) s, and 8 roundings of 2."""
    t = within.quantile(within.FALSE_ALARM / (2 * values), NUM_SAMPLES - 1)
    return t * math.sqrt(2) * sigma + 8 * 2.0**-24 * 2


@pytest.mark.parametrize(("share", "outcome"), [(0.99, "passed"), (1.01, "failed")])
def test_a_gap_within_the_bound_passes_and_one_beyond_fails(share: float, outcome: str) -> None:
    """The first place is named, and how often the gap has the bound; `state` fails nothing."""
    gap = share * bound(values=32)
    made = Case(lambda step, rank, place: gap * ((step, rank, place) == (2, 1, 1)), even())
    digests = dict(made.lab.step(1, 2).digests) | {"weights": "0" * 64}
    made.legs[2] = edit_step(made.legs[2], 1, 3, digests=digests)
    verdict, loss = made.judged()
    assert verdict.outcome == outcome
    assert loss.figures["largest_gap"] == pytest.approx(share, rel=1e-3)
    assert loss.figures["samples"] == NUM_SAMPLES
    if outcome == "failed":
        assert verdict.what == "diverged"
        where = place_of(verdict)
        assert (where.step, where.rank) == (2, 1)
        assert where.quantity == "grad_norm"


def test_a_bound_never_shrinks() -> None:
    """Samples that meet again later do not take back how far they were off before."""
    early = [lambda step, *_, at=each: at(step) * (step == 0) for each in even()]
    gap = 0.9 * bound(values=32)
    late, _ = Case(lambda step, *_: gap * (step == 3), early).judged()
    assert late.outcome == "passed"
    after = [lambda step, *_, at=each: at(step) * (step == 3) for each in even()]
    before, _ = Case(lambda step, *_: gap * (step == 0), after).judged()
    assert before.outcome == "failed"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_within_no_bound(value: float) -> None:
    """Neither as a candidate's value nor as a reference's."""
    bounds = within.Spread(
        factor=1e9, deviations={(0, "loss"): 1e9}, roundoffs={"loss": 2.0**-24}
    )  # fmt: skip
    place = (0, 0, "loss")
    assert bounds.excess(place, 1.0, value) == bounds.excess(place, value, 1.0) == math.inf
    assert bounds.excess(place, value, 1.5, math.sqrt(1.5)) == math.inf


def test_tails_are_those_of_students_t() -> None:
    """Two-sided points of its tables, of odd and even degrees of freedom."""
    for probability, freedom, value in (
        (0.05, 1, 12.7062), (0.05, 2, 4.30265), (0.02, 3, 4.54070), (0.05, 7, 2.36462),
        (0.05, 5, 2.57058), (0.001, 5, 6.86883), (0.01, 10, 3.16927), (0.001, 30, 3.64596),
        (0.8, 1, 0.32492),
    ):  # fmt: skip
        assert within.quantile(probability, freedom) == pytest.approx(value, rel=1e-5)
    assert within.quantile(1e-9, 5) > 1.5 * within.quantile(1e-8, 5)


@pytest.mark.parametrize("walks", [False, True], ids=["independent", "random_walk"])
def test_right_programs_are_refused_no_more_often_than_stated(
    monkeypatch: pytest.MonkeyPatch, *, walks: bool
) -> None:
    """Errors as wide as those of samples, fresh or added up: alarms as stated, and not fewer.

    One step of one rank has three values, each asked of twice, whose bounds no other one widens:
    there the rate is nearly the stated one. Walks of four steps only widen bounds.
    """
    stated, trials = 0.2, 300
    monkeypatch.setattr(within, "FALSE_ALARM", stated)
    lab = Lab(steps=4 if walks else 1, world_size=1, microbatches=1)
    draw = np.random.default_rng(20)
    alarms = 0
    for _ in range(trials):
        errors = draw.normal(0, 1e-3, (NUM_SAMPLES + 2, lab.steps, 4))
        if walks:
            errors = errors.cumsum(1)
        changes = [table(each) for each in errors]
        verdict, _ = Case(changes[0], changes[2:], changes[1], lab).judged()
        alarms += verdict.outcome != "passed"
    deviation = math.sqrt(trials * stated * (1 - stated))
    assert alarms <= trials * stated + 4 * deviation
    if not walks:
        assert alarms >= trials * stated / 2


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda run: edit_outcome(run, what="crashed", message="it fell"), "crashed"),
        (lambda run: dataclasses.replace(run, ranks=()), "empty_run"),
        (lambda run: edit_rank(run, 1, steps=run.ranks[1].steps[:2]), "missing_step"),
        (lambda run: edit_step(run, 1, 2, grad_norm=None), "not_run"),
        (lambda run: edit_step(run, 1, 2, loss=bits_of(math.nan)), "unsupported"),
    ],
)
def test_a_sample_that_is_not_whole_is_an_error(
    damage: Callable[[RunResult], RunResult], what: str
) -> None:
    """A case is not passed for want of a bound, and its answer says which sample is at fault."""
    made = Case(lambda *_: 0.0, even())
    made.samples[4] = damage(made.samples[4])
    verdict, _ = made.judged()
    assert (verdict.outcome, verdict.what) == ("error", what)
    assert made.samples[4].spec.key in verdict.message


def test_samples_of_another_environment_or_number_are_an_error() -> None:
    """What another release of torch rounds says nothing; neither do five of six."""
    made = Case(lambda *_: 0.0, even())
    (start,) = (rank.start for rank in made.samples[0].ranks[:1])
    assert start is not None
    moved = dataclasses.replace(start, environment={"fingerprint": {"torch": "1"}})
    whole = list(made.samples)
    made.samples[0] = edit_rank(whole[0], 0, start=moved)
    verdict, _ = made.judged()
    assert (verdict.outcome, verdict.what) == ("error", "different_environment")
    for samples in (whole[1:], [], [*whole[1:], whole[0]]):
        verdict = judge(made.case, *made.legs, samples=samples)
        assert verdict.outcome == "error"


@pytest.mark.parametrize(("gap", "outcome"), [(0.0, "passed"), (2.0**-22, "failed")])
def test_where_nothing_rounds_bits_are_due(gap: float, outcome: str) -> None:
    """Samples equal to the reference give no bound of zero: the case is judged as bitwise."""
    made = Case(lambda *_: gap, [lambda *_: 0.0] * NUM_SAMPLES)
    verdict, loss = made.judged()
    assert verdict.outcome == outcome
    assert "bits are due" in loss.message


def test_a_reference_that_its_samples_are_not_is_an_error() -> None:
    """Samples that trained something else are far from it, whatever they say of rounding."""
    far = [lambda *_, at=each: at() + 100 * SIGMA for each in even()]
    verdict, loss = Case(lambda *_: 100 * SIGMA, far).judged()
    assert (verdict.outcome, verdict.what) == ("error", "unsupported")
    assert "samples" in loss.message


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_of_the_candidate_fails(value: float) -> None:
    """It is within no bound."""
    made = Case(lambda *_: 0.0, even(1e3))
    made.legs[2] = edit_step(made.legs[2], 0, 1, loss=bits_of(value))
    verdict, _ = made.judged()
    assert verdict.outcome == "failed"


def test_losses_of_bfloat16_may_be_a_few_of_its_roundings_off() -> None:
    """Values that are all bfloat16 have its gaps: one is 2^-7 of a number, not 2^-23."""
    gap = 2.0**-6  # of numbers from 2 on: one
    varied: Change = lambda step, rank, place: (step + 4 * rank) * gap + (place == 1) / 3  # noqa: E731
    off: Change = lambda step, rank, place: varied(step, rank, place) + gap * (place != 1)  # noqa: E731
    samples: list[Change] = [varied] * (NUM_SAMPLES - 1)
    samples.append(lambda *at: varied(*at) + 2.0**-22 * (at[2] == 1))
    verdict, _ = Case(off, samples, varied).judged()
    assert verdict.outcome == "passed"
    verdict, _ = Case(lambda *at: varied(*at) + gap * (at[2] == 1), samples, varied).judged()
    assert verdict.outcome == "failed"


def test_the_control_is_still_compared_bit_for_bit() -> None:
    """A reference that repeats itself within rounding only is not judged against."""
    made = Case(lambda *_: 0.0, even())
    made.legs[1] = edit_step(made.legs[1], 0, 1, loss=bits_of(2 + 2.0**-22))
    verdict, _ = made.judged()
    assert (verdict.outcome, verdict.what) == ("incomparable", "nondeterministic_reference")


def test_a_case_keeps_its_expectation_in_its_file() -> None:
    """Written and read again, it asks for the same samples."""
    case = Lab().case(expect="rounding")
    again = CaseSpec.from_json(case.to_json())
    assert [spec.key for spec in samples_of(again)] == [spec.key for spec in samples_of(case)]
    assert samples_of(Lab().case()) == ()
