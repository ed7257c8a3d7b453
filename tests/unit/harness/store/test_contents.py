"""Kept contents on disk: whole or not at all, and nothing damaged is believed."""

from pathlib import Path

import pytest

from harness.records import KeepSpec, RecordError, RunSpec
from harness.store import save_outcome
from harness.store.contents import KeptTensor, Place, contents_path, read_contents, write_contents
from tests.support.records import outcome, run_spec

KEEP = KeepSpec(step=2, names=("grads:a", "weights:*"))
BOX = Place(name="a", shape=(4,), offsets=(1,), local_offsets=(0,), sizes=(3,))
GRAD, WEIGHT = bytes(range(12)), bytes(range(100, 108))


def spec(keep: KeepSpec | None = KEEP, world_size: int = 1) -> RunSpec:
    """A run that keeps something."""
    return run_spec(world_size, keep=keep)


def entry(name: str, data: bytes, dtype: str = "float32", places: tuple[Place, ...] = ()) -> tuple[
    KeptTensor, bytes
]:  # fmt: skip
    """A tensor of one dimension, as a rank writes it."""
    size = {"float32": 4, "bfloat16": 2}[dtype]
    about = KeptTensor(
        name=name, part=0, dtype=dtype, shape=(len(data) // size,),
        as_digested=True, places=places,
    )  # fmt: skip
    return about, data


def write(folder: Path, rank: int = 0, world_size: int = 1) -> Path:
    """A rank's file with two tensors."""
    entries = [entry("grads:a", GRAD, places=(BOX,)), entry("weights:a", WEIGHT, "bfloat16")]
    write_contents(folder, spec(world_size=world_size).key, rank, KEEP.step, entries)
    return contents_path(folder, rank)


def end(folder: Path) -> None:
    """End the run: its outcome has the checksum of what it kept."""
    save_outcome(folder, outcome(spec().key))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Bytes, dtypes, shapes and places come back, and no file is left beside."""
    path = write(tmp_path)
    found = read_contents(tmp_path, spec())
    assert found.problems == ()
    assert [(each.about, each.data) for each in found.ranks[0]] == [
        entry("grads:a", GRAD, places=(BOX,)), entry("weights:a", WEIGHT, "bfloat16"),
    ]  # fmt: skip
    assert found.names == ("grads:a", "weights:a")
    assert [rank for rank, _ in found.held("weights:a")] == [0]
    assert list(tmp_path.iterdir()) == [path]


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    """Whichever byte changes once the run has ended: nothing of the rank is believed."""
    path = write(tmp_path)
    end(tmp_path)
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
    assert "run: expected" in read_contents(tmp_path, other).problems[0]
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
