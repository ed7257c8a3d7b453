"""Fixtures of the harness' unit tests."""

import functools
import os
from pathlib import Path

import pytest

from harness import provenance
from harness.cli import run as report_commands
from harness.runner import launch
from tests.support.fake_engine import SCENARIO, Capsys, Cli, FakeEngine

_packages = functools.cache(provenance.installed_packages)


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only they would lose need not reach the disk; packages are read once."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(provenance, "installed_packages", lambda: dict(_packages()))


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
