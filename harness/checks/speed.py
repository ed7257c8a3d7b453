"""Speed of the candidate against the reference, from pairs of runs made alone in turn.

A run is the unit: its steps share the mood of the machine, and are never counted as independent. A
pair of runs, neighbours in time, gives one slow-down: the log of a ratio, of the medians over steps
and of the means. An interval between order statistics of the pairs must lie below `max_slowdown` to
pass, and above it to fail. How often that errs: benchmarks/README.md, "Statistics".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from harness.checks.bits import loss, state
from harness.checks.complete import NO_BLAME, failure_of_machine, find_flaw, shares_gpus
from harness.checks.evidence import (
    Option,
    Options,
    Runs,
    alike,
    check,
    error,
    failed,
    incomparable,
    passed,
)
from harness.checks.memory import memory_notes, peak_bytes
from harness.records import CheckResult, RankRecords, RunResult, What
from harness.repeats import timed_pairs

NAME = "throughput"
MAX_SLOWDOWN = 0.05
SKIP_STEPS = 5
MOST_DIGESTS = 0.8  # part of the shortest step that digests are believed to take
TIMED_STEPS = 3  # that must be left of a run when the first ones are skipped
LEFT_OUT = 20  # of so many steps the longest is left out of a run's mean, and one of fewer
CONFIDENCE = 0.95
LEAST_PAIRS = 6  # of five even the widest interval is not as sure as `CONFIDENCE`
MAX_REPEATS = 50
Times = Sequence[Sequence[float]]  # seconds of the timed steps of each run, all > 0
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
    if (flaw := _untimed(legs)) is not None:
        return flaw
    times = {leg: [step_times(run, skipped) for run in made] for leg, made in legs.items()}
    if not all(seconds for made in times.values() for seconds in made):
        least = f"at least {skipped + TIMED_STEPS} steps with a time > 0 in a run"
        return error(NAME, "not_run", f"expected {least}")
    shortest = min(min(steps) for made in times.values() for steps in made)
    digests = min(*map(digest_seconds, runs.repeats), MOST_DIGESTS * shortest)
    times = {leg: [[s - digests for s in steps] for steps in made] for leg, made in times.items()}
    found = judge(times["reference"], times["candidate"], tolerance)
    figures = _figures(legs, times, found) | {"digest_s": digests}
    message = f"{_words(figures)}, limit {100 * tolerance:+.3g} %"
    if found.outcome == "passed":
        return passed(NAME, message, **figures)
    if found.outcome == "failed":
        return failed(NAME, "throughput_regression", f"{message}{found.why}", **figures)
    message = f"{found.why}, so the speed is not judged: {message}"
    return incomparable(NAME, "noisy", message, **figures)


def _untimed(legs: Mapping[str, Sequence[RunResult]]) -> CheckResult | None:
    """Why the times must not be judged; None if they may."""
    ours, theirs = map(len, legs.values())
    if ours != theirs or ours < LEAST_PAIRS:
        got = f"{ours} of the reference and {theirs} of the candidate"
        return error(NAME, "not_run", f"expected {LEAST_PAIRS} pairs of runs or more, got {got}")
    repeats = [run for pair in zip(*legs.values(), strict=True) for run in pair]
    for place, run in enumerate(repeats):
        if (flaw := find_flaw(run)) is None:
            continue
        message = f"{_name(place)} did not finish: {flaw.message}"
        if failure := failure_of_machine(run, flaw):
            return error(NAME, flaw.what, f"{message}; the machine failed ({failure})")
        is_blamed = place % 2 and flaw.what not in NO_BLAME
        return (failed if is_blamed else error)(NAME, flaw.what, message)
    if any(map(shares_gpus, repeats)):
        return incomparable(NAME, "noisy", "ranks shared GPUs, so the speed is not judged")
    return None


def _name(place: int) -> str:
    return f"repeat {place // 2} of the {'candidate' if place % 2 else 'reference'}"


def same_bits(runs: Runs) -> CheckResult:
    """Are timed repeats the runs that they repeat? Same environment, same bits as the reference.

    A repeat of the candidate that differs is a failure, one of the reference makes the reference
    nondeterministic. Repeats that are not whole are left to `throughput`, which names them.
    """
    case, reference, repeats = runs.case, runs.reference, runs.repeats
    due = [spec for pair in timed_pairs(case) for spec in pair]
    if [run.spec.key for run in repeats] != [spec.key for spec in due]:
        message = f"expected {case.repeats} pairs of the case's repeats"
        return error("repeats", "corrupt_record", message)
    for place, run in enumerate(repeats):
        if find_flaw(run) is not None:
            continue
        same = alike(reference, run, _name(place))
        if same.outcome != "passed":
            return replace(same, check="repeats")
        for differs in (state(reference, run), loss(reference, run)):
            if differs.outcome == "passed":
                continue
            found = replace(differs, check="repeats", message=f"{_name(place)}: {differs.message}")
            if place % 2 or differs.outcome != "failed":
                return found
            message = f"the reference differs from one of its repeats: {found.message}"
            what: What = "nondeterministic_reference"
            return incomparable("repeats", what, message, found.difference, **found.figures)
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


def typical_step_s(run: RunResult) -> float | None:
    """Median over the later half of the steps of a run that ended well; None of less than three."""
    number = max((len(rank.steps) for rank in run.ranks), default=0)
    times = step_times(run, min(number // 2, max(number - TIMED_STEPS, 0)))
    return median(times) if times and not run.outcome.what else None


def digest_seconds(run: RunResult) -> float:
    """What the digests of a step take at least, on any rank; 0 if a rank does not say."""
    said = ([each["seconds"] for each in rank.said("digest_time")] for rank in run.ranks)
    return min((found[0] if found else 0.0 for found in said), default=0.0)


# --- is one program slower than another? ------------------------------------------------------


class Interval(NamedTuple):
    """Of a slow-down, a log: the median of the pairs, and an interval around it."""

    low: float
    estimate: float
    high: float


class Speed(NamedTuple):
    """The answer, the slow-downs of the median and the mean step, and a reason or ""."""

    outcome: Outcome
    typical: Interval
    mean: Interval
    why: str


def judge(ours: Times, theirs: Times, tolerance: float) -> Speed:
    """Whether the runs `theirs` are slower than `ours`, pair by pair, by more than a fraction."""
    limit = math.log1p(tolerance)

    def slowdown(one: Callable[[Sequence[float]], float]) -> Interval:
        return interval_of([math.log(one(b) / one(a)) for a, b in zip(ours, theirs, strict=True)])

    typical, mean, whole = slowdown(median), slowdown(mean_step), slowdown(fmean)
    trend, whole_trend = (slowdown(partial(_growth, one)) for one in (mean_step, fmean))
    for found, grows, why in (
        (typical, trend, ""), (mean, trend, "; the mean step is slower by {}"),
        (whole, whole_trend, "; with its longest steps the mean is slower by {}"),
    ):  # fmt: skip
        if side_of(found, limit) == "failed":
            if grows.high < -limit:
                faster = f"the candidate gets faster by {_percent(grows.estimate)} as it runs"
                return Speed("incomparable", typical, mean, f"{faster}, skip more steps")
            return Speed("failed", typical, mean, why.format(_percent(found.estimate)))
    is_wide = (typical.high - typical.low) / 2 > limit
    rules = (
        (side_of(typical, limit) != "passed", "the noise is larger than the tolerance" if is_wide
         else "the interval holds the tolerance"),
        (side_of(mean, limit) != "passed",
         f"long steps leave open whether the mean step is slower, by {_percent(mean.high)}"),
        (trend.low > limit, f"the candidate gets slower by {_percent(trend.estimate)} than the "
         "reference as it runs, take longer runs"),
    )  # fmt: skip
    why = next((why for is_open, why in rules if is_open), "")
    return Speed("incomparable" if why else "passed", typical, mean, why)


def _percent(log: float) -> str:
    return f"{100 * abs(math.expm1(log)):.2g} %"


def side_of(found: Interval, limit: float) -> Outcome:
    """On which side of the limit an interval of logs lies, if it is not too wide to say."""
    width = found.high - found.low
    clear = width if width / 2 > limit else 0.0
    if found.high <= limit - clear:
        return "passed"
    return "failed" if found.low > limit + clear else "incomparable"


def mean_step(seconds: Sequence[float]) -> float:
    """Mean over steps but the longest: a disturbance of some runs does not widen its interval."""
    kept = sorted(seconds)[: len(seconds) - math.ceil(len(seconds) / LEFT_OUT)]
    return fmean(kept or seconds)


def _growth(one: Callable[[Sequence[float]], float], seconds: Sequence[float]) -> float:
    """How much longer one step of the last third takes than of the first."""
    third = max(1, len(seconds) // 3)
    return one(seconds[-third:]) / one(seconds[:third])


def interval_of(values: Sequence[float]) -> Interval:
    """The median of `values`, each of one pair, and the k-th smallest and largest of them.

    The true median is below the k-th smallest where fewer than k of n are, each with chance 1/2.
    """
    number, ordered = len(values), sorted(values)
    place, below = 0, 1
    while 2 * (below + math.comb(number, place + 1)) <= (1 - CONFIDENCE) * 2**number:
        place += 1
        below += math.comb(number, place)
    return Interval(ordered[place], median(ordered), ordered[-1 - place])


# --- figures ----------------------------------------------------------------------------------

PEAKS: Mapping[str, Callable[[RankRecords], int]] = {
    "allocated": peak_bytes,
    "reserved": lambda records: memory_notes(records).get("reserved_peak_bytes", 0),
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


def _words(figures: Mapping[str, float]) -> str:
    slow, low, high = (100 * figures[f"slowdown{end}"] for end in ("", "_low", "_high"))
    digests = f" (without {1e3 * figures['digest_s']:.3g} ms of digests)"
    message = f"a step takes {1e3 * figures['candidate_step_s']:.4g} ms against "
    message += f"{1e3 * figures['reference_step_s']:.4g}{digests if figures['digest_s'] else ''}"
    kinds = {"tflops_a_rank": (1.0, "TFLOP/s a rank")}
    kinds |= {f"{name}_peak_bytes": (2.0**20, f"MiB {name} at the peak") for name in PEAKS}
    for name, (unit, noun) in kinds.items():
        theirs, ours = (figures.get(f"{leg}_{name}") for leg in ("candidate", "reference"))
        if theirs is not None and ours is not None:
            message += f"; {theirs / unit:.4g} {noun} against {ours / unit:.4g}"
    message += f"; {slow:+.2f} % slower ({100 * CONFIDENCE:.0f} % interval {low:+.2f} to "
    return f"{message}{high:+.2f} % over {figures['pairs']:.0f} pairs of runs)"


def step_flops(config: Mapping[str, Any]) -> float | None:
    """Model FLOPs of one step of all ranks of a plain `TrainConfig`; None for packed documents.

    As in Chowdhery et al., PaLM, 2022, appendix B: a multiply-add is 2 FLOPs; the backward pass
    costs twice the forward pass; matrices and attention count, dropped tokens too. A causal mask is
    counted as what it leaves: T (T + 1) / 2 pairs of query and key of a sequence of T tokens.
    """
    model, parallel = config["model"], config["parallel"]
    if parallel["dynamic_cp"]:
        return None
    seq, layers, head = model["seq"], model["layers"], model["head_dim"]
    value = model["v_head_dim"] if model["attention"] == "mla" else head
    pairs = model["heads"] * (head + value) * seq * (seq + 1) * layers
    replicas = parallel["dp_outer"] * parallel["dp"]
    sequences = config["microbatches"] * config["micro_batch_size"] * replicas
    return float(3 * sequences * (2 * seq * matrix_weights(model) + pairs))


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
