"""Contracts of the file: whole or damaged, ours or not, old or new, and never overwritten."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import HarnessError, Infrastructure, UsageError
from harness.history import History, database
from harness.history.database import APPLICATION_ID, Damaged, open_database, set_aside
from harness.history.entries import FolderEntry
from harness.history.tables import MIGRATIONS, SCHEMA_VERSION
from tests.unit.harness.history.nights import FAILED, night

HERE = Path(__file__).parent
NIGHTS = [night(n, cases=2, answers={1: FAILED} if n == 2 else None) for n in range(4)]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history of four nights; tests work on copies."""
    path = tmp_path_factory.mktemp("full") / "history.sqlite"
    with History.open(path, create=True) as history:
        for entry in NIGHTS:
            history.record(entry)
    return path


def restored(dump: Path, path: Path) -> Path:
    """The database that a stored dump describes."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(dump.read_text())
    return path


def trusted(path: Path) -> tuple[list[FolderEntry], bool]:
    """What a history says, and whether it said that something is wrong with it."""
    try:
        with History.open(path) as history:
            entries = list(history.entries())
            return entries, bool(history.damaged)
    except HarnessError:
        return [], True


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
def test_each_older_version_migrates(version: int, tmp_path: Path) -> None:
    """Everything in a history of an older schema is there after it was opened, and a backup too."""
    path = restored(HERE / f"schema{version}.sql", tmp_path / "history.sqlite")
    with closing(sqlite3.connect(path)) as old:
        old.row_factory = sqlite3.Row
        rows = {
            table: [dict(row) for row in old.execute(f"SELECT * FROM {table}")]
            for table in ("folders", "cases", "runs")
        }
    assert all(rows.values())
    with History.open(path) as history:
        for table, before in rows.items():
            now = [dict(row) for row in history.connection.execute(f"SELECT * FROM {table}")]
            assert [{name: row[name] for name in before[0]} for row in now] == before
        entries = list(history.entries())
        assert not history.damaged
        assert [len(entry.cases) for entry in entries] == [3, 3]
        assert [len(entry.runs) for entry in entries] == [6, 6]
        assert {case.outcome for case in entries[0].cases} == {"passed", "failed", "skipped"}
        assert history.record(night()).folders == 1
    backup = path.with_name(f"history.sqlite.schema{version}.bak")
    with closing(sqlite3.connect(backup)) as kept:
        assert kept.execute("PRAGMA user_version").fetchone() == (version,)
        assert kept.execute("SELECT count(*) FROM runs").fetchone() == (len(rows["runs"]),)


def test_an_older_row_stands_beside_what_newer_code_would_record(tmp_path: Path) -> None:
    """A run folder recorded by an older schema is not recorded again, nor said to differ."""
    path = restored(HERE / "schema1.sql", tmp_path / "history.sqlite")
    with History.open(path) as history:
        (first, _) = history.entries()
        richer = first.to_json()
        for run in richer["runs"]:
            run["state_bits"] = "ab"
        assert history.record(FolderEntry.from_json(richer)).differing == 0
        assert next(history.entries()) == first


def test_a_migration_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a statement of a migration is refused, the old version is all there, and its backup."""
    path = restored(HERE / "schema1.sql", tmp_path / "history.sqlite")
    before = path.read_bytes()
    broken = (MIGRATIONS[0], ("ALTER TABLE runs ADD COLUMN state_bits TEXT", "DROP TABLE none"))
    monkeypatch.setattr(database, "MIGRATIONS", broken)
    with pytest.raises(Damaged, match="no such table: none"):
        open_database(path)
    assert path.read_bytes() == before
    monkeypatch.undo()
    open_database(path).close()
    assert len(list(tmp_path.glob("*.bak*"))) == 2


def test_a_schema_without_a_stored_dump_cannot_be() -> None:
    """Whoever adds a version stores a dump of the one before."""
    assert {path.name for path in HERE.glob("*.sql")} == {
        f"schema{version}.sql" for version in range(1, SCHEMA_VERSION)
    }


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def zeros(data: bytes) -> bytes:
    return data[:4096] + bytes(4096) + data[8192:]


@pytest.mark.parametrize(
    "spoil",
    [lambda data: b"", cut, zeros, lambda data: b"text" * 5000, lambda data: data[:50]],
    ids=["empty", "cut", "zeros", "text", "header"],
)  # fmt: skip
def test_a_damaged_file_is_told_and_stays_as_it_is(
    spoil: Callable[[bytes], bytes], full: Path, tmp_path: Path
) -> None:
    """One line that says damaged; not a byte of the file changes, and no journal is left."""
    path = tmp_path / "history.sqlite"
    path.write_bytes(spoil(full.read_bytes()))
    before = path.read_bytes()
    with pytest.raises(Damaged, match=r"history.sqlite is damaged: "):
        History.open(path)
    with pytest.raises(Damaged):
        History.open(path, create=True)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["history.sqlite"]


@given(data=st.data())
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_flipped_bytes_never_become_facts(
    data: st.DataObject, full: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of a file with changed bytes either all is as it was, or something is said to be wrong."""
    path = tmp_path_factory.mktemp("flip") / "history.sqlite"
    content = bytearray(full.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    entries, warned = trusted(path)
    assert warned or entries == NIGHTS


def test_what_is_not_ours_is_refused(tmp_path: Path, full: Path) -> None:
    """Another program's database, a newer history, a folder, or nothing: a line, no change."""
    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE folders (id)")
    before = other.read_bytes()
    with pytest.raises(UsageError, match="expected a history, got another program's database"):
        History.open(other, create=True)
    assert other.read_bytes() == before
    newer = Path(shutil.copy(full, tmp_path / "newer"))
    with closing(sqlite3.connect(newer)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(UsageError, match=r"newer harness \(schema 99, this one reads up to"):
        History.open(newer)
    with pytest.raises(UsageError, match="expected a history, got nothing"):
        History.open(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(Infrastructure, match="unable to open database file"):
        History.open(tmp_path)


def test_a_full_disk_is_one_line_and_adds_nothing(full: Path, tmp_path: Path) -> None:
    """If the disk is full while a night is recorded, what was there is still all there."""
    path = Path(shutil.copy(full, tmp_path / "history.sqlite"))
    with History.open(path) as history:
        pages = history.connection.execute("PRAGMA page_count").fetchone()[0]
        history.connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(Infrastructure, match=r"cannot write the history .*disk is full$"):
            history.record(night(9, cases=50))
        assert list(history.entries()) == NIGHTS
    assert trusted(path) == (NIGHTS, False)


def test_a_history_that_may_not_be_written_can_be_read(full: Path, tmp_path: Path) -> None:
    """On a read-only disk the history answers, and refuses to record in one line."""
    path = Path(shutil.copy(full, tmp_path / "history.sqlite"))
    with History.open(path) as history:
        history.connection.execute("PRAGMA query_only = ON")
        with pytest.raises(Infrastructure, match=r"cannot write the history .*readonly database$"):
            history.record(night(9))
        assert list(history.entries()) == NIGHTS


def test_a_place_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    """A history under a file is refused with the path in the line."""
    (tmp_path / "file").write_text("")
    with pytest.raises(Infrastructure, match=r"cannot make folder .*file.*"):
        History.open(tmp_path / "file" / "history.sqlite", create=True)


def test_others_that_write_are_waited_for_up_to_a_limit(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another process writes, recording waits, and then says that the history is locked."""
    monkeypatch.setattr(database, "BUSY_S", 0.01)
    path = Path(shutil.copy(full, tmp_path / "history.sqlite"))
    with History.open(path) as history, closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Infrastructure, match="database is locked"):
            history.record(night(9))
        other.execute("ROLLBACK")
        assert history.record(night(9)).folders == 1


def test_a_damaged_one_is_kept_aside_with_its_journal(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its bytes under another name; a second one gets a name of its own."""
    path = tmp_path / "history.sqlite"
    # SQLite itself removes a journal that it can read or that is none.
    monkeypatch.setattr(database, "_is_whole", lambda path: False)
    for number, name in enumerate(("history.sqlite.damaged", "history.sqlite.damaged-2")):
        path.write_bytes(cut(full.read_bytes()) + bytes(number))
        path.with_name("history.sqlite-journal").write_bytes(b"journal")
        kept = set_aside(path)
        assert kept == tmp_path / name
        assert kept.read_bytes() == cut(full.read_bytes()) + bytes(number)
        assert kept.with_name(f"{name}-journal").read_bytes() == b"journal"
        assert not path.exists()
    monkeypatch.undo()
    shutil.copy(full, path)
    with pytest.raises(Damaged, match="a moment ago"):
        set_aside(path)
    with pytest.raises(UsageError, match="got nothing"):
        set_aside(tmp_path / "none")
    assert trusted(path) == (NIGHTS, False)


def test_a_new_history_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is complete there is nothing at its place; where links fail it is still made."""
    path = tmp_path / "history.sqlite"
    real = database._put

    def put(beside: Path, place: Path) -> None:
        assert not place.exists()
        with closing(sqlite3.connect(beside)) as connection:
            assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        real(beside, place)

    def no_links(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(database, "_put", put)
    monkeypatch.setattr(os, "link", no_links)
    open_database(path, create=True).close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["history.sqlite"]


@pytest.mark.parametrize("links", [True, False])
def test_who_comes_second_makes_no_new_history(
    links: bool, full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two processes that find none, the slower one leaves the other's as it is."""

    def no_links(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    path = Path(shutil.copy(full, tmp_path / "history.sqlite"))
    database._make(path)
    assert trusted(path) == (NIGHTS, False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["history.sqlite"]
