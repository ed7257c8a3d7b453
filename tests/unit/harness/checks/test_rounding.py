"""A case that expects `rounding`: bounds out of samples, false alarms, what has no bound."""

import dataclasses
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from harness.checks import within
from harness.checks.judge import judge
from harness.records import CaseSpec, CheckResult, FloatBits, RunResult, StepRecord, Verdict
from harness.samples import NUM_SAMPLES, samples_of
from tests.unit.harness.checks.conftest import Lab, edit_outcome, edit_rank, edit_step

Change = Callable[[int, int, int], float]
"""From (step, rank, place of the value) to what is added to 2."""


def bits(number: float) -> FloatBits:
    return FloatBits.from_bits(struct.unpack(">I", struct.pack(">f", number))[0])


def rewritten(lab: Lab, run: RunResult, change: Change) -> RunResult:
    """The run with losses and norms of 2 and what `change` adds."""

    def step(record: StepRecord) -> StepRecord:
        number = [2 + change(record.step, record.rank, place) for place in range(4)]
        return dataclasses.replace(
            record, loss=bits(number[0]), grad_norm=bits(number[1]),
            microbatch_losses=tuple(map(bits, number[2 : 2 + lab.microbatches])),
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
        assert verdict.difference is not None
        assert (verdict.difference.step, verdict.difference.rank) == (2, 1)
        assert verdict.difference.quantity == "grad_norm"


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
    """Two-sided points of its tables, for five degrees of freedom and for three."""
    assert within.quantile(0.05, 5) == pytest.approx(2.5706, abs=1e-4)
    assert within.quantile(0.001, 5) == pytest.approx(6.8688, abs=1e-4)
    assert within.quantile(0.01, 3) == pytest.approx(5.8409, abs=1e-4)
    assert within.quantile(0.01, 1) == pytest.approx(63.657, abs=1e-3)
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
        (lambda run: edit_step(run, 1, 2, loss=bits(math.nan)), "unsupported"),
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
    made.legs[2] = edit_step(made.legs[2], 0, 1, loss=bits(value))
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
    made.legs[1] = edit_step(made.legs[1], 0, 1, loss=bits(2 + 2.0**-22))
    verdict, _ = made.judged()
    assert (verdict.outcome, verdict.what) == ("incomparable", "nondeterministic_reference")


def test_a_case_keeps_its_expectation_in_its_file() -> None:
    """Written and read again, it asks for the same samples."""
    case = Lab().case(expect="rounding")
    again = CaseSpec.from_json(case.to_json())
    assert [spec.key for spec in samples_of(again)] == [spec.key for spec in samples_of(case)]
    assert samples_of(Lab().case()) == ()
