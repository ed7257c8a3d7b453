"""Peak memory against limits, and what a soak proves: a bound on failures, memory that stays.

`max_ratio` holds the candidate's peak against the same rank's of the reference, `max_bytes` against
a number or a formula over what that rank of the *reference* keeps, `max_growth_bytes` its own late
steps against early ones: the worst rank decides. A peak that is zero or missing was not measured:
no ratio, and no pass.

Nothing failed in N replays (steps, without a graph), so failures are rarer than 3/N at 95 % (rule
of three: Hanley and Lippman-Hand 1983): at a rate p, N replays go well with a chance of (1 - p)^N.
Every value is finite in every step, and the memory of no rank grows: what torch counts, what the
driver counts on a GPU of its own, and the process's own. docs/ARCHITECTURE.md says when a series
grows, benchmarks/README.md how often that test errs.
"""

import ast
import itertools
import math
import operator
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from harness.checks.bits import finite
from harness.checks.complete import shares_gpus
from harness.checks.evidence import Option, Options, Runs, check, error, failed, passed, rank_table
from harness.records import CheckResult, RankRecords, RunResult
from harness.values import LEAST_QUARTERED, LEAST_STEPS, taking_turns

PEAK = "peak_memory"
_AT_REST = ("parameters", "gradients", "optimizer", "largest_unit")
_OF_MODEL = ("layers", "hidden", "vocab_size", "seq")
_OF_RUN = ("microbatches", "micro_batch_size")
FORMULA_NAMES = (*_AT_REST, "reference", "world_size", *_OF_MODEL, *_OF_RUN)
"""What a formula for `max_bytes` may use: bytes that the same rank of the reference keeps at rest,
full weights of its largest unit, its peak; and the sizes of the run."""
UNITS: Mapping[str, float] = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
Peaks = Mapping[int, int]  # bytes by rank


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
    answers = list[CheckResult]()
    for name, limit in options.items():
        try:
            answers.append(_against(name, limit, runs, ours, theirs))
        except ValueError as wrong:
            answers.append(error(PEAK, "not_run", str(wrong)))
    if not answers:
        return error(PEAK, "not_run", "no limit is given: nothing was asked")
    for outcome in ("failed", "error"):
        for answer in answers:
            if answer.outcome == outcome:
                return answer
    figures = {name: value for answer in answers for name, value in answer.figures.items()}
    return passed(PEAK, "; ".join(answer.message for answer in answers), **figures)


def _against(name: str, limit: Any, runs: Runs, ours: Peaks, theirs: Peaks) -> CheckResult:
    """The rank that is nearest to a limit, or farthest above it."""
    table, measured = rank_table(runs.reference), theirs
    if name == "max_growth_bytes":
        candidate = rank_table(runs.candidate)
        measured = {rank: growth_bytes(records) for rank, records in candidate.items()}
    elif name == "max_ratio":
        for rank in theirs:
            if ours.get(rank, 0) <= 0:
                raise ValueError(f"rank {rank} of the reference recorded no peak")
    allowed: dict[int, float] = {
        rank: limit * ours[rank] if name == "max_ratio"
        else _comes_to(limit, runs.reference, table.get(rank)) if isinstance(limit, str)
        else limit
        for rank in measured
    }  # fmt: skip
    worst = max(measured, key=lambda rank: (measured[rank] / allowed[rank], -rank))
    got, most, figures = measured[worst], allowed[worst], {"rank": worst}
    if name == "max_growth_bytes":
        figures = {"growth_rank": worst, "growth_bytes": got}
        message = f"memory that steps leave grew by {got} bytes on the worst rank ({worst}), from "
        message += f"the second quarter of the run to the last, limit {most:.0f}"
    elif name == "max_ratio":
        figures |= {"reference_peak_bytes": ours[worst], "candidate_peak_bytes": got}
        message = f"peak memory of the worst rank ({worst}) is {got / ours[worst]:.3f} times the "
        message += f"reference's ({got} against {ours[worst]} bytes), limit {limit:g}"
    else:
        figures |= {"candidate_peak_bytes": got}
        message = f"peak memory of the worst rank ({worst}) is {got} bytes, limit {most:.0f}"
    if got <= most:
        return passed(PEAK, message, **figures)
    return failed(PEAK, "memory_regression", message, **figures)


def peak_bytes(records: RankRecords) -> int:
    """Highest memory that a rank recorded, in bytes; 0 if it recorded none."""
    peaks = [record.peak_bytes for record in records.steps]
    return max([*peaks, records.end.peak_bytes if records.end is not None else 0])


def memory_notes(records: RankRecords) -> Mapping[str, Any]:
    """What the rank's event `memory` holds; empty if it wrote none."""
    return next(iter(records.said("memory")), {})


def growth_bytes(records: RankRecords) -> int:
    """The least that lived after a step of the last quarter, less that of the second, when graphs
    are captured and all is allocated; a ValueError of a run that is too short."""
    live = [record.live_bytes for record in records.steps]
    quarter = len(live) // 4
    if len(live) < LEAST_QUARTERED:
        raise ValueError(f"growth shows from {LEAST_QUARTERED} steps on, got {len(live)}")
    return min(live[-quarter:]) - min(live[quarter : 2 * quarter])


# --- limits as formulas -----------------------------------------------------------------------

MAX_CHARS = 500
TRIALS = 256
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def _comes_to(formula: str, reference: RunResult, records: RankRecords | None) -> float:
    """What the formula allows a rank, in bytes, by the reference: a candidate that keeps more must
    not raise its own limit."""
    config = reference.spec.config
    sizes: dict[str, Any] = {**config, **config.get("model", {})}
    values = {name: sizes[name] for name in (*_OF_MODEL, *_OF_RUN) if name in sizes}
    kept = memory_notes(records).get("at_rest") if records is not None else None
    for name in _AT_REST:
        value = kept.get(name) if isinstance(kept, Mapping) else None
        if records is None or type(value) is not int or value < 0:
            raise ValueError(f"{formula!r} has no value: the reference did not say what it keeps")
        values |= {name: value, "reference": peak_bytes(records)}
    values["world_size"] = reference.spec.world_size
    return evaluate(formula, values)


class FormulaError(ValueError):
    """A formula that cannot be taken: what was expected, and what was got."""

    def __init__(self, expected: str, got: str) -> None:
        self.expected, self.got = expected, got
        super().__init__(f"Expected {expected}, got {got}.")


def names_in(text: str) -> frozenset[str]:
    """The names that a formula needs values for: numbers, names, + - * /, brackets, min and max.

    Raises:
        FormulaError: not a formula, or no number > 0 for `TRIALS` values of its names to 2 ** 50.
    """
    tree, draw, why = _parse(text), random.Random(text), ""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    named = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in called}
    names = sorted(named - set(UNITS))
    for _ in range(TRIALS):
        try:
            result = _value(tree, {name: 2.0 ** draw.uniform(0, 50) for name in names})
        except ArithmeticError as error:
            why = why or f"{text!r}: {error}"
            continue
        if 0 < result < math.inf:
            return frozenset(names)
        why = why or f"{text!r}, which {'it never is' if names else f'comes to {result:g}'}"
    raise FormulaError("a number > 0", why)


def evaluate(text: str, values: Mapping[str, float]) -> float:
    """What a formula comes to.

    Raises:
        FormulaError: not a formula, a name without a value, or no number > 0.
    """
    try:
        result = _value(_parse(text), values)
    except ArithmeticError as error:
        raise FormulaError("a number > 0", f"{text!r}: {error}") from error
    if not 0 < result < math.inf:
        raise FormulaError("a number > 0", f"{text!r}, which comes to {result:g}")
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
            return float(value)
        case ast.Name(id=name):
            if name not in UNITS and name not in values:
                raise FormulaError(", ".join(sorted(values)), f"the name {name}")
            return UNITS.get(name) or values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, values), _value(right, values))
        case ast.Call(
            func=ast.Name(id="min" | "max" as name), args=[_, _, *_] as args, keywords=[]
        ):
            return (min if name == "min" else max)(_value(each, values) for each in args)
        case _:
            expected = "numbers, names, + - * /, brackets, min and max of several"
            raise FormulaError(expected, repr(ast.unparse(node)))


# --- soaks ------------------------------------------------------------------------------------

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
    values = finite(runs, {})
    if values.outcome != "passed":
        return replace(values, check=SOAK)
    memory = _memory(candidate, options.get("max_leak_bytes", 0))
    if memory.outcome != "passed":
        return memory
    bound, compared = min(3.0 / number, 1.0), min(steps, num_steps(reference))
    message = f"no failure in {number:,} {unit}: fewer than {bound:.2g} a {unit[:-1]} at 95 % "
    message += f"(rule of three); {steps:,} steps, bits compared in {compared:,}; {memory.message}"
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
        had = {name for detail in records.said("turn") for name in detail["stress"]}
        if missed := [name for name in due if name not in had]:
            message = f"{', '.join(missed)} never had a turn on rank {rank} in {len(records.steps)}"
            message += f" steps, a turn being {soak.turn_steps}"
            return error("turns", "not_run", message)
    return None


def _memory(candidate: RunResult, limit: float) -> CheckResult:
    is_shared, found, growing = shares_gpus(candidate), list[_Found](), list[_Found]()
    for records in rank_table(candidate).values():
        for kind, values, apart in _series(records, is_shared=is_shared):
            if len(values) < LEAST_STEPS:
                continue
            slope = slope_of(values, apart)
            found.append((kind == "live", slope, kind, records.rank, values))
            # Over the half that is tested.
            if slope.grows(max(limit, 2 * LEAST_GROWTH_BYTES[kind] / len(values) / apart)):
                growing.append(found[-1])
    if len({rank for *_, rank, _ in found}) < len(candidate.ranks) or not found:
        return error(SOAK, "not_run", f"growth of memory shows from {LEAST_STEPS} steps on")
    # What torch counts names the leak; that the driver sees it too only follows.
    worst = max(growing or found, key=lambda each: (each[0], each[1].bytes_per_step))
    _, slope, kind, rank, values = worst
    figures = {"leak_bytes_per_step": slope.bytes_per_step, "leak_rank": float(rank)}
    if not growing:
        return passed(SOAK, "memory does not grow", **figures)
    message = f"{kind} memory of rank {rank} grows by {slope.bytes_per_step:,.0f} bytes a step: "
    message += f"{values[len(values) // 2]:,} bytes in mid-run, {values[-1]:,} at its end, "
    message += f"{slope.rising} of {WINDOWS - 1} windows rising"
    return failed(SOAK, "memory_regression", message, **figures)


def _series(records: RankRecords, *, is_shared: bool) -> Iterator[tuple[str, Sequence[int], float]]:
    """Each kind of memory of a rank: its name, its bytes, the steps between two of them."""
    steps = records.steps
    yield "live", [each.live_bytes for each in steps], 1.0
    host = [each.host_bytes for each in steps if each.host_bytes is not None]
    if len(host) == len(steps):
        yield "host", host, 1.0
    used = [(each.step, each.device_bytes) for each in steps if each.device_bytes is not None]
    if len(used) > 1 and not is_shared:
        apart = (used[-1][0] - used[0][0]) / (len(used) - 1)
        yield "device-used", [value for _, value in used], max(apart, 1.0)


# --- does a series grow? ----------------------------------------------------------------------

WINDOWS = 16
EARLIER = WINDOWS // 2  # of the second quarter, as long as those
TREND = 79  # pairs of windows that rise, less those that fall: of one in 10,000 orders
JUMP_DEVIATIONS = 5.0  # of a normal distribution's increments one in 1,500 is so far off


_Found = tuple[bool, "Slope", str, int, Sequence[int]]  # is live, slope, kind, rank, bytes


@dataclass(frozen=True, kw_only=True)
class Slope:
    """What a series does in its second half."""

    bytes_per_step: float  # Theil-Sen slope
    trend: int  # pairs of windows that rise, less those that fall
    rising: int  # increments between windows that are positive, of `WINDOWS` - 1
    goes_on: bool  # whether the end rises at half the pace before it, at least
    stands_out: bool  # whether it ends higher than ever, by more than noise

    def grows(self, limit: float = 0.0) -> bool:
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
