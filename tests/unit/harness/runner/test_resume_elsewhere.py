"""A run folder is gone on with by the code, packages and variables that it was made with."""

from pathlib import Path

import pytest

from harness import provenance
from harness.cli import main
from harness.cli import report as report_commands
from harness.history import History
from harness.history.entries import FolderEntry
from harness.runner import launch
from harness.store import RunFolder
from tests.unit.harness.fake_engine import SCENARIO, FakeEngine, run_json

RESUME = ("run", "--resume", "run")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Makes the runs of the small scenario in `run`, of which one case is then half done."""
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SCENARIO)
    engine = FakeEngine()
    monkeypatch.setattr(launch, "LocalEngine", engine)
    monkeypatch.setattr(report_commands, "build_reports", lambda folder, *_: {})
    monkeypatch.setattr(provenance, "installed_packages", lambda: {"torch": "2.12"})
    monkeypatch.setattr(provenance, "code", lambda: "old")
    monkeypatch.setattr("harness.provenance.describe", lambda root=None: "a" * 40)
    engine.environment |= {"commit": "a" * 40}
    assert main(["run", "s.yaml", "--out", "run", "--slots", "2", "--no-history"]) == 0
    with RunFolder.open(Path("run")) as folder:
        (case,) = (case for case in folder.cases if case.id == "dp2-attn")
        folder.set_aside(case.candidate.key)
    engine.made.clear()
    return engine


def other_code(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "code", lambda: "new")
    monkeypatch.setattr("harness.provenance.describe", lambda root=None: "b" * 40)
    engine.environment = {"fingerprint": {"torch": "x", "code": "new"}, "commit": "b" * 40}


@pytest.mark.parametrize(
    ("name", "told"),
    [("code", "code old became new"), ("packages", "package torch 2.12 became 2.13"),
     ("variables", "variable TORCHDYNAMO_DISABLE absent became 1")],
)  # fmt: skip
def test_what_differs_is_refused_in_one_line(
    name: str, told: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Other code, packages or variables: exit 4, nothing is run, the way out is named."""
    if name == "code":
        other_code(engine, monkeypatch)
    elif name == "packages":
        monkeypatch.setattr(provenance, "installed_packages", lambda: {"torch": "2.13"})
    else:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert main([*RESUME, "--no-history"]) == 4
    said = capsys.readouterr().err
    assert (said.count("\n"), told in said, "--mixed" in said) == (1, True, True)
    assert engine.made == []


def test_another_commit_of_the_same_code_goes_on(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that touched no file of the packages is the same code; another GPU is no matter."""
    monkeypatch.setattr("harness.provenance.describe", lambda root=None: "b" * 40)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert main([*RESUME, "--no-history"]) == 0
    assert len(engine.made) == 1


def test_a_program_that_was_edited_is_other_code(tmp_path: Path, engine: FakeEngine) -> None:
    """The scripts beside a program's own count, whichever case starts it."""
    from harness.program.spec import codes_of

    script = tmp_path / "train.py"
    config = {"program": {"kind": "script", "target": str(script), "folder": str(tmp_path)}}
    script.write_text("lr = 1")
    before = codes_of([config, config])
    (tmp_path / "model.py").write_text("layers = 2")
    after = codes_of([config])
    assert provenance.changes(before, after).startswith(f"program {script} ")


def test_mixed_runs_are_incomparable_and_booked_under_their_own_commit(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The case with runs of both has no verdict about the code; the history knows who made what."""
    other_code(engine, monkeypatch)
    code, done = run_json(capsys, *RESUME, "--mixed", "--history", "h.sqlite")
    assert code == 6
    outcomes = {verdict["case_id"]: verdict["what"] for verdict in done["verdicts"]}
    assert outcomes["dp2-attn"] == "different_environment"
    with History.open(Path("h.sqlite")) as history:
        (entry,) = history.entries()
    assert isinstance(entry, FolderEntry)
    assert entry.commit == "a" * 40
    by_commit = {run.commit for run in entry.runs if run.key == engine.made[0]}
    assert by_commit == {"", "b" * 40}
    assert {case.case_id for case in entry.cases if case.commit == "b" * 40} == {"dp2-attn"}
    assert {run.commit for run in entry.runs if run.key not in engine.made} == {""}


def test_mixed_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """By itself it says nothing."""
    assert main(["run", "s.yaml", "--mixed"]) == 4
    assert "expected --resume" in capsys.readouterr().err
