"""Limits that are written as formulas: `1.2 * (parameters + gradients + optimizer) + 64 * MiB`.

Numbers, names, + - * /, brackets, and `min` and `max` of several. What a name stands for is up to
who evaluates it; `KiB`, `MiB` and `GiB` always stand for themselves. Python's own parser reads the
text, and nothing of it is ever run.
"""

import ast
import math
import operator
import random
import warnings
from collections.abc import Callable, Mapping

PEAK_MEMORY = ("max_ratio", "max_bytes", "max_growth_bytes", "max_unexplained")
THROUGHPUT = ("max_slowdown", "skip_steps", "repeats")
FORMULA_NAMES = (
    "parameters", "gradients", "optimizer", "largest_unit", "reference", "world_size", "layers",
    "hidden", "vocab_size", "seq", "microbatches", "micro_batch_size",
)  # fmt: skip
"""What a formula for `max_bytes` may use: bytes that the same rank of the reference keeps at rest,
full weights of its largest unit, its peak; and the sizes of the run."""
DEFAULT_MAX_SLOWDOWN = 0.05
DEFAULT_SKIP_STEPS = 5
MAX_REPEATS = 50
TIMED_STEPS = 3
"""Steps of a timed run that must be left when the first ones are skipped."""

UNITS: Mapping[str, float] = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
MAX_CHARS = 500
TRIALS = 256
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., float]] = {"min": min, "max": max}


def names_in(text: str) -> frozenset[str]:
    """The names that a formula needs values for.

    What it comes to is tried with `TRIALS` values of each name, from 1 to 2 ** 50: a formula that
    is a number > 0 for none of them is a mistake, whatever the run.

    Raises:
        FormulaError: not a formula, or never a number > 0.
    """
    tree, found, draw = _parse(text), set[str](), random.Random(text)

    def note(name: str) -> float:
        found.add(name)
        return values.setdefault(name, 2.0 ** draw.uniform(0, 50))

    why: FormulaError | None = None
    for _ in range(TRIALS):
        values: dict[str, float] = {}
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


class FormulaError(ValueError):
    """A formula that cannot be taken: what was expected, and what was got."""

    def __init__(self, expected: str, got: str) -> None:
        self.expected, self.got = expected, got
        super().__init__(f"Expected {expected}, got {got}.")


class _NoNumber(FormulaError):
    """The formula has no value for these values of its names; it may have one for others."""


def _parse(text: str) -> ast.expr:
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


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise FormulaError("a number of a float's size", str(error)) from error


def _evaluate(node: ast.expr, look_up: Callable[[str], float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _as_float(value)
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
