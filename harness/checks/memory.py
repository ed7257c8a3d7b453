"""Peak memory: the candidate's against the reference's rank by rank, or against a number of bytes.

    max_ratio         candidate's peak over the reference's, of the worst rank
    max_bytes         a number or a formula over what the same rank of the reference keeps: a
                      candidate that keeps more must not raise its own limit
    max_growth_bytes  least memory that lived after a step of the last quarter of the run, less that
                      of the second, when graphs are captured and all is allocated: a leak of n
                      bytes a step shows as half a run's n, whatever single steps hold for a while
    max_unexplained   part of a rank's own peak, or 16 MiB, that may have no owner

A reference whose peak is zero or missing measured nothing, so there is no ratio and no pass. Sizes
and owners are of the event `memory` that every rank writes at its end.
"""

import ast
import math
import operator
import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from harness.checks.evidence import Options, error, failed, judged, passed, rank_table
from harness.records import CheckResult, RankRecords, RunResult

NAME = "peak_memory"
MIB = 1 << 20
LEAST_STEPS = 8
"""Of a run whose growth is looked at."""
SMALL_BYTES = 16 * MIB
"""What may stay unexplained of any peak, however small."""
_AT_REST = ("parameters", "gradients", "optimizer", "largest_unit")
_OF_MODEL = ("layers", "hidden", "vocab_size", "seq")
_OF_RUN = ("microbatches", "micro_batch_size")
FORMULA_NAMES = (*_AT_REST, "reference", "world_size", *_OF_MODEL, *_OF_RUN)
"""What a formula for `max_bytes` may use: bytes that the same rank of the reference keeps at rest,
full weights of its largest unit, its peak; and the sizes of the run."""
Peaks = Mapping[int, int]


def peak_memory(reference: RunResult, candidate: RunResult, options: Options) -> CheckResult:
    """Check the worst rank against each limit that is given."""
    ours, theirs = (
        {rank: peak_bytes(records) for rank, records in rank_table(run).items()}
        for run in (reference, candidate)
    )
    if not theirs:
        return error(NAME, "not_run", "the candidate has no rank: nothing was measured")
    for rank, peak in theirs.items():
        if peak <= 0:
            return failed(NAME, "corrupt_record", f"rank {rank} of the candidate recorded no peak")
    limits: dict[str, Callable[[Any], CheckResult]] = {
        "max_ratio": lambda limit: _against_reference(ours, theirs, limit),
        "max_bytes": lambda limit: _against_bytes(reference, ours, theirs, limit),
        "max_growth_bytes": lambda limit: _growth(candidate, limit),
        "max_unexplained": lambda limit: _explained(candidate, limit, theirs),
    }
    answers = [limits[name](options[name]) for name in limits if name in options]
    for outcome in ("failed", "error"):
        for answer in answers:
            if answer.outcome == outcome:
                return answer
    figures = {name: value for answer in answers for name, value in answer.figures.items()}
    return passed(NAME, "; ".join(answer.message for answer in answers), **figures)


def peak_bytes(records: RankRecords) -> int:
    """Highest memory that a rank recorded, in bytes; 0 if it recorded none."""
    peaks = [record.peak_bytes for record in records.steps]
    if records.end is not None:
        peaks.append(records.end.peak_bytes)
    return max(peaks, default=0)


def memory_notes(records: RankRecords) -> Mapping[str, Any]:
    """What the rank's event `memory` holds; empty if it wrote none."""
    return next((event.detail for event in records.events if event.name == "memory"), {})


def _against_reference(ours: Peaks, theirs: Peaks, max_ratio: float) -> CheckResult:
    for rank in theirs:
        if ours.get(rank, 0) <= 0:
            return error(NAME, "not_run", f"rank {rank} of the reference recorded no peak")
    worst = max(theirs, key=lambda rank: (theirs[rank] / ours[rank], -rank))
    ratio = theirs[worst] / ours[worst]
    message = (
        f"peak memory of the worst rank ({worst}) is {ratio:.3f} times the reference's "
        f"({theirs[worst] / MIB:.1f} against {ours[worst] / MIB:.1f} MiB), limit {max_ratio:g}"
    )
    # The product, not the rounded ratio, decides: 1.0 must let an equal peak through.
    return judged(
        NAME, "memory_regression", message, ok=theirs[worst] <= max_ratio * ours[worst],
        ratio=ratio, rank=float(worst), reference_peak_bytes=float(ours[worst]),
        candidate_peak_bytes=float(theirs[worst]),
    )  # fmt: skip


def _against_bytes(
    reference: RunResult, ours: Peaks, theirs: Peaks, limit: float | str
) -> CheckResult:
    allowed: Mapping[int, float]
    if isinstance(limit, str):
        try:
            allowed = _limits_of(limit, reference, ours)
        except ValueError as wrong:
            return error(NAME, "not_run", f"no limit comes of {limit!r}: {wrong}")
        if set(theirs) - set(allowed):
            return error(NAME, "not_run", "the reference has fewer ranks than the candidate")
    else:
        allowed = dict.fromkeys(theirs, limit)
    worst = max(theirs, key=lambda rank: (theirs[rank] - allowed[rank], -rank))
    message = f"peak memory of the worst rank ({worst}) is {theirs[worst]} bytes, "
    message += f"limit {allowed[worst]:.0f}"
    return judged(
        NAME, "memory_regression", message, ok=theirs[worst] <= allowed[worst],
        rank=float(worst), candidate_peak_bytes=float(theirs[worst]),
    )  # fmt: skip


def growth_bytes(records: RankRecords) -> int | None:
    """How much more memory a rank keeps late in the run than early; None of a short run."""
    live = [record.live_bytes for record in records.steps]
    quarter = len(live) // 4
    if len(live) < LEAST_STEPS:
        return None
    return min(live[-quarter:]) - min(live[quarter : 2 * quarter])


def _growth(candidate: RunResult, max_bytes: float) -> CheckResult:
    grown = {rank: growth_bytes(records) for rank, records in rank_table(candidate).items()}
    known = {rank: nbytes for rank, nbytes in grown.items() if nbytes is not None}
    if len(known) < len(grown):
        return error(NAME, "not_run", f"growth shows from {LEAST_STEPS} steps on, got fewer")
    worst = max(known, key=lambda rank: (known[rank], -rank))
    message = (
        f"memory that steps leave grew by {known[worst]} bytes on the worst rank ({worst}), from "
        f"the second quarter of the run to the last, limit {max_bytes:.0f}"
    )
    return judged(
        NAME, "memory_regression", message, ok=known[worst] <= max_bytes,
        growth_rank=float(worst), growth_bytes=float(known[worst]),
    )  # fmt: skip


def _explained(candidate: RunResult, max_part: float, peaks: Peaks) -> CheckResult:
    """Whether every rank knows whose its peak was; what was not seen as it came has no owner."""
    table = rank_table(candidate)
    owners = {rank: owned for rank, each in table.items() if (owned := _owners(each)) is not None}
    if not owners or len(owners) < len(table):
        silent = ", ".join(str(rank) for rank in table if rank not in owners) or "none"
        return error(NAME, "not_run", f"ranks that did not say whose their peak was: {silent}")
    rests = {
        rank: abs(mine["rest"]) + abs(peaks[rank] - sum(mine.values()))
        for rank, mine in owners.items()
    }
    allowed = {rank: max(max_part * peaks[rank], SMALL_BYTES) for rank in owners}
    # Not the largest rest: a smaller one may be more of a smaller peak.
    worst = max(owners, key=lambda rank: (rests[rank] - allowed[rank], -rank))
    mine = owners[worst]
    largest = sorted(mine.items(), key=lambda item: (-item[1], item[0]))
    shares = ", ".join(f"{name} {value / MIB:.1f}" for name, value in largest if value)
    message = (
        f"of the peak of rank {worst}, {peaks[worst] / MIB:.1f} MiB, {rests[worst] / MIB:.1f} MiB "
        f"have no owner, limit {allowed[worst] / MIB:.1f}; in MiB: {shares}"
    )
    is_small = rests[worst] <= allowed[worst]
    if not is_small:
        listed = memory_notes(table[worst])["explained"].get("largest_rest", ())
        places = ", ".join(str(place) for place, _ in listed[:3]) or "the allocator"
        message += f"; asked for by {places}"
    figures = {f"{name.replace(' ', '_')}_bytes": float(value) for name, value in mine.items()}
    figures["unexplained_bytes"] = float(rests[worst])
    return judged(NAME, "memory_regression", message, ok=is_small, **figures)


def _owners(records: RankRecords) -> dict[str, int] | None:
    """Bytes of each owner at the rank's peak; None if it did not say, or they do not add up."""
    notes = memory_notes(records).get("explained")
    owners = notes.get("owners") if isinstance(notes, Mapping) else None
    if not isinstance(notes, Mapping) or not isinstance(owners, Mapping) or "rest" not in owners:
        return None
    found = {str(name): n for name, n in owners.items() if type(n) is int}
    is_whole = len(found) == len(owners) and sum(found.values()) == notes.get("peak_bytes")
    return found if is_whole else None


# --- limits as formulas -----------------------------------------------------------------------

UNITS: Mapping[str, float] = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
MAX_CHARS = 500
TRIALS = 256
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., float]] = {"min": min, "max": max}


class FormulaError(ValueError):
    """A formula that cannot be taken: what was expected, and what was got."""

    def __init__(self, expected: str, got: str) -> None:
        self.expected, self.got = expected, got
        super().__init__(f"Expected {expected}, got {got}.")


class _NoNumber(FormulaError):
    """The formula has no value for these values of its names; it may have one for others."""


def _limits_of(formula: str, reference: RunResult, peaks: Peaks) -> dict[int, float]:
    """What the formula allows each rank, in bytes.

    Raises:
        ValueError: a rank of the reference did not say what it keeps, or no finite limit > 0.
    """
    config = reference.spec.config
    model = config.get("model", {})
    sizes = {name: config[name] for name in _OF_RUN if name in config}
    sizes |= {name: model[name] for name in _OF_MODEL if name in model}
    sizes["world_size"] = reference.spec.world_size
    limits = {}
    for rank, records in rank_table(reference).items():
        kept = memory_notes(records).get("at_rest")
        given = [kept.get(name) if isinstance(kept, Mapping) else None for name in _AT_REST]
        mine = [value for value in given if type(value) is int and value >= 0]
        if len(mine) < len(_AT_REST):
            raise ValueError(f"Expected what rank {rank} of the reference keeps, it did not say.")
        own = dict(zip(_AT_REST, mine, strict=True)) | {"reference": peaks.get(rank, 0)}
        limits[rank] = evaluate(formula, sizes | own)
        if limits[rank] <= 0:
            raise ValueError(f"Expected a limit > 0 for rank {rank}, got {limits[rank]:g}.")
    return limits


def names_in(text: str) -> frozenset[str]:
    """The names that a formula needs values for: numbers, names, + - * /, brackets, min and max.

    What it comes to is tried with `TRIALS` values of each name, from 1 to 2 ** 50: a formula that
    is a number > 0 for none of them is a mistake, whatever the run.

    Raises:
        FormulaError: not a formula, or never a number > 0.
    """
    tree, found, draw = _parse(text), set[str](), random.Random(text)
    why: FormulaError | None = None
    for _ in range(TRIALS):
        values: dict[str, float] = {}

        def note(name: str, values: dict[str, float] = values) -> float:
            found.add(name)
            return values.setdefault(name, 2.0 ** draw.uniform(0, 50))

        try:
            result = _evaluate(tree, note)
        except _NoNumber as error:
            why = why or error
            continue
        if math.isfinite(result) and result > 0:
            return frozenset(found)
        never = "which it never is" if found else f"which comes to {result:g}"
        why = why or FormulaError("a number > 0", f"{text!r}, {never}")
    assert why is not None
    raise why


def evaluate(text: str, values: Mapping[str, float]) -> float:
    """What a formula comes to.

    Raises:
        ValueError: not a formula, a name without a value, or no finite number.
    """

    def look_up(name: str) -> float:
        if name not in values:
            raise FormulaError(", ".join(sorted(values)), f"the name {name}")
        return values[name]

    result = _evaluate(_parse(text), look_up)
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


def _evaluate(node: ast.expr, look_up: Callable[[str], float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError as error:
                raise FormulaError("a number of a float's size", str(error)) from error
        case ast.Name(id=name):
            return UNITS[name] if name in UNITS else look_up(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, look_up)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            pair = _evaluate(left, look_up), _evaluate(right, look_up)
            try:
                return _OPERATORS[type(op)](*pair)
            except (ZeroDivisionError, OverflowError) as error:
                raise _NoNumber("a number", f"{ast.unparse(node)!r}: {error}") from error
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            if len(args) > 1:
                return _FUNCTIONS[name](*(_evaluate(each, look_up) for each in args))
    expected = "numbers, names, + - * /, brackets, min and max of several"
    raise FormulaError(expected, repr(ast.unparse(node)))
