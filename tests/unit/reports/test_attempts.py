"""Attempts that the machine failed: in every format, and no reason for two reports to differ."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import junitparser
import pytest
import xmlschema
from junitparser.xunit2 import FlakyError, RerunError
from junitparser.xunit2 import TestCase as ParsedCase

from harness.records import ErrorRecord, RunOutcome, dumps
from harness.store import RunFolder, begin_run, save_outcome
from reports import build, junit, markdown
from reports.json_report import normalised
from reports.reading import summarise
from reports.report import Report

TAKEN = "rank 0 before its first step: EADDRINUSE, address already in use <b>"
NO_PORT = ErrorRecord(
    rank=0, step=-1, what="crashed", type="DistNetworkError", traceback="",
    message="EADDRINUSE, address already in use",
)  # fmt: skip


def fail_first(folder: Path, case_id: str, leg: str, message: str = TAKEN) -> None:
    """Put an attempt before the one that a run's folder holds."""
    with RunFolder.open(folder) as opened:
        (case,) = [case for case in opened.cases if case.id == case_id]
        spec = getattr(case, leg)
        current = opened.run_folder(spec.key)
        kept = current.with_name(f"{current.name}.attempt0")
        begin_run(kept, spec)
        (kept / "rank0.jsonl").write_text(dumps(NO_PORT) + "\n")
        outcome = opened.load_run(spec).outcome
        save_outcome(
            kept,
            dataclasses.replace(outcome, what="crashed", message=message, culprit_rank=0),
        )
        assert isinstance(outcome, RunOutcome)


@pytest.fixture(scope="module")
def retried(tmp_path_factory: pytest.TempPathFactory, make_writer: Any) -> dict[str, Any]:
    """Reports of a folder before and after one of its runs is said to have failed once."""
    writer = make_writer(tmp_path_factory.mktemp("retried") / "run")
    writer.add("dp2-attn", 2, "attn")
    writer.add("dp3-attn", 3, "attn", candidate={"peak": 100 << 20})
    folder = writer.write()
    before = {form: path.read_text() for form, path in build(folder).items()}
    fail_first(folder, "dp2-attn", "candidate")
    fail_first(folder, "dp3-attn", "control")
    files = build(folder)
    return {
        "folder": folder, "before": before, "paths": files,
        "texts": {form: path.read_text() for form, path in files.items()},
    }  # fmt: skip


def test_every_format_says_passed_on_attempt_two(retried: dict[str, Any]) -> None:
    """A pass that took two attempts is told as such, with the failure's name."""
    texts = retried["texts"]
    words = "passed on attempt 2 (candidate: port_in_use)"
    assert words in texts["html"]
    assert words.replace("(", "\\(").replace(")", "\\)").replace("_", "\\_") in texts["markdown"]
    assert "Needed another attempt: 2" in texts["markdown"]
    (case,) = [c for c in json.loads(texts["json"])["cases"] if c["id"] == "dp2-attn"]
    (attempt,) = case["attempts"]["candidate"]
    assert (attempt["signature"], attempt["what"]) == ("port_in_use", "crashed")
    assert case["verdict"]["outcome"] == "passed"
    assert "EADDRINUSE" in texts["html"]


def test_reports_differ_in_nothing_else(retried: dict[str, Any], tmp_path: Path) -> None:
    """Once normalised, a report with attempts is the report without."""
    before = tmp_path / "report.json"
    before.write_text(retried["before"]["json"])
    folder = retried["folder"]
    assert normalised(before, folder) == normalised(retried["paths"]["json"], folder)
    assert retried["before"]["json"] != retried["texts"]["json"]


def test_two_parsers_find_every_attempt(retried: dict[str, Any]) -> None:
    """The XML is valid by the schema, and junitparser reads flaky and rerun errors as its own."""
    xmlschema.XMLSchema(str(Path(__file__).with_name("junit.xsd"))).validate(
        retried["texts"]["junit"]
    )
    (suite,) = junitparser.JUnitXml.fromfile(str(retried["paths"]["junit"]))
    assert (suite.tests, suite.failures, suite.errors) == (2, 1, 0)
    cases = {case.name: ParsedCase.fromelem(case) for case in suite}
    (flaky,) = cases["dp2-attn"].iterchildren(FlakyError)
    assert cases["dp2-attn"].is_passed
    assert (flaky.type, flaky.stack_trace is not None) == ("port_in_use", True)
    assert str(flaky.message).startswith("attempt 1 of the candidate: rank 0 before")
    (rerun,) = cases["dp3-attn"].iterchildren(RerunError)
    assert rerun.type == "port_in_use"
    assert cases["dp3-attn"].is_failure


def test_junitparser_counts_every_outcome(summary: Report) -> None:
    """Over every kind of outcome a parser that is not ours counts what we count."""
    (suite,) = junitparser.JUnitXml.fromstring(junit.render(summary).encode())
    kinds = [type(result).__name__ for case in suite for result in case.result]
    assert len(list(suite)) == suite.tests == 13
    assert [kinds.count(kind) for kind in ("Failure", "Error", "Skipped")] == [6, 4, 1]
    stated = (suite.failures, suite.errors, suite.skipped)
    assert stated == (6, 4, 1)


def test_the_summary_of_a_step_is_added_and_never_too_large(writer: Any, tmp_path: Path) -> None:
    """What stands in the file stays; with little room less is told, with a count; then one line."""
    for number in range(40):
        writer.add(f"c{number}", 1, "attn", skip_reason="later " * 40)
    report = summarise(writer.write())
    place = tmp_path / "summary.md"
    place.write_text("before\n")
    markdown.add_to_step(place, report)
    text = place.read_text()
    assert text.startswith("before\n")
    assert text.count("skipped | c") == 40
    for room, expected in ((6000, "more cases are in the page"), (100, "no room is left here")):
        place.write_text("x" * (markdown.MAX_STEP_FILE_BYTES - room))
        markdown.add_to_step(place, report)
        added = place.read_text()[markdown.MAX_STEP_FILE_BYTES - room :]
        assert expected in added
        assert place.stat().st_size <= 1 << 20


def test_elements_of_attempts_come_before_output(retried: dict[str, Any]) -> None:
    """The order of elements is the one that strict readers ask for."""
    case = ET.fromstring(retried["texts"]["junit"]).find(".//testcase[@name='dp3-attn']")
    assert case is not None
    assert [child.tag for child in case] == ["failure", "rerunError", "system-out"]
