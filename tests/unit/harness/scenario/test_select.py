"""Contracts of harness.scenario.selection."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness.errors import UsageError
from harness.scenario.selection import select


def _case(name: str, **labels: str) -> Any:
    return SimpleNamespace(id=name, labels=labels)


CASES = (
    _case("dp2-attn", parallel="dp2", graph="attn"),
    _case("dp4-attn", parallel="dp4", graph="attn"),
    _case("dp4-full_iteration", parallel="dp4", graph="full_iteration"),
)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (None, [0, 1, 2]),
        ("dp4", [1, 2]),
        ("DP4", [1, 2]),
        ("not dp4", [0]),
        ("dp4 and not attn", [2]),
        ("dp2 or full_iteration", [0, 2]),
        ("dp2 or dp4 and full_iteration", [0, 2]),
        ("(dp2 or dp4) and attn", [0, 1]),
        ("not not dp2", [0]),
        ("not (dp2 or attn)", [2]),
        ("graph=attn", [0, 1]),
        ("parallel=dp4 and graph=attn", [1]),
        ("nowhere", []),
    ],
)
def test_expressions_select_as_in_pytest(expression: str | None, expected: list[int]) -> None:
    """Words are parts of ids or axis=value labels; not binds before and, and before or."""
    assert list(select(CASES, expression)) == [CASES[i] for i in expected]


@pytest.mark.parametrize(
    "expression",
    ["", " ", "and", "a and", "a b", "not", "(a", "a)", "()", "or a", "a or or b",
     "(" * 5000 + "a", "not " * 400 + "a", "x" * 5000],
)  # fmt: skip
def test_a_bad_expression_is_one_usage_error(expression: str) -> None:
    """What cannot be read is refused, however deep or long, and selects nothing by accident."""
    with pytest.raises(UsageError, match=r"^-k .*: expected .*, got ") as caught:
        select(CASES, expression)
    assert len(str(caught.value)) < 300


def test_a_word_does_not_reach_from_one_label_into_the_next() -> None:
    """Texts of a case are matched one by one."""
    assert select(CASES, "attnparallel") == ()
