"""Fixtures of the harness' unit tests."""

from pathlib import Path

import pytest

from harness.cli import report as report_commands
from harness.runner import launch
from tests.support.fake_engine import SCENARIO, Capsys, Cli, FakeEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    """A fake in place of the local engine; the working folder is a fresh one."""
    fake = FakeEngine()
    monkeypatch.setattr(launch, "LocalEngine", fake)
    monkeypatch.setattr(
        report_commands,
        "build_reports",
        lambda folder, *_: {"html": folder / "report" / "index.html"},
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SCENARIO)
    return fake


@pytest.fixture
def cli(engine: FakeEngine, capsys: Capsys) -> Cli:
    """Commands over the fake engine."""
    return Cli(capsys)
