"""Contracts of harness.checks.memory."""

import pytest

from harness.checks.memory import evaluate, names_in


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * a + b / 4", 7.0), ("-(a - 5) * 2", 4.0), ("1.5 * MiB + KiB", 1.5 * 2**20 + 1024),
        ("max(a, b, 1) - min(a, b)", 9.0), (" 1e3 ", 1000.0),
    ],
)  # fmt: skip
def test_arithmetic(text: str, value: float) -> None:
    """Formulas come to what they say."""
    assert evaluate(text, {"a": 3.0, "b": 12.0 if "min" in text else 4.0}) == value


def test_names_that_need_values() -> None:
    """Units and functions need none."""
    assert names_in("2 * parameters + max(optimizer, MiB)") == {"parameters", "optimizer"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("64 * MiB / (world_size - 1)", {"world_size"}), ("a - b", {"a", "b"}),
        ("1 / (a - b)", {"a", "b"}), ("a - GiB", {"a"}), ("1 / (2 - min(a, 2))", {"a"}),
        ("1e12 / a - MiB", {"a"}),
    ],
)  # fmt: skip
def test_what_has_no_value_for_some_runs_may_have_one_for_others(
    text: str, names: set[str]
) -> None:
    """A formula is not refused because it would divide by zero, or be negative, for some sizes."""
    assert names_in(text) == names


@pytest.mark.parametrize(
    "text", ["0", "-5", "1e999", "a - a", "a / (b - b)", "-a", "1e308 * 10 * a"]
)
def test_what_is_never_a_limit_is_refused_as_it_is_read(text: str) -> None:
    """No value of any name makes a number > 0 of it."""
    with pytest.raises(ValueError, match="Expected a number"):
        names_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "1 +", "a.b", "a[0]", "__import__('os')", "f(1)", "max(1)", "max(*a)", "max(1, key=2)",
        "'x' * 3", "True", "2 ** 9 ** 9", "a if a else b", "lambda: 1", "[1]", "1; 2", "1 / 0",
        "(" * 600, "1e308 * 10", "9" * 400 + " * 9" * 10, "unknown",
    ],
)  # fmt: skip
def test_what_is_no_formula_is_refused(text: str) -> None:
    """Anything but arithmetic, and arithmetic without a finite result."""
    with pytest.raises(ValueError, match="Expected"):
        evaluate(text, {"a": 1.0, "b": 1.0})
