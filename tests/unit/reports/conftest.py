"""A synthetic run folder with every kind of outcome, judged by the real checks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.records import Verdict
from reports.reading import summarise
from reports.report import Report
from tests.unit.reports.folders import HOSTILE, Writer, add_everything


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every kind of outcome; tests do not change it."""
    return add_everything(Writer(tmp_path_factory.mktemp("runs") / "run")).write()


@pytest.fixture(scope="session")
def summary(everything: Path) -> Report:
    """The summary of that folder."""
    return summarise(everything)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    """An empty writer of a folder that is the test's own."""
    return Writer(tmp_path / "run")


@pytest.fixture(scope="session")
def make_writer() -> type[Writer]:
    """For folders elsewhere."""
    return Writer


@pytest.fixture(scope="session")
def hostile() -> str:
    """Text that breaks careless reports."""
    return HOSTILE


@pytest.fixture(scope="session")
def make_verdict() -> Callable[..., Verdict]:
    """A verdict with only what matters set."""

    def make(case_id: str, **changes: Any) -> Verdict:
        facts: dict[str, Any] = {
            "case_id": case_id, "outcome": "failed", "what": "diverged", "message": "it differs",
            "checks": (), "runs": {}, "wall_s": 0.0,
        }  # fmt: skip
        return Verdict(**(facts | changes))

    return make
