"""Contracts of `harness bisect --commits`, over commits whose harness answers at once."""

import os
import signal
from pathlib import Path

import pytest

from harness import provenance
from harness.bisect import session
from harness.cli import main
from tests.bisect_history.history import git, harnesses, make_history
from tests.support.fake_engine import FakeEngine, failed_run, run_json


@pytest.fixture
def history(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The working folder is a repository of 17 commits of harnesses that answer at once."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("ASKED_OF_HISTORY", str(tmp_path / "asked.log"))
    commits = make_history(tmp_path, harnesses(16, 11, broken=(3, 12, 14)))
    failed_run(engine)
    return commits


def searched(commits: list[str], *more: str) -> list[str]:
    """The command that searches all of them."""
    return [
        "bisect", "dp2-attn", "r", "--out", "b", "--until", "environment",
        "--commits", f"{commits[0]}..{commits[-1]}", *more,
    ]  # fmt: skip


def test_the_first_bad_commit_in_log2_of_all(
    history: list[str], engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """With both ends, skips over what does not build, with the room that was given, three runs
    a commit; nothing is left of the worktree, and the same command asks nothing again."""
    room = ("--slots", "4", "--jobs", "2")
    command = searched(history, "--every-run", *room)
    code, found = run_json(capsys, *command)
    commits = found["commits"]
    assert (code, commits["first_bad"]["hash"]) == (1, history[11])
    assert commits["first_bad"]["subject"] == "Change 11"
    num_skipped = len(commits["skipped"])
    assert commits["num_runs"] <= 4 + 2 + num_skipped
    assert found["num_runs"] == 3 * commits["num_runs"]
    asked = Path("asked.log").read_text().splitlines()
    assert len(asked) == commits["num_runs"] - num_skipped
    assert all(line.endswith("--json --no-history --slots 4 --jobs 2") for line in asked)
    assert git(Path.cwd(), "worktree", "list").count("\n") == 0
    assert git(Path.cwd(), "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert main(command) == 1
    assert f"first bad commit: {history[11][:10]} Change 11" in capsys.readouterr().out
    assert Path("asked.log").read_text().splitlines() == asked


def test_what_is_known_of_the_bad_commit_is_not_asked_again(
    history: list[str],
    engine: FakeEngine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search for causes has seen how often the case fails: where that was the bad commit's
    code it need only fail there once, elsewhere as often as without."""
    command = searched(history)
    command[command.index("environment")] = "causes"
    command[-1] = f"{history[10]}..{history[13]}"
    runs = []
    for number, code in enumerate((history[13], f"{history[13]}+changed")):
        monkeypatch.setattr(provenance, "describe", lambda code=code: code)
        command[command.index("--out") + 1] = f"b{number}"
        found = run_json(capsys, *command, "--no-element")[1]
        assert found["commits"]["first_bad"]["hash"] == history[11]
        runs.append(found["commits"]["num_runs"])
    assert runs[1] - runs[0] == 4


def test_sigterm_ends_it_as_ctrl_c_does(
    history: list[str],
    engine: FakeEngine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit 2 with the command that goes on, also where no run is under way."""

    def terminated(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(session, "first_bad_commit", terminated)
    assert main(searched(history)) == 2
    assert "go on with: harness bisect dp2-attn r" in capsys.readouterr().err


def test_every_run_goes_with_commits(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone it says nothing."""
    failed_run(engine)
    assert main(["bisect", "dp2-attn", "r", "--every-run"]) == 4
    error = capsys.readouterr().err
    assert "--commits" in error
    assert "--package" in error
