"""What a soak proves: nothing failed in N replays, so failures are rarer than 3/N at 95 %.

    N           replays of the rank that made fewest; steps, of a run without graphs
    no failure  the candidate is whole and went on as long as was asked, every value and tensor is
                finite in every step, memory does not grow, and no other check says no
    the bound   3/N, the rule of three (Hanley and Lippman-Hand 1983): were the rate p a replay, N
                replays without a failure had a chance of (1 - p)^N, which is below 5 % from
                p = 3/N on. It holds for failures that strike each replay alike.

Bits are compared in the steps that the reference has, too. Memory is what the device's allocator
counts, what the driver counts on the whole GPU, unless the run shares it, and the process's own.

Memory grows, by a test of a series of bytes, one a step, that knows no model of noise, if:

    first quarter           left out: warm-up, captures, caches that fill
    the rest                cut into 24 windows of one length; of each the least value: what a step
                            holds for a while, a sawtooth, a late free show in single values
    jumps taken off         an increment between windows that is above the usual one by more than 5
                            times what increments differ by (median absolute deviation) is an
                            allocation that stays; the usual one takes its place
    second half             the last 16 of these minima are tested:
    trend                   Mann-Kendall, one-sided (Mann 1945, Kendall 1975), by the exact
                            distribution of its statistic; ties make large values rarer
    most windows rise       more than half of the 15 increments: a stair of few is no leak
    it goes on              the slope of the last 8 minima is at least half of that of the first 8:
                            what fills up slows down
    higher than ever        the last minimum is above those of the second quarter by half of what
                            the slope gives over the second half, with and without jumps
    more than noise         that growth is more than a window's median swing
    slope                   Theil-Sen, the median over all pairs (Theil 1950, Sen 1968), above the
                            limit

The level is 1e-4 a series. SLOPE.md has false alarms and power over kinds of series, and the
command that measures them. No test can tell from a leak: memory that is given back less than once
in the run, and caches that are still filling at its end.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.checks.evidence import Options, error, failed, not_run, passed, rank_table
from harness.checks.exact import finite
from harness.infrastructure import shares_gpus
from harness.records import CheckResult, RankRecords, RunResult
from harness.soaking import LEAST_STEPS

NAME = "soak"
LEAST_DEVICE_GROWTH_BYTES = 32 << 20
"""Over the half that is tested, of what the driver counts: it hands out blocks of 2 MiB or more."""
LEAST_HOST_GROWTH_BYTES = 16 << 20
"""The same of the host, whose allocators keep what they are given back."""
LEVEL = 1e-4
"""Of the trend test, for one series."""
JUMP_DEVIATIONS = 5.0
"""Of a normal distribution's increments one in 1,500 is so far off."""
WINDOWS = 16
EARLIER = WINDOWS // 2
"""Windows of the second quarter, as long as those."""


def soak(reference: RunResult, candidate: RunResult, options: Options) -> CheckResult:
    """Judge the candidate's soak, whose records are taken to be whole.

    Args:
        options: `max_leak_bytes`, growth of memory a step that is let pass, 0 by default.
    """
    if candidate.spec.soak is None:
        return error(NAME, "not_run", "the candidate was not soaked")
    number, unit = trials(candidate)
    if not number:
        return error(NAME, "not_run", "the candidate recorded no replay and no step")
    values = finite(reference, candidate)
    if values.outcome != "passed":
        return replace(values, check=NAME)
    memory = _memory(candidate, float(str(options.get("max_leak_bytes", 0))))
    if memory.outcome != "passed":
        return memory
    steps = num_steps(candidate)
    compared, bound = min(steps, num_steps(reference)), rate_bound(number)
    message = (
        f"no failure in {number:,} {unit}: fewer than {bound:.2g} a {unit[:-1]} at 95 % "
        f"(rule of three); {steps:,} steps, bits compared in {compared:,}; {memory.message}"
    )
    return passed(
        NAME, message, trials=number, rate_bound=bound, steps=steps, compared_steps=compared,
        **memory.figures,
    )  # fmt: skip


def withdrawn(result: CheckResult, others: Iterable[CheckResult]) -> CheckResult:
    """The same answer, unless it is a bound that another check's answer takes the ground from."""
    for other in others if result.outcome == "passed" else ():
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


# --- memory of every rank ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Series:
    """One kind of memory of one rank."""

    kind: str
    rank: int
    values: Sequence[int]
    least_growth_bytes: int
    steps_apart: float = 1.0

    @property
    def least_slope(self) -> float:
        """In bytes a step, over the half that is tested."""
        return 2 * self.least_growth_bytes / max(len(self.values) * self.steps_apart, 1.0)


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
    growing = [each for each in found if each[0].grows(max(limit, each[1].least_slope))]
    # What torch counts names the leak; that the driver sees it too only follows.
    worst, series = max(
        growing or found,
        key=lambda each: (
            each[1].kind == "live" if growing else each[0].grows(limit), each[0].bytes_per_step
        ),
    )  # fmt: skip
    figures = {"leak_bytes_per_step": worst.bytes_per_step, "leak_rank": float(series.rank)}
    if not growing:
        return passed(NAME, "memory does not grow", **figures)
    first, last = series.values[len(series.values) // 2], series.values[-1]
    message = (
        f"{series.kind} memory of rank {series.rank} grows by {worst.bytes_per_step:,.0f} bytes a "
        f"step ({worst.bytes_per_step / 1024:.1f} KiB): {first:,} bytes in mid-run, {last:,} at "
        f"its end, {worst.rising} of {WINDOWS - 1} windows rising, Mann-Kendall "
        f"p = {worst.chance:.1g}"
    )
    return failed(NAME, "memory_regression", message, **figures, leak_chance=worst.chance)


def _series(records: RankRecords, *, is_shared: bool) -> Iterator[_Series]:
    rank, live = records.rank, [record.live_bytes for record in records.steps]
    yield _Series("live", rank, live, 0)
    host = [each.host_bytes for each in records.steps if each.host_bytes is not None]
    if len(host) == len(live):
        yield _Series("host", rank, host, LEAST_HOST_GROWTH_BYTES)
    used = [
        (each.step, each.device_bytes) for each in records.steps if each.device_bytes is not None
    ]
    if len(used) > 1 and not is_shared:
        apart = (used[-1][0] - used[0][0]) / (len(used) - 1)
        values = [value for _, value in used]
        yield _Series("device-used", rank, values, LEAST_DEVICE_GROWTH_BYTES, max(apart, 1.0))


# --- does a series grow? ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Slope:
    """What a series does.

    Attributes:
        bytes_per_step: Theil-Sen slope of its second half.
        chance: of a trend as strong or stronger in a series without one.
        rising: increments between windows that are positive, of `WINDOWS` - 1.
        goes_on: whether the end rises at half the pace before it, at least.
        stands_out: whether it ends higher than ever, by more than noise.
    """

    bytes_per_step: float
    chance: float
    rising: int
    goes_on: bool
    stands_out: bool

    def grows(self, limit: float = 0.0) -> bool:
        """Whether it grows by more than `limit` bytes a step."""
        is_trend = self.chance <= LEVEL and 2 * self.rising > WINDOWS - 1
        is_lasting = self.goes_on and self.stands_out
        return is_trend and is_lasting and self.bytes_per_step > limit


def slope_of(series: Sequence[float], steps_apart: float = 1.0) -> Slope:
    """Test a series.

    Args:
        series: bytes, `LEAST_STEPS` values at least.
        steps_apart: steps between two values.

    Raises:
        ValueError: too few values.
    """
    if len(series) < LEAST_STEPS:
        raise ValueError(f"Expected {LEAST_STEPS} values at least, got {len(series)}.")
    late = series[len(series) // 4 :]
    # Of one length, or a longer window's share of a leak would count as a jump.
    length, over = divmod(len(late), EARLIER + WINDOWS)
    edges = [over + i * length for i in range(EARLIER + WINDOWS + 1)]
    windows = [late[a:b] for a, b in itertools.pairwise(edges)]
    found = [min(w) for w in windows]
    smooth = without_jumps(found)
    minima, half = smooth[EARLIER:], WINDOWS // 2
    middles = [(a + b) / 2 * steps_apart for a, b in itertools.pairwise(edges)][EARLIER:]
    first = theil_sen(middles[:half], minima[:half])
    last = theil_sen(middles[half:], minima[half:])
    slope = theil_sen(middles, minima)
    growth, a_window = slope * (middles[-1] - middles[0]), slope * (middles[1] - middles[0])
    swing = statistics.median(max(w) - min(w) for w in windows[EARLIER:]) - a_window
    return Slope(
        bytes_per_step=slope,
        chance=chance_of_trend(minima),
        rising=sum(b > a for a, b in itertools.pairwise(minima)),
        goes_on=last > 0 and last >= first / 2,
        stands_out=growth > swing
        and all(each[-1] - max(each[:EARLIER]) >= growth / 2 for each in (found, smooth)),
    )


def without_jumps(values: Sequence[float]) -> list[float]:
    """The series with the usual increment in the place of each that is far above it.

    Falls stay: without its falls a sawtooth would rise for ever.
    """
    increments = [b - a for a, b in itertools.pairwise(values)]
    middle = statistics.median(increments)
    most = middle + JUMP_DEVIATIONS * statistics.median(abs(each - middle) for each in increments)
    # Of those that are none: jumps move the median of all.
    usual = statistics.median(each for each in increments if each <= most)
    kept = [each if each <= most else usual for each in increments]
    return list(itertools.accumulate(kept, initial=values[0]))


def theil_sen(places: Sequence[float], values: Sequence[float]) -> float:
    """Median of the slopes of all pairs; places are distinct."""
    pairs = itertools.combinations(zip(places, values, strict=True), 2)
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)


def chance_of_trend(values: Sequence[float]) -> float:
    """Chance that a random order of distinct values rises as much as these do, or more."""
    number = len(values)
    statistic = sum((b > a) - (b < a) for a, b in itertools.combinations(values, 2))
    # S = pairs - 2 x inversions: as large an S means at most so many inversions.
    most = (number * (number - 1) // 2 - statistic) // 2
    return sum(_inversions(number)[: most + 1]) / math.factorial(number)


@functools.cache
def _inversions(number: int) -> tuple[int, ...]:
    """How many orders of `number` values have 0, 1, 2, ... inversions (Mahonian numbers)."""
    counts = [1]
    for size in range(2, number + 1):
        # A value put in front of `size` - 1 others adds 0 to `size` - 1 inversions.
        longest = len(counts) + size - 1
        counts = [sum(counts[max(0, place + 1 - size) : place + 1]) for place in range(longest)]
    return tuple(counts)
