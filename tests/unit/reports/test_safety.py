"""The page of safety: what no verdict says is never safe, and records name the version."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import quickjs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reports
from harness.cli import main
from harness.errors import ScenarioError, UsageError
from harness.scenario.schema import decode_scenario
from harness.scenario.suite import compile_expression
from reports import html, safety, summarise
from tests.unit.reports.folders import Writer, drift

SCENARIO = """\
name: {name}
why: A release is safe or it is not.
about: {{package: Mega_FSDP, combination: {words}}}
axes: {{graph: [eager, [attn]]}}
compare: {{axis: graph, reference: eager, expect: bitwise}}
"""


def folder(path: Path, words: str, version: str, **cases: dict[str, object]) -> Path:
    """A run folder of such a scenario; ranks of the version."""
    writer = Writer(path, scenario=SCENARIO.format(name="one", words=words), steps=10)
    legs = {"environment": {"packages": {"mega-fsdp": version}}}
    for world_size, (case_id, changes) in enumerate(cases.items(), 2):
        candidate = legs | changes.pop("candidate", {})  # type: ignore[operator]
        writer.add(case_id, world_size, "attn", scenario="one", reference=legs, control=legs,
                   candidate=candidate, **changes)  # fmt: skip
    return writer.write()


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Release 0.9 with graphs, 0.10 with graphs and sharding, 0.10 with sharding in part."""
    hang: dict[str, object] = {
        "candidate": {"what": "hang", "message": "rank 0 did not finish", "culprit": 0}
    }
    return [
        folder(tmp_path / "a", "[graphs]", "0.9", good={}, wrong={"candidate": {"edit": drift}}),
        folder(tmp_path / "b", "[sharding, graphs]", "0.10", good={}, stuck=hang),
        folder(tmp_path / "c", "[sharding]", "0.10", good={}, late={"unjudged": True}),
        folder(tmp_path / "d", "[graphs]", "0.10", good={}),
    ]


def test_a_cell_is_its_worst_case_and_safe_only_if_every_case_passed(folders: list[Path]) -> None:
    """One row a combination, one column a release in their order; what never ran says so."""
    (table,) = safety.tables(summarise(each) for each in folders)
    assert (table.package, table.versions) == ("Mega_FSDP", ("0.9", "0.10"))
    assert {words: [cell.answer for cell in cells] for words, cells in table.rows} == {
        "graphs": ["wrong", "safe"], "graphs + sharding": ["not run", "crashes"],
        "sharding": ["not run", "not run"],
    }  # fmt: skip
    cells = dict(table.rows)["graphs"]
    assert {f.case_id: f.answer for f in cells[0].findings} == {"good": "safe", "wrong": "wrong"}


def test_a_feature_that_is_an_axis_is_the_value_of_each_case(tmp_path: Path) -> None:
    """So one scenario fills a row for each value."""
    (table,) = safety.tables([summarise(folder(tmp_path / "a", "[fp8, graph]", "1.0", good={}))])
    assert [words for words, _ in table.rows] == ["fp8 + graph attn"]


def test_what_never_ran_fills_no_column_that_tells_nothing(tmp_path: Path) -> None:
    """A run that was interrupted has cases without a version; alone they are all that is known."""
    ran = folder(tmp_path / "ran", "[graphs]", "1.0", good={})
    never = Writer(tmp_path / "never", scenario=SCENARIO.format(name="one", words="[graphs]"))
    never.add("late", 2, "attn", scenario="one", skip_reason="not here")
    never.write()
    for folders, versions in (([ran, tmp_path / "never"], ("1.0",)),
                              ([tmp_path / "never"], ("not recorded",))):  # fmt: skip
        (table,) = safety.tables(summarise(each) for each in folders)
        assert table.versions == versions


def test_the_command_and_the_page_show_the_table(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Markdown has a row a combination, JSON the same cells, the page its own folder's."""
    names = [str(each) for each in folders]
    assert main(["safety", *names]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| graphs")]
    assert [row.count("|") for row in rows] == [4, 4]
    assert main(["safety", *names, "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    assert table["rows"][0][1][0]["findings"][0]["words"].startswith("step 7, rank 1, weights")
    assert 'id="h-safety"' in html.render(summarise(folders[0]))


def test_folders_of_other_scenarios_say_nothing(tmp_path: Path) -> None:
    """No key `about`: exit code 5, and no table on the page."""
    writer = Writer(tmp_path / "run", steps=10)
    writer.add("dp1", 1, "attn")
    path = writer.write()
    assert main(["safety", str(path)]) == 5
    assert 'id="h-safety"' not in html.render(summarise(path))


@pytest.mark.parametrize("about", ["{package: torch}", "{package: torch, combination: [a, a]}",
                                   "{package: torch, combination: [args.none]}"])  # fmt: skip
def test_a_scenario_says_what_it_is_about_in_full(about: str) -> None:
    """Both keys, each feature once."""
    text = SCENARIO.format(name="one", words="[]").replace("{package: Mega_FSDP, combination: []}",
                                                           about)  # fmt: skip
    with pytest.raises(ScenarioError, match="about"):
        decode_scenario(f"{text}base: {{steps: 2}}\nchecks: {{loss: {{}}}}\n".encode(), "one.yaml")


# --- the page's filter means what `-k` means, and what it selects can be linked to ----------------


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
