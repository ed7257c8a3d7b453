"""Step times of pairs of runs: verdicts, intervals, repeats' bits, model FLOPs."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from fsdp_core.config import TrainConfig, model_from_preset
from fsdp_core.config.parallel import ParallelConfig
from harness.checks import speed
from harness.checks.evidence import Runs
from harness.checks.speed import (
    CONFIDENCE,
    LEAST_PAIRS,
    TIMED_STEPS,
    interval_of,
    judge,
    same_bits,
    sequence_flops,
    step_flops,
    throughput,
)
from harness.records import CheckResult, ErrorRecord, EventRecord, FloatBits, RunResult
from harness.repeats import timed_pairs
from tests.unit.harness.checks.conftest import Lab, place_of

STEPS, SKIPPED, PAIRS, TRIALS = 9, 3, 6, 1000
MANY = (TRIALS / 40 + 3 * math.sqrt(TRIALS / 40)) / TRIALS
"""What 1 case of 40 comes to among so many, at three sigma."""
LIMITS = {"max_slowdown": 0.05, "skip_steps": SKIPPED}
Noise = Callable[[random.Random], Callable[[], float]]


@pytest.fixture(scope="module")
def runs(make_lab: Any) -> list[RunResult]:
    """A whole run of the reference and one of the candidate."""
    lab = make_lab(steps=STEPS, world_size=1)
    shape = TrainConfig(steps=STEPS, microbatches=2).to_dict()
    specs = (lab.spec(), lab.spec(graph=("attn",)))
    plain = [
        dataclasses.replace(spec, config=shape | {"graph": spec.config["graph"]}) for spec in specs
    ]
    return [lab.run(spec) for spec in plain]


def timed(run: RunResult, seconds: list[float], **changes: Any) -> RunResult:
    """The run with these step times on its only rank."""
    (rank,) = run.ranks
    steps = tuple(
        dataclasses.replace(record, step_s=value)
        for record, value in zip(rank.steps, seconds, strict=True)
    )
    return dataclasses.replace(run, ranks=(dataclasses.replace(rank, steps=steps, **changes),))


def steady(run: RunResult, seconds: float) -> RunResult:
    """The run with a slow warm-up and then one speed."""
    return timed(run, [100 * seconds] * SKIPPED + [seconds] * (STEPS - SKIPPED))


def check(
    references: list[RunResult], candidates: list[RunResult], limits: dict[str, Any]
) -> CheckResult:
    """The answer for timed runs, which are made in turn."""
    both = itertools.zip_longest(references, candidates)
    repeats = [run for pair in both for run in pair if run is not None]
    lab = Lab()
    ours, again, theirs = lab.legs()
    runs = Runs(
        case=lab.case(), reference=ours, control=again, candidate=theirs, repeats=repeats
    )  # fmt: skip
    return throughput(runs, limits)


def judged(runs: list[RunResult], ours: list[float], theirs: list[float]) -> CheckResult:
    """The answer for pairs of runs of these speeds."""
    references = [steady(runs[0], seconds) for seconds in ours]
    return check(references, [steady(runs[1], seconds) for seconds in theirs], LIMITS)


@pytest.mark.parametrize(
    ("slower", "outcome", "what"),
    [
        (1.0, "passed", ""), (1.049, "passed", ""), (0.5, "passed", ""),
        (1.051, "failed", "throughput_regression"), (2.0, "failed", "throughput_regression"),
    ],
)  # fmt: skip
def test_without_noise_the_tolerance_decides(
    runs: list[RunResult], slower: float, outcome: str, what: str
) -> None:
    """Runs whose speeds do not scatter are judged to a hair, and the warm-up counts for nothing."""
    answer = judged(runs, [0.02] * PAIRS, [0.02 * slower] * PAIRS)
    assert (answer.outcome, answer.what) == (outcome, what)
    assert answer.figures["slowdown"] == pytest.approx(slower - 1, abs=1e-9)
    assert answer.figures["reference_step_s"] == 0.02


def test_noise_above_the_tolerance_is_no_verdict(runs: list[RunResult]) -> None:
    """Pairs that scatter by 30 % cannot tell 5 %: neither passed nor failed, and it says why."""
    scatter = [1.3, 0.75, 1.2, 0.8, 1.25, 0.7]
    answer = judged(runs, [0.02] * PAIRS, [0.02 * each for each in scatter])
    assert (answer.outcome, answer.what) == ("incomparable", "noisy")
    assert answer.message.startswith("the noise is larger than the tolerance")


def test_a_slow_down_at_the_tolerance_is_no_verdict(runs: list[RunResult]) -> None:
    """Little noise, but the truth so near the limit that the interval holds it."""
    answer = judged(
        runs, [0.02] * PAIRS, [0.021 * (1 + d) for d in (-0.01, 0.01, -0.02, 0.02, 0.005, 0)]
    )
    assert (answer.outcome, answer.what) == ("incomparable", "noisy")
    assert answer.message.startswith("the interval holds the tolerance")


def test_the_slowest_rank_of_each_step_counts(make_lab: Any, edit: Any) -> None:
    """A step is as long as its slowest rank makes it, whichever that is."""
    run = make_lab(steps=STEPS).run(make_lab(steps=STEPS).spec())
    for step in range(STEPS):
        run = edit.step(run, step % 2, step, step_s=0.05)
    assert speed.step_times(run, SKIPPED) == [0.05] * (STEPS - SKIPPED)


def test_flops_and_peaks_are_in_the_table(runs: list[RunResult]) -> None:
    """TFLOP/s a rank, and allocated, reserved and device-used peaks of both legs."""
    event = EventRecord(name="memory", rank=0, step=1, detail={"reserved_peak_bytes": 5 << 20})
    reference = steady(runs[0], 0.02)
    candidate = timed(
        runs[1], [0.02] * STEPS, events=(event,),
        end=dataclasses.replace(runs[1].ranks[0].end, peak_bytes=2000 + (3 << 20)),  # type: ignore[type-var]
    )  # fmt: skip
    steps = candidate.ranks[0].steps
    more = tuple(dataclasses.replace(each, device_bytes=7 << 20) for each in steps)
    candidate = dataclasses.replace(
        candidate, ranks=(dataclasses.replace(candidate.ranks[0], steps=more),)
    )
    answer = check([reference] * PAIRS, [candidate] * PAIRS, LIMITS)
    flops = step_flops(runs[0].spec.config)
    assert flops is not None
    assert answer.figures["candidate_tflops_a_rank"] == pytest.approx(flops / 0.02 / 1e12)
    assert answer.figures["candidate_reserved_peak_bytes"] == 5 << 20
    assert answer.figures["candidate_device_peak_bytes"] == 7 << 20
    assert "reference_device_peak_bytes" not in answer.figures
    assert "peak allocated +3.0 MiB" in answer.message
    assert "reserved" not in answer.message  # only one leg has it


# ---- digests


def with_digests(run: RunResult, seconds: object) -> RunResult:
    """The run, whose only rank says what the digests of a step take."""
    (rank,) = run.ranks
    event = EventRecord(name="digest_time", rank=0, step=8, detail={"seconds": seconds})
    return dataclasses.replace(run, ranks=(dataclasses.replace(rank, events=(event,)),))


@pytest.mark.parametrize(
    ("seconds", "outcome", "slower"),
    [(0.0, "passed", 0.04), (0.01, "failed", 0.08), (0.5, "failed", 0.2),
     (math.inf, "passed", 0.04), (-1.0, "passed", 0.04), ("1", "passed", 0.04)],
)  # fmt: skip
def test_what_digests_take_hides_no_slow_down(
    runs: list[RunResult], seconds: object, outcome: str, slower: float
) -> None:
    """4 % of a step of which half are digests is 8 % of the program; digests are never believed
    to take more than four fifths, and what is no time counts as none."""
    legs = [
        [with_digests(steady(run, each), seconds)] * PAIRS
        for run, each in zip(runs, (0.02, 0.0208), strict=True)
    ]
    answer = check(legs[0], legs[1], LIMITS)
    assert answer.outcome == outcome
    assert answer.figures["slowdown"] == pytest.approx(slower, abs=1e-6)
    assert ("ms of digests" in answer.message) == (slower != 0.04)
    # One run that does not say: nothing is taken off.
    legs[0][3] = steady(runs[0], 0.02)
    assert check(legs[0], legs[1], LIMITS).outcome == "passed"


# ---- steps of one run that are not alike


def legs_of(
    candidate: list[float], scatter: float = 0.0
) -> tuple[list[list[float]], list[list[float]]]:
    """Steps of pairs of runs: a reference at 1 s a step, and a candidate of these."""
    draw = random.Random(2)

    def runs_of(steps: list[float]) -> list[list[float]]:
        return [[s * draw.lognormvariate(0, scatter) for s in steps] for _ in range(PAIRS)]

    return runs_of([1.0] * len(candidate)), runs_of(candidate)


@pytest.mark.parametrize("scatter", [0.0, 0.01])
def test_a_program_with_some_long_steps_fails_though_its_median_is_equal(scatter: float) -> None:
    """Every third step takes twice as long: a third of the time is lost, and it says so."""
    found = judge(*legs_of([1.0, 1.0, 2.0] * 5, scatter), 0.05)
    assert (found.outcome, found.why) == ("failed", "the mean step is slower by 29 %")
    assert found.typical.estimate == pytest.approx(0, abs=0.01)


def test_one_long_step_of_a_run_is_a_disturbance() -> None:
    """Whatever it takes, one of up to 20 steps decides nothing."""
    assert judge(*legs_of([1.0] * 19 + [50.0]), 0.05).outcome == "passed"


def test_a_mean_that_some_runs_raise_is_no_verdict() -> None:
    """If only some runs of the candidate have long steps, it neither passes nor fails."""
    ours, theirs = legs_of([1.0] * 15)
    theirs[:2] = [[1.0] * 10 + [4.0] * 5] * 2
    found = judge(ours, theirs, 0.05)
    assert found.outcome == "incomparable"
    assert found.why.startswith("long steps leave open")


def test_a_warm_up_that_was_not_skipped_is_no_slow_down() -> None:
    """A candidate whose first timed steps are slow is not failed: more steps are to be skipped."""
    for slow in (3, 8, 12):
        found = judge(*legs_of([3.0] * slow + [1.0] * (15 - slow), 0.01), 0.05)
        assert found.outcome == "incomparable"
        assert found.why.endswith("as it runs, skip more steps")
    assert judge(*legs_of([1.1] * 15, 0.01), 0.05).outcome == "failed"


def test_a_program_that_gets_slower_as_it_runs_does_not_pass() -> None:
    """Within the tolerance on average, past it in the end: longer runs are to decide."""
    found = judge(*legs_of([0.9 + 0.015 * step for step in range(15)], 0.01), 0.05)
    assert found.outcome == "incomparable"
    assert "gets slower by" in found.why


def test_a_wide_interval_decides_only_from_afar() -> None:
    """With noise past the tolerance only what is farther off than the noise is judged."""
    scatter = [1.3, 0.75, 1.2, 0.8, 1.25, 0.7]
    for ratio, outcome in ((0.3, "passed"), (0.7, "incomparable"), (1.6, "incomparable"),
                           (4.0, "failed")):  # fmt: skip
        theirs = [ratio * each for each in scatter]
        assert judge(alone([1.0] * PAIRS), alone(theirs), 0.05).outcome == outcome


def test_a_time_that_one_rank_lacks_is_no_time(make_lab: Any, edit: Any) -> None:
    """The other ranks' times do not stand for one that was not measured."""
    run = make_lab(steps=STEPS).run(make_lab(steps=STEPS).spec())
    assert speed.step_times(run, SKIPPED)
    for wrong in (math.nan, 0.0, -1.0):
        assert speed.step_times(edit.step(run, 1, STEPS - 1, step_s=wrong), SKIPPED) == []
        # What is skipped is not looked at.
        assert speed.step_times(edit.step(run, 1, 0, step_s=wrong), SKIPPED)


# ---- what noise does: rates over simulated cases


def verdicts(noise: Noise, slower: float) -> dict[str, float]:
    """How often each outcome comes of cases in which the candidate is so much slower."""
    draw, rates = random.Random(7), dict.fromkeys(("passed", "failed", "incomparable"), 0.0)
    for _ in range(TRIALS):
        seconds = noise(draw)
        legs: list[list[float]] = [[], []]
        for number in range(PAIRS):
            for leg in ((0, 1), (1, 0))[number % 2]:
                legs[leg].append(seconds() * (slower if leg else 1.0))
        rates[judge(alone(legs[0]), alone(legs[1]), 0.05).outcome] += 1 / TRIALS
    return rates


def alone(seconds: list[float]) -> list[list[float]]:
    """Runs of one step each."""
    return [[each] for each in seconds]


def independent(spread: float) -> Noise:
    """Every run has a mood of its own, lognormal."""
    return lambda draw: lambda: 0.02 * math.exp(draw.gauss(0, spread))


def drifting(spread: float, a_run: float) -> Noise:
    """The machine gets slower from run to run, beside moods."""

    def start(draw: random.Random) -> Callable[[], float]:
        made = 0

        def seconds() -> float:
            nonlocal made
            made += 1
            return 0.02 * math.exp(a_run * made + draw.gauss(0, spread))

        return seconds

    return start


def heavy(spread: float) -> Noise:
    """One run in ten is disturbed and takes half as long again."""
    return lambda draw: (
        lambda: 0.02 * math.exp(draw.gauss(0, spread) + (0.4 if draw.random() < 0.1 else 0))
    )


@pytest.mark.parametrize(
    "noise",
    {
        "small": independent(0.01), "as the tolerance": independent(0.05),
        "large": independent(0.3), "drift": drifting(0.01, 0.02), "heavy tails": heavy(0.01),
    }.values(),
)  # fmt: skip
def test_no_slow_down_is_invented(noise: Noise) -> None:
    """On noise alone at most 1 case of 100 fails, whatever the noise."""
    assert verdicts(noise, 1.0)["failed"] <= 1 / 100


def test_noise_past_the_tolerance_decides_nothing() -> None:
    """With moods of 30 % nothing passes or fails, equal or 10 % slower: 1 case of 500 at most."""
    for slower in (1.0, 1.1):
        assert verdicts(independent(0.3), slower)["incomparable"] >= 0.998


@pytest.mark.parametrize("noise", [independent(0.01), drifting(0.01, 0.02), independent(0.05)])
def test_a_slow_down_past_the_tolerance_hardly_passes(noise: Noise) -> None:
    """One of 5.1 % where 5 % are allowed passes in 1 case of 40."""
    assert verdicts(noise, 1.051)["passed"] <= MANY


@pytest.mark.parametrize("noise", [independent(0.01), heavy(0.01), drifting(0.01, 0.02)])
def test_a_slow_down_that_is_allowed_hardly_fails(noise: Noise) -> None:
    """One of 4.9 % where 5 % are allowed fails in 1 case of 40."""
    assert verdicts(noise, 1.049)["failed"] <= MANY


def test_planted_slow_downs_are_found() -> None:
    """With moods of 1 %, a candidate that is 10 % slower fails in 99 of 100 cases, none passes."""
    rates = verdicts(independent(0.01), 1.10)
    assert rates["failed"] >= 0.99
    assert rates["passed"] == 0
    assert verdicts(independent(0.01), 1.0)["passed"] >= 0.95


def test_steps_of_one_run_are_not_taken_for_independent(runs: list[RunResult]) -> None:
    """More steps of the same moods give the same interval, to the scatter of their medians."""
    draw = random.Random(3)
    moods = [[0.02 * math.exp(draw.gauss(0, 0.05)) for _ in range(PAIRS)] for _ in range(2)]

    def run(leg: int, mood: float) -> RunResult:
        return timed(runs[leg], [mood * (1 + draw.gauss(0, 1e-3)) for _ in range(STEPS)])

    legs = [[run(leg, mood) for mood in moods[leg]] for leg in range(2)]
    answer = check(legs[0], legs[1], LIMITS)
    found = judge(alone(moods[0]), alone(moods[1]), 0.05).typical
    assert answer.outcome == "incomparable"
    assert answer.figures["slowdown_low"] == pytest.approx(math.expm1(found.low), abs=3e-3)
    assert answer.figures["slowdown_high"] == pytest.approx(math.expm1(found.high), abs=3e-3)


# ---- what must not be judged


def test_a_repeat_that_is_not_whole_decides(runs: list[RunResult], edit: Any) -> None:
    """A dead candidate has failed, in a repeat too; a dead reference accuses nobody."""
    good = [steady(run, 0.02) for run in runs]
    dead = [edit.outcome(run, what="hang", message="rank 0 hangs") for run in good]
    ours, theirs = [good[0]] * PAIRS, [good[1]] * PAIRS
    answer = check(ours, [*theirs[1:], dead[1]], LIMITS)
    assert (answer.outcome, answer.what) == ("failed", "hang")
    assert "repeat 5 of the candidate" in answer.message
    answer = check([dead[0], *ours[1:]], theirs, LIMITS)
    assert (answer.outcome, answer.what) == ("error", "hang")
    lost = edit.outcome(good[1], what="interrupted", message="the server died")
    assert check(ours, [lost, *theirs[1:]], LIMITS).outcome == "error"


def test_a_repeat_that_the_machine_crashed_accuses_nobody(runs: list[RunResult]) -> None:
    """No verdict, with the name of what failed."""
    ours, theirs = (steady(run, 0.02) for run in runs)
    told = ErrorRecord(rank=0, step=-1, what="crashed", type="DistBackendError",
                       message="NCCL error: unhandled system error", traceback="")  # fmt: skip
    outcome = dataclasses.replace(theirs.outcome, what="crashed", culprit_rank=0)
    crashed = dataclasses.replace(timed(theirs, [0.02] * STEPS, error=told), outcome=outcome)
    answer = check([ours] * PAIRS, [crashed] + [theirs] * (PAIRS - 1), LIMITS)
    assert (answer.outcome, "nccl_system_error" in answer.message) == ("error", True)


def shared(run: RunResult) -> RunResult:
    assert run.ranks[0].start is not None
    environment = {"fingerprint": {"environment": {"NCCL_HOSTID": "shared-gpus-1"}}}
    start = dataclasses.replace(run.ranks[0].start, environment=environment)
    return timed(run, [0.02] * STEPS, start=start)


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_ranks_that_share_gpus_are_not_judged(runs: list[RunResult], slower: float) -> None:
    """Whatever their times are, they are those of taking turns."""
    ours, theirs = (steady(shared(run), 0.02 * f) for run, f in zip(runs, (1, slower), strict=True))
    answer = check([ours] * PAIRS, [theirs] * PAIRS, LIMITS)
    assert (answer.outcome, answer.what) == ("incomparable", "noisy")
    assert "shared GPUs" in answer.message


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_times_that_are_none_give_no_verdict(runs: list[RunResult], seconds: float) -> None:
    """Records of an older harness, or damaged ones, have no speed."""
    assert judged(runs, [0.02] * PAIRS, [0.02] * 5 + [seconds]).outcome == "error"


def test_too_little_gives_no_verdict(runs: list[RunResult]) -> None:
    """Five pairs, unequal numbers, or a run that is all warm-up."""
    good = [steady(run, 0.02) for run in runs]
    for ours, theirs in ((5, 5), (7, 6), (0, 0)):
        assert check([good[0]] * ours, [good[1]] * theirs, LIMITS).outcome == "error"
    limits: dict[str, Any] = {"skip_steps": STEPS - TIMED_STEPS + 1}
    assert check([good[0]] * PAIRS, [good[1]] * PAIRS, limits).outcome == "error"


def bits_of_repeats(lab: Any, case: Any, repeats: list[Any]) -> Any:
    run = lab.run(case.reference)
    return same_bits(Runs(case=case, reference=run, control=run, candidate=run, repeats=repeats))


@pytest.fixture
def case(lab: Any) -> Any:
    return lab.case(repeats=2)


@pytest.fixture
def repeats(lab: Any, case: Any) -> list[Any]:
    return [lab.run(spec) for pair in timed_pairs(case) for spec in pair]


def test_equal_repeats_pass(lab: Any, case: Any, repeats: list[Any]) -> None:
    """Two pairs with the bits of the reference."""
    assert bits_of_repeats(lab, case, repeats).outcome == "passed"


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("what", ["loss", "state"])
def test_any_repeat_may_differ(
    lab: Any, edit: Any, case: Any, repeats: list[Any], place: int, what: str
) -> None:
    """A candidate's has failed; one of the reference makes the reference nondeterministic."""
    run = repeats[place]
    repeats[place] = (
        edit.step(run, 1, 3, grad_norm=FloatBits.from_bits(0x3F123456))
        if what == "loss" else edit.digest(run, 1, 3, "optim", 5)
    )  # fmt: skip
    answer = bits_of_repeats(lab, case, repeats)
    expected = ("failed", "diverged") if place % 2 else (
        "incomparable", "nondeterministic_reference"
    )  # fmt: skip
    assert (answer.outcome, answer.what) == expected
    where = place_of(answer)
    assert (where.step, where.rank) == (3, 1)


def test_a_repeat_in_another_environment(
    lab: Any, edit: Any, case: Any, repeats: list[Any]
) -> None:
    """Equal bits of another environment are no repeat."""
    start = dataclasses.replace(repeats[3].ranks[0].start, environment={"torch": "2.13"})
    repeats[3] = edit.rank(repeats[3], 0, start=start)
    answer = bits_of_repeats(lab, case, repeats)
    assert (answer.outcome, answer.what) == ("incomparable", "different_environment")


def test_repeats_of_another_case_or_too_few(lab: Any, case: Any, repeats: list[Any]) -> None:
    """They are known by their keys, in the order of the plan."""
    for wrong in (repeats[:2], repeats[::-1], [lab.run(case.reference)] * 4, []):
        answer = bits_of_repeats(lab, case, wrong)
        assert (answer.outcome, answer.what) == ("error", "corrupt_record")


@pytest.mark.parametrize(
    ("number", "left_out"), [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (12, 13), (15, 25), (20, 52)]
)
def test_interval_leaves_out_what_the_published_table_says(number: int, left_out: int) -> None:
    """The critical values of the signed-rank test at two-sided 5 %, as books have them."""
    values = [2.0**index for index in range(number)]
    means = sorted((values[i] + values[j]) / 2 for i in range(number) for j in range(i, number))
    found = interval_of(values)
    assert (found.low, found.high) == (means[left_out], means[-1 - left_out])


def test_confidence_is_counted_exactly() -> None:
    """Over all signs of six magnitudes, all equally likely, 0 is missed as often as is said."""
    magnitudes = [1.0, 2.5, 3.0, 7.0, 11.0, 20.0]
    missed, found = 0, interval_of(magnitudes)
    for signs in itertools.product((-1, 1), repeat=6):
        found = interval_of([s * m for s, m in zip(signs, magnitudes, strict=True)])
        missed += not found.low <= 0 <= found.high
    assert missed == 2
    assert found.confidence == 1 - missed / 64 >= CONFIDENCE


def test_estimate_is_the_middle_of_all_means() -> None:
    """One wild pair moves the mean, not the estimate."""
    calm = [0.9, 1.0, 1.1, 1.0, 0.95, 1.05, 1.0]
    assert interval_of([*calm, 50.0]).estimate == pytest.approx(1.0, abs=0.06)


def test_order_and_sign_do_not_matter() -> None:
    """Shuffled pairs give the same answer, exchanged legs the mirrored one, bit for bit."""
    draw = random.Random(1)
    values = [draw.gauss(0, 1) for _ in range(9)]
    found = interval_of(values)
    assert interval_of(sorted(values)) == found
    mirrored = interval_of([-value for value in values])
    assert (mirrored.low, mirrored.estimate, mirrored.high) == (
        -found.high, -found.estimate, -found.low,
    )  # fmt: skip


@pytest.mark.parametrize(
    "values", [[0.0] * (LEAST_PAIRS - 1), [0.0] * 6 + [math.nan], [math.inf] * 6]
)
def test_refuses_what_has_no_interval(values: list[float]) -> None:
    """Too few pairs, or one that is no number."""
    with pytest.raises(ValueError, match="Expected"):
        interval_of(values)


DENSE = {
    "vocab_size": 11, "hidden": 4, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 5, "seq": 3,
}  # fmt: skip
MOE = DENSE | {
    "experts": 6, "top_k": 2, "expert_ffn": 7, "shared_expert_ffn": 3, "first_dense_layers": 1,
}  # fmt: skip
MLA = DENSE | {
    "kv_heads": 2, "attention": "mla", "q_lora_rank": 3, "kv_lora_rank": 5,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 8,
}  # fmt: skip


def plain(shape: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A run of a model as records hold it."""
    return TrainConfig(model=model_from_preset("dense_tiny", shape), **changes).to_dict()


def by_hand(attention: int, widths: int, pairs: int) -> int:
    """Two layers and a head of 4 x 11, 3 tokens, 6 pairs of query and key a head."""
    tokens = 2 * 3 * (2 * attention + widths + 4 * 11)
    return tokens + 2 * 2 * pairs * 6  # two layers, two FLOPs


@pytest.mark.parametrize(
    ("shape", "forward"),
    {
        # wq 4x4, wk and wv 4x2, wo 4x4; gate, up and down 4x5 twice; 2 heads of 2 + 2 a pair
        "dense": (DENSE, by_hand(16 + 8 + 8 + 16, 2 * 3 * 20, 2 * (2 + 2))),
        # the second layer: router 4x6, two experts of 4x7 and one shared of 4x3, thrice each
        "experts": (MOE, by_hand(48, 3 * 20 + 24 + 3 * (2 * 28 + 12), 8)),
        # down 4x3, up 3x(2x6), latents 4x5 and 4x2, keys 5x(2x4), values 5x(2x8), out 16x4
        "latent attention": (MLA, by_hand(12 + 36 + 20 + 8 + 40 + 80 + 64, 120, 2 * (6 + 8))),
        # queries from the hidden state: 4x(2x6) in place of both
        "no query latent": (MLA | {"q_lora_rank": None},
                            by_hand(48 + 20 + 8 + 40 + 80 + 64, 120, 28)),
    }.values(),
)  # fmt: skip
def test_forward_is_what_hand_counting_gives(shape: dict[str, Any], forward: int) -> None:
    """Every matrix that a token meets twice its weights, and the causal pairs of every head."""
    assert sequence_flops(plain(shape)["model"]) == forward


def test_a_step_is_three_forwards_of_every_sequence_of_all_replicas() -> None:
    """tp, cp and pp share the work of a sequence; dp, dp_outer and microbatches multiply it."""
    parallel = ParallelConfig(dp=2, dp_outer=2, tp=2)
    shape = DENSE | {"kv_heads": 2, "ffn": 6, "vocab_size": 12}
    config = plain(shape, parallel=parallel, microbatches=5, micro_batch_size=3)
    assert step_flops(config) == 3 * (5 * 3 * 4) * sequence_flops(config["model"])


def test_packed_documents_have_no_count() -> None:
    """Their pairs depend on the data: no number is better than a wrong one."""
    config = plain(DENSE)
    config["parallel"]["dynamic_cp"] = [1, 2]
    assert step_flops(config) is None


def test_six_times_the_parameters_where_attention_is_small() -> None:
    """An 8B model at 1 token a sequence: 6 a token for every weight but the embedding's."""
    model = plain({}, steps=1)["model"] | model_from_preset("llama3_8b", {"seq": 1}).__dict__
    assert sequence_flops(model) * 3 / 6 == pytest.approx(8.03e9 - 128_256 * 4096, rel=0.01)
