"""Contracts of harness.scenario.suite: `-k`, and pairs of values."""

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.records import CaseSpec, RunSpec
from harness.scenario.suite import num_pairs, pairwise, select

RUN = RunSpec(config={}, device="cpu", world_size=1, timeout_s=1.0)


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


def case(name: str, labels: dict[str, str]) -> CaseSpec:
    return CaseSpec(
        id=name, scenario="s", labels=labels, reference=RUN, control=RUN, candidate=RUN,
        expect="bitwise", checks={},
    )  # fmt: skip


def product(*lengths: int) -> list[CaseSpec]:
    rows = itertools.product(*map(range, lengths))
    return [
        case("-".join(map(str, row)), {f"a{n}": str(value) for n, value in enumerate(row)})
        for row in rows
    ]


def pairs_of(cases: Sequence[CaseSpec]) -> set[tuple[tuple[str, str], ...]]:
    """Written apart from the module: unordered pairs of (axis, value) that share a case."""
    return {pair for one in cases for pair in itertools.combinations(sorted(one.labels.items()), 2)}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(0, 2**16))
def test_every_pair_that_some_case_has_is_covered(lengths: list[int], seed: int) -> None:
    """Whatever was excluded, the chosen are of the cases, in their order, with all their pairs."""
    draw = random.Random(seed)
    held = [one for one in product(*lengths) if draw.random() < 0.7]
    keep = {one.id for one in held if draw.random() < 0.1}
    chosen = pairwise(held, keep=keep)
    assert pairs_of(chosen) == pairs_of(held)
    places = [held.index(one) for one in chosen]
    assert places == sorted(set(places))
    assert keep <= {one.id for one in chosen}
    assert pairwise(held, keep=keep) == chosen


def test_few_are_chosen() -> None:
    """Of 3^4 cases at most 12 are needed for greed to cover 54 pairs (9 is the least)."""
    assert 9 <= len(pairwise(product(3, 3, 3, 3))) <= 12
    assert num_pairs(product(3, 3, 3, 3)) == 6 * 9


def test_one_axis_is_all_its_values_and_nothing_is_nothing() -> None:
    """Without pairs every value is covered; no cases are no cases."""
    assert len(pairwise(product(5))) == 5
    assert pairwise([]) == ()


def test_values_that_read_alike_are_all_kept() -> None:
    """Two values with one label must not stand for each other."""
    alike = [case("x1", {"a": "v", "b": "w"}), case("x2", {"a": "v", "b": "w"})]
    assert pairwise([*product(2, 2), *alike])[-2:] == tuple(alike)
