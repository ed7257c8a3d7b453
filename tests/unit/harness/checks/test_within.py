"""Losses and norms by bits, within a stated tolerance, and within measured rounding."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.checks import judge, within
from harness.records import CaseSpec, FloatBits, RecordError, RunResult, Verdict
from harness.repeats import NUM_SAMPLES, samples_of
from harness.tolerance import Close
from tests.unit.harness.checks.conftest import (
    CANDIDATE,
    CONTROL,
    INF,
    LAB,
    NAN,
    REFERENCE,
    Lab,
    answers,
    ask,
    edit_all,
    edit_outcome,
    edit_rank,
    edit_step,
    f32,
    flip,
    place,
    said,
    verdict_of,
)

RTOL = 2.0**-10
ONLY: dict[str, Any] = {"loss": {}, "state": {}, "finite": {}}
TWO = f32(2.0)


def flat(run: RunResult) -> RunResult:
    """Every loss and norm is 2."""
    return edit_all(run, loss=TWO, microbatch_losses=(TWO, TWO), grad_norm=TWO)


FLAT = [flat(run) for run in (REFERENCE, CONTROL, CANDIDATE)]

# --- by bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 8, 15])
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("quantity", ["loss", "grad_norm", 0, 1])
@pytest.mark.parametrize("bit", [0, 31])
def test_any_flipped_bit_is_found_where_it_is(
    rank: int, step: int, quantity: Any, bit: int
) -> None:
    """Of any loss or norm: exactly that step, rank and quantity."""
    reference, _, candidate = Lab(world_size=16).legs()
    record = candidate.ranks[rank].steps[step]
    losses = list(record.microbatch_losses)
    held = losses[quantity] if isinstance(quantity, int) else getattr(record, quantity)
    changed = FloatBits.from_bits(int(held.bits, 16) ^ (1 << bit))
    change: dict[str, Any] = {str(quantity): changed}
    if isinstance(quantity, int):
        losses[quantity] = changed
        quantity, change = f"microbatch_losses[{quantity}]", {"microbatch_losses": tuple(losses)}
    assert ask("loss", reference, candidate).figures["pairs"] == 64
    answer = ask("loss", reference, edit_step(candidate, rank, step, **change))
    assert said(answer) == ("failed", "diverged")
    assert place(answer) == (step, rank, quantity, "")
    assert (answer.figures["beyond"], answer.figures["differing_pairs"]) == (1, 1)


@pytest.mark.parametrize(
    ("left", "right", "ulps"),
    [(0x3F800000, 0x3F800001, 1), (0, 0x80000000, 0), (0x7FC00000, 0x7FC00001, None),
     (0x7F800000, 0x7F7FFFFF, None), (0x80000001, 0x00000001, 2)],
)  # fmt: skip
def test_bits_decide(left: int, right: int, ulps: int | None) -> None:
    """One ulp, -0.0 for 0.0, another NaN payload and infinity for the largest float all differ."""
    a, b = FloatBits.from_bits(left), FloatBits.from_bits(right)
    reference = edit_step(REFERENCE, 1, 2, grad_norm=a)
    found = ask("loss", reference, edit_step(CANDIDATE, 1, 2, grad_norm=b)).difference
    assert found is not None
    assert (found.step, found.rank, found.ulps) == (2, 1, ulps)
    assert (a.bits in found.reference, b.bits in found.candidate) == (True, True)
    assert ask("loss", reference, edit_step(CANDIDATE, 1, 2, grad_norm=a)).outcome == "passed"


def test_a_loss_comes_before_a_norm_then_the_rank() -> None:
    """Within a step a loss of a later rank comes before the norm of an earlier one."""
    run = edit_step(CANDIDATE, 0, 2, grad_norm=TWO)
    run = edit_step(edit_step(run, 1, 2, loss=TWO), 0, 3, loss=TWO)
    answer = ask("loss", REFERENCE, run)
    assert place(answer)[:3] == (2, 1, "loss")
    assert "3 of 8 (step, rank) pairs, on ranks 0 and 1" in answer.message
    turned = CANDIDATE.ranks[0].steps[1].microbatch_losses[::-1]
    run = edit_step(run, 0, 1, microbatch_losses=turned)
    assert place(ask("loss", REFERENCE, run))[:3] == (1, 0, "microbatch_losses[0]")


@pytest.mark.parametrize(
    ("change", "name"),
    [({"grad_norm": None}, "grad_norm"), ({"loss": None}, "loss"),
     ({"microbatch_losses": (REFERENCE.ranks[1].steps[1].loss,)}, "microbatch_losses[1]")],
)  # fmt: skip
@pytest.mark.parametrize("expect", ["bitwise", {"atol": 1e9}])
def test_a_missing_value_differs(change: Any, name: str, expect: Any) -> None:
    """In either run, by bits and within any tolerance."""
    bare = edit_step(CANDIDATE, 1, 1, **change)
    for pair in ((REFERENCE, bare), (bare, REFERENCE)):
        found = ask("loss", *pair, LAB.case(expect=expect)).difference
        assert found is not None
        assert (found.step, found.rank, found.quantity) == (1, 1, name)
        assert "missing" in (found.reference, found.candidate)


@pytest.mark.parametrize("expect", ["bitwise", {"atol": 1.0}, {"loss_gap": 1.0, "over": 2}])
def test_runs_without_any_loss_compare_nothing(expect: Any) -> None:
    """Programs may record none, and runs may share no step: then there is no pass."""
    bare = [
        edit_all(run, loss=None, microbatch_losses=(), grad_norm=None)
        for run in (REFERENCE, CANDIDATE)
    ]
    assert ask("loss", *bare, LAB.case(expect=expect)).outcome == "error"
    empty = replace(CANDIDATE, ranks=())
    assert ask("loss", REFERENCE, empty, LAB.case(expect=expect)).outcome != "passed"


# --- within a tolerance -----------------------------------------------------------------------


def tolerated(expect: Any, *changes: tuple[int, dict[str, Any]]) -> Verdict:
    """Of flat runs, rank 1 of whose candidate has these changes by step."""
    run = FLAT[2]
    for step, change in changes:
        run = edit_step(run, 1, step, **change)
    return verdict_of(FLAT[0], FLAT[1], run, expect=expect, checks=ONLY)


@pytest.mark.parametrize(
    ("expect", "changes", "outcome"),
    [
        ({"rtol": RTOL}, [(1, {"loss": f32(2 * (1 + RTOL))})], "passed"),
        ({"rtol": RTOL}, [(1, {"loss": f32(2 * (1 + RTOL) + 2.0**-22)})], "failed"),
        ({"rtol": RTOL}, [(1, {"loss": f32(2 * (1 - RTOL) - 2.0**-22)})], "failed"),
        *(({"atol": 0.25}, [(3, change)], outcome)
          for gap, outcome in ((0.25, "passed"), (0.2500002, "failed"))
          for change in ({"grad_norm": f32(2 + gap)}, {"microbatch_losses": (TWO, f32(2 + gap))})),
        # One of 2 steps x 2 ranks off by 4 gaps moves the mean by one gap; earlier steps count not.
        *(({"loss_gap": 0.25, "over": 2}, [(2, {"loss": f32(2 + 4 * gap)})], outcome)
          for gap, outcome in ((0.25, "passed"), (0.2500002, "failed"), (-0.3, "failed"))),
        ({"loss_gap": 0.25, "over": 2}, [(1, {"loss": f32(200)})], "passed"),
        ({"loss_gap": 1e9, "over": 4}, [(2, {"loss": None})], "failed"),
        ({"loss_gap": 1.0, "over": 5}, [], "error"),
        # Digests differ and are only counted; what is not finite fails.
        ({"atol": 1.0}, [(2, {"digests": {"weights": "0" * 64}})], "passed"),
        ({"atol": 1.0}, [(2, {"nonfinite": {"grads": ("x",)}})], "failed"),
    ],
)  # fmt: skip
def test_the_bound_itself_is_within(expect: Any, changes: Any, outcome: str) -> None:
    """Of every loss, microbatch and norm, or of the mean; beyond it the place is named."""
    verdict = tolerated(expect, *changes)
    assert verdict.outcome == outcome
    if outcome == "failed":
        assert place(verdict)[:2] == (changes[0][0], 1)
    if "digests" in str(changes):
        assert answers(verdict)["state"].figures["differing_tensors"] == 2


@pytest.mark.parametrize("expect", [{"rtol": 1e9, "atol": 1e9}, {"loss_gap": 1e9, "over": 4}])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("sides", [(0, 1, 2), (2,), (0, 1)])
def test_nan_is_within_no_tolerance_not_even_of_itself(
    expect: Any, value: FloatBits, sides: tuple[int, ...]
) -> None:
    """In whichever run it is, its place is named, and not that of the largest gap."""
    runs = [edit_step(r, 1, 3, loss=value) if i in sides else r for i, r in enumerate(FLAT)]
    runs[2] = edit_step(runs[2], 0, 3, loss=f32(9.0))
    loss = answers(verdict_of(*runs, expect=expect, checks={"loss": {}}))["loss"]
    assert (loss.outcome, place(loss)) == ("failed", (3, 1, "loss", ""))


@pytest.mark.parametrize(
    ("reference", "candidate", "excess"),
    [(2.0, 1.0, 4.0), (1.0, 2.0, 8.0), (-2.0, -1.0, 4.0), (-2.0, -2.25, 1.0), (0.0, 0.0, 0.0),
     (0.0, -1e-30, math.inf), (math.nan, math.nan, math.inf), (math.inf, math.inf, math.inf),
     (1.0, -math.inf, math.inf)],
)  # fmt: skip
def test_a_gap_counts_in_both_directions(reference: float, candidate: float, excess: float) -> None:
    """In units of the bound: below as above, of negative values, and of 0, where nothing is."""
    assert Close(rtol=0.125, atol=0.0).excess(reference, candidate) == excess


@pytest.mark.parametrize(
    "expect",
    [{}, {"rtol": 0.0}, {"rtol": -1.0}, {"rtol": math.nan}, {"rtol": 1.0, "over": 2},
     {"loss_gap": 1.0}, {"loss_gap": 0.0, "over": 1}, {"loss_gap": 1.0, "over": 1.5},
     {"ulps": 1.0}],
)  # fmt: skip
def test_what_is_no_tolerance_is_refused(expect: dict[str, float]) -> None:
    """A case cannot hold a bound that bounds nothing."""
    with pytest.raises(RecordError):
        LAB.case(expect=expect)


@pytest.mark.parametrize("expect", ["bitwise", "rounding", {"rtol": 1e-5, "atol": 0.0}])
def test_a_case_keeps_its_expectation_in_its_file(expect: Any) -> None:
    """Written and read again, it asks for the same samples; another word is refused."""
    case = LAB.case(expect=expect)
    again = CaseSpec.from_json(case.to_json())
    assert (again, samples_of(again)) == (case, samples_of(case))
    assert len(samples_of(case)) == (NUM_SAMPLES if expect == "rounding" else 0)
    with pytest.raises(RecordError):
        CaseSpec.from_json(case.to_json() | {"expect": "about"})


@pytest.mark.parametrize("expect", [{"atol": 1.0}, "rounding"])
def test_the_control_is_still_compared_bit_for_bit(expect: Any) -> None:
    """A reference that repeats itself within the tolerance only is not judged against."""
    control = edit_step(CONTROL, 0, 1, loss=f32(2.001))
    verdict = verdict_of(REFERENCE, control, CANDIDATE, expect=expect, checks=ONLY)
    assert said(verdict) == ("incomparable", "nondeterministic_reference")


def test_without_a_control_a_difference_is_no_verdict() -> None:
    """Of runs recorded by hand: named and incomparable; a NaN is a failure all the same."""
    case = LAB.case()
    reference = LAB.run(replace(case.reference, recorded="by-hand"))
    candidate = LAB.run(replace(case.candidate, recorded="by-hand-too"))

    def verdict(run: RunResult) -> Verdict:
        return verdict_of(reference, reference, run, checks=ONLY)

    assert verdict(candidate).outcome == "passed"
    differs = verdict(edit_step(candidate, 1, 2, loss=f32(3.0)))
    assert (said(differs), place(differs)[:2]) == (("incomparable", "no_control"), (2, 1))
    assert said(verdict(edit_step(candidate, 1, 2, loss=NAN))) == ("failed", "nonfinite")
    assert said(verdict_of(REFERENCE, REFERENCE, CANDIDATE)) == ("error", "not_run")


# --- within rounding --------------------------------------------------------------------------

Change = Callable[[int, int, int], float]
"""From (step, rank, place of the value) to what is added to 2."""
SIGMA = 2.0**-12
"""Of the samples below; they are powers of two off 2, so that float32 holds them."""


def rewritten(lab: Lab, run: RunResult, change: Change) -> RunResult:
    """The run with losses and norms of 2 and what `change` adds."""
    return edit_all(
        run,
        loss=lambda step, rank: f32(2 + change(step, rank, 0)),
        grad_norm=lambda step, rank: f32(2 + change(step, rank, 1)),
        microbatch_losses=lambda step, rank: tuple(
            f32(2 + change(step, rank, 2 + n)) for n in range(lab.microbatches)
        ),
    )


class Case:
    """A case of `lab` whose candidate and samples differ from a flat reference as stated."""

    def __init__(
        self, candidate: Change, samples: Sequence[Change],
        reference: Change = lambda *_: 0.0, lab: Lab = LAB,
    ) -> None:  # fmt: skip
        self.case = lab.case(expect="rounding", checks=ONLY)
        legs = zip(lab.legs(), (reference, reference, candidate), strict=True)
        self.legs = [rewritten(lab, run, change) for run, change in legs]
        self.samples = [
            rewritten(lab, lab.run(spec), change)
            for spec, change in zip(samples_of(self.case), samples, strict=True)
        ]

    def judged(self) -> Verdict:
        return judge(self.case, *self.legs, samples=self.samples)


def table(errors: Any) -> Change:
    """By step and place."""
    return lambda step, rank, place: float(errors[step, place])


def even(sigma: float = SIGMA) -> list[Change]:
    """Six samples whose standard deviation is `sigma` and whose mean is the reference."""
    gap = sigma * math.sqrt((NUM_SAMPLES - 1) / NUM_SAMPLES)
    return [lambda *_, sign=sign: sign * gap for sign in (1, -1) * (NUM_SAMPLES // 2)]


BOUND = (
    within.quantile(within.FALSE_ALARM / 64, NUM_SAMPLES - 1) * math.sqrt(2) * SIGMA + 16 * 2.0**-24
)
"""The largest gap of 32 values that is within: t sqrt(2) s, and 8 roundings of 2."""


@pytest.mark.parametrize(("share", "outcome"), [(0.99, "passed"), (1.01, "failed")])
def test_a_gap_within_the_bound_passes_and_one_beyond_fails(share: float, outcome: str) -> None:
    """The first place is named, and how often the gap has the bound; `state` fails nothing."""
    made = Case(lambda *at: share * BOUND * (at == (2, 1, 1)), even())
    made.legs[2] = flip(made.legs[2], 1, 3, "weights")
    verdict = made.judged()
    figures = answers(verdict)["loss"].figures
    assert verdict.outcome == outcome
    assert figures["largest_gap"] == pytest.approx(share, rel=1e-3)
    assert figures["samples"] == NUM_SAMPLES
    assert outcome == "passed" or place(verdict)[:3] == (2, 1, "grad_norm")


@pytest.mark.parametrize(("spread", "off", "outcome"), [(0, 3, "passed"), (3, 0, "failed")])
def test_a_bound_never_shrinks(spread: int, off: int, outcome: str) -> None:
    """Samples that meet again later do not take back how far they were off before."""
    samples = [lambda step, *_, at=each: at(step) * (step == spread) for each in even()]
    verdict = Case(lambda step, *_: 0.9 * BOUND * (step == off), samples).judged()
    assert verdict.outcome == outcome


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_within_no_bound(value: float) -> None:
    """Neither as a candidate's value nor as a reference's."""
    bounds = within.Spread(factor=1e9, deviations={(0, "loss"): 1e9}, roundoffs={"loss": 2.0**-24})
    at = (0, 0, "loss")
    assert bounds.excess(at, 1.0, value) == bounds.excess(at, value, 1.0) == math.inf
    made = Case(lambda *_: 0.0, even(1e3))
    made.legs[2] = edit_step(made.legs[2], 0, 1, loss=f32(value))
    assert made.judged().outcome == "failed"


def test_tails_are_those_of_students_t() -> None:
    """Two-sided points of its tables, of odd and even degrees of freedom."""
    for probability, freedom, value in (
        (0.05, 1, 12.7062), (0.05, 2, 4.30265), (0.02, 3, 4.54070), (0.05, 7, 2.36462),
        (0.001, 5, 6.86883), (0.01, 10, 3.16927), (0.001, 30, 3.64596), (0.8, 1, 0.32492),
    ):  # fmt: skip
        assert within.quantile(probability, freedom) == pytest.approx(value, rel=1e-5)


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
    draw, alarms = np.random.default_rng(20), 0
    for _ in range(trials):
        errors = draw.normal(0, 1e-3, (NUM_SAMPLES + 2, lab.steps, 4))
        errors = errors.cumsum(1) if walks else errors
        made = [table(each) for each in errors]
        alarms += Case(made[0], made[2:], made[1], lab).judged().outcome != "passed"
    deviation = math.sqrt(trials * stated * (1 - stated))
    assert alarms <= trials * stated + 4 * deviation
    assert walks or alarms >= trials * stated / 2


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda run: edit_outcome(run, what="crashed", message="it fell"), "crashed"),
        (lambda run: replace(run, ranks=()), "empty_run"),
        (lambda run: edit_rank(run, 1, steps=run.ranks[1].steps[:2]), "missing_step"),
        (lambda run: edit_step(run, 1, 2, grad_norm=None), "not_run"),
        (lambda run: edit_step(run, 1, 2, loss=NAN), "unsupported"),
        (lambda run: edit_rank(run, 0, start={"environment": {"torch": "1"}}),
         "different_environment"),
    ],
)  # fmt: skip
def test_a_sample_that_is_not_whole_is_an_error(damage: Any, what: str) -> None:
    """A case is not passed for want of a bound, and its answer says which sample is at fault."""
    made = Case(lambda *_: 0.0, even())
    made.samples[4] = damage(made.samples[4])
    verdict = made.judged()
    assert said(verdict) == ("error", what)
    assert "sample 5" in verdict.message


def test_samples_of_another_number_or_work_are_an_error() -> None:
    """Five of six, the wrong six; six that trained something else, far from the reference."""
    made = Case(lambda *_: 0.0, even())
    whole = made.samples
    for samples in (whole[1:], [], [*whole[1:], whole[0]]):
        assert judge(made.case, *made.legs, samples=samples).outcome == "error"
    far = [lambda *_, at=each: at() + 100 * SIGMA for each in even()]
    assert said(Case(lambda *_: 100 * SIGMA, far).judged()) == ("error", "unsupported")


@pytest.mark.parametrize(("gap", "outcome"), [(0.0, "passed"), (2.0**-22, "failed")])
def test_where_nothing_rounds_bits_are_due(gap: float, outcome: str) -> None:
    """Samples equal to the reference give no bound of zero; one of six that rounds gives one."""
    verdict = Case(lambda *_: gap, [lambda *_: 0.0] * NUM_SAMPLES).judged()
    assert verdict.outcome == outcome
    assert "bits are due" in answers(verdict)["loss"].message
    one: list[Change] = [lambda *_: 0.0] * (NUM_SAMPLES - 1)
    assert Case(lambda *_: gap, [*one, lambda *_: SIGMA / 8]).judged().outcome == "passed"


def test_losses_of_bfloat16_may_be_a_few_of_its_roundings_off() -> None:
    """Values that are all bfloat16 have its gaps: one is 2^-7 of a number, not 2^-23."""
    gap = 2.0**-6  # of numbers from 2 on: one

    def varied(step: int, rank: int, place: int) -> float:
        return (step + 4 * rank) * gap + (place == 1) / 3

    samples: list[Change] = [varied] * (NUM_SAMPLES - 1)
    samples.append(lambda *at: varied(*at) + 2.0**-22 * (at[2] == 1))
    for norm, outcome in ((False, "passed"), (True, "failed")):
        off: Change = lambda *at, norm=norm: varied(*at) + gap * ((at[2] == 1) == norm)  # noqa: E731
        assert Case(off, samples, varied).judged().outcome == outcome
