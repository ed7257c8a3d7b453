"""What the command line does when it is misused, interrupted, or finds a bug."""

import os
import re
import signal
from pathlib import Path

import pytest

from harness.cli import main
from harness.cli import report as report_commands
from harness.cli.main import COMMANDS
from harness.cli.options import for_git
from harness.records import ExitCode, RunSpec
from harness.runner import launch
from tests.support.fake_engine import SCENARIO, Capsys, FakeEngine, Patch, run_json, unequal


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("run --resume r -k x", "expected no -k"),
        ("run --resume r --set seed=1", "expected no --set"),
        ("run --resume r --device cpu", "expected no --device"),
        ("run --resume nowhere", "is not a run folder"),
        ("run other.yaml --resume r", "expected no SCENARIO"),
        ("run", "expected a SCENARIO, --tier or --resume RUN"),
        ("run small.yaml --out r", "is a run folder already"),
        ("run small.yaml --out small.yaml", "expected a folder or nothing"),
        ("run small.yaml --slots 0", "--slots"),
        ("run small.yaml --jobs x", "--jobs"),
        ("run small.yaml --ranks-per-gpu 0", "--ranks-per-gpu"),
        ("run small.yaml --ranks-per-gpu 2", "--ranks-per-gpu 2: expected a run on GPUs"),
        ("run small.yaml --device tpu", "--device"),
        ("run small.yaml --frobnicate", "--frobnicate"),
        ("run small.yaml --mixed", "expected --resume"),
        ("run small.yaml other.yaml", "other.yaml"),
        ("run small.yaml -k (a", "-k '(a': expected"),
        ("run small.yaml --set seed", "--set 'seed'"),
        ("frob", "frob"),
        ("--frob", "--frob"),
        ("show", "CASE"),
        ("show dp9 r", "dp1-attn"),
        ("show nowhere/dp1-attn", "nowhere/dp1-attn"),
        ("bisect nowhere/dp1-attn", "nowhere/dp1-attn"),
        ("report nowhere", "nowhere"),
        ("rerun x r", "'x'"),
    ],
)
def test_misuse_is_one_line_and_exit_4(
    args: str, said: str, engine: FakeEngine, capsys: Capsys
) -> None:
    """Every misuse costs one line on stderr and exit 4, never click's 2, and nothing runs."""
    assert main(["run", "small.yaml", "--out", "r", "-k", "dp1-attn"]) == 0
    Path("other.yaml").write_text(SCENARIO.replace("steps: 4", "steps: 5"))
    made = len(engine.made)
    capsys.readouterr()
    assert main(args.split()) == 4
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), said in err, len(engine.made)) == ("", 1, True, made)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_and_the_version_are_exit_0(command: str, capsys: Capsys) -> None:
    """-h works everywhere and says what the command does; without a command it is misuse."""
    assert main([*command.split(), "-h"]) == 0
    assert f"Usage: harness {command}" in capsys.readouterr().out
    if not command:
        assert (main([]), main(["--version"])) == (4, 0)
        assert re.fullmatch(r"harness \S.*\n", capsys.readouterr().out)


def test_a_bug_in_the_engine_is_exit_3_with_its_traceback_kept(
    engine: FakeEngine, capsys: Capsys
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


def test_what_ends_before_anything_runs(
    engine: FakeEngine, monkeypatch: Patch, capsys: Capsys
) -> None:
    """Ctrl-C is 2, for git a stop; of a bug the traceback goes to a file that the line names."""

    def fail(error: BaseException) -> None:
        raise error

    monkeypatch.setattr(launch, "load_suite", lambda *a, **k: fail(KeyboardInterrupt()))
    codes = (main(["run", "small.yaml"]), main(["run", "small.yaml", "--bisect-exit"]))
    assert codes == (2, 130)
    monkeypatch.setattr(launch, "load_suite", lambda *a, **k: fail(ZeroDivisionError()))
    capsys.readouterr()
    assert main(["run", "small.yaml"]) == 3
    path = Path(capsys.readouterr().err.split("traceback: ")[1].rstrip().rstrip(")"))
    assert "ZeroDivisionError" in path.read_text()
    path.unlink()


def _stopped_in_run(engine: FakeEngine, number: int) -> None:
    """Two cases are judged after four runs; somebody stops the harness in a later one."""

    def stop(spec: RunSpec) -> None:
        if len(engine.made) == number:
            os.kill(os.getpid(), signal.SIGTERM)

    engine.on_start = stop


def test_an_interrupted_run_shows_and_reports_what_is_done(
    engine: FakeEngine, capsys: Capsys
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
    capsys: Capsys,
    monkeypatch: Patch,
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


def test_every_exit_code_has_a_meaning_for_git() -> None:
    """Good and bad are those of a verdict; without one a commit is skipped, or the search stops."""
    found = {code.name: for_git(code, ["run", "--bisect-exit"]) for code in ExitCode}
    assert found == {
        "PASSED": 0, "FAILED": 1, "INTERNAL": 125, "NOTHING_RAN": 125, "NO_VERDICT": 125,
        "INTERRUPTED": 130, "USAGE": 132,
    }  # fmt: skip
    assert [for_git(code, ["run"]) for code in ExitCode] == list(ExitCode)
