"""One command says whether two run folders came to the same results, and where they did not."""

import shutil
from pathlib import Path

import pytest

from harness.cli import main
from harness.cli import report as report_commands
from harness.runner import launch
from tests.support.fake_engine import SCENARIO, FakeEngine, unequal


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Two with the same results, one of which was interrupted; one with others."""
    (tmp_path / "s.yaml").write_text(SCENARIO)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(report_commands, "build_reports", lambda folder, *_: {})  # they take seconds
        for name in ("whole", "resumed", "other"):
            engine = FakeEngine()
            engine.spoil = unequal if name == "other" else engine.spoil
            patch.setattr(launch, "LocalEngine", engine)
            args = ["run", "s.yaml", "-k", "dp1-attn", "--out", name, "--slots", "1"]
            assert main([*args, "--no-history"]) == int(name == "other")
    run = next((tmp_path / "resumed/runs").iterdir())
    shutil.copytree(run, run.with_name(f"{run.name}.attempt0"))
    (run.with_name(f"{run.name}.attempt0") / "outcome.json").unlink()
    return {name: tmp_path / name for name in ("whole", "resumed", "other")}


def test_a_resumed_run_is_the_same_as_one_that_nobody_disturbed(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """An attempt more, other times and another place are no difference."""
    assert main(["report", str(folders["resumed"]), "--same-as", str(folders["whole"])]) == 0
    assert "not as in" not in capsys.readouterr().err


def test_other_results_are_told(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A difference ends with exit code 1 and names the line and both sides."""
    assert main(["report", str(folders["other"]), "--same-as", str(folders["whole"])]) == 1
    told = capsys.readouterr().err
    assert f"not as in {folders['whole']}: report.json: line " in told
