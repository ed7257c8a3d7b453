"""Speed and memory of the candidate beside the reference, from pairs of runs made alone in turn.

    run          the slowest rank's time of each step, the first `skip_steps` left out, less what
                 the step's digests take, which is no part of either program
    pair         two runs that were neighbours in time
    case         `speed`: estimates and intervals over pairs, against `max_slowdown`

    interval      0 ........ max_slowdown ........
    [------]      passed          |
                  no verdict  [---|----]
                  failed          |   [------]

A run is the unit: its steps share the mood of the machine, so a thousand of them say little more
than one, and are never counted as if they were independent. Which leg of a pair ran first
alternates, so that a machine that gets slower or faster by and by favours neither.

The interval misses the true slow-down in at most 1 of 20 cases, on each side in 1 of 40. So a
candidate that is slower than the tolerance, in its median or its mean step, passes in at most 1 of
40 cases; one as slow as the tolerance allows, or faster, fails in at most 1 of 32 (the means add 1
of 2 to the power of pairs). What the noise leaves open is no verdict: more pairs, or a machine left
alone, decide it. `MEASURES.md` has the rates as they were measured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from harness.checks.answer import error, failed, passed
from harness.checks.complete import NO_BLAME, failure_of_machine, find_flaw
from harness.checks.limits import (
    DEFAULT_MAX_SLOWDOWN,
    DEFAULT_SKIP_STEPS,
    THROUGHPUT,
    TIMED_STEPS,
)
from harness.checks.memory import peak_bytes
from harness.checks.speed import Speed, judge
from harness.flops import step_flops
from harness.infrastructure import shares_gpus
from harness.paired import CONFIDENCE, LEAST_PAIRS
from harness.records import CheckResult, RankRecords, RunResult

NAME = "throughput"
MEMORY_EVENT = "memory"
DIGEST_EVENT = "digest_time"
MOST_DIGESTS = 0.8
"""Part of the shortest step that digests are believed to take."""
MIB = 1 << 20

PEAKS: Mapping[str, Callable[[RankRecords], int]] = {
    "allocated": peak_bytes,
    "reserved": lambda records: _noted(records, "reserved_peak_bytes"),
    "device": lambda records: max((each.device_bytes or 0 for each in records.steps), default=0),
}
"""Peaks of one rank in bytes, 0 where nothing was measured.

    allocated   tensors, by the caching allocator (CPU: live storage)
    reserved    what the allocator has from the driver
    device      used on the whole GPU, as NVML counts: contexts, NCCL and neighbours too
"""


def check(
    references: Sequence[RunResult],
    candidates: Sequence[RunResult],
    parameters: Mapping[str, object],
) -> CheckResult:
    """Compare step times of pairs of runs.

    Args:
        references: timed runs of the reference.
        candidates: timed runs of the candidate, each made next to the reference of its number.
        parameters: `max_slowdown`, a fraction; `skip_steps` of every run; `repeats`.

    Returns:
        `passed` or `failed` (`throughput_regression`) where the interval is clear of the tolerance,
        `incomparable` (`noisy`) where it is not.
    """
    limits = _limits(parameters)
    if isinstance(limits, CheckResult):
        return limits
    tolerance, skipped = limits
    if len(references) != len(candidates) or len(references) < LEAST_PAIRS:
        got = f"{len(references)} of the reference and {len(candidates)} of the candidate"
        return error(NAME, "not_run", f"expected {LEAST_PAIRS} pairs of runs or more, got {got}")
    flaw = _first_flaw("reference", references) or _first_flaw("candidate", candidates)
    if flaw is not None:
        return flaw
    if any(shares_gpus(run) for run in (*references, *candidates)):
        return _not_judged("ranks shared GPUs and took turns on them")
    times = [[step_times(run, skipped) for run in leg] for leg in (references, candidates)]
    if not all(seconds for leg in times for seconds in leg):
        least = skipped + TIMED_STEPS
        return error(NAME, "not_run", f"expected at least {least} steps with a time > 0 in a run")
    digests = min(digest_seconds(run) for run in (*references, *candidates))
    digests = min(digests, MOST_DIGESTS * min(min(steps) for leg in times for steps in leg))
    bare = [[[second - digests for second in steps] for steps in leg] for leg in times]
    return _answer(references, candidates, bare[0], bare[1], tolerance, digests)


def _not_judged(why: str) -> CheckResult:
    return CheckResult(
        check=NAME, outcome="incomparable", what="noisy",
        message=f"{why}, so the speed is not judged",
    )  # fmt: skip


def _answer(
    references: Sequence[RunResult],
    candidates: Sequence[RunResult],
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
    tolerance: float,
    digests: float,
) -> CheckResult:
    found = judge(ours, theirs, tolerance)
    figures = _figures(references, candidates, ours, theirs, found) | {"digest_s": digests}
    message = _words(figures, len(ours), tolerance)
    if found.outcome == "passed":
        return passed(NAME, message, **figures)
    if found.outcome == "failed":
        message = f"{message}; {found.why}" if found.why else message
        return failed(NAME, "throughput_regression", message, None, **figures)
    return CheckResult(
        check=NAME, outcome="incomparable", what="noisy", figures=figures,
        message=f"{found.why}, so the speed is not judged: {message}; "
        "more repeats or a machine left alone would tell",
    )  # fmt: skip


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
        events = [event for event in rank.events if event.name == DIGEST_EVENT]
        value = events[0].detail.get("seconds") if events else None
        is_time = isinstance(value, float) and math.isfinite(value) and value > 0
        found.append(float(str(value)) if is_time else 0.0)
    return min(found, default=0.0)


def _limits(parameters: Mapping[str, object]) -> tuple[float, int] | CheckResult:
    if wrong := sorted(set(parameters) - set(THROUGHPUT)):
        got = ", ".join(wrong)
        return error(NAME, "unsupported", f"expected {', '.join(THROUGHPUT)}, got {got}")
    tolerance = parameters.get("max_slowdown", DEFAULT_MAX_SLOWDOWN)
    skipped = parameters.get("skip_steps", DEFAULT_SKIP_STEPS)
    is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not (is_number and 0 < float(str(tolerance)) < math.inf):
        return error(NAME, "unsupported", f"max_slowdown: expected a number > 0, got {tolerance!r}")
    if not isinstance(skipped, int) or isinstance(skipped, bool) or skipped < 0:
        return error(NAME, "unsupported", f"skip_steps: expected an integer >= 0, got {skipped!r}")
    return float(str(tolerance)), skipped


def _first_flaw(leg: str, runs: Sequence[RunResult]) -> CheckResult | None:
    for number, run in enumerate(runs):
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


def _noted(records: RankRecords, name: str) -> int:
    """A number of the rank's event `memory`; 0 if there is none."""
    for event in records.events:
        value = event.detail.get(name) if event.name == MEMORY_EVENT else None
        if isinstance(value, int) and not isinstance(value, bool):
            return max(value, 0)
    return 0


def _figures(
    references: Sequence[RunResult],
    candidates: Sequence[RunResult],
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
    found: Speed,
) -> dict[str, float]:
    figures = {
        "slowdown": math.expm1(found.typical.estimate),
        "slowdown_low": math.expm1(found.typical.low),
        "slowdown_high": math.expm1(found.typical.high),
        "mean_slowdown": math.expm1(found.mean.estimate),
        "confidence": found.typical.confidence,
        "pairs": float(len(ours)),
    }
    for leg, runs, times in (
        ("reference", references, [median(steps) for steps in ours]),
        ("candidate", candidates, [median(steps) for steps in theirs]),
    ):
        figures[f"{leg}_step_s"] = median(times)
        flops = step_flops(runs[0].spec.config)
        if flops is not None:
            ranks = runs[0].spec.world_size
            figures[f"{leg}_tflops_a_rank"] = flops / ranks / median(times) / 1e12
        for name, peak in PEAKS.items():
            worst = [max(map(peak, run.ranks)) for run in runs]
            if min(worst) > 0:
                figures[f"{leg}_{name}_peak_bytes"] = float(median(worst))
    return figures


def _words(figures: Mapping[str, float], pairs: int, tolerance: float) -> str:
    slow, low, high = (
        100 * figures[name] for name in ("slowdown", "slowdown_low", "slowdown_high")
    )
    parts = [
        f"a step takes {1e3 * figures['candidate_step_s']:.4g} ms against "
        f"{1e3 * figures['reference_step_s']:.4g}"
        f"{_without_digests(figures['digest_s'])}, {slow:+.2f} % "
        f"({100 * CONFIDENCE:.0f} % interval {low:+.2f} to {high:+.2f} % over {pairs} pairs of "
        f"runs), limit {100 * tolerance:+.3g} %"
    ]
    if "candidate_tflops_a_rank" in figures:
        parts.append(
            f"{figures['candidate_tflops_a_rank']:.4g} TFLOP/s a rank against "
            f"{figures['reference_tflops_a_rank']:.4g}"
        )
    deltas = [
        f"{name} {(figures[theirs] - figures[ours]) / MIB:+.1f} MiB"
        for name in PEAKS
        if (ours := f"reference_{name}_peak_bytes") in figures
        and (theirs := f"candidate_{name}_peak_bytes") in figures
    ]
    if deltas:
        parts.append(f"peak {', '.join(deltas)}")
    return "; ".join(parts)


def _without_digests(seconds: float) -> str:
    return f" (without {1e3 * seconds:.3g} ms of digests)" if seconds else ""
