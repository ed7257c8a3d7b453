"""The page of safety: what no verdict says is never safe, and records name the version."""

import json
from pathlib import Path

import pytest

from harness.cli import main
from harness.errors import ScenarioError
from harness.scenario.schema import decode_scenario
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
