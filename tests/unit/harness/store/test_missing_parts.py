"""Contracts of `check`, `report`, `show` and `merge` where a part of a run folder is gone."""

import shutil
from pathlib import Path

import pytest

from harness.cli import main
from tests.unit.harness.fake_engine import FakeEngine, run_json

CASE = "dp2-attn"


def harness(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    code = main(args)
    return (code, *capsys.readouterr())


@pytest.fixture
def run(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run folder of which every case passed."""
    assert harness(capsys, "run", "small.yaml", "--out", "r", "--no-history")[0] == 0
    return Path("r")


def test_a_case_whose_folder_is_gone_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its verdict is gone with it: check and report say whose, and neither ends with 0."""
    shutil.rmtree(run / "cases" / CASE)
    code, found = run_json(capsys, "check", "r")
    assert (code, found["unjudged"], found["exit_code"]) == (6, [CASE], 6)
    for command in ("check", "report"):
        code, out, err = harness(capsys, command, "r")
        assert (code, err) == (6, f"harness: no verdict: {CASE}\n")
        assert "as they were written" not in out


def test_a_run_that_is_gone_is_no_pass_anywhere(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check and show read a case's runs from the same place, so they say the same of it."""
    _, before = run_json(capsys, "show", CASE, "r")
    shutil.rmtree(run / "runs" / before["verdict"]["runs"]["candidate"])
    _, shown = run_json(capsys, "show", CASE, "r")
    assert (shown["verdict"]["outcome"], shown["verdict"]["what"]) == ("error", "not_run")
    code, found = run_json(capsys, "check", "r")
    (checked,) = (each for each in found["verdicts"] if each["case_id"] == CASE)
    assert (code, checked) == (6, shown["verdict"])


def test_cases_kept_without_any_run_are_whole(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder from which `runs` was left out as a whole is judged by what lies with its cases."""
    shutil.rmtree(run / "runs")
    assert run_json(capsys, "show", CASE, "r")[1]["verdict"]["outcome"] == "passed"
    assert run_json(capsys, "check", "r")[0] == 0


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("unlinked", "verdict.json: missing"),
        ("cut", "verdict.json: "),
        ("other", "verdict.json is that of case dp1-attn"),
        ("no folder", "the case was not judged"),
    ],
)
def test_show_says_why_there_is_no_verdict(
    run: Path, capsys: pytest.CaptureFixture[str], damage: str, why: str
) -> None:
    """A verdict that cannot be read is no answer: its reason, and exit code 6."""
    path = run / "cases" / CASE / "verdict.json"
    match damage:
        case "unlinked":
            path.unlink()
        case "cut":
            path.write_text(path.read_text()[:40])
        case "other":
            shutil.copy(run / "cases" / "dp1-attn" / "verdict.json", path)
        case _:
            shutil.rmtree(path.parent)
    code, shown = run_json(capsys, "show", CASE, "r")
    assert (code, shown["verdict"]) == (6, None)
    assert shown["why"].startswith(why)
    code, out, _ = harness(capsys, "show", CASE, "r")
    assert code == 6
    assert f"no verdict: {why}" in out


def test_a_folder_is_not_merged_with_itself(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever spelling it is given in."""
    code, _, err = harness(capsys, "merge", "r", "./r", "--out", "m")
    assert (code, err) == (4, "harness: merge: expected each run folder once, got r, r\n")
