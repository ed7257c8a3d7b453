"""What a soak proves: nothing failed in N replays, so failures are rarer than 3/N at 95 %.

    N           replays of the rank that made fewest; steps, of a run without graphs
    no failure  the candidate is whole and went on as long as was asked, every value and tensor is
                finite in every step, memory does not grow (`slope`), and no other check says no
    the bound   3/N, the rule of three (Hanley and Lippman-Hand 1983): were the rate p a replay, N
                replays without a failure had a chance of (1 - p)^N, which is below 5 % from
                p = 3/N on. It holds for failures that strike each replay alike.

Bits are compared in the steps that the reference has, too; how many is said.

Memory is that which the device's allocator counts, that which the driver counts on the whole GPU,
unless the run shares it, whose neighbours may grow, and that of the rank's process on the host.

Parameters: `max_leak_bytes`, growth of memory a step that is let pass, 0 by default.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.checks import finite
from harness.checks.answer import error, failed, not_run, passed
from harness.checks.evidence import rank_table
from harness.checks.slope import WINDOWS, slope_of
from harness.records import CheckResult, RankRecords, RunResult
from harness.shared_gpus import shares_gpus
from harness.soaking import LEAST_STEPS

NAME = "soak"
LEAST_DEVICE_GROWTH_BYTES = 32 << 20
"""Over the half that is tested, of what the driver counts: it hands out blocks of 2 MiB or more."""

LEAST_HOST_GROWTH_BYTES = 16 << 20
"""The same of the host, whose allocators keep what they are given back."""


@dataclass(frozen=True, kw_only=True)
class _Series:
    """One kind of memory of one rank."""

    kind: str
    rank: int
    values: tuple[int, ...]
    steps_apart: float
    least_growth_bytes: int


def check(
    reference: RunResult, candidate: RunResult, parameters: Mapping[str, object]
) -> CheckResult:
    """Judge the candidate's soak, whose records are taken to be whole."""
    limit = parameters.get("max_leak_bytes", 0)
    wrong = sorted(set(parameters) - {"max_leak_bytes"})
    if wrong or isinstance(limit, bool) or not isinstance(limit, int | float) or limit < 0:
        got = ", ".join(wrong) or repr(limit)
        return error(NAME, "unsupported", f"expected max_leak_bytes, a number >= 0, got {got}")
    if candidate.spec.soak is None:
        return error(NAME, "not_run", "the candidate was not soaked")
    number, unit = trials(candidate)
    if not number:
        return error(NAME, "not_run", "the candidate recorded no replay and no step")
    values = finite.check(reference, candidate, {})
    if values.outcome != "passed":
        return _of_finite(values)
    memory = _memory(candidate, float(limit))
    if memory.outcome != "passed":
        return memory
    steps = num_steps(candidate)
    compared = min(steps, num_steps(reference))
    bound = rate_bound(number)
    return passed(
        NAME,
        f"no failure in {number:,} {unit}: fewer than {bound:.2g} a {unit[:-1]} at 95 % "
        f"(rule of three); {steps:,} steps, bits compared in {compared:,}; {memory.message}",
        trials=number, rate_bound=bound, steps=steps, compared_steps=compared, **memory.figures,
    )  # fmt: skip


def withdrawn(result: CheckResult, others: Iterable[CheckResult]) -> CheckResult:
    """The same answer, unless it is a bound that another check's answer takes the ground from."""
    if result.outcome != "passed":
        return result
    for other in others:
        if other.outcome != "passed":
            return not_run(NAME, f"{other.check} did not pass: there is no bound to state")
    return result


def rate_bound(number: int) -> float:
    """Upper bound at 95 % of the rate of failures of which there was none in `number` trials."""
    return min(3.0 / number, 1.0)


def trials(run: RunResult) -> tuple[int, str]:
    """How many, of what: the fewest replays of a rank, or steps of a run without graphs."""
    ends = [records.end for records in run.ranks]
    if run.spec.config.get("graph"):
        return min((0 if end is None else end.replays for end in ends), default=0), "replays"
    return num_steps(run), "steps"


def num_steps(run: RunResult) -> int:
    """Steps that every rank recorded."""
    return min((len(records.steps) for records in run.ranks), default=0)


def _of_finite(result: CheckResult) -> CheckResult:
    if result.outcome == "failed":
        return failed(NAME, result.what, result.message, result.difference, **result.figures)
    return error(NAME, result.what, result.message)


def _memory(candidate: RunResult, limit: float) -> CheckResult:
    """No rank's memory grows; the worst is named if one does."""
    is_shared = shares_gpus(candidate)
    found = [
        (slope_of(series.values, series.steps_apart), series)
        for records in rank_table(candidate).values()
        for series in _series(records, is_shared=is_shared)
        if len(series.values) >= LEAST_STEPS
    ]
    if len({series.rank for _, series in found}) < len(candidate.ranks) or not found:
        return error(NAME, "not_run", f"growth of memory shows from {LEAST_STEPS} steps on")
    worst, series = max(found, key=lambda each: (each[0].grows(limit), each[0].bytes_per_step))
    figures = {"leak_bytes_per_step": worst.bytes_per_step, "leak_rank": float(series.rank)}
    growing = [
        (slope, series)
        for slope, series in found
        if slope.grows(max(limit, 2 * series.least_growth_bytes / _length(series)))
    ]
    if not growing:
        return passed(NAME, "memory does not grow", **figures)
    # What torch counts names the leak; that the driver sees it too only follows.
    worst, series = max(growing, key=lambda each: (each[1].kind == "live", each[0].bytes_per_step))
    first, last = series.values[len(series.values) // 2], series.values[-1]
    return failed(
        NAME,
        "memory_regression",
        f"{series.kind} memory of rank {series.rank} grows by {worst.bytes_per_step:,.0f} bytes a "
        f"step ({worst.bytes_per_step / 1024:.1f} KiB): {first:,} bytes in mid-run, {last:,} at "
        f"its end, {worst.rising} of {WINDOWS - 1} windows rising, Mann-Kendall "
        f"p = {worst.chance:.1g}",
        leak_bytes_per_step=worst.bytes_per_step, leak_rank=float(series.rank),
        leak_chance=worst.chance,
    )  # fmt: skip


def _length(series: _Series) -> float:
    return max(len(series.values) * series.steps_apart, 1.0)


def _series(records: RankRecords, *, is_shared: bool) -> Iterable[_Series]:
    live = tuple(record.live_bytes for record in records.steps)
    yield _Series(
        kind="live", rank=records.rank, values=live, steps_apart=1.0, least_growth_bytes=0
    )
    host = tuple(each.host_bytes for each in records.steps if each.host_bytes is not None)
    if len(host) == len(live):
        yield _Series(
            kind="host", rank=records.rank, values=host, steps_apart=1.0,
            least_growth_bytes=LEAST_HOST_GROWTH_BYTES,
        )  # fmt: skip
    used = [record for record in records.steps if record.device_bytes is not None]
    if len(used) > 1 and not is_shared:
        apart = (used[-1].step - used[0].step) / (len(used) - 1)
        yield _Series(
            kind="device-used", rank=records.rank,
            values=tuple(record.device_bytes or 0 for record in used),
            steps_apart=apart if math.isfinite(apart) and apart > 0 else 1.0,
            least_growth_bytes=LEAST_DEVICE_GROWTH_BYTES,
        )  # fmt: skip
