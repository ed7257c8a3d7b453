"""Contracts of the ledger: what is recorded comes back, once, whoever writes and in which order."""

import dataclasses
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import Infrastructure, UsageError
from harness.history import History, Recorded
from harness.history.entries import CaseEntry, FolderEntry, RunEntry, digest_of
from harness.history.ledger import _line
from harness.records import OUTCOMES, Difference
from tests.unit.harness.history.nights import FAILED, case, night, run

# Surrogates never get this far: `gather` escapes them.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
WHOLE = st.integers(0, 2**63 - 1)
SECONDS = st.floats(0, 1e12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT | SECONDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
DIFFERENCES = st.builds(
    Difference, step=WHOLE, rank=WHOLE, quantity=TEXT, tensor=TEXT, reference=TEXT,
    candidate=TEXT, ulps=st.none() | WHOLE,
)  # fmt: skip
CASES = st.builds(
    CaseEntry, case_id=TEXT, attempt=st.integers(0, 2), outcome=st.sampled_from(OUTCOMES),
    what=st.sampled_from(["", "diverged", "oom"]), message=TEXT,
    labels=st.dictionaries(TEXT, TEXT, max_size=2), causes=st.lists(TEXT, max_size=2).map(tuple),
    difference=st.none() | DIFFERENCES, reference=TEXT, control=TEXT, candidate=TEXT,
    wall_s=SECONDS,
)  # fmt: skip
RUNS = st.builds(
    RunEntry, key=TEXT, attempt=st.integers(0, 2), work=TEXT,
    what=st.sampled_from(["", "hang"]), device=st.sampled_from(["cpu", "cuda"]),
    world_size=WHOLE, preset=TEXT, steps=WHOLE, started_unix_s=SECONDS, wall_s=SECONDS,
    fingerprint=TEXT, problems=WHOLE, startup_s=st.none() | SECONDS, step_s=st.none() | SECONDS,
    step_spread_s=st.none() | SECONDS, timed_steps=WHOLE, peak_bytes=st.none() | WHOLE,
    replays=WHOLE, loss_bits=TEXT, state_bits=TEXT,
)  # fmt: skip
FOLDERS = st.builds(
    FolderEntry, id=TEXT, scenario=TEXT, created=TEXT, num_cases=WHOLE, commit=TEXT, shard=TEXT,
    tier=TEXT, device=TEXT, machine=TEXT, slots=WHOLE,
    environment=st.dictionaries(TEXT, JSON, max_size=2),
    fingerprints=st.dictionaries(TEXT, st.dictionaries(TEXT, JSON, max_size=1), max_size=2),
    cases=st.lists(CASES, max_size=3, unique_by=lambda c: (c.case_id, c.attempt)).map(tuple),
    runs=st.lists(RUNS, max_size=3, unique_by=lambda r: (r.key, r.attempt)).map(tuple),
)  # fmt: skip
SETS = st.lists(FOLDERS, min_size=1, max_size=3, unique_by=lambda folder: folder.id)
QUICK = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def in_order(entries: list[FolderEntry]) -> list[FolderEntry]:
    return sorted(entries, key=lambda entry: (entry.created.encode(), entry.id.encode()))


@given(entries=SETS)
@QUICK
def test_what_is_recorded_comes_back(
    entries: list[FolderEntry], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any entry comes back equal, field by field, from the database and from exported lines."""
    place = tmp_path_factory.mktemp("round")
    with History.open(place / "a", create=True) as first:
        for entry in entries:
            assert first.record(entry).folders == 1
        assert list(first.entries()) == in_order(entries)
        assert not first.damaged
        (place / "lines").write_text("".join(first.export()), "utf-8")
    with History.open(place / "b", create=True) as second:
        added, problems = second.load(place / "lines")
        assert (added.folders, problems) == (len(entries), [])
        assert list(second.entries()) == in_order(entries)
        assert "".join(second.export()) == (place / "lines").read_text("utf-8")


def test_recording_twice_adds_nothing(history: History) -> None:
    """The same run folder again is nothing new, and changes nothing."""
    entry = night(cases=2, answers={1: FAILED})
    assert history.record(entry) == Recorded(folders=1, cases=2, runs=6)
    before = list(history.export())
    assert history.record(entry) == Recorded()
    assert list(history.export()) == before


def test_what_a_resume_adds_is_new(history: History) -> None:
    """A folder recorded half-way takes in its later answers and attempts, each kept."""
    whole = night(cases=2)
    half = dataclasses.replace(whole, cases=whole.cases[:1], runs=whole.runs[:3])
    second = case(0, attempt=1, **FAILED)
    again = run(0, "candidate", attempt=1, what="hang")
    history.record(half)
    grown = dataclasses.replace(
        whole, cases=(*whole.cases, second), runs=(*whole.runs, again)
    )  # fmt: skip
    assert history.record(grown) == Recorded(folders=0, cases=2, runs=4)
    (stored,) = history.entries()
    assert stored == dataclasses.replace(
        grown,
        cases=(whole.cases[0], whole.cases[1], second),
        runs=(*whole.runs, again),
    )


def test_what_was_recorded_first_stands(history: History) -> None:
    """An entry that says something else of the same answer is counted, and changes nothing."""
    history.record(night())
    other = night(answers={0: FAILED}, values=lambda run, leg: {"step_s": 0.5})
    assert history.record(other) == Recorded(differing=4)
    assert list(history.entries()) == [night()]


def test_merging_is_blind_to_order(tmp_path: Path) -> None:
    """Histories of two machines hold the same after each has taken in the other's lines."""
    nights = [night(n, cases=2) for n in range(4)]
    for name, own in (("a", nights[:3]), ("b", nights[1:])):
        with History.open(tmp_path / name, create=True) as history:
            for entry in own:
                history.record(entry)
            (tmp_path / f"{name}.jsonl").write_text("".join(history.export()))
    exported = []
    for name, other in (("a", "b"), ("b", "a")):
        with History.open(tmp_path / name) as history:
            assert history.load(tmp_path / f"{other}.jsonl")[0].folders == 1
            exported.append(list(history.export()))
    assert exported[0] == exported[1]
    assert len(exported[0]) == 5


def changed_digit(line: str) -> str:
    return line.replace('"slots":8', '"slots":9')


def renamed_field(line: str) -> str:
    return line.replace('"slots"', '"slats"')


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (changed_digit, "its digest does not fit"),
        (renamed_field, "unknown keys"),
        (lambda line: line[: len(line) // 2], ""),
        (lambda line: "[1]", "an entry and its digest"),
        (lambda line: line.replace('"wall_s":12.0', '"wall_s":NaN'), "NaN is not JSON"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_told_and_left_out(
    spoil: Callable[[str], str], why: str, history: History, tmp_path: Path
) -> None:
    """The other lines are taken in; the damaged one is named by its number, never half trusted."""
    for number in range(3):
        history.record(night(number))
    lines = [line.rstrip("\n") for line in history.export()]
    lines[2] = spoil(lines[2])
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    with History.open(tmp_path / "other", create=True) as other:
        added, problems = other.load(tmp_path / "lines")
        assert added.folders == 2
        assert [entry.id for entry in other.entries()] == [night(0).id, night(2).id]
    assert len(problems) == 1
    assert problems[0].startswith("line 3: ")
    assert why in problems[0]


@pytest.mark.parametrize("what", ["peak_bytes", "message"])
def test_a_line_that_cannot_be_stored_is_left_out_whole(
    what: str, history: History, tmp_path: Path
) -> None:
    """A number past 64 bits, and text that is none, found when half the line is stored."""
    odd = night(1, values=lambda run, leg: {"peak_bytes": 2**63} if leg == "candidate" else {})
    if what == "message":
        odd = night(1, cases=2, answers={1: {"message": "\udfff"}})
    lines = list(history.export())
    lines += [_line({"digest": digest_of(e), "entry": e.to_json()}) for e in (odd, night(2))]
    (tmp_path / "lines").write_text("".join(lines))
    added, problems = history.load(tmp_path / "lines")
    assert [problem[:8] for problem in problems] == ["line 2: "]
    assert added == Recorded(folders=1, cases=1, runs=3)
    assert list(history.entries()) == [night(2)]
    both = "SELECT folder FROM runs UNION SELECT folder FROM cases"
    rows = history.connection.execute(both)
    assert [row[0] for row in rows.fetchall()] == [night(2).id]


def test_an_import_that_fails_adds_nothing(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk gives out at the last of three runs, the first two are not there either."""
    for number in range(3):
        history.record(night(number))
    (tmp_path / "lines").write_text("".join(history.export()))
    with History.open(tmp_path / "other", create=True) as other:
        own, taken = other._record, list[str]()

        def full(entry: FolderEntry) -> Recorded:
            taken.append(entry.id)
            if len(taken) == 3:
                raise sqlite3.OperationalError("database or disk is full")
            return own(entry)

        monkeypatch.setattr(other, "_record", full)
        with pytest.raises(Infrastructure, match="disk is full"):
            other.load(tmp_path / "lines")
        assert len(taken) == 3
        assert list(other.entries()) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected JSON lines of"), ("{}\n", "expected JSON lines of"),
        ('{"kind":"deltazero history","schema":99}\n', "newer harness (schema 99"),
        ('{"kind":"deltazero history","schema":null}\n', "newer harness"),
    ],
)  # fmt: skip
def test_other_files_are_refused(text: str, why: str, history: History, tmp_path: Path) -> None:
    """A file that is not an export, or of a later format, adds nothing."""
    (tmp_path / "file").write_text(text)
    with pytest.raises(UsageError, match=why.replace("(", r"\(")):
        history.load(tmp_path / "file")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        history.load(tmp_path / "none")
    assert list(history.entries()) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("outcome = 'failed'", "its digest does not fit"),
        ("wall_s = 12", ""),
        ("wall_s = 'soon'", "its digest does not fit"),
        ("causes = '5'", "'int' object is not iterable"),
        ("causes = '['", "Expecting value"),
        ("difference = '{}'", "Difference: Object missing required field"),
        ("labels = '{\"parallel\": NaN}'", "Out of range float values"),
    ],
)  # fmt: skip
def test_a_row_that_was_changed_is_left_out_and_told(
    change: str, why: str, history: History
) -> None:
    """Whoever edits an answer in the database gets no answer out of it; the others stand."""
    history.record(night(cases=2))
    history.connection.execute(f"UPDATE cases SET {change} WHERE case_id = 'dp1-attn'")
    (entry,) = history.entries()
    left = ["dp2-attn"] if why else ["dp1-attn", "dp2-attn"]
    assert [answer.case_id for answer in entry.cases] == left
    assert len(history.damaged) == bool(why)
    for line in history.damaged:
        assert line.startswith(f"cases: {night().id} dp1-attn 0: {why}")


def test_a_table_without_a_column_is_damaged(history: History) -> None:
    """If the schema itself was changed, its rows are left out and told, one by one."""
    history.record(night(cases=2))
    history.connection.execute("ALTER TABLE cases RENAME COLUMN labels TO tables")
    (entry,) = history.entries()
    assert entry.cases == ()
    assert len(history.damaged) == 2


def test_a_field_of_a_later_schema_leaves_digests_alone() -> None:
    """An entry's digest does not depend on fields at their defaults, and on all others it does."""
    entry = run(state_bits="")
    assert digest_of(entry) == digest_of(dataclasses.replace(entry, replays=entry.replays))
    told: dict[str, Any] = json.loads(json.dumps(entry.to_json()))
    del told["state_bits"]
    assert digest_of(RunEntry.from_json(told)) == digest_of(entry)
    for name, value in entry.to_json().items():
        other = "hang" if name == "what" else "cpu" if name == "device" else None
        changed: Any = other or (value + 1 if isinstance(value, int | float) else f"{value}x")
        assert digest_of(dataclasses.replace(entry, **{name: changed})) != digest_of(entry), name


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
    with History.open(place) as history:
        assert list(history.entries()) == [night(number, cases=2) for number in range(20)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history.sqlite"]


KILLED = """
import os, signal, sys
from pathlib import Path
from harness.history import History
from harness.history.entries import RunEntry
from tests.unit.harness.history.nights import night
whole = History._add
def add(self, kind, entries, *, owner):
    if kind is RunEntry:
        self.connection.execute("PRAGMA cache_size = 1")
        whole(self, kind, list(entries)[:1], owner=owner)
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, kind, entries, owner=owner)
History._add = add
History.open(Path(sys.argv[1])).record(night(1, cases=200))
"""


def test_a_kill_in_the_middle_leaves_all_or_nothing(history: History) -> None:
    """A writer that is killed while it records leaves the history as it was, for the next one."""
    history.record(night(0))
    gone = subprocess.run([sys.executable, "-c", KILLED, str(history.path)], check=False)
    assert gone.returncode == -9
    assert history.path.with_name("history.sqlite-journal").exists()
    with History.open(history.path) as after:
        assert list(after.entries()) == [night(0)]
        after.record(night(1))
