"""The known bugs can still be put back: their texts are there, and so are their tests."""

import ast
from pathlib import Path

import pytest

from tests.known_bugs.bugs import BUGS, Bug
from tests.known_bugs.put_back import ROOT, main, put_back


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bugs_fit(bug: Bug, tmp_path: Path) -> None:
    """The right text stands once, the wrong one is Python, and the test exists."""
    copy = tmp_path / bug.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / bug.file).read_text())
    put_back(bug, tmp_path)
    ast.parse(copy.read_text())
    assert copy.read_text() != (ROOT / bug.file).read_text()
    path, _, name = bug.test.partition("::")
    assert f"def {name}" in (ROOT / path).read_text()


def test_names_are_unique() -> None:
    """A name means one bug."""
    assert len({bug.name for bug in BUGS}) == len(BUGS)


def test_an_unknown_bug_is_an_error() -> None:
    """A misspelt name must not look like a success."""
    assert main(["no_such_bug"]) == 4
