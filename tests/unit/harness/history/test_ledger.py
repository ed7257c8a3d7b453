"""Contracts of the file: what is recorded comes back, once, whoever writes; damage is no fact."""

import dataclasses
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import HarnessError, UsageError
from harness.history import NOT_WRITTEN_FILE, History, remember
from harness.history.ledger import Damaged, FolderEntry, name_of
from harness.records import Difference
from reports.reading import summarise
from tests.unit.harness.history.nights import FAILED, case, night, run
from tests.unit.reports.folders import Writer

DIFFERENCE = Difference(
    step=3, rank=1, quantity="weights", tensor="a.b", reference="0x1", candidate="0x2", ulps=1
)
NIGHTS = [
    night(n, cases=2, answers={1: FAILED | {"difference": DIFFERENCE}} if n == 2 else None)
    for n in range(4)
]


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
    (tmp_path / "copy").mkdir()
    return Path(shutil.copy(full, tmp_path / "copy" / "history.sqlite"))


def read(path: Path) -> list[FolderEntry]:
    with History.open(path) as history:
        return list(history.entries())


def test_what_is_recorded_comes_back_once(path: Path, history: History) -> None:
    """Field by field, and however often it is recorded."""
    assert read(path) == NIGHTS
    assert sum(map(history.record, NIGHTS), Counter()) == Counter(folders=4, cases=8, runs=24)
    assert sum(map(history.record, NIGHTS), Counter()) == Counter()
    differing = night(0, cases=2, answers={0: FAILED}, values=lambda run, leg: {"step_s": 0.5})
    assert history.record(differing) == Counter(differing=7)
    assert list(history.entries()) == NIGHTS
    assert [entry.id for entry in history.entries(NIGHTS[2].id[:8])] == [NIGHTS[2].id]
    again = run(0, attempt=1)
    later = dataclasses.replace(
        NIGHTS[3], cases=(*NIGHTS[3].cases, case(0, attempt=1)), runs=(*NIGHTS[3].runs, again)
    )
    assert history.record(later) == Counter(cases=1, runs=1)
    assert next(history.entries(later.id)) == later


@pytest.mark.parametrize(
    ("sql", "digest_fits"),
    [
        ("UPDATE cases SET outcome = 'passed' WHERE outcome = 'failed'", False),
        ("UPDATE runs SET attempt = 3 WHERE rowid = 1", False),
        ("UPDATE folders SET num_cases = 9", False),
        ("ALTER TABLE cases RENAME COLUMN labels TO tables", False),
        ("UPDATE cases SET attempt = -1 WHERE rowid = 1", True),
        ("UPDATE cases SET outcome = 'fine' WHERE rowid = 1", True),
        ('UPDATE cases SET labels = \'{"a": "1", "a": "2"}\' WHERE rowid = 1', True),
        ("UPDATE cases SET message = CAST(x'ff' AS TEXT)", False),
    ],
)
def test_a_row_that_is_not_what_was_written_is_damage(
    sql: str, digest_fits: bool, path: Path
) -> None:
    """Edited and forged rows, digest or not: reading says so."""
    with History.open(path) as edited:
        edited.connection.execute(sql)
        if digest_fits:
            (row,) = edited.query("SELECT * FROM cases WHERE rowid = 1")
            fits = [name_of(list(row)[:-1])]
            edited.connection.execute("UPDATE cases SET digest = ? WHERE rowid = 1", fits)
        with pytest.raises(Damaged):
            list(edited.entries())


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_flipped_bytes_never_become_facts(
    data: st.DataObject, full: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of a file with changed bytes either all is as it was, or it is said to be damaged."""
    path = tmp_path_factory.mktemp("flip") / "history.sqlite"
    content = bytearray(full.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with suppress(HarnessError):
        assert read(path) == NIGHTS


def other_program(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE folders (id)")


def other_schema(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")


def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (rewritten(lambda data: b""), Damaged, "it is empty"),
        (rewritten(lambda data: data[: len(data) // 2]), Damaged, "damaged"),
        (rewritten(lambda data: b"text" * 5000), Damaged, "damaged"),
        (other_program, UsageError, "another program"),
        (other_schema, UsageError, "99"),
    ],
    ids=["empty", "cut", "text", "other program", "other schema"],
)  # fmt: skip
def test_what_is_damaged_or_not_ours_stays_as_it_is(
    spoil: Callable[[Path], object], kind: type[HarnessError], words: str, path: Path
) -> None:
    """An error in one line; not a byte of it changes, and no other file is left."""
    spoil(path)
    before = path.read_bytes()
    for create in (False, True):
        with pytest.raises(kind, match=words):
            History.open(path, create=create)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["history.sqlite"]


WRITER = """
import sys
from pathlib import Path
from harness.history import History
from tests.unit.harness.history.nights import night
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    with History.open(Path(sys.argv[1]), create=True) as history:
        history.record(night(number, cases=2))
"""
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


def test_two_processes_write_at_once_and_one_is_killed(tmp_path: Path) -> None:
    """Harnesses that begin one history and add to it at the same time lose nothing."""
    place = tmp_path / "history.sqlite"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(place), str(first), str(last)])
        for first, last in ((30, 42), (38, 50))
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    whole = [night(number, cases=2) for number in range(30, 50)]
    assert read(place) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["history.sqlite"]
    gone = subprocess.run([sys.executable, "-c", KILLED, str(place)], check=False)
    assert gone.returncode == -9
    assert place.with_name("history.sqlite-journal").exists()
    assert read(place) == whole
    with History.open(place) as after:
        assert after.record(night(9))["folders"] == 1


def test_a_run_is_recorded_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning and one entry, however often; else one line, and a note until it is recorded."""
    (tmp_path / "out").mkdir()
    writer = Writer(tmp_path / "out" / "run", steps=3)
    writer.add("dp1-attn", 1, "attn")
    folder, database = writer.write(), tmp_path / "out" / "history.sqlite"
    (tmp_path / "file").write_text("")
    database.write_bytes(b"not a database" * 1000)

    def broken(self: History, entry: object) -> None:
        raise ZeroDivisionError("a\nb")

    with monkeypatch.context() as patched:
        patched.setattr(History, "record", broken)
        internal = remember(folder, tmp_path / "other.sqlite")
    for warning in (
        internal, remember(folder, tmp_path / "file" / "history.sqlite"), remember(folder, database)
    ):  # fmt: skip
        assert len(warning.splitlines()) == 1
        assert (folder / NOT_WRITTEN_FILE).exists()
    assert summarise(folder).history_note == warning
    assert database.read_bytes() == b"not a database" * 1000
    database.unlink()
    assert [remember(folder, database) for _ in range(2)] == ["", ""]
    assert not (folder / NOT_WRITTEN_FILE).exists()
    assert [entry.scenario for entry in read(database)] == ["fsdp_cudagraph_alignment"]
    shutil.rmtree(folder)
    assert remember(folder, database)
