"""Memory: peaks against limits, and what a soak proves.

`peak_memory` holds the candidate's worst rank against the reference's same rank (`max_ratio`), a
number or a formula over what that rank of the *reference* keeps (`max_bytes`), and its own steps
(`max_growth_bytes`). A reference whose peak is zero or missing measured nothing: no ratio, no pass.

`soak`: nothing failed in N replays (steps, without a graph), so failures are rarer than 3/N at 95 %
(rule of three: Hanley and Lippman-Hand 1983): were the rate p a replay, N replays without a failure
had a chance of (1 - p)^N. Every value is finite in every step, and the memory of no rank grows:
what torch counts, what the driver counts on a GPU of its own, and the process's own.

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

SLOPE.md has false alarms and power over kinds of series. No test can tell from a leak: memory that
is given back less than once in the run, and caches that are still filling at its end.
"""

import ast
import functools
import itertools
import math
import operator
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from harness.checks import Option, check
from harness.checks.evidence import (
    Options,
    Runs,
    error,
    failed,
    judged,
    passed,
    rank_table,
)
from harness.checks.exact import finite
from harness.infrastructure import shares_gpus
from harness.records import CheckResult, RankRecords, RunResult
from harness.soaking import LEAST_STEPS

PEAK, SOAK = "peak_memory", "soak"
LEAST_QUARTERED = 8
"""Steps of a run whose growth is looked at."""
_AT_REST = ("parameters", "gradients", "optimizer", "largest_unit")
_OF_MODEL = ("layers", "hidden", "vocab_size", "seq")
_OF_RUN = ("microbatches", "micro_batch_size")
FORMULA_NAMES = (*_AT_REST, "reference", "world_size", *_OF_MODEL, *_OF_RUN)
"""What a formula for `max_bytes` may use: bytes that the same rank of the reference keeps at rest,
full weights of its largest unit, its peak; and the sizes of the run."""
UNITS: Mapping[str, float] = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}

# --- peaks ------------------------------------------------------------------------------------


@check(PEAK, "peak memory of the worst rank", needs_option=True, options={
    "max_ratio": Option(kind="number", doc="candidate's peak over the reference's"),
    "max_bytes": Option(
        kind="bytes", doc=f"the formula is over {', '.join((*FORMULA_NAMES, *UNITS))}"
    ),
    "max_growth_bytes": Option(
        least=1, doc="what steps leave, from the second quarter of the run to the last"
    ),
})  # fmt: skip
def peak_memory(runs: Runs, options: Options) -> CheckResult:
    """Check the worst rank against each limit that is given: all must hold."""
    tables = (rank_table(run) for run in (runs.reference, runs.candidate))
    ours, theirs = ({rank: peak_bytes(r) for rank, r in table.items()} for table in tables)
    if not theirs:
        return error(PEAK, "not_run", "the candidate has no rank: nothing was measured")
    for rank, peak in theirs.items():
        if peak <= 0:
            return failed(PEAK, "corrupt_record", f"rank {rank} of the candidate recorded no peak")
    answers, figures = list[CheckResult](), dict[str, float]()
    for name in (name for name in _LIMITS if name in options):
        try:
            answers.append(_LIMITS[name](runs, ours, theirs, options[name]))
        except ValueError as wrong:
            answers.append(error(PEAK, "not_run", str(wrong)))
        figures |= answers[-1].figures
    if not answers:
        return error(PEAK, "not_run", "no limit is given: nothing was asked")
    for outcome in ("failed", "error"):
        for answer in answers:
            if answer.outcome == outcome:
                return answer
    return passed(PEAK, "; ".join(answer.message for answer in answers), **figures)


def peak_bytes(records: RankRecords) -> int:
    """Highest memory that a rank recorded, in bytes; 0 if it recorded none."""
    peaks = [record.peak_bytes for record in records.steps]
    return max([*peaks, records.end.peak_bytes if records.end is not None else 0])


def memory_notes(records: RankRecords) -> Mapping[str, Any]:
    """What the rank's event `memory` holds; empty if it wrote none."""
    return next((event.detail for event in records.events if event.name == "memory"), {})


Peaks = Mapping[int, int]


def _ratio(_: Runs, ours: Peaks, theirs: Peaks, limit: float) -> CheckResult:
    for rank in theirs:
        if ours.get(rank, 0) <= 0:
            raise ValueError(f"rank {rank} of the reference recorded no peak")
    worst = max(theirs, key=lambda rank: (theirs[rank] / ours[rank], -rank))
    ratio = theirs[worst] / ours[worst]
    message = (
        f"peak memory of the worst rank ({worst}) is {ratio:.3f} times the reference's "
        f"({theirs[worst] / 2**20:.1f} against {ours[worst] / 2**20:.1f} MiB), limit {limit:g}"
    )
    # The product, not the rounded ratio, decides: 1.0 must let an equal peak through.
    return judged(
        PEAK, "memory_regression", message, ok=theirs[worst] <= limit * ours[worst], ratio=ratio,
        rank=worst, reference_peak_bytes=ours[worst], candidate_peak_bytes=theirs[worst],
    )  # fmt: skip


def _bytes(runs: Runs, ours: Peaks, theirs: Peaks, limit: float | str) -> CheckResult:
    allowed = {
        rank: _comes_to(limit, runs.reference, rank, ours) if isinstance(limit, str) else limit
        for rank in theirs
    }
    worst = max(theirs, key=lambda rank: (theirs[rank] - allowed[rank], -rank))
    message = f"peak memory of the worst rank ({worst}) is {theirs[worst]} bytes, "
    message += f"limit {allowed[worst]:.0f}"
    return judged(
        PEAK, "memory_regression", message, ok=theirs[worst] <= allowed[worst],
        rank=worst, candidate_peak_bytes=theirs[worst],
    )  # fmt: skip


def _comes_to(formula: str, reference: RunResult, rank: int, peaks: Peaks) -> float:
    """What the formula allows a rank, in bytes, by the reference: a candidate that keeps more must
    not raise its own limit."""
    config, table = reference.spec.config, rank_table(reference)
    model = config.get("model", {})
    values = {name: config[name] for name in _OF_RUN if name in config}
    values |= {name: model[name] for name in _OF_MODEL if name in model}
    kept = memory_notes(table[rank]).get("at_rest") if rank in table else None
    for name in _AT_REST:
        value = kept.get(name) if isinstance(kept, Mapping) else None
        if type(value) is not int or value < 0:
            raise ValueError(f"no limit comes of {formula!r}: rank {rank} of the reference did not "
                             f"say what it keeps")  # fmt: skip
        values[name] = value
    values |= {"world_size": reference.spec.world_size, "reference": peaks.get(rank, 0)}
    if (limit := evaluate(formula, values)) <= 0:
        raise ValueError(f"no limit comes of {formula!r}: {limit:g} for rank {rank}")
    return limit


def growth_bytes(records: RankRecords) -> int | None:
    """How much more memory a rank keeps late in the run than early; None of a short run.

    The least that lived after a step of the last quarter, less that of the second, when graphs are
    captured and all is allocated: a leak of n bytes a step shows as half a run's n.
    """
    live = [record.live_bytes for record in records.steps]
    quarter = len(live) // 4
    if len(live) < LEAST_QUARTERED:
        return None
    return min(live[-quarter:]) - min(live[quarter : 2 * quarter])


def _growth(runs: Runs, _: Peaks, theirs: Peaks, limit: float) -> CheckResult:
    grown = {rank: growth_bytes(records) for rank, records in rank_table(runs.candidate).items()}
    known = {rank: nbytes for rank, nbytes in grown.items() if nbytes is not None}
    if len(known) < len(theirs):
        raise ValueError(f"growth shows from {LEAST_QUARTERED} steps on, got fewer")
    worst = max(known, key=lambda rank: (known[rank], -rank))
    message = (
        f"memory that steps leave grew by {known[worst]} bytes on the worst rank ({worst}), from "
        f"the second quarter of the run to the last, limit {limit:.0f}"
    )
    return judged(
        PEAK, "memory_regression", message, ok=known[worst] <= limit, growth_rank=worst,
        growth_bytes=known[worst],
    )  # fmt: skip


_LIMITS: Mapping[str, Callable[[Runs, Peaks, Peaks, Any], CheckResult]] = {
    "max_ratio": _ratio, "max_bytes": _bytes, "max_growth_bytes": _growth,
}  # fmt: skip

# --- limits as formulas -----------------------------------------------------------------------

MAX_CHARS = 500
TRIALS = 256
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


class FormulaError(ValueError):
    """A formula that cannot be taken: what was expected, and what was got."""

    def __init__(self, expected: str, got: str) -> None:
        self.expected, self.got = expected, got
        super().__init__(f"Expected {expected}, got {got}.")


class _NoNumber(FormulaError):
    """The formula has no value for these values of its names; it may have one for others."""


def names_in(text: str) -> frozenset[str]:
    """The names that a formula needs values for: numbers, names, + - * /, brackets, min and max.

    What it comes to is tried with `TRIALS` values of each name, from 1 to 2 ** 50: a formula that
    is a number > 0 for none of them is a mistake, whatever the run.

    Raises:
        FormulaError: not a formula, or never a number > 0.
    """
    tree, draw = _parse(text), random.Random(text)
    why: FormulaError | None = None
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    names = sorted({node.id for node in nodes if id(node) not in called} - set(UNITS))
    for _ in range(TRIALS):
        try:
            result = _value(tree, {name: 2.0 ** draw.uniform(0, 50) for name in names})
        except _NoNumber as error:
            why = why or error
            continue
        if math.isfinite(result) and result > 0:
            return frozenset(names)
        never = "which it never is" if names else f"which comes to {result:g}"
        why = why or FormulaError("a number > 0", f"{text!r}, {never}")
    assert why is not None
    raise why


def evaluate(text: str, values: Mapping[str, float]) -> float:
    """What a formula comes to.

    Raises:
        ValueError: not a formula, a name without a value, or no finite number.
    """
    result = _value(_parse(text), values)
    if not math.isfinite(result):
        raise FormulaError("a finite number", f"{text!r}, which comes to {result}")
    return result


def _parse(text: str) -> ast.expr:
    """Python's own parser reads the text, and nothing of it is ever run."""
    if len(text) > MAX_CHARS:
        raise FormulaError(f"at most {MAX_CHARS} characters", str(len(text)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of `1if`, which is refused all the same
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error) or "too deep"
        expected = "a formula, as in 1.2 * parameters + 64 * MiB"
        raise FormulaError(expected, f"{text!r}: {why}") from error


def _value(node: ast.expr, values: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError as error:
                raise FormulaError("a number of a float's size", str(error)) from error
        case ast.Name(id=name):
            if name not in UNITS and name not in values:
                raise FormulaError(", ".join(sorted(values)), f"the name {name}")
            return UNITS.get(name) or values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            try:
                return _OPERATORS[type(op)](_value(left, values), _value(right, values))
            except (ZeroDivisionError, OverflowError) as error:
                raise _NoNumber("a number", f"{ast.unparse(node)!r}: {error}") from error
        case ast.Call(
            func=ast.Name(id="min" | "max" as name), args=[_, _, *_] as args, keywords=[]
        ):
            return (min if name == "min" else max)(_value(each, values) for each in args)
        case _:
            pass
    expected = "numbers, names, + - * /, brackets, min and max of several"
    raise FormulaError(expected, repr(ast.unparse(node)))


# --- a soak -----------------------------------------------------------------------------------

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
    number, unit = trials(candidate)
    if not number:
        return error(SOAK, "not_run", "the candidate recorded no replay and no step")
    values = finite(reference, candidate)
    if values.outcome != "passed":
        return replace(values, check=SOAK)
    memory = _memory(candidate, options.get("max_leak_bytes", 0))
    if memory.outcome != "passed":
        return memory
    steps, bound = num_steps(candidate), min(3.0 / number, 1.0)
    compared = min(steps, num_steps(reference))
    message = (
        f"no failure in {number:,} {unit}: fewer than {bound:.2g} a {unit[:-1]} at 95 % "
        f"(rule of three); {steps:,} steps, bits compared in {compared:,}; {memory.message}"
    )
    return passed(
        SOAK, message, trials=number, rate_bound=bound, steps=steps, compared_steps=compared,
        **memory.figures,
    )  # fmt: skip


def trials(run: RunResult) -> tuple[int, str]:
    """How many, of what: the fewest replays of a rank, or steps of a run without graphs."""
    ends = [records.end for records in run.ranks]
    if run.spec.config.get("graph"):
        return min((0 if end is None else end.replays for end in ends), default=0), "replays"
    return num_steps(run), "steps"


def num_steps(run: RunResult) -> int:
    """Steps that every rank recorded."""
    return min((len(records.steps) for records in run.ranks), default=0)


@dataclass(frozen=True)
class _Series:
    """One kind of memory of one rank."""

    kind: str
    rank: int
    values: Sequence[int]
    steps_apart: float = 1.0

    @property
    def least_slope(self) -> float:
        """In bytes a step, over the half that is tested."""
        return 2 * LEAST_GROWTH_BYTES[self.kind] / max(len(self.values) * self.steps_apart, 1.0)


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
    growing = [each for each in found if each[0].grows(max(limit, each[1].least_slope))]
    # What torch counts names the leak; that the driver sees it too only follows.
    slope, series = max(
        growing or found,
        key=lambda each: (
            each[1].kind == "live" if growing else each[0].grows(limit), each[0].bytes_per_step
        ),
    )  # fmt: skip
    figures = {"leak_bytes_per_step": slope.bytes_per_step, "leak_rank": float(series.rank)}
    if not growing:
        return passed(SOAK, "memory does not grow", **figures)
    first, last = series.values[len(series.values) // 2], series.values[-1]
    message = (
        f"{series.kind} memory of rank {series.rank} grows by {slope.bytes_per_step:,.0f} bytes a "
        f"step ({slope.bytes_per_step / 1024:.1f} KiB): {first:,} bytes in mid-run, {last:,} at "
        f"its end, {slope.rising} of {WINDOWS - 1} windows rising, Mann-Kendall "
        f"p = {slope.chance:.1g}"
    )
    return failed(SOAK, "memory_regression", message, **figures, leak_chance=slope.chance)


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

LEVEL = 1e-4
"""Of the trend test, for one series."""
JUMP_DEVIATIONS = 5.0
"""Of a normal distribution's increments one in 1,500 is so far off."""
WINDOWS = 16
EARLIER = WINDOWS // 2
"""Windows of the second quarter, as long as those."""


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
        return is_trend and self.goes_on and self.stands_out and self.bytes_per_step > limit


def slope_of(series: Sequence[float], steps_apart: float = 1.0) -> Slope:
    """Test a series of bytes, whose values are so many steps apart.

    Raises:
        ValueError: fewer than `LEAST_STEPS` values.
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
    swing = median(max(w) - min(w) for w in windows[EARLIER:]) - a_window
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
    middle = median(increments)
    most = middle + JUMP_DEVIATIONS * median(abs(each - middle) for each in increments)
    # Of those that are none: jumps move the median of all.
    usual = median(each for each in increments if each <= most)
    kept = [each if each <= most else usual for each in increments]
    return list(itertools.accumulate(kept, initial=values[0]))


def theil_sen(places: Sequence[float], values: Sequence[float]) -> float:
    """Median of the slopes of all pairs; places are distinct."""
    pairs = itertools.combinations(zip(places, values, strict=True), 2)
    return median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)


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
