"""What the command line does when it is misused, interrupted, or finds a bug."""

import os
import signal
from pathlib import Path

import pytest

from harness.cli import main
from harness.cli import report as report_commands
from harness.cli.options import for_git
from harness.records import ExitCode, RunSpec, What
from harness.runner import launch
from tests.unit.harness.fake_engine import SCENARIO, FakeEngine, run_json, unequal


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--resume", "r", "-k", "x"], "expected no -k"),
        (["--resume", "r", "--set", "seed=1"], "expected no --set"),
        (["--resume", "r", "--device", "cpu"], "expected no --device"),
        (["--resume", "nowhere"], "is not a run folder"),
        (["other.yaml", "--resume", "r"], "expected no SCENARIO"),
        ([], "expected a SCENARIO, --tier or --resume RUN"),
        (["small.yaml", "--out", "r"], "is a run folder already"),
        (["small.yaml", "--out", "small.yaml"], "expected a folder or nothing"),
        (["small.yaml", "--slots", "0"], "--slots"),
        (["small.yaml", "--jobs", "x"], "--jobs"),
        (["small.yaml", "--ranks-per-gpu", "0"], "--ranks-per-gpu"),
        (["small.yaml", "--ranks-per-gpu", "2"], "--ranks-per-gpu 2: expected a run on GPUs"),
        (["small.yaml", "--device", "tpu"], "--device"),
        (["small.yaml", "--frobnicate"], "--frobnicate"),
        (["small.yaml", "other.yaml"], "other.yaml"),
        (["small.yaml", "-k", "(a"], "-k '(a': expected"),
        (["small.yaml", "--set", "seed"], "--set 'seed'"),
    ],
)
def test_misuse_is_one_line_and_exit_4(
    args: list[str], said: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every misuse costs one line on stderr and exit 4, and nothing runs."""
    assert main(["run", "small.yaml", "--out", "r", "-k", "dp1-attn"]) == 0
    Path("other.yaml").write_text(SCENARIO.replace("steps: 4", "steps: 5"))
    made = len(engine.made)
    capsys.readouterr()
    assert main(["run", *args]) == 4
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert len(engine.made) == made


@pytest.mark.parametrize("args", [[], ["frob"], ["--frob"], ["show"], ["report", "nowhere"],
                                  ["show", "x"], ["rerun", "x"]])  # fmt: skip
def test_other_commands_misused(args: list[str], engine: FakeEngine) -> None:
    """Usage mistakes end in 4 for every command, never in click's own 2."""
    assert main(args) == 4


def test_help_is_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    """-h works everywhere and says what the command does."""
    for command in ([], ["run"], ["list"], ["report"], ["show"], ["rerun"], ["doctor"]):
        assert main([*command, "-h"]) == 0
        assert "Usage: harness" in capsys.readouterr().out


def test_a_bug_in_the_engine_is_exit_3_with_its_traceback_kept(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our own mistake is one line too; the traceback lies in the run folder."""

    def broken(spec: RunSpec) -> None:
        raise KeyError("oops")

    engine.on_start = broken
    assert main(["run", "small.yaml", "--out", "r"]) == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "internal error: KeyError: 'oops'" in err
    assert "Traceback" in Path("r/internal_error.txt").read_text()
    assert engine.closed == 1


def test_a_bug_elsewhere_is_exit_3_with_its_traceback_kept(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a run folder the traceback goes to a file that the line names."""
    monkeypatch.setattr(launch, "load_suite", lambda *a, **k: 1 / 0)
    assert main(["run", "small.yaml"]) == 3
    err = capsys.readouterr().err
    path = Path(err.split("traceback: ")[1].rstrip().rstrip(")"))
    assert "ZeroDivisionError" in path.read_text()
    path.unlink()


def interrupted(*args: object, **options: object) -> None:
    raise KeyboardInterrupt


def _stopped_in_run(engine: FakeEngine, number: int) -> None:
    """Two cases are judged after four runs; somebody stops the harness in a later one."""

    def stop(spec: RunSpec) -> None:
        if len(engine.made) == number:
            os.kill(os.getpid(), signal.SIGTERM)

    engine.on_start = stop


def test_an_interrupted_run_shows_and_reports_what_is_done(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM while runs are made: exit 2, failures so far, counts, report, how to go on."""
    engine.spoil = unequal
    _stopped_in_run(engine, 5)
    code, answer = run_json(capsys, "run", "small.yaml", "--out", "r")
    assert code == answer["exit_code"] == 2
    assert [v["outcome"] for v in answer["verdicts"]] == ["failed", "passed"]
    assert (answer["num_cases"], list(answer["reports"])) == (4, ["html"])
    assert main(["run", "--resume", "r"]) == 2
    out, err = capsys.readouterr()
    *_, counts, ends, report = out.splitlines()
    assert counts.startswith("1 passed, 1 failed, 2 without a verdict in ")
    assert ends.startswith("interrupted: ")
    assert report.startswith("report: ")
    where = Path("r").absolute()
    assert err == f"harness: interrupted: 2 of 4 cases are done; go on with --resume {where}\n"
    engine.on_start = lambda spec: None
    assert main(["run", "--resume", "r"]) == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [(OSError("no space left"), "no report: OSError: no space left"), (KeyboardInterrupt(), "")],
)
def test_a_report_that_cannot_be_written_does_not_change_why_a_run_ended(
    engine: FakeEngine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    words: str,
) -> None:
    """A full disk, or one more Ctrl-C: the counts are told, the exit code is 2 with its line."""
    before = ""

    def fail(*args: object) -> None:
        nonlocal before
        before = capsys.readouterr().out
        raise error

    monkeypatch.setattr(report_commands, "build_reports", fail)
    _stopped_in_run(engine, 5)
    assert main(["run", "small.yaml", "--out", "r"]) == 2
    said = capsys.readouterr()
    assert "2 passed, 2 without a verdict" in before
    assert "interrupted: writing the report" in before
    assert words in said.err
    assert said.err.splitlines()[-1].endswith(f"go on with --resume {Path('r').absolute()}")


def test_an_interrupt_while_planning_ends_in_2(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before anything runs is the same exit code."""
    monkeypatch.setattr(launch, "load_suite", interrupted)
    assert main(["run", "small.yaml"]) == 2


def test_every_exit_code_has_a_meaning_for_git() -> None:
    """Good and bad are those of a verdict; without one a commit is skipped, or the search stops."""
    found = {code.name: for_git(code, ["run", "--bisect-exit"]) for code in ExitCode}
    assert found == {
        "PASSED": 0, "FAILED": 1, "INTERNAL": 125, "NOTHING_RAN": 125, "NO_VERDICT": 125,
        "INTERRUPTED": 130, "USAGE": 132,
    }  # fmt: skip
    assert [for_git(code, ["run"]) for code in ExitCode] == list(ExitCode)


@pytest.mark.parametrize(
    ("ends", "keyword", "code"),
    [({}, "dp1", 0), ({"attn": "hang"}, "dp1", 1), ({"": "crashed"}, "dp1", 125),
     ({}, "dp9", 125), ({}, "(", 132), ({}, "dp1", 130)],
)  # fmt: skip
def test_a_run_under_git_bisect(
    ends: dict[str, What], keyword: str, code: int, engine: FakeEngine
) -> None:
    """Passed, failed, no verdict, nothing selected, misused; Ctrl-C is for all of the search."""
    engine.ends = ends
    if code == 130:
        engine.on_start = interrupted
    assert main(["run", "small.yaml", "-k", keyword, "--bisect-exit"]) == code


def test_rerun_under_git_bisect(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """The same of one case; JSON tells our own code."""
    assert main(["run", "small.yaml", "--out", "r"]) == 0
    engine.spoil = unequal
    assert main(["rerun", "dp1-attn", "r", "--bisect-exit"]) == 1
    engine.spoil, engine.ends = lambda spec, record: record, {"": "crashed"}
    capsys.readouterr()
    code, answer = run_json(capsys, "rerun", "dp1-attn", "r", "--bisect-exit")
    assert (code, answer["exit_code"]) == (125, 6)
