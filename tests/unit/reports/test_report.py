"""One summary for all formats: failures first, and nothing missing looks green."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UsageError
from reports.reading import summarise
from reports.report import Report


def test_every_outcome_is_counted_and_failures_lead(summary: Report) -> None:
    """Cases come worst first, in the plan's order within an outcome."""
    report = summary
    assert dict(report.counts) == {
        "failed": 6, "error": 2, "incomparable": 2, "passed": 2, "skipped": 1,
    }  # fmt: skip
    assert report.exit_code == 1
    assert [case.outcome for case in report.cases] == sorted(
        (case.outcome for case in report.cases), key=list(report.counts).index
    )
    whats = {case.spec.id: case.verdict.what for case in report.cases}
    assert whats == {
        "dp1-attn": "", "dp1-full_iteration": "", "dp2-attn": "diverged",
        "dp2-full_iteration": "nonfinite", "dp3-attn": "hang",
        "dp3-full_iteration": "memory_regression", "dp4-attn": "missing_step",
        "dp4-full_iteration": "nondeterministic_reference", "dp5-attn": "oom",
        "dp5-full_iteration": "different_environment", "dp6-attn": "unsupported",
        "dp6-full_iteration": "not_run", "dp7-attn": "diverged",
    }  # fmt: skip


def test_case_without_verdict_is_an_error(writer: Any) -> None:
    """A planned case that was never judged, or whose verdict is damaged, is not left out."""
    writer.add("a", 1, "attn", unjudged=True)
    writer.add("b", 1, "attn")
    folder = writer.write()
    (folder / "cases" / "b" / "verdict.json").write_text("{")
    report = summarise(folder)
    assert [case.verdict.what for case in report.cases] == ["not_run", "corrupt_record"]
    assert report.exit_code == 6


def test_empty_plan(writer: Any) -> None:
    """A folder without cases is reported as nothing ran."""
    report = summarise(writer.write())
    assert (report.exit_code, report.headline, report.cases) == (5, "nothing ran", ())


def test_matrix_has_the_compared_axis_across(summary: Report) -> None:
    """Columns are the values of the axis that the scenario compares."""
    matrix = summary.matrix
    assert (matrix.axis, matrix.row_axes) == ("graph", ("parallel",))
    assert matrix.columns[:2] == ("attn", "full_iteration")
    (case,) = matrix.cases["dp2", "attn"]
    assert case.spec.id == "dp2-attn"


def test_matrix_without_a_readable_scenario(writer: Any) -> None:
    """An unreadable scenario text costs the axis, not the report."""
    writer.scenario = "{[" * 100
    writer.add("a", 1, "attn")
    report = summarise(writer.write())
    assert report.scenario == "fsdp_cudagraph_alignment"
    assert len(report.matrix.cases) == 1


def test_environments_are_told_apart(summary: Report) -> None:
    """Two fingerprints get two letters, and a case says which key differs."""
    report = summary
    assert len(report.environments) == 2
    cases = {case.spec.id: case for case in report.cases}
    moved = cases["dp5-full_iteration"]
    assert moved.environments["candidate"] != moved.environments["reference"]
    assert moved.environment_note == "differs in torch"
    assert cases["dp1-attn"].environment_note == "the same in every run and rank"


def test_output_is_of_the_rank_at_fault(summary: Report) -> None:
    """A failing case shows what its culprit printed; a passing one shows nothing."""
    cases = {case.spec.id: case for case in summary.cases}
    hang = cases["dp3-attn"].output
    assert hang is not None
    assert (hang.role, hang.rank) == ("candidate", 1)
    assert hang.text.endswith("last line")
    oom = cases["dp5-attn"].output
    assert oom is not None
    assert oom.role == "reference"
    assert cases["dp1-attn"].output is None


def test_commands_are_quoted(tmp_path: Path, writer: Any) -> None:
    """A path with a space is quoted so that the command can be pasted."""
    writer.path = tmp_path / "my run;rm -rf"
    writer.add("a", 1, "attn")
    report = summarise(writer.write())
    assert report.cases[0].command == f"harness rerun '{writer.path}/cases/a'"


def test_runs_are_read_from_sealed_cases_too(writer: Any) -> None:
    """A folder from which the runs were removed is still reported from its cases."""
    writer.add("a", 1, "attn")
    folder = writer.write()
    (folder / "runs").rename(folder / "gone")
    report = summarise(folder)
    assert report.cases[0].curve is not None
    assert report.cases[0].peaks["reference"] == {0: 40 << 20}


def test_the_head_says_when_what_where_and_how_long(writer: Any, tmp_path: Path) -> None:
    """Wall time is that with runs under way, overlaps once."""
    writer.add("a", 1, "attn")
    folder = writer.write()
    report = summarise(folder)
    assert (report.wall_s, report.created) == (
        1.25,
        "2031-02-03T04:05:06+00:00",
    )


def test_failed_checks_come_first(summary: Report) -> None:
    """A reader sees what failed before what passed."""
    case = next(case for case in summary.cases if case.spec.id == "dp7-attn")
    outcomes = [check.outcome for check in case.checks]
    assert outcomes[0] == "failed"
    assert outcomes == sorted(outcomes, key=list(summary.counts).index)


def test_not_a_run_folder(tmp_path: Path) -> None:
    """A folder that is no run folder, or a damaged one, is one line to the user."""
    with pytest.raises(UsageError, match="not a run folder"):
        summarise(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": 1}))
    with pytest.raises(UsageError, match="damaged"):
        summarise(tmp_path)
