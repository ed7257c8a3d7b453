"""Speed and memory of the candidate beside the reference, from pairs of runs made alone in turn.

    run       the slowest rank's time of each step, the first `skip_steps` left out, less what the
              step's digests take, which is no part of either program
    pair      two runs that were neighbours in time; which leg ran first alternates, so a machine
              that gets slower by and by favours neither
    typical   log of the ratio of the medians over steps, one number a pair
    mean      the same of the means over steps, the longest one of 20 of each run left out
    trend     how much slower than the reference the candidate gets from the first third of the
              steps to the last, a log

    interval      0 ........ max_slowdown ........
    [------]      passed          |                 and the mean is, too
              noisy           [---|----]            or wider than the tolerance to either side and
                  failed          |   [------]      not its own width clear of it

A run is the unit: its steps share the mood of the machine, and are never counted as independent.
The median is blind to a program of which every third step is long, so the mean must hold too; it
fails if the means of all pairs are above. Where the verdict is a matter of which steps are looked
at, there is none: a candidate that would fail gets faster by more than the tolerance as it runs, or
one that would pass gets slower.

The interval misses the true slow-down in at most 1 of 20 cases, on each side in 1 of 40. So a
candidate that is slower than the tolerance passes in at most 1 of 40 cases; one as slow as the
tolerance allows fails in at most 1 of 32 (the means add 1 of 2 to the power of pairs). MEASURES.md
has the rates as they were measured.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Literal

from harness.checks import exact
from harness.checks.complete import NO_BLAME, failure_of_machine, find_flaw
from harness.checks.environment import alike
from harness.checks.evidence import Options, Runs, error, failed, incomparable, passed
from harness.checks.memory import memory_notes, peak_bytes
from harness.infrastructure import shares_gpus
from harness.records import CheckResult, RankRecords, RunResult
from harness.repeats import timed_pairs

NAME = "throughput"
MAX_SLOWDOWN = 0.05
SKIP_STEPS = 5
"""Where a case does not say."""
MOST_DIGESTS = 0.8
"""Part of the shortest step that digests are believed to take."""
TIMED_STEPS = 3
"""Steps of a timed run that must be left when the first ones are skipped."""
LEFT_OUT = 20
"""Of so many steps the longest is left out of a run's mean, and one of fewer."""
CONFIDENCE = 0.95
LEAST_PAIRS = 6
"""The fewest whose interval can be as sure as `CONFIDENCE`: of five even the widest is not."""
MIB = 1 << 20
Times = Sequence[Sequence[float]]
"""Seconds of the timed steps of each run, all > 0."""


def throughput(runs: Runs, options: Options) -> CheckResult:
    """Compare step times of pairs of runs.

    Args:
        runs: `repeats` of the reference and the candidate in turn.
        options: `max_slowdown`, a fraction; `skip_steps` of every run.

    Returns:
        `passed` or `failed` (`throughput_regression`) where the interval is clear of the tolerance,
        `incomparable` (`noisy`) where it is not.
    """
    tolerance = float(str(options.get("max_slowdown", MAX_SLOWDOWN)))
    skipped = int(str(options.get("skip_steps", SKIP_STEPS)))
    legs = {"reference": runs.repeats[0::2], "candidate": runs.repeats[1::2]}
    if (flaw := _first_flaw(legs)) is not None:
        return flaw
    if any(shares_gpus(run) for run in runs.repeats):
        why = "ranks shared GPUs and took turns on them, so the speed is not judged"
        return incomparable(NAME, "noisy", why)
    times = {leg: [step_times(run, skipped) for run in made] for leg, made in legs.items()}
    if not all(seconds for made in times.values() for seconds in made):
        least = f"at least {skipped + TIMED_STEPS} steps with a time > 0 in a run"
        return error(NAME, "not_run", f"expected {least}")
    digests = min(map(digest_seconds, runs.repeats))
    shortest = min(min(steps) for made in times.values() for steps in made)
    digests = min(digests, MOST_DIGESTS * shortest)
    bare = {leg: [[s - digests for s in steps] for steps in made] for leg, made in times.items()}
    found = judge(bare["reference"], bare["candidate"], tolerance)
    figures = _figures(legs, bare, found) | {"digest_s": digests}
    message = _words(figures, tolerance)
    if found.outcome == "passed":
        return passed(NAME, message, **figures)
    if found.outcome == "failed":
        message = f"{message}; {found.why}" if found.why else message
        return failed(NAME, "throughput_regression", message, **figures)
    message = f"{found.why}, so the speed is not judged: {message}; "
    message += "more repeats or a machine left alone would tell"
    return incomparable(NAME, "noisy", message, **figures)


def _first_flaw(legs: Mapping[str, Sequence[RunResult]]) -> CheckResult | None:
    ours, theirs = map(len, legs.values())
    if ours != theirs or ours < LEAST_PAIRS:
        got = f"{ours} of the reference and {theirs} of the candidate"
        return error(NAME, "not_run", f"expected {LEAST_PAIRS} pairs of runs or more, got {got}")
    for leg, number, run in (
        (leg, *each) for leg, made in legs.items() for each in enumerate(made)
    ):
        flaw = find_flaw(run)
        if flaw is None:
            continue
        message = f"repeat {number} of the {leg} did not finish: {flaw.message}"
        if failure := failure_of_machine(run, flaw):
            message = f"{message}; the machine failed ({failure})"
        elif leg == "candidate" and flaw.what not in NO_BLAME:
            return failed(NAME, flaw.what, message)
        return error(NAME, flaw.what, message)
    return None


def same_bits(runs: Runs) -> CheckResult:
    """Are timed repeats the runs that they repeat? Same environment, same bits as the reference.

    Each is one more chance for a race to show: a repeat of the candidate that differs is a failure
    of the candidate, one of the reference makes the reference nondeterministic. Repeats that are
    not whole are left to `throughput`, which names them.
    """
    case, reference, repeats = runs.case, runs.reference, runs.repeats
    due = [spec for pair in timed_pairs(case) for spec in pair]
    if [run.spec.key for run in repeats] != [spec.key for spec in due]:
        message = f"expected {case.repeats} pairs of the case's repeats"
        return error("repeats", "corrupt_record", message)
    for number, run in enumerate(repeats):
        if find_flaw(run) is not None:
            continue
        leg = "candidate" if number % 2 else "reference"
        name = f"repeat {number // 2} of the {leg}"
        same = alike(reference, run, name)
        if same.outcome != "passed":
            return replace(same, check="repeats")
        for differs in (exact.state(reference, run), exact.loss(reference, run)):
            if differs.outcome == "passed":
                continue
            found = replace(differs, check="repeats", message=f"{name}: {differs.message}")
            if leg == "candidate" or differs.outcome != "failed":
                return found
            message = f"the reference differs from one of its repeats: {found.message}"
            what: Literal["nondeterministic_reference"] = "nondeterministic_reference"
            return replace(found, outcome="incomparable", what=what, message=message)
    return passed("repeats", f"{len(repeats)} timed repeats have the bits of the reference")


def step_times(run: RunResult, skipped: int) -> list[float]:
    """Seconds of the slowest rank, step by step; empty of a run that is too short or untimed."""
    slowest: dict[int, float] = {}
    for rank in run.ranks:
        for record in rank.steps:
            # Of no rank may a time be missing: the others' would stand for it.
            is_time = math.isfinite(record.step_s) and record.step_s > 0
            now = record.step_s if is_time else math.inf
            slowest[record.step] = max(slowest.get(record.step, 0.0), now)
    kept = [slowest[step] for step in sorted(slowest)][skipped:]
    return kept if len(kept) >= TIMED_STEPS and all(map(math.isfinite, kept)) else []


def digest_seconds(run: RunResult) -> float:
    """What the digests of a step take at least, on any rank; 0 if a rank does not say."""
    found = []
    for rank in run.ranks:
        events = [event for event in rank.events if event.name == "digest_time"]
        value = events[0].detail.get("seconds") if events else None
        is_time = isinstance(value, float) and math.isfinite(value) and value > 0
        found.append(float(str(value)) if is_time else 0.0)
    return min(found, default=0.0)


# --- figures ----------------------------------------------------------------------------------


def _noted(records: RankRecords) -> int:
    value = memory_notes(records).get("reserved_peak_bytes")
    return max(value, 0) if type(value) is int else 0


PEAKS: Mapping[str, Callable[[RankRecords], int]] = {
    "allocated": peak_bytes,
    "reserved": _noted,
    "device": lambda records: max((each.device_bytes or 0 for each in records.steps), default=0),
}
"""Peaks of one rank in bytes, 0 where nothing was measured.

    allocated   tensors, by the caching allocator (CPU: live storage)
    reserved    what the allocator has from the driver
    device      used on the whole GPU, as NVML counts: contexts, NCCL and neighbours too
"""


def _figures(
    legs: Mapping[str, Sequence[RunResult]], times: Mapping[str, Times], found: "Speed"
) -> dict[str, float]:
    figures = {
        "slowdown": math.expm1(found.typical.estimate),
        "slowdown_low": math.expm1(found.typical.low),
        "slowdown_high": math.expm1(found.typical.high),
        "mean_slowdown": math.expm1(found.mean.estimate),
        "confidence": found.typical.confidence,
        "pairs": float(len(times["reference"])),
    }
    for leg, made in legs.items():
        step_s = figures[f"{leg}_step_s"] = median(map(median, times[leg]))
        if (flops := step_flops(made[0].spec.config)) is not None:
            figures[f"{leg}_tflops_a_rank"] = flops / made[0].spec.world_size / step_s / 1e12
        for name, peak in PEAKS.items():
            worst = [max(map(peak, run.ranks)) for run in made]
            if min(worst) > 0:
                figures[f"{leg}_{name}_peak_bytes"] = float(median(worst))
    return figures


def _words(figures: Mapping[str, float], tolerance: float) -> str:
    names = ("slowdown", "slowdown_low", "slowdown_high")
    slow, low, high = (100 * figures[name] for name in names)
    digests = f" (without {1e3 * figures['digest_s']:.3g} ms of digests)"
    parts = [
        f"a step takes {1e3 * figures['candidate_step_s']:.4g} ms against "
        f"{1e3 * figures['reference_step_s']:.4g}{digests if figures['digest_s'] else ''}, "
        f"{slow:+.2f} % ({100 * CONFIDENCE:.0f} % interval {low:+.2f} to {high:+.2f} % over "
        f"{figures['pairs']:.0f} pairs of runs), limit {100 * tolerance:+.3g} %"
    ]
    a, b = (figures.get(f"{leg}_tflops_a_rank") for leg in ("candidate", "reference"))
    if a is not None and b is not None:
        parts.append(f"{a:.4g} TFLOP/s a rank against {b:.4g}")
    deltas = [
        f"{name} {(figures[theirs] - figures[ours]) / MIB:+.1f} MiB"
        for name in PEAKS
        if (ours := f"reference_{name}_peak_bytes") in figures
        and (theirs := f"candidate_{name}_peak_bytes") in figures
    ]
    if deltas:
        parts.append(f"peak {', '.join(deltas)}")
    return "; ".join(parts)


# --- is one program slower than another? ------------------------------------------------------

Outcome = Literal["passed", "failed", "incomparable"]


@dataclass(frozen=True)
class Interval:
    """An estimate with an interval around it.

    Attributes:
        confidence: how often at least such an interval holds the true value.
    """

    low: float
    estimate: float
    high: float
    confidence: float


@dataclass(frozen=True)
class Speed:
    """The answer, and what it rests on.

    Attributes:
        typical: slow-down of the median step, a log; the same for `mean` and `trend`.
        why: why there is no verdict, or what failed beside the median; "" else.
    """

    outcome: Outcome
    typical: Interval
    mean: Interval
    trend: Interval
    why: str = ""


def judge(ours: Times, theirs: Times, tolerance: float) -> Speed:
    """Whether the runs `theirs` are slower than `ours`, pair by pair, by more than a fraction."""
    limit = math.log1p(tolerance)
    typicals, means, trends = (
        [math.log(of(b) / of(a)) for a, b in zip(ours, theirs, strict=True)]
        for of in (median, mean_step, _growth)
    )
    typical, mean, trend = map(interval_of, (typicals, means, trends))
    outcome, why = side_of(typical, limit), ""
    by_mean = side_of(replace(mean, low=min(means), high=max(means)), limit)
    if outcome != "failed" and by_mean == "failed":
        outcome, why = "failed", f"the mean step is slower by {_percent(mean.estimate)}"
    elif outcome == "incomparable":
        wide = (typical.high - typical.low) / 2 > limit
        why = (
            "the noise is larger than the tolerance" if wide else "the interval holds the tolerance"
        )
    elif outcome == "passed" and side_of(mean, limit) != "passed":
        outcome = "incomparable"
        why = f"long steps leave open whether the mean step is slower, by {_percent(mean.high)}"
    if outcome == "failed" and trend.high < -limit:
        outcome = "incomparable"
        by = _percent(-trend.estimate)
        why = f"the candidate gets faster by {by} as it runs, skip more steps"
    elif outcome == "passed" and trend.low > limit:
        outcome = "incomparable"
        by = _percent(trend.estimate)
        why = f"the candidate gets slower by {by} than the reference as it runs, take longer runs"
    return Speed(outcome, typical, mean, trend, why)


def side_of(found: Interval, limit: float) -> Outcome:
    """On which side of the limit an interval of logs lies, if it is not too wide to say."""
    width = found.high - found.low
    clear = width if width / 2 > limit else 0.0
    if found.high <= limit - clear:
        return "passed"
    return "failed" if found.low > limit + clear else "incomparable"


def mean_step(seconds: Sequence[float]) -> float:
    """Mean over steps but the longest: one disturbed step is no property of the program."""
    kept = sorted(seconds)[: len(seconds) - math.ceil(len(seconds) / LEFT_OUT)]
    return fmean(kept or seconds)


def _growth(seconds: Sequence[float]) -> float:
    """How much longer the last third of the steps takes than the first."""
    third = max(1, len(seconds) // 3)
    return mean_step(seconds[-third:]) / mean_step(seconds[:third])


def _percent(log: float) -> str:
    return f"{100 * math.expm1(log):.2g} %"


def interval_of(differences: Sequence[float]) -> Interval:
    """The location of `differences`, each the outcome of one pair, whatever the noise.

    The Hodges-Lehmann estimate and Tukey's interval (Hollander, Wolfe and Chicken, Nonparametric
    Statistical Methods, 2014, sections 3.2 and 3.3) over the means of two of them. The probability
    that it misses is counted exactly, and asks of the noise only that it is as likely up as down.

    Raises:
        ValueError: fewer than `LEAST_PAIRS`, or one that is not finite.
    """
    number = len(differences)
    if number < LEAST_PAIRS:
        raise ValueError(f"Expected at least {LEAST_PAIRS} differences, got {number}.")
    if not all(map(math.isfinite, differences)):
        raise ValueError(f"Expected finite differences, got {list(differences)}.")
    means = sorted(
        (differences[i] + differences[j]) / 2 for i in range(number) for j in range(i, number)
    )
    left_out, missed = _trim(number)
    return Interval(means[left_out], median(means), means[-1 - left_out], 1.0 - missed)


@functools.cache
def _trim(number: int) -> tuple[int, float]:
    """How many means to leave out at each end, and the probability that the interval misses."""
    ways = [1]
    for rank in range(1, number + 1):
        # Ways to reach each sum with the ranks so far: without this one, and with it.
        longer = [0] * rank
        ways = [a + b for a, b in zip([*ways, *longer], [*longer, *ways], strict=True)]
    total, left_out, below = 2**number, 0, 0
    for reached, count in enumerate(ways):
        if 2 * (below + count) > (1.0 - CONFIDENCE) * total:
            break
        below += count
        left_out = reached + 1
    # To leave out none is to trust the extremes; that is the step before the first sum.
    return left_out - 1, 2 * below / total


# --- model FLOPs ------------------------------------------------------------------------------


def step_flops(config: Mapping[str, Any]) -> float | None:
    """Model FLOPs of one step of all ranks: what the mathematics needs, not what hardware did.

    As in Chowdhery et al., PaLM, 2022, appendix B: a multiply-add is 2 FLOPs; the backward pass
    costs twice the forward pass; recomputation, norms, activations, RoPE, softmax and the lookup of
    the embedding do not count; dropped tokens do. A causal mask is counted as what it leaves:
    T (T + 1) / 2 pairs of query and key of a sequence of T tokens.

    Args:
        config: a plain `TrainConfig`.

    Returns:
        None for packed documents (`dynamic_cp`): their pairs depend on the data.
    """
    model, parallel = config["model"], config["parallel"]
    if parallel["dynamic_cp"]:
        return None
    replicas = parallel["dp_outer"] * parallel["dp"]
    sequences = config["microbatches"] * config["micro_batch_size"] * replicas
    return float(3 * sequences * sequence_flops(model))


def sequence_flops(model: Mapping[str, Any]) -> int:
    """FLOPs of the forward pass of one sequence of `seq` tokens, of a plain `ModelConfig`."""
    seq = model["seq"]
    pairs = seq * (seq + 1) // 2
    value = model["v_head_dim"] if model["attention"] == "mla" else model["head_dim"]
    attention = 2 * model["heads"] * (model["head_dim"] + value) * pairs * model["layers"]
    return int(2 * seq * matrix_weights(model) + attention)


def matrix_weights(model: Mapping[str, Any]) -> int:
    """Elements of all matrices that one token is multiplied by."""
    hidden, layers = model["hidden"], model["layers"]
    dense = model["first_dense_layers"] if model["experts"] else layers
    width = model["top_k"] * model["expert_ffn"] + model["shared_expert_ffn"]
    routed = hidden * (model["experts"] + 3 * width)
    heads, head = model["heads"], model["head_dim"]
    if model["attention"] == "gqa":
        attention = hidden * head * 2 * (heads + model["kv_heads"])
    else:
        latent, rope, value = model["kv_lora_rank"], model["qk_rope_head_dim"], model["v_head_dim"]
        rank = model["q_lora_rank"]
        attention = hidden * heads * head if rank is None else rank * (hidden + heads * head)
        attention += hidden * (latent + rope) + latent * heads * (model["qk_nope_head_dim"] + value)
        attention += heads * value * hidden
    mlps = dense * 3 * hidden * model["ffn"] + (layers - dense) * routed
    return int(layers * attention + mlps + hidden * model["vocab_size"])
