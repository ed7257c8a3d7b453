"""Files of ranks in every state: records and contents, or problems, and never an exception."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.records import EventRecord, KeepSpec, RankRecords, Record, RecordError, RunSpec, dumps
from harness.store import save_outcome
from harness.store.contents import KeptTensor, Place, contents_path, read_contents, write_contents
from harness.store.streams import MAX_PROBLEMS, read_rank, read_ranks
from tests.support.records import (
    end,
    error,
    kept_tensor,
    outcome,
    rank_records,
    run_spec,
    start,
    step,
)


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


KEEP = KeepSpec(step=2, names=("grads:a", "weights:*"))
BOX = Place(name="a", shape=(4,), offsets=(1,), local_offsets=(0,), sizes=(3,))
GRAD, WEIGHT = bytes(range(12)), bytes(range(100, 108))


def spec(keep: KeepSpec | None = KEEP, world_size: int = 1) -> RunSpec:
    """A run that keeps something."""
    return run_spec(world_size, keep=keep)


def entry(name: str, data: bytes, size: int = 4, **fields: Any) -> tuple[KeptTensor, bytes]:
    """A tensor of one dimension, as a rank writes it."""
    return kept_tensor(name, (len(data) // size,), **fields), data


def write(folder: Path, rank: int = 0, world_size: int = 1) -> Path:
    """A rank's file with two tensors."""
    entries = [
        entry("grads:a", GRAD, places=(BOX,)),
        entry("weights:a", WEIGHT, 2, dtype="bfloat16"),
    ]
    write_contents(folder, spec(world_size=world_size).key, rank, KEEP.step, entries)
    return contents_path(folder, rank)


def end_of_contents(folder: Path) -> None:
    """End the run: its outcome has the checksum of what it kept."""
    save_outcome(folder, outcome(spec().key))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Bytes, dtypes, shapes and places come back, and no file is left beside."""
    path = write(tmp_path)
    found = read_contents(tmp_path, spec())
    assert found.problems == ()
    assert [(each.about, each.data) for each in found.ranks[0]] == [
        entry("grads:a", GRAD, places=(BOX,)), entry("weights:a", WEIGHT, 2, dtype="bfloat16"),
    ]  # fmt: skip
    assert found.names == ("grads:a", "weights:a")
    assert [rank for rank, _ in found.held("weights:a")] == [0]
    assert list(tmp_path.iterdir()) == [path]


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    """Whichever byte changes once the run has ended: nothing of the rank is believed."""
    path = write(tmp_path)
    end_of_contents(tmp_path)
    good = path.read_bytes()
    assert read_contents(tmp_path, spec()).problems == ()
    for at in [*range(0, len(good), 7), *range(len(good) - 20, len(good))]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        found = read_contents(tmp_path, spec())
        assert found.problems[0].startswith("rank0.contents: changed since it was written")
        assert found.ranks == ((),)
    for size in (0, 10, -1):  # cut short
        path.write_bytes(good[:size])
        assert read_contents(tmp_path, spec()).ranks == ((),)


def test_files_in_other_places_are_not_believed(tmp_path: Path) -> None:
    """Another run's file, another rank's, and one of another step, is refused."""
    path = write(tmp_path)
    other = run_spec(timeout_s=2.0, keep=KEEP)
    assert "run, rank and step: expected" in read_contents(tmp_path, other).problems[0]
    path.rename(contents_path(tmp_path, 1))
    write(tmp_path, world_size=2)
    found = read_contents(tmp_path, spec(world_size=2))
    assert "rank1.contents: " in found.problems[0]
    assert found.ranks[1] == ()


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """A rank without a file, a name that no rank has, a star that nothing fits, no wish at all."""
    missing = read_contents(tmp_path, spec())
    assert missing.problems[0] == "rank 0 kept nothing: it did not end step 2"
    assert missing.problems[1].startswith("no rank has kept grads:a: expected")
    stars = spec(KeepSpec(step=2, names=("optim:*",)))
    write_contents(tmp_path, stars.key, 0, 2, [])
    assert read_contents(tmp_path, stars).problems == ("no rank has a tensor that fits optim:*",)
    assert read_contents(tmp_path, spec(None)).problems == (
        "the run was not asked to keep anything",
    )


@pytest.mark.parametrize(
    "values", [{"step": -1}, {"names": ()}, {"max_bytes": 0}], ids=lambda v: next(iter(v))
)
def test_what_cannot_be_kept_is_refused(values: dict[str, object]) -> None:
    """A step before the first, no names and no bytes are refused where the wish is made."""
    plain = KEEP.to_json() | values
    with pytest.raises(RecordError, match=f"keep.{next(iter(values))}: expected"):
        KeepSpec.from_json(plain)
