"""What a soak states, and the test of a series of memory."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks import judge, memory
from harness.checks.complete import find_flaw
from harness.checks.evidence import Runs, error
from harness.checks.memory import (
    LEVEL,
    WINDOWS,
    chance_of_trend,
    slope_of,
    theil_sen,
    without_jumps,
)
from harness.infrastructure import HOST_KEY, SHARED_HOST
from harness.records import EventRecord, RunResult
from harness.soaking import LEAST_STEPS, SoakSpec
from tests.unit.harness.checks.conftest import flaw_of

KIB = 1 << 10
STEPS, BASE = 96, 64
REPLAYS = (STEPS - 2) * 2 * 2 * 2
"""Of a layer each of two microbatches, forward and backward."""


def soak(reference, candidate, options):
    return memory.soak(Runs(case=None, reference=reference, control=reference, candidate=candidate), options)


@pytest.fixture(scope="session")
def soaked(make_lab: Any) -> Any:
    """A case of 64 steps whose candidate was soaked for 96, its reference not."""
    lab, longer = make_lab(steps=BASE), make_lab(steps=STEPS)
    plain = lab.case()
    soak = SoakSpec(by="replays", amount=700)
    case = replace(
        plain,
        candidate=replace(plain.candidate, soak=soak),
        checks={"loss": {}, "state": {}, "soak": {}},
    )
    reference, control = lab.run(case.reference), lab.run(case.control)
    candidate = replace(longer.run(longer.case().candidate), spec=case.candidate)
    outcome = replace(candidate.outcome, key=case.candidate.key)
    return case, reference, control, replace(_with_events(candidate), outcome=outcome)


def _with_events(run: RunResult, **changes: Any) -> RunResult:
    ranks = []
    for records in run.ranks:
        assert records.end is not None
        detail = {"steps": records.end.steps, "replays": records.end.replays, "trained_s": 12.0}
        event = EventRecord(name="soaked", rank=records.rank, step=0, detail=detail | changes)
        ranks.append(replace(records, events=(event,)))
    return replace(run, ranks=tuple(ranks))


def test_a_soak_states_its_bound(soaked: Any) -> None:
    """The verdict says how many replays, the rate, what was compared, and that memory stayed."""
    verdict = judge(*soaked)
    assert verdict.outcome == "passed", verdict.message
    assert (
        f"no failure in {REPLAYS} replays: fewer than 0.004 a replay at 95 % (rule of three); "
        "96 steps, bits compared in 64; memory does not grow" in verdict.message
    )
    (answer,) = (each for each in verdict.checks if each.check == "soak")
    assert answer.figures["trials"] == REPLAYS
    assert answer.figures["rate_bound"] == 3 / REPLAYS


def test_the_rank_with_fewest_replays_counts(soaked: Any, edit: Any) -> None:
    """Ranks of other stages replay more graphs: each of theirs is no trial of its own."""
    _, reference, _, candidate = soaked
    end = replace(candidate.ranks[1].end, replays=900)
    assert soak(reference, edit.rank(candidate, 1, end=end), {}).figures["trials"] == REPLAYS


def test_less_than_asked_is_no_pass(soaked: Any, edit: Any) -> None:
    """Replays that were not made are named with their rank, whatever all checks say."""
    case, reference, control, candidate = soaked
    end = replace(candidate.ranks[1].end, replays=699)
    short = _with_events(edit.rank(candidate, 1, end=end))
    flaw = flaw_of(short)
    # As many as steps past the warm-up are due of any graph: here the soak asks for no more.
    assert (flaw.what, flaw.rank) == ("not_replayed", 1)
    verdict = judge(case, reference, control, short)
    assert (verdict.outcome, verdict.what) == ("failed", "not_replayed")


@pytest.mark.parametrize(
    ("by", "amount", "what"),
    [
        ("duration", 12.0, None),
        ("duration", 12.1, "missing_step"),
        ("replays", REPLAYS + 1, "not_replayed"),
    ],
)
def test_what_was_asked_is_what_counts(soaked: Any, by: Any, amount: float, what: Any) -> None:
    """Seconds of rank 0, or replays of every rank."""
    _, _, _, candidate = soaked
    spec = replace(candidate.spec, soak=SoakSpec(by=by, amount=amount))
    run = replace(candidate, spec=spec, outcome=replace(candidate.outcome, key=spec.key))
    flaw = find_flaw(run)
    assert (flaw and flaw.what) == what


def test_a_stressor_without_a_turn_is_no_pass(soaked: Any, edit: Any) -> None:
    """One that was to be at work and never was, on one rank: no verdict, and nobody's failure."""
    case, reference, control, candidate = soaked
    config = dict(candidate.spec.config) | {"stress": ["jitter", "poison", "races"]}
    spec = replace(
        candidate.spec, config=config, soak=SoakSpec(by="replays", amount=700, turn_steps=48)
    )
    reference, control = (
        replace(run, spec=replace(run.spec, config=dict(run.spec.config) | {"stress": []}))
        for run in (reference, control)
    )
    case = replace(case, candidate=spec, reference=reference.spec, control=control.spec)
    reference, control, run = (
        replace(run, spec=spec, outcome=replace(run.outcome, key=spec.key))
        for run, spec in (
            (reference, reference.spec), (control, control.spec), (candidate, spec),
        )
    )  # fmt: skip

    def with_turns(*names: str) -> RunResult:
        """Rank 1 has these turns, all others one of each."""
        made: RunResult = run
        for records in run.ranks:
            turns = names if records.rank == 1 else ("jitter", "poison")
            events = tuple(
                EventRecord(
                    name="turn", rank=records.rank, step=48 * n, detail={"stress": [name, "races"]}
                )
                for n, name in enumerate(turns)
            )
            made = edit.rank(made, records.rank, events=(*records.events, *events))
        return made

    assert judge(case, reference, control, with_turns("poison", "jitter")).outcome == "passed"
    verdict = judge(case, reference, control, with_turns("jitter"))
    assert (verdict.outcome, verdict.what) == ("error", "not_run")
    told = "turns gave no answer: poison never had a turn on rank 1 in 96 steps: expected 2 turns"
    assert verdict.message.startswith(told)
    assert judge(case, reference, control, with_turns()).outcome == "error"


@pytest.mark.parametrize(
    "changes", [{"steps": 95}, {"replays": 1000}, {"trained_s": "long"}, {"trained_s": True}]
)
def test_what_a_rank_says_of_its_soak_must_fit(soaked: Any, changes: Any) -> None:
    """It is a damaged record if it disagrees with the end record, or is no number."""
    flaw = flaw_of(_with_events(soaked[3], **changes))
    assert flaw.what == "corrupt_record"


def test_a_soak_without_a_word_of_it_is_damaged(soaked: Any, edit: Any) -> None:
    """A rank that does not say what it soaked did not end as soaks end."""
    flaw = flaw_of(edit.rank(soaked[3], 1, events=()))
    assert (flaw.what, flaw.rank) == ("corrupt_record", 1)


def test_ranks_that_end_apart_are_a_flaw(soaked: Any, edit: Any) -> None:
    """All ranks end a soak at the same step: one that took fewer has steps missing."""
    candidate = soaked[3]
    end = replace(candidate.ranks[1].end, steps=STEPS - 1)
    short = edit.rank(candidate, 1, steps=candidate.ranks[1].steps[:-1], end=end)
    flaw = flaw_of(_with_events(short))
    assert (flaw.what, flaw.rank, flaw.step) == ("missing_step", 1, STEPS - 1)


def test_a_leak_is_named(soaked: Any, edit: Any) -> None:
    """64 KiB a step on one rank fail the soak, with rank and rate; a limit above lets it pass."""
    case, reference, control, candidate = soaked
    steps = tuple(
        replace(record, live_bytes=1000 + 64 * KIB * record.step)
        for record in candidate.ranks[1].steps
    )
    leaking = edit.rank(candidate, 1, steps=steps)
    verdict = judge(case, reference, control, leaking)
    assert (verdict.outcome, verdict.what) == ("failed", "memory_regression")
    assert "live memory of rank 1 grows by 65,536 bytes a step (64.0 KiB)" in verdict.message
    assert soak(reference, leaking, {"max_leak_bytes": 70_000}).outcome == "passed"


def test_what_the_driver_counts_is_looked_at_too(soaked: Any, edit: Any) -> None:
    """A leak that torch does not see grows the GPU's used memory; a few blocks are no leak."""
    _, reference, _, candidate = soaked
    for a_step, grows in ((4 << 20, True), (100, False)):
        steps = tuple(
            replace(record, device_bytes=(1 << 30) + a_step * record.step)
            for record in candidate.ranks[0].steps
        )
        answer = soak(reference, edit.rank(candidate, 0, steps=steps), {})
        assert (answer.outcome == "failed") == grows
        assert answer.message.startswith("device-used memory of rank 0 grows") == grows


def test_neighbours_on_a_shared_gpu_leak_for_themselves(soaked: Any, edit: Any) -> None:
    """Where a GPU is shared, what the driver counts on all of it is nobody's; live memory is."""
    _, reference, _, candidate = soaked
    start = candidate.ranks[0].start
    variables = {HOST_KEY: f"{SHARED_HOST}-0"}
    prints = start.environment["fingerprint"] | {"environment": variables}
    shared = replace(start, environment=start.environment | {"fingerprint": prints})
    steps = tuple(
        replace(record, device_bytes=(1 << 30) + (4 << 20) * record.step)
        for record in candidate.ranks[0].steps
    )
    grown = edit.rank(candidate, 0, steps=steps)
    assert soak(reference, grown, {}).what == "memory_regression"
    assert soak(reference, edit.rank(grown, 0, start=shared), {}).outcome == "passed"
    own = tuple(replace(record, live_bytes=(4 << 20) * record.step) for record in steps)
    answer = soak(reference, edit.rank(grown, 0, start=shared, steps=own), {})
    assert (answer.what, answer.figures["leak_bytes_per_step"]) == ("memory_regression", 4 << 20)


@pytest.mark.parametrize(("a_step", "grows"), [(1 << 20, True), (64 * KIB, False)])
def test_the_host_leaks_too(soaked: Any, edit: Any, a_step: int, grows: bool) -> None:
    """1 MiB a step of a rank's process fails the soak; what allocators keep does not."""
    _, reference, _, candidate = soaked
    steps = tuple(
        replace(record, host_bytes=(1 << 30) + a_step * record.step)
        for record in candidate.ranks[1].steps
    )
    answer = soak(reference, edit.rank(candidate, 1, steps=steps), {})
    assert (answer.outcome, answer.what) == (
        ("failed", "memory_regression") if grows else ("passed", "")
    )
    if grows:
        assert answer.message.startswith("host memory of rank 1 grows by 1,048,576 bytes a step")
        assert answer.figures["leak_rank"] == 1.0


def test_late_values_that_are_not_finite_fail(soaked: Any, edit: Any) -> None:
    """Also past the steps of the reference, where no bits are compared."""
    case, reference, control, candidate = soaked
    bad = edit.step(candidate, 1, STEPS - 2, nonfinite={"grads": ("head.weight",)})
    verdict = judge(case, reference, control, bad)
    assert (verdict.outcome, verdict.what) == ("failed", "nonfinite")
    assert f"at step {STEPS - 2} on rank 1" in verdict.message
    answer = soak(reference, bad, {})
    assert (answer.outcome, answer.what) == ("failed", "nonfinite")


def test_a_bound_needs_every_other_check(soaked: Any, edit: Any) -> None:
    """Where bits differ, nothing is said of no failure."""
    case, reference, control, candidate = soaked
    verdict = judge(case, reference, control, edit.digest(candidate, 1, 5, "grads", 3))
    assert verdict.what == "diverged"
    assert "no failure" not in verdict.message
    (answer,) = (each for each in verdict.checks if each.check == "soak")
    assert (answer.outcome, answer.message) == (
        "skipped", "not run: state did not pass: there is no bound to state",
    )  # fmt: skip


def test_a_bound_needs_answers_of_other_checks(soaked: Any) -> None:
    """One without an answer is no pass either."""
    _, reference, _, candidate = soaked
    bound = soak(reference, candidate, {})
    assert withdrawn(bound, [bound]) is bound
    answer = withdrawn(bound, [error("taps", "not_run", "no tapped module ran")])
    assert (answer.outcome, answer.what) != (bound.outcome, bound.what)


def test_each_rank_shows_whether_its_memory_grows(soaked: Any, edit: Any) -> None:
    """One with too few steps for that leaves the question open."""
    _, reference, _, candidate = soaked
    short = edit.rank(candidate, 1, steps=candidate.ranks[1].steps[: LEAST_STEPS - 1])
    answer = soak(reference, short, {})
    assert (answer.outcome, answer.what) == ("error", "not_run")


def test_a_run_that_was_not_soaked_proves_nothing(lab: Any) -> None:
    """There is nothing to state a bound of."""
    reference, _, candidate = lab.legs()
    assert soak(reference, candidate, {}).outcome == "error"


def test_the_rule_of_three() -> None:
    """At that rate, so many trials without a failure have a chance of at most 5 %."""
    for number in (10, 96, 20_000):
        assert (1 - rate_bound(number)) ** number <= 0.05
        assert (1 - 0.99 * rate_bound(number)) ** number > 0.0475 or number < 100
    assert rate_bound(1) == 1


MIB = 1 << 20
LENGTHS = st.integers(LEAST_STEPS, 600)


def spaced(number: int) -> list[float]:
    """Values in [0, 1) that look like noise: multiples of the golden ratio's fraction."""
    return [(n * 0.6180339887) % 1 for n in range(number)]


@given(steps=LENGTHS, level=st.integers(0, 1 << 36), swing=st.integers(0, 500 * KIB))
def test_a_leak_of_64_kib_a_step_is_found(steps: int, level: int, swing: int) -> None:
    """In every run that is long enough, whatever else is held, under noise of some steps' leak."""
    series = [level + 64 * KIB * n + swing * x for n, x in enumerate(spaced(steps))]
    slope = slope_of(series)
    assert slope.grows()
    assert slope.bytes_per_step == pytest.approx(64 * KIB, rel=0.5)
    assert not slope.grows(limit=128 * KIB)


@given(steps=LENGTHS, level=st.integers(0, 1 << 36))
def test_a_steady_leak_is_told_to_the_byte(steps: int, level: int) -> None:
    """However many steps the windows have left over."""
    assert slope_of([level + 64 * KIB * n for n in range(steps)]).bytes_per_step == 64 * KIB


def test_a_leak_is_found_behind_a_warm_up_and_in_every_nth_step() -> None:
    """Captures that hold much at first, a leak once in 20 steps, memory given back in between."""
    leak = [64 * KIB * n for n in range(2000)]
    warm = [leak[n] + 500 * MIB * (n < 400) for n in range(2000)]
    rare = [20 * 64 * KIB * (n // 20) for n in range(2000)]
    saw = [leak[n] + 16 * MIB * (n % 37) / 37 for n in range(2000)]
    for series in (warm, rare, saw):
        assert slope_of(series).grows()


@given(
    steps=LENGTHS,
    period=st.floats(0.001, 0.5),
    phase=st.floats(0, 1),
    height=st.integers(1, 1 << 34),
)
def test_a_sawtooth_is_no_leak(steps: int, period: float, phase: float, height: int) -> None:
    """Memory that is kept for up to half of the run and then given back, at any phase."""
    # Seen once a step, a shorter one looks like one that is longer than the run.
    length = max(period * steps, 2.0)
    assert not slope_of([height * ((n / length + phase) % 1) for n in range(steps)]).grows()


@given(steps=LENGTHS, places=st.lists(st.floats(0, 1), max_size=6), height=st.integers(1, 1 << 34))
def test_stairs_are_no_leak(steps: int, places: list[float], height: int) -> None:
    """A plateau, or some allocations that stay, wherever they come in the run."""
    assert not slope_of(
        [height * sum(n >= p * steps for p in places) for n in range(steps)]
    ).grows()


def test_stairs_under_noise_are_no_leak() -> None:
    """A few allocations that stay, in memory that swings: increments rise half the time by luck."""
    alarms = 0
    for seed in range(60):
        drawn = random.Random(seed)
        places = [drawn.randrange(1000) for _ in range(drawn.randint(1, 6))]
        series = [
            64 * MIB * sum(n >= at for at in places) + drawn.uniform(0, MIB) for n in range(1000)
        ]
        alarms += slope_of(series).grows()
    assert alarms == 0


def test_a_leak_is_found_beside_allocations_that_stay() -> None:
    """Jumps are taken off, the leak is not."""
    for at in range(0, 2000, 100):
        series = [64 * KIB * n + 256 * MIB * (n >= at) for n in range(2000)]
        assert slope_of(series).grows(), at
        assert slope_of(series).bytes_per_step == pytest.approx(64 * KIB, rel=0.01)


@given(steps=LENGTHS, constant=st.floats(0.001, 0.25), height=st.integers(1, 1 << 34))
def test_what_fills_up_is_no_leak(steps: int, constant: float, height: int) -> None:
    """A warm-up that slows down, with a time constant of up to a quarter of the run."""
    series = [height * (1 - math.exp(-n / (constant * steps))) for n in range(steps)]
    assert not slope_of(series).grows()


@given(st.lists(st.integers(0, 1 << 40), min_size=LEAST_STEPS, max_size=80))
def test_constant_and_falling_memory_are_no_leak(values: list[int]) -> None:
    """Sorted downwards nothing grows, nor if all is constant."""
    assert not slope_of(sorted(values, reverse=True)).grows()
    assert not slope_of([values[0]] * len(values)).grows()


def test_the_chance_is_that_of_all_orders() -> None:
    """Counted over every order of six values, and one in n! for the rising one of sixteen."""
    orders = list(itertools.permutations(range(6)))
    chances = [chance_of_trend(order) for order in orders]
    for level in (1 / 720, 0.01, 0.05, 0.3, 1.0):
        share = sum(chance <= level for chance in chances) / len(orders)
        assert share <= level + 1e-12
    for order in orders[:: len(orders) // 7]:
        reached = sum(chance <= chance_of_trend(order) for chance in chances) / len(orders)
        assert chance_of_trend(order) == pytest.approx(reached)
    rarest = 1 / math.factorial(WINDOWS)
    assert rarest < LEVEL
    assert chance_of_trend(range(WINDOWS)) == pytest.approx(rarest)
    assert chance_of_trend([7] * WINDOWS) > 0.4


def test_the_slope_is_the_median_of_all_pairs() -> None:
    """Of (0, 0), (1, 1), (2, 2), (4, 40): slopes 1, 1, 10, 1, 13, 19; and one bad value is one."""
    assert theil_sen((0, 1, 2, 4), (0, 1, 2, 40)) == 5.5
    assert theil_sen(range(5), (0, 2, 4, 1000, 8)) == 2


def test_a_jump_gives_way_to_the_usual_increment() -> None:
    """Increments of 1, 2, 3 and two jumps: 2 is usual, not the median of all, which jumps move."""
    assert without_jumps([0, 1, 3, 6, 106, 206]) == [0, 1, 3, 6, 8, 10]
    assert without_jumps([0, 1, 3, 6, -94]) == [0, 1, 3, 6, -94]


def test_too_short_a_series_is_refused() -> None:
    """Below two values a window there is nothing to test."""
    with pytest.raises(ValueError, match=r"Expected 64 values at least, got 63\."):
        slope_of([0] * (LEAST_STEPS - 1))
