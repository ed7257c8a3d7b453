"""The page's filter means what `-k` means, and what it selects can be linked to."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import quickjs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reports
from harness.errors import UsageError
from harness.scenario.suite import compile_expression

FILTER = Path(reports.__file__).parent / "templates" / "filter.js"
AXES = [["model", ["dense", "moe"]], ["graph", ["attn", "attn+mlp", "full_iteration"]]]
OUTCOMES = ["failed", "error", "incomparable", "passed", "skipped"]
NOTHING: dict[str, Any] = {"words": "", "outcomes": [], "axes": {}, "cause": -1}
WORDS = ("dp2", "DP24", "attn", "mlp", "model=moe", "graph=attn+mlp", "x" * 9)


def index(num_cases: int) -> dict[str, Any]:
    rng = random.Random(num_cases)
    cases = [
        [f"dp{n}-{n % 7}", rng.randrange(5), rng.randrange(-1, 4), [n % 2, rng.randrange(-1, 3)]]
        for n in range(num_cases)
    ]
    return {"outcomes": OUTCOMES, "axes": AXES, "cases": cases}


class Script:
    """The page's filter over one index."""

    def __init__(self, cases: dict[str, Any]) -> None:
        self.engine = quickjs.Context()
        self.engine.eval(FILTER.read_text())
        self.engine.eval(f"const index = {json.dumps(cases)}; const texts = known(index);")

    def ask(self, expression: str) -> Any:
        return json.loads(self.engine.eval(f"JSON.stringify({expression})"))

    def choose(self, **wish: Any) -> Any:
        return self.ask(f"choose(index, texts, {json.dumps(NOTHING | wish)})")


@pytest.fixture(scope="module")
def script() -> Script:
    return Script(index(60))


EXPRESSIONS = st.recursive(
    st.sampled_from(WORDS),
    lambda inner: st.one_of(
        inner.map("not {}".format), inner.map("({})".format),
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(" ".join),
    ), max_leaves=8,
)  # fmt: skip


@given(text=EXPRESSIONS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_words_mean_what_they_mean_to_the_command_line(script: Script, text: str) -> None:
    """Any expression selects the same cases in the page as `-k` does."""
    matches = compile_expression(text)
    assert script.choose(words=text)["shown"] == [matches(known) for known in script.ask("texts")]


@pytest.mark.parametrize("text", ["and", "a b", "(a", "a)", "not", "a or", "()", "not " * 51 + "a"])
def test_what_the_command_line_refuses_the_page_refuses(script: Script, text: str) -> None:
    """An expression that cannot be read is told, not guessed at."""
    with pytest.raises(UsageError):
        compile_expression(text)
    with pytest.raises(quickjs.JSException, match="expected"):
        script.choose(words=text)


def test_outcomes_axes_and_causes_narrow_together(script: Script) -> None:
    """Only cases that fit every wish are shown; the chips count what fits all but the outcome."""
    cases = index(60)["cases"]
    answer = script.choose(outcomes=[0, 1], axes={"0": 1}, cause=2)
    found = [(values[0] == 1 and cause == 2, outcome) for _, outcome, cause, values in cases]
    assert any(answer["shown"])
    assert answer["shown"] == [fit and outcome in (0, 1) for fit, outcome in found]
    assert answer["counts"] == [found.count((True, place)) for place in range(5)]
    assert script.choose(axes={"1": 1})["shown"] == [values[1] == 1 for _, _, _, values in cases]
    assert script.choose()["shown"] == [True] * 60


def test_a_wish_goes_into_the_address_and_comes_back(script: Script) -> None:
    """What is shown can be sent as a link; an address that says nothing known shows everything."""
    wish = {"words": "a & b=c (d)", "outcomes": [0, 3], "axes": {"1": 1}, "cause": 2}
    assert script.ask(f"read(index, written(index, {json.dumps(wish)}))") == wish
    assert script.ask(f"written(index, {json.dumps(NOTHING)})") == ""
    for fragment in ("", "#dp2-attn", "#?o=green&axis.graph=none&cause=-7&%E0=%zz", "#?=&&"):
        assert script.ask(f"read(index, {json.dumps(fragment)})") == NOTHING
