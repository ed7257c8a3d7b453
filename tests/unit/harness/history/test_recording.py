"""Contracts of recording a run: it never fails, and what went wrong is one line and a note."""

import shutil
from pathlib import Path

import pytest

from harness.history import NOT_WRITTEN_FILE, History, recording, remember
from harness.history.database import Damaged, set_aside
from reports.summary import summarise
from tests.unit.reports.folders import Writer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with one case that passed."""
    writer = Writer(tmp_path / "out" / "run", steps=3)
    (tmp_path / "out").mkdir()
    writer.add("dp1-attn", 1, "attn")
    return writer.write()


def ids(database: Path) -> list[str]:
    with History.open(database) as history:
        return [entry.scenario for entry in history.entries()]


def test_a_run_is_recorded_and_nothing_is_said(folder: Path) -> None:
    """No warning, no note, one entry, however often."""
    database = folder.parent / "history.sqlite"
    assert remember(folder, database) == ""
    assert remember(folder, database) == ""
    assert not (folder / NOT_WRITTEN_FILE).exists()
    assert ids(database) == ["fsdp_cudagraph_alignment"]
    assert summarise(folder).history_note == ""


def test_a_history_that_cannot_be_written_is_a_line_and_a_note(folder: Path) -> None:
    """The report says so until the run has been recorded."""
    (folder.parent / "file").write_text("")
    warning = remember(folder, folder.parent / "file" / "history.sqlite")
    assert warning.startswith("not written to the history: cannot make folder ")
    assert len(warning.splitlines()) == 1
    assert summarise(folder).history_note == warning
    assert remember(folder, folder.parent / "history.sqlite") == ""
    assert summarise(folder).history_note == ""


def test_a_damaged_history_is_kept_aside_and_a_new_one_begun(folder: Path) -> None:
    """The line names the old file, its bytes are all there, and the run is in the new one."""
    database = folder.parent / "history.sqlite"
    database.write_bytes(b"not a database" * 1000)
    warning = remember(folder, database)
    kept = folder.parent / "history.sqlite.damaged"
    assert f"is damaged: file is not a database; it is kept as {kept}" in warning
    assert kept.read_bytes() == b"not a database" * 1000
    assert ids(database) == ["fsdp_cudagraph_alignment"]
    assert remember(folder, database) == ""


def test_several_that_find_it_damaged_lose_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds that another harness has just seen to it records in the new history, and says
    nothing; one that stays damaged is told after a limit."""
    database = folder.parent / "history.sqlite"
    database.write_bytes(b"not a database" * 1000)
    real = set_aside

    def seen_to(path: Path) -> Path:
        if path.exists():
            real(path)
        raise Damaged("another harness sees to it")

    monkeypatch.setattr(recording, "set_aside", seen_to)
    monkeypatch.setattr(recording, "PAUSE_S", 0.0)
    assert remember(folder, database) == ""
    assert ids(database) == ["fsdp_cudagraph_alignment"]
    database.write_bytes(b"not a database" * 1000)
    monkeypatch.setattr(recording, "TRIES", 1)
    assert "is damaged: file is not a database" in remember(folder, database)


def test_our_own_mistakes_do_not_fail_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception that nobody expected is told as an internal error, in one line."""

    def broken(self: History, entry: object) -> None:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr(History, "record", broken)
    warning = remember(folder, folder.parent / "history.sqlite")
    assert warning == "not written to the history: internal error: ZeroDivisionError: a\\nb"


def test_a_folder_that_is_gone_is_a_line(folder: Path) -> None:
    """Neither the run nor its note can be written: still no exception."""
    shutil.rmtree(folder)
    warning = remember(folder, folder.parent / "history.sqlite")
    assert "is not a run folder" in warning
    assert "cannot write" in warning
