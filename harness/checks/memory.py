"""Peak memory against limits: of each rank, the worst decides.

`max_ratio` holds the candidate's peak against the same rank's of the reference, `max_bytes` against
a number or a formula over what that rank of the *reference* keeps, `max_growth_bytes` its own late
steps against early ones. A peak that is zero or missing was not measured: no ratio, and no pass.
"""

import ast
import math
import operator
import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from harness.checks import Option, check
from harness.checks.evidence import Options, Runs, error, failed, passed, rank_table
from harness.records import CheckResult, RankRecords, RunResult

PEAK = "peak_memory"
LEAST_QUARTERED = 8  # steps of a run whose growth is looked at
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
        message = (
            f"peak memory of the worst rank ({worst}) is {got / ours[worst]:.3f} times the "
            f"reference's ({got / 2**20:.1f} against {ours[worst] / 2**20:.1f} MiB), limit "
            f"{limit:g}"
        )
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
    return next((event.detail for event in records.events if event.name == "memory"), {})


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
