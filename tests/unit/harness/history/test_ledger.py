"""Contracts of the files: what is recorded comes back, once, whoever writes; damage is no fact."""

import dataclasses
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import HarnessError, UsageError
from harness.history import NOT_WRITTEN_FILE, History, remember
from harness.history.ledger import Damaged, FolderEntry
from harness.records import Difference, dumps
from harness.store.files import read_object, with_checksum, write_atomic
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
    history = History.open(tmp_path_factory.mktemp("full") / "history", create=True)
    for entry in NIGHTS:
        history.record(entry)
    return history.path


@pytest.fixture
def path(full: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(full, tmp_path / "copy"))


def read(path: Path) -> list[FolderEntry]:
    return list(History.open(path).entries())


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
    ("old", "new"), [('"failed"', '"passed"'), ('"attempt":0', '"attempt":3'), ("a.b", "a.c")]
)
def test_an_entry_that_is_not_what_was_written_is_damage(old: str, new: str, path: Path) -> None:
    """An answer, an attempt, a place; what comes before it is read all the same."""
    place = sorted(path.iterdir())[2]
    place.write_text(place.read_text().replace(old, new))
    entries = History.open(path).entries()
    assert [next(entries), next(entries)] == NIGHTS[:2]
    with pytest.raises(Damaged):
        next(entries)


@pytest.mark.parametrize("changed", [{"attempt": -1}, {"outcome": "fine"}, {"labels": [1]}])
def test_what_no_harness_writes_is_damage_whatever_its_checksum(
    changed: object, path: Path
) -> None:
    """Values that cannot be."""
    place = sorted(path.iterdir())[0]
    plain = read_object(place)
    plain["cases"][0] |= changed
    write_atomic(place, dumps(with_checksum(plain)))
    with pytest.raises(Damaged):
        read(path)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_flipped_bytes_never_become_facts(
    data: st.DataObject, full: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of a file with changed bytes either all is as it was, or it is said to be damaged."""
    path = Path(shutil.copytree(full, tmp_path_factory.mktemp("flip") / "history"))
    place = sorted(path.iterdir())[data.draw(st.integers(0, 3))]
    content = bytearray(place.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    place.write_bytes(content)
    with suppress(HarnessError):
        assert read(path) == NIGHTS


def test_what_is_damaged_or_no_history_stays_as_it_is(path: Path) -> None:
    """An error in one line; not a byte of it changes, and no other file is left."""
    place, names = sorted(path.iterdir())[3], sorted(path.iterdir())
    for content in (b"", place.read_bytes()[:900], b"text" * 500):
        place.write_bytes(content)
        with pytest.raises(Damaged):
            History.open(path).record(NIGHTS[3])
        assert place.read_bytes() == content
    assert sorted(path.iterdir()) == names
    for create in (False, True):
        with pytest.raises(HarnessError):
            History.open(place, create=create)
    with pytest.raises(UsageError):
        History.open(path / "none")


WRITER = """
import sys
from pathlib import Path
from harness.history import History
from tests.unit.harness.history.nights import night
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    History.open(Path(sys.argv[1]), create=True).record(night(number, cases=2))
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from harness.history import History
from tests.unit.harness.history.nights import night
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
History.open(Path(sys.argv[1])).record(night(9, cases=200))
"""


def test_two_processes_write_at_once_and_one_is_killed(tmp_path: Path) -> None:
    """Harnesses that begin one history and add to it at the same time lose nothing."""
    place = tmp_path / "history"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(place), str(first), str(last)])
        for first, last in ((30, 42), (38, 50))
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    whole = [night(number, cases=2) for number in range(30, 50)]
    assert read(place) == whole
    gone = subprocess.run([sys.executable, "-c", KILLED, str(place)], check=False)
    assert gone.returncode == -9
    assert read(place) == whole
    assert History.open(place).record(night(9))["folders"] == 1


def test_a_run_is_recorded_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning and one entry, however often; else one line, and a note until it is recorded."""
    (tmp_path / "out").mkdir()
    writer = Writer(tmp_path / "out" / "run", steps=3)
    writer.add("dp1-attn", 1, "attn")
    folder, database = writer.write(), tmp_path / "out" / "history"
    (tmp_path / "file").write_text("")
    database.write_bytes(b"no history")

    def broken(self: History, entry: object) -> None:
        raise ZeroDivisionError("a\nb")

    with monkeypatch.context() as patched:
        patched.setattr(History, "record", broken)
        internal = remember(folder, tmp_path / "other")
    for warning in (
        internal, remember(folder, tmp_path / "file" / "history"), remember(folder, database)
    ):  # fmt: skip
        assert len(warning.splitlines()) == 1
        assert (folder / NOT_WRITTEN_FILE).exists()
    assert summarise(folder).history_note == warning
    assert database.read_bytes() == b"no history"
    database.unlink()
    assert [remember(folder, database) for _ in range(2)] == ["", ""]
    assert not (folder / NOT_WRITTEN_FILE).exists()
    assert [entry.scenario for entry in read(database)] == ["fsdp_cudagraph_alignment"]
    shutil.rmtree(folder)
    assert remember(folder, database)
