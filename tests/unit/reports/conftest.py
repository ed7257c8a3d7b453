"""A synthetic run folder with every kind of outcome, judged by the real checks."""

from pathlib import Path

import pytest

from reports import build
from reports.reading import Report, summarise
from tests.unit.reports.folders import Writer, add_everything


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every kind of outcome; tests do not change it."""
    return add_everything(Writer(tmp_path_factory.mktemp("runs") / "run")).write()


@pytest.fixture(scope="session")
def summary(everything: Path) -> Report:
    """The summary of that folder."""
    return summarise(everything)


@pytest.fixture(scope="session")
def built(everything: Path) -> dict[str, str]:
    """Texts of its report by format."""
    return {form: path.read_text("utf-8") for form, path in build(everything).items()}


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    """An empty writer of a folder that is the test's own."""
    return Writer(tmp_path / "run")
