"""Questions to the service of a session: who may ask, and what is left once it has ended."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import Infrastructure
from harness.records import Verdict
from harness.under_pytest.service import Answer
from harness.under_pytest.sockets import CaseServer, ask_at


def answer(file: Path, case_id: str) -> Answer:
    verdict = Verdict(
        case_id=case_id, outcome="passed", what="", message=str(file), checks=(), runs={},
        wall_s=0.0,
    )  # fmt: skip
    return Answer(verdict=verdict, folder="folder")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CaseServer]:
    """A server that would leave its files in `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = CaseServer(answer)
    yield server
    server.close()


def test_a_question_is_answered_and_leaves_no_file(server: CaseServer, tmp_path: Path) -> None:
    """While it listens there is no file that a kill -9 could leave behind."""
    assert ask_at(server.address)(Path("s.yaml"), "case") == answer(Path("s.yaml"), "case")
    assert list(tmp_path.iterdir()) == []


def test_another_user_is_not_heard(server: CaseServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who connects as somebody else gets no answer: a name of the kernel's has no permissions."""
    somebody_else = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody_else)
    with pytest.raises(Infrastructure, match="does not answer"):
        ask_at(server.address)(Path("s.yaml"), "case")
