"""Speed of the candidate against the reference, from pairs of runs made alone in turn.

    run       the slowest rank's time of each step, the first `skip_steps` left out, less what the
              step's digests take, which is no part of either program
    pair      two runs that were neighbours in time; which side ran first alternates
    slow-down a log of a ratio of the two runs, one number a pair: of the medians over steps, of the
              means (the longest of 20 steps left out), of the growths from the first third of the
              steps to the last
    interval  between order statistics of the pairs: it misses the median of their distribution in
              at most 1 of 20 cases, in 1 of 40 on each side, whatever the noise; a candidate as
              slow as the tolerance allows fails in 1 of 20, by its median or its mean

    passed        the intervals of median and mean are below `max_slowdown`
    failed        one of them is above
    incomparable  anything else (`noisy`); an interval wider than the tolerance to either side
                  decides nothing unless it is its own width clear of it; a candidate that would
                  fail gets faster by more than the tolerance as it runs, or would pass gets slower

A run is the unit: its steps share the mood of the machine, and are never counted as independent.
The median is blind to a program of which every third step is long. MEASURES.md has the rates.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Literal

from harness.checks import Option, check
from harness.checks.complete import NO_BLAME, failure_of_machine, find_flaw
from harness.checks.evidence import (
    Options,
    Runs,
    alike,
    error,
    failed,
    incomparable,
    passed,
)
from harness.checks.exact import state
from harness.checks.memory import memory_notes, peak_bytes
from harness.checks.within import loss
from harness.infrastructure import shares_gpus
from harness.records import CheckResult, RankRecords, RunResult
from harness.repeats import timed_pairs

NAME = "throughput"
MAX_SLOWDOWN = 0.05
SKIP_STEPS = 5
MOST_DIGESTS = 0.8
"""Part of the shortest step that digests are believed to take."""
TIMED_STEPS = 3
"""Steps of a timed run that must be left when the first ones are skipped."""
LEFT_OUT = 20
"""Of so many steps the longest is left out of a run's mean, and one of fewer."""
CONFIDENCE = 0.95
LEAST_PAIRS = 6
"""The fewest whose interval can be as sure as `CONFIDENCE`: of five even the widest is not."""
MAX_REPEATS = 50
Times = Sequence[Sequence[float]]
"""Seconds of the timed steps of each run, all > 0."""
Outcome = Literal["passed", "failed", "incomparable"]


@check("throughput", "step time of timed runs made alone, in pairs", options={
    "max_slowdown": Option(kind="number", default=MAX_SLOWDOWN, doc="as a fraction"),
    "skip_steps": Option(default=SKIP_STEPS, doc="of every run, captures among them"),
    "repeats": Option(
        least=LEAST_PAIRS, most=MAX_REPEATS, default=LEAST_PAIRS,
        doc="pairs of runs; an interval of fewer is not as sure as the verdict says",
    ),
})  # fmt: skip
def throughput(runs: Runs, options: Options) -> CheckResult:
    """Compare step times of `repeats`, which are of the reference and the candidate in turn."""
    tolerance = options.get("max_slowdown", MAX_SLOWDOWN)
    skipped = options.get("skip_steps", SKIP_STEPS)
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
    shortest = min(min(steps) for made in times.values() for steps in made)
    digests = min(*map(digest_seconds, runs.repeats), MOST_DIGESTS * shortest)
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
        if (flaw := find_flaw(run)) is None:
            continue
        message = f"repeat {number} of the {leg} did not finish: {flaw.message}"
        if failure := failure_of_machine(run, flaw):
            return error(NAME, flaw.what, f"{message}; the machine failed ({failure})")
        is_blamed = leg == "candidate" and flaw.what not in NO_BLAME
        return (failed if is_blamed else error)(NAME, flaw.what, message)
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
        for differs in (state(reference, run), loss(reference, run)):
            if differs.outcome == "passed":
                continue
            found = replace(differs, check="repeats", message=f"{name}: {differs.message}")
            if leg == "candidate" or differs.outcome != "failed":
                return found
            message = f"the reference differs from one of its repeats: {found.message}"
            other = incomparable("repeats", "nondeterministic_reference", message)
            return replace(other, difference=found.difference, figures=found.figures)
    return passed("repeats", f"{len(repeats)} timed repeats have the bits of the reference")


def step_times(run: RunResult, skipped: int) -> list[float]:
    """Seconds of the slowest rank, step by step; empty of a run that is too short or untimed."""
    slowest: dict[int, float] = {}
    for rank in run.ranks:
        for record in rank.steps:
            # Of no rank may a time be missing: the others' would be taken in its place.
            is_time = math.isfinite(record.step_s) and record.step_s > 0
            now = record.step_s if is_time else math.inf
            slowest[record.step] = max(slowest.get(record.step, 0.0), now)
    kept = [slowest[step] for step in sorted(slowest)][skipped:]
    return kept if len(kept) >= TIMED_STEPS and all(map(math.isfinite, kept)) else []


def digest_seconds(run: RunResult) -> float:
    """What the digests of a step take at least, on any rank; 0 if a rank does not say."""
    found = []
    for rank in run.ranks:
        said = [event.detail.get("seconds") for event in rank.events if event.name == "digest_time"]
        value = said[0] if said else None
        is_time = isinstance(value, float) and math.isfinite(value) and value > 0
        found.append(value if is_time and isinstance(value, float) else 0.0)
    return min(found, default=0.0)


# --- is one program slower than another? ------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """Of a slow-down, a log: the median of the pairs, and an interval around it."""

    low: float
    estimate: float
    high: float


@dataclass(frozen=True)
class Speed:
    """The answer, the slow-downs that it rests on, and why there is none; "" else."""

    outcome: Outcome
    typical: Interval
    mean: Interval
    trend: Interval
    why: str = ""


def judge(ours: Times, theirs: Times, tolerance: float) -> Speed:
    """Whether the runs `theirs` are slower than `ours`, pair by pair, by more than a fraction."""
    limit = math.log1p(tolerance)
    of: tuple[Callable[[Sequence[float]], float], ...] = (median, mean_step, _growth)
    typical, mean, trend = (
        interval_of([math.log(one(b) / one(a)) for a, b in zip(ours, theirs, strict=True)])
        for one in of
    )
    sides = [side_of(typical, limit), side_of(mean, limit)]
    outcome: Outcome = "incomparable"
    why = f"long steps leave open whether the mean step is slower, by {_percent(mean.high)}"
    if "failed" in sides and trend.high < -limit:
        by = _percent(-trend.estimate)
        why = f"the candidate gets faster by {by} as it runs, skip more steps"
    elif "failed" in sides:
        is_seen = sides[0] == "failed"
        outcome = "failed"
        why = "" if is_seen else f"the mean step is slower by {_percent(mean.estimate)}"
    elif sides[0] == "incomparable":
        is_wide = (typical.high - typical.low) / 2 > limit
        noise, near = "the noise is larger than the tolerance", "the interval holds the tolerance"
        why = noise if is_wide else near
    elif sides[1] == "passed" and trend.low > limit:
        by = _percent(trend.estimate)
        why = f"the candidate gets slower by {by} than the reference as it runs, take longer runs"
    elif sides[1] == "passed":
        outcome, why = "passed", ""
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


def interval_of(values: Sequence[float]) -> Interval:
    """The median of `values`, each of one pair, and the k-th smallest and largest of them.

    The true median is below the k-th smallest where fewer than k of n are, each with chance 1/2.

    Raises:
        ValueError: fewer than `LEAST_PAIRS`, or one that is not finite.
    """
    number, ordered = len(values), sorted(values)
    if number < LEAST_PAIRS or not all(map(math.isfinite, values)):
        raise ValueError(f"Expected at least {LEAST_PAIRS} finite values, got {list(values)}.")
    place, below = 0, 1
    while 2 * (below + math.comb(number, place + 1)) <= (1 - CONFIDENCE) * 2**number:
        place += 1
        below += math.comb(number, place)
    return Interval(ordered[place], median(ordered), ordered[-1 - place])


def _percent(log: float) -> str:
    return f"{100 * math.expm1(log):.2g} %"


# --- figures ----------------------------------------------------------------------------------


def _noted(records: RankRecords) -> int:
    value = memory_notes(records).get("reserved_peak_bytes")
    return max(value, 0) if type(value) is int else 0


PEAKS: Mapping[str, Callable[[RankRecords], int]] = {
    "allocated": peak_bytes,
    "reserved": _noted,
    "device": lambda records: max((each.device_bytes or 0 for each in records.steps), default=0),
}
"""Peaks of one rank in bytes, 0 where nothing was measured: tensors, by the caching allocator (CPU:
live storage); what it has from the driver; used on the whole GPU, contexts and neighbours too."""


def _figures(
    legs: Mapping[str, Sequence[RunResult]], times: Mapping[str, Times], found: Speed
) -> dict[str, float]:
    ends = {"": found.typical.estimate, "_low": found.typical.low, "_high": found.typical.high}
    figures = {f"slowdown{end}": math.expm1(value) for end, value in ends.items()}
    figures |= {"mean_slowdown": math.expm1(found.mean.estimate), "pairs": len(legs["reference"])}
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
    slow, low, high = (100 * figures[f"slowdown{end}"] for end in ("", "_low", "_high"))
    digests = f" (without {1e3 * figures['digest_s']:.3g} ms of digests)"
    message = (
        f"a step takes {1e3 * figures['candidate_step_s']:.4g} ms against "
        f"{1e3 * figures['reference_step_s']:.4g}{digests if figures['digest_s'] else ''}, "
        f"{slow:+.2f} % ({100 * CONFIDENCE:.0f} % interval {low:+.2f} to {high:+.2f} % over "
        f"{figures['pairs']:.0f} pairs of runs), limit {100 * tolerance:+.3g} %"
    )
    a, b = (figures.get(f"{leg}_tflops_a_rank") for leg in ("candidate", "reference"))
    if a is not None and b is not None:
        message += f"; {a:.4g} TFLOP/s a rank against {b:.4g}"
    both = [[figures.get(f"{leg}_{name}_peak_bytes") for leg in ("candidate", "reference")]
            for name in PEAKS]  # fmt: skip
    deltas = [
        f"{name} {(theirs - ours) / 2**20:+.1f} MiB"
        for name, (theirs, ours) in zip(PEAKS, both, strict=True)
        if theirs is not None and ours is not None
    ]
    return message + (f"; peak {', '.join(deltas)}" if deltas else "")


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
    value = model["v_head_dim"] if model["attention"] == "mla" else model["head_dim"]
    attention = model["heads"] * (model["head_dim"] + value) * seq * (seq + 1) * model["layers"]
    return int(2 * seq * matrix_weights(model) + attention)


def matrix_weights(model: Mapping[str, Any]) -> int:
    """Elements of all matrices that one token is multiplied by."""
    hidden, layers, heads, head = (model[k] for k in ("hidden", "layers", "heads", "head_dim"))
    dense = model["first_dense_layers"] if model["experts"] else layers
    width = model["top_k"] * model["expert_ffn"] + model["shared_expert_ffn"]
    if model["attention"] == "gqa":
        attention = hidden * head * 2 * (heads + model["kv_heads"])
    else:
        latent, rope, value = model["kv_lora_rank"], model["qk_rope_head_dim"], model["v_head_dim"]
        rank = model["q_lora_rank"]
        attention = hidden * heads * head if rank is None else rank * (hidden + heads * head)
        attention += hidden * (latent + rope) + latent * heads * (model["qk_nope_head_dim"] + value)
        attention += heads * value * hidden
    mlps = dense * 3 * hidden * model["ffn"]
    mlps += (layers - dense) * hidden * (model["experts"] + 3 * width)
    return int(layers * attention + mlps + hidden * model["vocab_size"])
