"""Timed runs: which are made and when, verdicts on their times, their bits, model FLOPs."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fsdp_core.config import ParallelConfig, TrainConfig, model_from_preset
from harness.checks.evidence import Runs
from harness.checks.speed import (
    CONFIDENCE,
    interval_of,
    judge,
    same_bits,
    step_flops,
    step_times,
)
from harness.records import CaseSpec, CheckResult, RunResult
from harness.repeats import in_turn, timed_pairs
from tests.support import records
from tests.support import run_records as lab
from tests.support.run_records import LAB, ask, edit, edit_all, place, said

STEPS, SKIPPED, PAIRS = 9, 3, 6
LIMITS = {"max_slowdown": 0.05, "skip_steps": SKIPPED}
SHAPE = TrainConfig(steps=STEPS, microbatches=2).to_dict()
SMALL = lab.Lab(steps=STEPS, world_size=1)
BOTH = [
    SMALL.run(lab.configured(run, **(SHAPE | {"graph": run.spec.config["graph"]})).spec)
    for run in SMALL.legs()[::2]
]


def timed(leg: int, seconds: float) -> RunResult:
    """A run with a slow warm-up and then one speed."""
    steady = [100 * seconds] * SKIPPED + [seconds] * (STEPS - SKIPPED)
    return edit_all(BOTH[leg], step_s=lambda step, rank: steady[step])


def check(ours: Sequence[RunResult], theirs: Sequence[RunResult], **limits: Any) -> CheckResult:
    """The answer for timed runs, which are made in turn."""
    both = itertools.zip_longest(ours, theirs)
    repeats = [run for pair in both for run in pair if run is not None]
    return ask("throughput", BOTH[0], BOTH[1], repeats=repeats, **(LIMITS | limits))


SCATTER = (1.3, 0.75, 1.2, 0.8, 1.25, 0.7)
PASSED, SLOW = ("passed", ""), ("failed", "throughput_regression")
NOISY, UNTIMED = ("incomparable", "noisy"), ("error", "not_run")


@pytest.mark.parametrize(
    ("theirs", "told", "why"),
    [
        *(([0.02 * slower] * PAIRS, told, "") for slower, told in (
            (1.0, PASSED), (1.049, PASSED), (0.5, PASSED), (1.051, SLOW), (2.0, SLOW),
        )),
        # With noise past the tolerance only what is farther off than the noise is judged.
        *(([0.02 * ratio * each for each in SCATTER], told, why) for ratio, told, why in (
            (0.3, PASSED, ""), (1.6, NOISY, "the noise is larger"),
            (1.0, NOISY, "the noise is larger"), (4.0, SLOW, ""),
        )),
        ([0.021 * (1 + d) for d in (-0.01, 0.01, -0.02, 0.02, 0.005, 0)], NOISY,
         "the interval holds the tolerance"),
        *(([0.02] * 5 + [bad], UNTIMED, "") for bad in (0.0, -1.0, math.nan, math.inf)),
        *(([0.02] * pairs, UNTIMED, "") for pairs in (0, 5, 7)),
    ],
)  # fmt: skip
def test_pairs_of_runs_are_judged(theirs: list[float], told: tuple[str, str], why: str) -> None:
    """To a hair without noise, not at all within it; a time that is none is no verdict."""
    pairs = min(len(theirs), PAIRS)
    answer = check([timed(0, 0.02)] * pairs, [timed(1, s) for s in theirs])
    assert said(answer) == told
    assert answer.message.startswith(why)
    if len(set(theirs)) == 1 and told != UNTIMED:
        assert answer.figures["slowdown"] == pytest.approx(theirs[0] / 0.02 - 1, abs=1e-9)


@pytest.mark.parametrize(
    ("seconds", "outcome", "slower"),
    [(0.0, "passed", 0.04), (0.01, "failed", 0.08), (0.5, "failed", 0.2)],
)
def test_what_digests_take_hides_no_slow_down(seconds: Any, outcome: str, slower: float) -> None:
    """4 % of a step of which half are digests is 8 % of the program."""
    legs = [
        [lab.told(timed(leg, each), 0, ("digest_time", {"seconds": seconds}))] * PAIRS
        for leg, each in enumerate((0.02, 0.0208))
    ]
    answer = check(*legs)
    assert answer.outcome == outcome
    assert answer.figures["slowdown"] == pytest.approx(slower, abs=1e-6)
    legs[0][3] = timed(0, 0.02)
    assert check(*legs).outcome == "passed"


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    """Ranks wait for each other: which of them is slow may change from step to step."""
    run = lab.Lab(steps=STEPS).legs()[0]
    for slow in ({0}, {1}, {0, 1}):
        timed = edit_all(run, step_s=lambda step, rank, slow=slow: 0.02 + 0.02 * (rank in slow))
        assert step_times(timed, SKIPPED) == [0.04] * (STEPS - SKIPPED)


# --- steps that are not alike, and noise ------------------------------------------------------


@pytest.mark.parametrize("scatter", [0.0, 0.01])
@pytest.mark.parametrize(
    ("candidate", "outcome", "why"),
    [
        ([1.0, 1.0, 2.0] * 5, "failed", "the mean step is slower by 29 %"),
        ([1.0] * 24 + [10.0], "failed", "with its longest steps the mean is slower by 36 %"),
        ([1.1] * 15, "failed", ""),
        *(([3.0] * slow + [1.0] * (15 - slow), "incomparable", "as it runs, skip more steps")
          for slow in (1, 3, 8, 12)),
        ([0.9 + 0.015 * step for step in range(15)], "incomparable", "gets slower by"),
    ],
)  # fmt: skip
def test_steps_that_are_not_alike(candidate: Any, outcome: str, why: str, scatter: float) -> None:
    """Long steps of each run fail; a warm-up or what gets slower is no verdict."""
    draw = random.Random(2)
    ours, theirs = (
        [[s * draw.lognormvariate(0, scatter) for s in steps] for _ in range(PAIRS)]
        for steps in ([1.0] * len(candidate), candidate)
    )
    found = judge(ours, theirs, 0.05)
    assert found.outcome == outcome
    assert why in found.why or scatter
    # If only some runs have long steps, the candidate neither passes nor fails; one of all is a
    # disturbance.
    assert judge([[1.0] * 15] * PAIRS, [[1.0] * 14 + [50.0], *[[1.0] * 15] * 5], 0.05).why == ""
    some = [[1.0] * 10 + [4.0] * 5] * 2 + [[1.0] * 15] * 4
    mixed = judge([[1.0] * 15] * PAIRS, some, 0.05)
    assert (mixed.outcome, mixed.why[:21]) == ("incomparable", "long steps leave open")


def test_the_interval_is_as_sure_as_it_says() -> None:
    """Over all signs, equally likely, 0 is missed in at most 5 %."""
    for number in (6, 8, 9, 12):
        magnitudes = [1.5**index for index in range(number)]
        missed = nearer = 0
        for signs in itertools.product((-1, 1), repeat=number):
            values = sorted(s * m for s, m in zip(signs, magnitudes, strict=True))
            found = interval_of(values[::-1])
            at = values.index(found.low)
            assert (found.low, found.high) == (values[at], values[-1 - at])
            missed += not found.low <= 0 <= found.high
            nearer += not values[at + 1] <= 0 <= values[-2 - at]
        assert missed <= (1 - CONFIDENCE) * 2**number < nearer
    assert interval_of([0.9, 1.0, 1.1, 1.0, 0.95, 1.05, 1.0, 50.0]).estimate == 1.0


# --- repeats: which runs, in which order, with which bits -------------------------------------


def case(graph: str, repeats: int, ranks: int = 2) -> CaseSpec:
    """A graph scope against eager."""
    size = lab.Lab(world_size=ranks)
    return size.case(candidate=size.spec(graph=(graph,)), repeats=repeats)


def names(*cases: CaseSpec) -> str:
    """eager0, attn0, ..."""
    runs = in_turn(cases)
    assert len({spec.key for spec in runs}) == len(runs)
    return " ".join(f"{(s.config['graph'] or ['eager'])[0]}{s.replica - 2}" for s in runs)


def test_legs_take_turns() -> None:
    """Neighbours in time are a pair, each side first as often."""
    assert names(case("attn", 3)) == "eager0 attn0 attn1 eager1 eager2 attn2"
    assert names(case("attn", 2), case("mlp", 2, ranks=1), case("layer", 2)) == (
        "eager0 attn0 layer0 layer1 attn1 eager1 eager0 mlp0 mlp1 eager1"
    )
    mine = case("attn", 2)
    assert names(replace(mine, skip_reason="no GPU")) == ""


TOLD = records.error(step=-1, type="DistBackendError", message="NCCL error: unhandled system error")
SHARED = {"fingerprint": {"environment": {"NCCL_HOSTID": "shared-gpus-1"}}}


@pytest.mark.parametrize(
    ("leg", "change", "told", "says"),
    [
        (1, lambda run: edit(run, what="hang"), ("failed", "hang"), "repeat 5 of the candidate"),
        (0, lambda run: edit(run, what="hang"), ("error", "hang"), "repeat 5 of the reference"),
        (1, lambda run: edit(run, what="interrupted"), ("error", "interrupted"), ""),
        (1, lambda run: edit(edit(run, what="crashed", culprit_rank=0), 0, error=TOLD),
         ("error", "crashed"), "nccl_system_error"),
        *((leg, lambda run: edit(run, 0, start={"environment": SHARED}), NOISY, "shared GPUs")
          for leg in (0, 1)),
    ],
)  # fmt: skip
def test_a_repeat_that_must_not_be_judged(leg: int, change: Any, told: Any, says: str) -> None:
    """A dead candidate has failed; a reference, the machine or shared GPUs accuse nobody."""
    legs = [[timed(0, 0.02)] * PAIRS, [timed(1, 0.02)] * PAIRS]
    legs[leg] = [*legs[leg][:-1], change(legs[leg][-1])]
    answer = check(*legs)
    assert said(answer) == told
    assert says in answer.message


CASE = LAB.case(repeats=2)
REPEATS = [LAB.run(spec) for pair in timed_pairs(CASE) for spec in pair]


def bits_of(repeats: Sequence[RunResult]) -> CheckResult:
    run = LAB.run(CASE.reference)
    return same_bits(Runs(case=CASE, reference=run, control=run, candidate=run, repeats=repeats))


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize(
    "change", [lambda run: edit(run, 1, 3, grad_norm=lab.f32(3.0)),
               lambda run: lab.flip(run, 1, 3, "optim")],
)  # fmt: skip
def test_any_repeat_may_differ(at: int, change: Any) -> None:
    """A candidate's has failed; one of the reference makes the reference nondeterministic."""
    answer = bits_of([change(run) if n == at else run for n, run in enumerate(REPEATS)])
    nondeterministic = ("incomparable", "nondeterministic_reference")
    assert said(answer) == (("failed", "diverged") if at % 2 else nondeterministic)
    assert place(answer)[:2] == (3, 1)


def test_repeats_are_those_of_the_case() -> None:
    """By key, in the order of the plan, in the environment of the reference."""
    assert bits_of(REPEATS).outcome == "passed"
    for wrong in (REPEATS[:2], REPEATS[::-1], [LAB.run(CASE.reference)] * 4, []):
        assert said(bits_of(wrong)) == ("error", "corrupt_record")
    environment = {"fingerprint": {"torch": "2.13"}}
    moved = edit(REPEATS[3], 0, start={"environment": environment})
    assert said(bits_of([*REPEATS[:3], moved])) == ("incomparable", "different_environment")


# --- model FLOPs ------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("shape", "attention", "widths", "pairs"),
    [
        # wq 4x4, wk and wv 4x2, wo 4x4; gate, up and down 4x5 twice; 2 heads of 2 + 2 a pair
        (DENSE, 16 + 8 + 8 + 16, 2 * 3 * 20, 2 * (2 + 2)),
        # the second layer: router 4x6, two experts of 4x7 and one shared of 4x3, thrice each
        (MOE, 48, 3 * 20 + 24 + 3 * (2 * 28 + 12), 8),
        # down 4x3, up 3x(2x6), latents 4x5 and 4x2, keys 5x(2x4), values 5x(2x8), out 16x4
        (MLA, 12 + 36 + 20 + 8 + 40 + 80 + 64, 120, 2 * (6 + 8)),
        # queries from the hidden state: 4x(2x6) in place of both
        (MLA | {"q_lora_rank": None}, 48 + 20 + 8 + 40 + 80 + 64, 120, 28),
    ],
)
def test_a_step_is_what_hand_counting_gives(
    shape: Any, attention: int, widths: int, pairs: int
) -> None:
    """Two layers and a head of 4 x 11, 3 tokens, 6 causal pairs of query and key a head."""
    tokens = 2 * 3 * (2 * attention + widths + 4 * 11)
    parallel, model = ParallelConfig(dp=2, dp_outer=2), model_from_preset("dense_tiny", shape)
    train = TrainConfig(model=model, parallel=parallel, microbatches=5, micro_batch_size=3)
    config = train.to_dict()
    assert step_flops(config) == 3 * (5 * 3 * 4) * (tokens + 2 * 2 * pairs * 6)
    config["parallel"]["dynamic_cp"] = [1, 2]
    assert step_flops(config) is None
