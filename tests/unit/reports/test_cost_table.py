"""The table of what was compared, memory and step time, in Markdown and on the page."""

import json
from typing import Any

from reports import build
from reports.reading import summarise
from reports.report import COST_HEAD, Report, cost_rows

JOINED = """\
name: several
why: "Together: a, b."
scenarios:
  - {file: a.yaml, text: "{name: a, compare: {axis: graph, reference: eager}}"}
  - {file: b.yaml, text: "{name: b, compare: {axis: %s, reference: eager}}"}
"""


def table(report: Report) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(COST_HEAD, row, strict=True)) for row in cost_rows(report)}


def test_each_measured_case_has_its_comparisons_and_ratios(summary: Report) -> None:
    """How many losses and digests were compared, and what the candidate takes."""
    row = table(summary)["dp1-attn"]
    assert (row["losses"], row["digests"]) == ("20 equal", "289 equal")
    assert (row["peak, MiB"], row["peak ratio"]) == ("40.0 → 40.0", "1.00")
    assert (row["step, ms"], row["speed"], row["A/A speed"]) == ("10 → 10", "1.00", "1.00")
    assert table(summary)["dp3-full_iteration"]["peak ratio"] == "2.50"


def test_what_differs_is_counted(summary: Report) -> None:
    """A case that diverged is not told as equal."""
    row = table(summary)["dp2-attn"]
    assert "differ" in row["losses"]
    assert "equal" not in row["losses"] + row["digests"]


def test_a_case_whose_candidate_never_ran_has_no_row(summary: Report) -> None:
    """Nothing was measured, so there is nothing to read."""
    assert "dp6-attn" not in table(summary)


def test_the_table_is_in_markdown_page_and_json(writer: Any) -> None:
    """Each format shows the same costs."""
    writer.add("dp1-attn", 1, "attn")
    folder = writer.write()
    files = build(folder)
    page, words = files["html"].read_text(), files["markdown"].read_text()
    assert "A/A speed" in page
    assert "| dp1\\-attn | 20 equal | 289 equal |" in words
    (case,) = json.loads(files["json"].read_text())["cases"]
    assert case["times"]["speed"] == 1.0


def test_several_scenarios_that_compare_one_axis_have_it_across(writer: Any) -> None:
    """The matrix of many scenarios reads like that of each."""
    writer.scenario = JOINED % "graph"
    labels = {"parallel": "dp1", "graph": "attn", "scenario": "a"}
    writer.add("a.dp1-attn", 1, "attn", labels=labels)
    assert summarise(writer.write()).matrix.axis == "graph"


def test_several_scenarios_that_compare_different_axes_have_the_scenario_across(
    writer: Any,
) -> None:
    """No axis is the one under test for all of them."""
    writer.scenario = JOINED % "stress"
    labels = {"parallel": "dp1", "graph": "attn", "scenario": "a"}
    writer.add("a.dp1-attn", 1, "attn", labels=labels)
    assert summarise(writer.write()).matrix.axis == "scenario"
