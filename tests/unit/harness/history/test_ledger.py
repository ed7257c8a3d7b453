"""Contracts of the file: what is recorded comes back, once, whoever writes; damage is no fact."""

import dataclasses
import json
import shutil
import sqlite3
import subprocess
import sys
import threading
import typing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import HarnessError, Infrastructure, UsageError
from harness.history import (
    NOT_WRITTEN_FILE,
    History,
    Recorded,
    gathering,
    ledger,
    record_folder,
    remember,
)
from harness.history.entries import CaseEntry, FolderEntry, RunEntry, name_of
from harness.history.ledger import Damaged, locked, make, open_import, set_aside
from harness.records import Difference
from reports.reading import summarise
from tests.damaged_folders.rewrite import rewrite
from tests.unit.harness.history.nights import FAILED, case, night, run
from tests.unit.reports.folders import Writer

NIGHTS = [night(n, cases=2, answers={1: FAILED} if n == 2 else None) for n in range(4)]
# Surrogates never get this far: `gather` escapes them.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
WHOLE = st.integers(0, 2**63 - 1)
SECONDS = st.floats(0, 1e12).map(abs)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT | SECONDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
OBJECT = st.dictionaries(TEXT, JSON, max_size=2)
DIFFERENCES = st.builds(
    Difference, step=WHOLE, rank=WHOLE, quantity=TEXT, tensor=TEXT, reference=TEXT,
    candidate=TEXT, ulps=st.none() | WHOLE,
)  # fmt: skip
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT, int: WHOLE, float: SECONDS, float | None: st.none() | SECONDS,
    int | None: st.none() | WHOLE, dict[str, str]: st.dictionaries(TEXT, TEXT, max_size=2),
    tuple[str, ...]: st.lists(TEXT, max_size=2).map(tuple), dict[str, Any]: OBJECT,
    dict[str, dict[str, Any]]: st.dictionaries(TEXT, OBJECT, max_size=2),
    Difference | None: st.none() | DIFFERENCES,
}  # fmt: skip


def any_of(kind: Any, **own: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Entries with any value in every field that the type has."""
    hints = typing.get_type_hints(kind)
    drawn = {name: BY_TYPE[hint] if hint in BY_TYPE else st.from_type(hint)
             for name, hint in hints.items() if name not in own}  # fmt: skip
    return st.builds(kind, **drawn, **own)


def some(kind: Any, name: str) -> st.SearchStrategy[Any]:
    entries = any_of(kind, attempt=st.integers(0, 2))
    identity: Callable[[Any], Any] = lambda entry: (getattr(entry, name), entry.attempt)  # noqa: E731
    return st.lists(entries, max_size=3, unique_by=identity).map(tuple)


FOLDERS = any_of(FolderEntry, cases=some(CaseEntry, "case_id"), runs=some(RunEntry, "key"))
QUICK = settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history of four runs; tests work on copies."""
    path = tmp_path_factory.mktemp("full") / "history.sqlite"
    with History.open(path, create=True) as history:
        for entry in NIGHTS:
            history.record(entry)
    return path


@pytest.fixture
def path(full: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(full, tmp_path / "history.sqlite"))


def trusted(path: Path) -> tuple[list[FolderEntry], bool]:
    """What a history says, and whether it said that something is wrong with it."""
    try:
        with History.open(path) as history:
            return list(history.entries()), bool(history.damaged)
    except HarnessError:
        return [], True


@given(entries=st.lists(FOLDERS, min_size=1, max_size=3, unique_by=lambda folder: folder.id))
@QUICK
def test_what_is_recorded_comes_back(
    entries: list[FolderEntry], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any entry comes back equal, field by field, from the file, a merged one and its lines."""
    place = tmp_path_factory.mktemp("round")
    wanted = sorted(entries, key=lambda entry: (entry.created.encode(), entry.id.encode()))
    with History.open(place / "a", create=True) as first:
        for entry in entries:
            assert first.record(entry).folders == 1
        assert (list(first.entries()), first.damaged) == (wanted, [])
        lines = [FolderEntry.from_json(json.loads(line)) for line in first.export()]
        assert lines == wanted
        with History.open(place / "b", create=True) as second:
            assert second.merge(first).folders == len(entries)
            assert list(second.entries()) == wanted


def test_recording_twice_adds_nothing_and_the_first_stands(history: History) -> None:
    """The same folder again is nothing new; what says something else is counted, not stored."""
    assert history.record(night(cases=2)) == Recorded(folders=1, cases=2, runs=6)
    assert history.record(night(cases=2)) == Recorded()
    slower = {"step_s": 0.5}
    other = night(cases=2, answers={0: FAILED}, values=lambda run, leg: slower)
    assert history.record(other) == Recorded(differing=7)
    assert list(history.entries()) == [night(cases=2)]


def test_what_a_resume_adds_is_new(history: History) -> None:
    """A folder recorded half-way takes in its later answers and attempts, each kept."""
    whole = night(cases=2)
    history.record(dataclasses.replace(whole, cases=whole.cases[:1], runs=whole.runs[:3]))
    grown = dataclasses.replace(
        whole,
        cases=(*whole.cases, case(0, attempt=1, **FAILED)),
        runs=(*whole.runs, run(0, "candidate", attempt=1, what="hang")),
    )
    assert history.record(grown) == Recorded(folders=0, cases=2, runs=4)
    assert list(history.entries()) == [grown]


def test_merging_is_blind_to_order(tmp_path: Path) -> None:
    """Histories of two machines hold the same after each has taken in the other."""
    for name, own in (("a", NIGHTS[:3]), ("b", NIGHTS[1:])):
        with History.open(tmp_path / name, create=True) as history:
            for entry in own:
                history.record(entry)
    with open_import(tmp_path / "a") as a, open_import(tmp_path / "b") as b:
        assert (a.merge(b).folders, b.merge(a).folders) == (1, 1)
        assert list(a.entries()) == list(b.entries()) == NIGHTS


@pytest.mark.parametrize(
    "change",
    ["outcome = 'failed'", "wall_s = 12", "wall_s = 'soon'", "causes = '['", "difference = '{}'",
     "labels = '{\"parallel\": NaN}'", "attempt = 1", "folder = 'x'", "message = x'00'",
     "wall_s = 9e999", "digest = ''"],
)  # fmt: skip
def test_a_row_that_was_changed_is_left_out_and_told(change: str, path: Path) -> None:
    """Whoever edits an answer gets no answer out of it, nor does who imports it; others stand."""
    with History.open(path) as history:
        first = NIGHTS[0]
        history.connection.execute("INSERT INTO folders (id, digest) VALUES ('x', '')")
        history.connection.execute(
            f"UPDATE cases SET {change} WHERE case_id = 'dp1-attn' AND folder = ?", [first.id]
        )
        history.connection.execute("DELETE FROM folders WHERE id = 'x'")
        read = [entry for _, entry in history.rows(CaseEntry, "ORDER BY rowid")]
        assert read == [case for entry in NIGHTS for case in entry.cases][1:]
        assert len(history.damaged) == 1
        assert "dp1-attn" in history.damaged[0]
        if "folder" not in change:
            left = dataclasses.replace(first, cases=first.cases[1:])
            assert list(history.entries()) == [left, *NIGHTS[1:]]
        with History.open(path.with_name("other"), create=True) as other:
            assert other.merge(history).cases == 7
            assert (len(list(other.entries())), other.damaged) == (4, [])


@pytest.mark.parametrize(
    ("column", "value"),
    [("attempt", -1), ("outcome", "fine"), ("labels", "[1]"), ("wall_s", "soon"),
     ("labels", '{"a":' * 100 + "1" + "}" * 100), ("labels", '{"a": "1", "a": "2"}')],
)  # fmt: skip
def test_a_forged_row_is_left_out(column: str, value: object, path: Path) -> None:
    """A digest that fits makes no entry of a row that no harness writes."""
    with History.open(path) as history:
        wanted = "rowid = (SELECT min(rowid) FROM cases)"
        history.connection.execute(f"UPDATE cases SET {column} = ? WHERE {wanted}", [value])
        (row,) = history.query(f"SELECT * FROM cases WHERE {wanted}")
        forged = name_of(list(row)[:-1])
        history.connection.execute(f"UPDATE cases SET digest = ? WHERE {wanted}", [forged])
        assert [len(entry.cases) for entry in history.entries()] == [1, 2, 2, 2]
        assert len(history.damaged) == 1
        assert "digest" not in history.damaged[0]


def test_a_table_without_a_column_is_damaged(path: Path) -> None:
    """If the schema itself was changed, its rows are left out and told, one by one."""
    with History.open(path) as history:
        history.connection.execute("ALTER TABLE cases RENAME COLUMN labels TO tables")
        assert [entry.cases for entry in history.entries()] == [()] * 4
        assert len(history.damaged) == 8


def test_an_import_that_fails_adds_nothing(path: Path, tmp_path: Path) -> None:
    """If the disk gives out at the last folder, those before it are not there either."""
    with open_import(path) as whole, History.open(tmp_path / "other", create=True) as other:
        whole.record(night(9, cases=200))
        other.record(NIGHTS[0])
        pages = other.query("PRAGMA page_count")[0][0]
        other.connection.execute(f"PRAGMA max_page_count = {pages + 20}")
        with pytest.raises(Infrastructure, match="disk is full"):
            other.merge(whole)
        assert list(other.entries()) == NIGHTS[:1]


def test_a_refusal_in_the_middle_adds_nothing(path: Path) -> None:
    """What SQLite has not rolled back by itself is rolled back, and the next one is recorded."""
    with History.open(path) as history:
        history.connection.execute(
            "CREATE TRIGGER no BEFORE INSERT ON runs BEGIN SELECT RAISE(FAIL, 'not now'); END"
        )
        with pytest.raises(Infrastructure, match="not now"):
            history.record(night(9))
        assert list(history.entries()) == NIGHTS
        history.connection.execute("DROP TRIGGER no")
        assert history.record(night(9)).folders == 1


def test_bytes_that_are_no_text_are_damage(path: Path) -> None:
    """They are said to be damage, not that the disk refused."""
    with History.open(path) as history:
        history.connection.execute("UPDATE cases SET message = CAST(x'ff' AS TEXT)")
        with pytest.raises(Damaged, match=r"is damaged: .*decode"):
            list(history.entries())


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
    spoil: Callable[[bytes], bytes], path: Path
) -> None:
    """One line that says damaged; not a byte of the file changes, and no journal is left."""
    before = spoil(path.read_bytes())
    path.write_bytes(before)
    for create in (False, True):
        with pytest.raises(Damaged, match=r"history.sqlite is damaged: "):
            History.open(path, create=create)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["history.sqlite"]


@given(data=st.data())
@settings(QUICK, max_examples=30)
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


def test_what_is_not_ours_is_refused(path: Path, tmp_path: Path) -> None:
    """Another program's database, another schema, a folder, or nothing: a line, no change."""
    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE folders (id)")
    before = other.read_bytes()
    with pytest.raises(UsageError, match="expected a history, got another program's database"):
        History.open(other, create=True)
    assert other.read_bytes() == before
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(UsageError, match=r"expected a history of schema .*, got 99"):
        History.open(path)
    with pytest.raises(UsageError, match="expected a history, got nothing"):
        History.open(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        open_import(tmp_path / "nothing")
    with pytest.raises(Infrastructure, match="unable to open database file"):
        History.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(Infrastructure, match=r"cannot make folder .*file.*"):
        History.open(tmp_path / "file" / "history.sqlite", create=True)


def test_a_full_or_read_only_disk_is_one_line_and_adds_nothing(path: Path) -> None:
    """What was there is still all there, and can be read."""
    with History.open(path) as history:
        pages = history.query("PRAGMA page_count")[0][0]
        history.connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(Infrastructure, match=r"cannot write the history .*disk is full$"):
            history.record(night(9, cases=50))
        assert list(history.entries()) == NIGHTS
        history.connection.execute("PRAGMA query_only = ON")
        with pytest.raises(Infrastructure, match=r"cannot write the history .*readonly database$"):
            history.record(night(9))
        assert list(history.entries()) == NIGHTS
    assert trusted(path) == (NIGHTS, False)


def test_others_that_write_are_waited_for_up_to_a_limit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another process writes, or renames the file, a writer waits, and then says so."""
    monkeypatch.setattr(ledger, "BUSY_S", 0.01)
    with History.open(path) as history, closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Infrastructure, match="database is locked"):
            history.record(night(9))
        other.execute("ROLLBACK")
        assert history.record(night(9)).folders == 1
    with (
        locked(path),
        pytest.raises(Infrastructure, match=r"cannot lock .* is locked"),
        locked(path),
    ):
        pytest.fail("two hold one lock")


def test_a_damaged_one_is_renamed_with_its_journal(path: Path) -> None:
    """It keeps its bytes under a name that is free; a whole one is never made anew."""
    for number, name in enumerate(("history.sqlite.damaged", "history.sqlite.damaged-2")):
        path.write_bytes(bytes(number + 1))
        path.with_name("history.sqlite-journal").write_bytes(b"journal")
        kept = set_aside(path)
        assert (kept.name, kept.read_bytes()) == (name, bytes(number + 1))
        assert kept.with_name(f"{name}-journal").read_bytes() == b"journal"
        assert not path.exists()
        assert not path.with_name("history.sqlite-journal").exists()
    with pytest.raises(Infrastructure, match="cannot set aside"):
        set_aside(path)
    make(path)
    with History.open(path) as history:
        history.record(NIGHTS[0])
    make(path)
    assert trusted(path) == (NIGHTS[:1], False)


WRITER = """
import sys
from pathlib import Path
from harness.history import History
from tests.unit.harness.history.nights import night
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    with History.open(Path(sys.argv[1]), create=True) as history:
        history.record(night(number, cases=2))
"""


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    """Harnesses that begin and add to one history at the same time lose nothing."""
    place = tmp_path / "history.sqlite"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(place), str(first), str(last)])
        for first, last in ((0, 12), (8, 20))
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert trusted(place) == ([night(number, cases=2) for number in range(20)], False)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"history.sqlite", "history.sqlite.lock"}


KILLED = """
import os, signal, sys
from pathlib import Path
from harness.history import History, ledger
from tests.unit.harness.history.nights import night
real, rows = ledger.name_of, []
def name_of(value):
    rows.append(value)
    if len(rows) == 500:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(value)
ledger.name_of = name_of
history = History.open(Path(sys.argv[1]))
history.connection.execute("PRAGMA cache_size = 1")
history.record(night(9, cases=200))
"""


def test_a_kill_in_the_middle_leaves_all_or_nothing(path: Path) -> None:
    """A writer that is killed while it records leaves the history as it was, for the next one."""
    gone = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert gone.returncode == -9
    assert path.with_name("history.sqlite-journal").exists()
    assert trusted(path) == (NIGHTS, False)
    with History.open(path) as after:
        assert after.record(night(9)).folders == 1


# --- recording of a run folder ----------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with one case that passed."""
    (tmp_path / "out").mkdir()
    writer = Writer(tmp_path / "out" / "run", steps=3)
    writer.add("dp1-attn", 1, "attn")
    return writer.write()


def test_a_run_is_recorded_or_says_why_not(folder: Path) -> None:
    """No warning and one entry, however often; else one line, and a note until it is recorded."""
    database = folder.parent / "history.sqlite"
    (folder.parent / "file").write_text("")
    warning = remember(folder, folder.parent / "file" / "history.sqlite")
    assert warning.startswith("not written to the history: cannot make folder ")
    assert len(warning.splitlines()) == 1
    assert summarise(folder).history_note == warning
    assert [remember(folder, database) for _ in range(2)] == ["", ""]
    assert not (folder / NOT_WRITTEN_FILE).exists()
    assert summarise(folder).history_note == ""
    assert [entry.scenario for entry in trusted(database)[0]] == ["fsdp_cudagraph_alignment"]
    shutil.rmtree(folder)
    warning = remember(folder, database)
    assert "is not a run folder" in warning
    assert "cannot write" in warning


def test_our_own_mistakes_do_not_fail_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception that nobody expected is told as an internal error, in one line."""

    def broken(self: History, entry: object) -> None:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr(History, "record", broken)
    warning = remember(folder, folder.parent / "history.sqlite")
    assert warning == "not written to the history: internal error: ZeroDivisionError: a\\nb"


def test_several_that_find_it_damaged_lose_nothing(folder: Path) -> None:
    """One renames it and says so, its bytes are all there, and every run is in the new one."""
    database = folder.parent / "history.sqlite"
    database.write_bytes(b"not a database" * 1000)
    copies = []
    for number in range(6):
        copies.append(Path(shutil.copytree(folder, folder.with_name(f"copy{number}"))))
        manifest = json.loads((copies[-1] / "manifest.json").read_text())
        rewrite(copies[-1] / "manifest.json", manifest | {"id": f"{number}"})
    together = threading.Barrier(len(copies))

    def recorded(copy: Path) -> str:
        together.wait(timeout=60)
        return record_folder(copy, database)[1]

    with ThreadPoolExecutor(len(copies)) as pool:
        said = sorted(pool.map(recorded, copies))
    assert said[:-1] == [""] * (len(copies) - 1)
    kept = folder.parent / "history.sqlite.damaged"
    assert f"is damaged: file is not a database; it is kept as {kept}" in said[-1]
    assert kept.read_bytes() == b"not a database" * 1000
    assert {entry.id for entry in trusted(database)[0]} == set("012345")


def test_another_that_was_first_is_not_renamed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited for the lock uses the new one; one that vanishes as it is opened is made anew."""
    database = folder.parent / "history.sqlite"
    database.write_bytes(b"not a database" * 1000)
    first = Path(shutil.copytree(folder, folder.with_name("first")))
    manifest = json.loads((first / "manifest.json").read_text())
    rewrite(first / "manifest.json", manifest | {"id": "1"})

    def after_another(path: Path) -> AbstractContextManager[None]:
        monkeypatch.setattr(gathering, "locked", locked)
        assert "is kept as" in record_folder(first, path)[1]
        return locked(path)

    monkeypatch.setattr(gathering, "locked", after_another)
    assert record_folder(folder, database)[1] == ""
    assert [kept.name for kept in folder.parent.glob("*.damaged*")] == ["history.sqlite.damaged"]
    assert len(trusted(database)[0]) == 2

    def vanishes(path: Path) -> str:
        path.unlink()
        monkeypatch.setattr(ledger, "quote", quote)
        return quote(str(path))

    monkeypatch.setattr(ledger, "quote", lambda _: vanishes(database))
    assert record_folder(folder, database)[1] == ""
    assert len(trusted(database)[0]) == 1
