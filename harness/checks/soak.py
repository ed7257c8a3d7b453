"""What a soak proves: a bound on the rate of failures, and memory that does not grow.

Nothing failed in N replays (steps, without a graph), so failures are rarer than 3/N at 95 % (rule
of three: Hanley and Lippman-Hand 1983): at a rate p, N replays go well with a chance of (1 - p)^N.
Every value is finite in every step, and the memory of no rank grows: what torch counts, what the
driver counts on a GPU of its own, and the process's own. docs/ARCHITECTURE.md says when a series
grows, benchmarks/README.md how often that test errs.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from harness.checks import Option, check
from harness.checks.evidence import Options, Runs, error, failed, passed, rank_table
from harness.checks.exact import finite
from harness.infrastructure import shares_gpus
from harness.records import CheckResult, RankRecords, RunResult
from harness.soaking import LEAST_STEPS, taking_turns

SOAK = "soak"
LEAST_GROWTH_BYTES = {"live": 0, "host": 16 << 20, "device-used": 32 << 20}
"""Over the half that is tested: the driver hands out blocks of 2 MiB or more, and the host's
allocators keep what they are given back."""


@check(
    SOAK, "a bound on the rate of failures, and memory that does not grow; with section `soak`",
    options={"max_leak_bytes": Option(doc="growth a step that is let pass; 0 if left out")},
    is_claim=True,
)  # fmt: skip
def soak(runs: Runs, options: Options) -> CheckResult:
    """Judge the candidate's soak, whose records are taken to be whole."""
    reference, candidate = runs.reference, runs.candidate
    if candidate.spec.soak is None:
        return error(SOAK, "not_run", "the candidate was not soaked")
    steps = num_steps(candidate)
    number, unit = steps, "steps"
    if candidate.spec.config.get("graph"):
        # Ranks of other stages replay more graphs: each of theirs is no trial of its own.
        replays = [0 if r.end is None else r.end.replays for r in candidate.ranks]
        number, unit = min(replays, default=0), "replays"
    if not number:
        return error(SOAK, "not_run", "the candidate recorded no replay and no step")
    values = finite(reference, candidate)
    if values.outcome != "passed":
        return replace(values, check=SOAK)
    memory = _memory(candidate, options.get("max_leak_bytes", 0))
    if memory.outcome != "passed":
        return memory
    bound, compared = min(3.0 / number, 1.0), min(steps, num_steps(reference))
    message = (
        f"no failure in {number:,} {unit}: fewer than {bound:.2g} a {unit[:-1]} at 95 % "
        f"(rule of three); {steps:,} steps, bits compared in {compared:,}; {memory.message}"
    )
    return passed(
        SOAK, message, trials=number, rate_bound=bound, steps=steps, compared_steps=compared,
        **memory.figures,
    )  # fmt: skip


def num_steps(run: RunResult) -> int:
    """Steps that every rank recorded."""
    return min((len(records.steps) for records in run.ranks), default=0)


def missed_turns(run: RunResult) -> CheckResult | None:
    """An error that names stressors that had no turn on some rank: they prove nothing."""
    soak, stress = run.spec.soak, run.spec.config.get("stress")
    if soak is None or not soak.turn_steps or not isinstance(stress, list | tuple):
        return None
    due = taking_turns([str(name) for name in stress])
    for rank, records in rank_table(run).items():
        turns = (e.detail.get("stress") for e in records.events if e.name == "turn")
        had = {name for names in turns if isinstance(names, list | tuple) for name in names}
        if missed := [name for name in due if name not in had]:
            message = f"{', '.join(missed)} never had a turn on rank {rank} in {len(records.steps)}"
            message += f" steps: expected {len(due)} turns of {soak.turn_steps} steps at least; "
            return error("turns", "not_run", f"{message}make soak.period shorter or steps more")
    return None


class _Series(NamedTuple):
    """One kind of memory of one rank."""

    kind: str
    rank: int
    values: Sequence[int]
    steps_apart: float = 1.0


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
        return error(SOAK, "not_run", f"growth of memory shows from {LEAST_STEPS} steps on")
    growing = [
        (slope, series)
        for slope, series in found
        # Over the half that is tested.
        if slope.grows(max(limit, 2 * LEAST_GROWTH_BYTES[series.kind] / len(series.values)
                           / series.steps_apart))
    ]  # fmt: skip
    # What torch counts names the leak; that the driver sees it too only follows.
    slope, series = max(
        growing or found, key=lambda each: (each[1].kind == "live", each[0].bytes_per_step)
    )
    figures = {"leak_bytes_per_step": slope.bytes_per_step, "leak_rank": float(series.rank)}
    if not growing:
        return passed(SOAK, "memory does not grow", **figures)
    first, last = series.values[len(series.values) // 2], series.values[-1]
    message = (
        f"{series.kind} memory of rank {series.rank} grows by {slope.bytes_per_step:,.0f} bytes a "
        f"step ({slope.bytes_per_step / 1024:.1f} KiB): {first:,} bytes in mid-run, {last:,} at "
        f"its end, {slope.rising} of {WINDOWS - 1} windows rising"
    )
    return failed(SOAK, "memory_regression", message, **figures)


def _series(records: RankRecords, *, is_shared: bool) -> Iterator[_Series]:
    rank, steps = records.rank, records.steps
    yield _Series("live", rank, [each.live_bytes for each in steps])
    host = [each.host_bytes for each in steps if each.host_bytes is not None]
    if len(host) == len(steps):
        yield _Series("host", rank, host)
    used = [(each.step, each.device_bytes) for each in steps if each.device_bytes is not None]
    if len(used) > 1 and not is_shared:
        apart = (used[-1][0] - used[0][0]) / (len(used) - 1)
        yield _Series("device-used", rank, [value for _, value in used], max(apart, 1.0))


# --- does a series grow? ----------------------------------------------------------------------

WINDOWS = 16
EARLIER = WINDOWS // 2  # of the second quarter, as long as those
TREND = 79  # pairs of windows that rise, less those that fall: of one in 10,000 orders
JUMP_DEVIATIONS = 5.0  # of a normal distribution's increments one in 1,500 is so far off


@dataclass(frozen=True, kw_only=True)
class Slope:
    """What a series does in its second half."""

    bytes_per_step: float  # Theil-Sen slope
    trend: int  # pairs of windows that rise, less those that fall
    rising: int  # increments between windows that are positive, of `WINDOWS` - 1
    goes_on: bool  # whether the end rises at half the pace before it, at least
    stands_out: bool  # whether it ends higher than ever, by more than noise

    def grows(self, limit: float = 0.0) -> bool:
        """Whether it grows by more than `limit` bytes a step."""
        is_trend = self.trend >= TREND and 2 * self.rising > WINDOWS - 1
        return is_trend and self.goes_on and self.stands_out and self.bytes_per_step > limit


def slope_of(series: Sequence[float], steps_apart: float = 1.0) -> Slope:
    """Test bytes at times so many steps apart; a ValueError of fewer than `LEAST_STEPS`."""
    if len(series) < LEAST_STEPS:
        raise ValueError(f"Expected {LEAST_STEPS} values at least, got {len(series)}.")
    late = series[len(series) // 4 :]
    # Of one length, or a longer window's share of a leak would count as a jump.
    length, over = divmod(len(late), EARLIER + WINDOWS)
    windows = [late[at : at + length] for at in range(over, len(late), length)]
    found = [min(w) for w in windows]
    smooth = without_jumps(found)
    minima, half, a_window = smooth[EARLIER:], WINDOWS // 2, length * steps_apart
    first, last, slope = (
        theil_sen(part) / a_window for part in (minima[:half], minima[half:], minima)
    )
    growth = slope * a_window * (WINDOWS - 1)
    swing = median(max(w) - min(w) for w in windows[EARLIER:]) - slope * a_window
    return Slope(
        bytes_per_step=slope,
        trend=sum((b > a) - (b < a) for a, b in itertools.combinations(minima, 2)),
        rising=sum(b > a for a, b in itertools.pairwise(minima)),
        goes_on=last > 0 and last >= first / 2,
        stands_out=growth > swing
        and all(each[-1] - max(each[:EARLIER]) >= growth / 2 for each in (found, smooth)),
    )


def without_jumps(values: Sequence[float]) -> list[float]:
    """The usual increment in the place of each far above it; falls stay, for sawteeth."""
    increments = [b - a for a, b in itertools.pairwise(values)]
    middle = median(increments)
    most = middle + JUMP_DEVIATIONS * median(abs(each - middle) for each in increments)
    # Of those that are none: jumps move the median of all.
    usual = median(each for each in increments if each <= most)
    kept = [each if each <= most else usual for each in increments]
    return list(itertools.accumulate(kept, initial=values[0]))


def theil_sen(values: Sequence[float]) -> float:
    """Median of the slopes of all pairs of values that are 1 apart."""
    pairs = itertools.combinations(enumerate(values), 2)
    return median((b - a) / (at_b - at_a) for (at_a, a), (at_b, b) in pairs)
