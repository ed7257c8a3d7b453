"""Rank files in every state: records or problems, never an exception, never silence."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.records import EventRecord, RankRecords, Record, dumps
from harness.store.streams import MAX_PROBLEMS, read_rank, read_ranks
from tests.support.records import end, error, rank_records, start, step


def read(folder: Path, *records: Record, tail: bytes = b"") -> RankRecords:
    path = folder / "rank0.jsonl"
    path.write_bytes(b"".join(dumps(record).encode() + b"\n" for record in records) + tail)
    return read_rank(path, 0)


def test_a_whole_file_has_no_problems(tmp_path: Path) -> None:
    """Everything that a healthy rank wrote is there, and nothing is complained of."""
    event = EventRecord(name="captured", rank=0, step=0)
    got = read(tmp_path, start(), event, step(0), step(1), end())
    steps = (step(0), step(1))
    assert got == rank_records(start=start(), steps=steps, events=(event,), end=end())


@pytest.mark.parametrize(
    ("records", "tail", "problem"),
    [
        ((start(), step(0)), dumps(step(1))[:30].encode(), "line 3: cut short after 30 bytes"),
        ((start(), step(0)), b"\x00\xff\n", "line 3: not JSON"),
        ((start(),), b"not json\n", "line 2: not JSON"),
        ((start(),), b"\n", "line 2: not JSON"),
        ((start(),), b"[1]\n", "line 2: expected an object, got list"),
        ((start(),), b'{"kind": "dance"}\n', "line 2: unknown kind 'dance'"),
        ((start(),), b'{"kind": "end"}\n', "EndRecord: Object missing required field `rank`"),
        ((start(),), b"[" * 100_000 + b"\n", "line 2: "),
        ((start(), step(0, rank=1)), b"", "line 2: step record of rank 1 in the file of rank 0"),
        ((start(), end(rank=1)), b"", "line 2: end record of rank 1 in the file of rank 0"),
        ((start(rank=1),), b"", "line 1: start record of rank 1 in the file of rank 0"),
        ((start(schema=99),), b"", "line 1: schema 99, expected 1"),
        ((start(), start()), b"", "line 2: start record is not the first line"),
        ((start(), start()), b"", "line 2: a second start record"),
        ((step(0), start()), b"", "line 1: step 0 before a start record"),
        ((start(), step(0), step(0)), b"", "line 3: step 0 follows step 0"),
        ((start(), step(1), step(0)), b"", "line 3: step 0 follows step 1"),
        ((start(), step(0), end(), step(1)), b"", "line 4: step record after end"),
        ((start(), end(), end()), b"", "line 3: end record after end"),
        ((start(), end()), b"junk\n", " after end"),
        ((start(), error(), end()), b"", "line 3: end record after an error record"),
        ((start(), error(), error()), b"", "line 3: a second error record"),
    ],
)
def test_every_flaw_is_a_problem(
    tmp_path: Path, records: tuple[Record, ...], tail: bytes, problem: str
) -> None:
    """Each kind of damage is listed with its line, in words that the checks recognise."""
    problems = read(tmp_path, *records, tail=tail).problems
    assert any(problem in p for p in problems), problems
    assert all(len(p) < 400 for p in problems)


def test_records_out_of_place_stay_visible(tmp_path: Path) -> None:
    """A step that comes twice or after the end is kept for the checks; a newline may be missing."""
    got = read(tmp_path, start(), step(0), step(0), end(), step(1))
    assert [s.step for s in got.steps] == [0, 0, 1]
    assert got.after_end == ("line 5: step record after end",)
    assert read(tmp_path, start(), step(0), step(0), end()).after_end == ()
    got = read(tmp_path, start(), tail=dumps(step(0)).encode())
    assert ([s.step for s in got.steps], got.problems) == ([0], ())


def test_all_files_of_ranks_are_read_and_no_others(tmp_path: Path) -> None:
    """Each under its own number; one that is missing is an empty rank; strange ones are said."""
    for rank in range(12):
        (tmp_path / f"rank{rank}.jsonl").write_text(dumps(step(0, rank)) + "\n")
    assert [(r.rank, r.steps[0].rank) for r in read_ranks(tmp_path, 12)] == [
        (n, n) for n in range(12)
    ]
    (tmp_path / "rank0.jsonl").unlink()
    (tmp_path / "rank01.jsonl").touch()
    first, *_, last = read_ranks(tmp_path, 11)
    assert first == rank_records(0)
    assert "rank01.jsonl, rank11.jsonl" in last.problems[-1]
    (tmp_path / "rank0.jsonl").mkdir()
    assert "cannot be read" in read_rank(tmp_path / "rank0.jsonl", 0).problems[0]


def test_a_flood_of_problems_is_counted(tmp_path: Path) -> None:
    """A file of junk gives a bounded list that still says how much more there is."""
    got = read(tmp_path, tail=b"junk\n" * (MAX_PROBLEMS + 50))
    assert len(got.problems) == MAX_PROBLEMS + 1
    assert got.problems[-1] == "line 0: 50 more problems"


@given(st.binary(max_size=300))
def test_any_bytes_are_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """No content of a file raises, and content that is no record is never silent."""
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(data)
    got = read_rank(path, 0)
    assert bool(data) == bool(got.problems)
