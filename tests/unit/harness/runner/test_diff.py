"""`harness diff`, and the files of a job that records itself: what is found, lost and told."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.recorder import LEAST_BYTES, Ring, num_bytes
from harness.records import FloatBits
from harness.runner.recorded import Comparison, compare
from harness.store.streams import read_parts
from tests.support import records
from tests.support.fake_engine import Capsys

NAMES = {"grads": ["a", "b"], "weights": ["a", "b"], "rng": ["cpu", "python"]}
TAPS = ["0:output[0]", "1:output[0]"]
Alter = Callable[[dict[str, Any]], object]


def digest(*of: object) -> str:
    return hashlib.md5(repr(of).encode()).hexdigest()


def write(
    folder: Path, *, rank: int = 0, world_size: int = 1, steps: Iterable[int] = range(10),
    every: int = 1, ring: int = 1 << 20, first_step: int = 0, seed: int = 0,
    shapes: Sequence[str] = ("float32[4]", "float32[8]"), environment: dict[str, Any] | None = None,
    alter: Alter = lambda record: None, shared: bool = False, is_over: bool = True,
) -> None:  # fmt: skip
    """What one process of a rank records; what `shared` ranks hold is of none in particular."""
    own = 0 if shared else rank
    stopped: list[str] = []
    file = Ring(folder / f"rank{rank}", ring, stopped.append)

    def put(record: dict[str, Any]) -> None:
        alter(record)
        file.write({"rank": rank, **record})

    def state(step: int) -> dict[str, Any]:
        texts = {g: "".join(digest(seed, g, n, own, step) for n in held)
                 for g, held in NAMES.items() if g != "rng"}  # fmt: skip
        return {"digests": {**texts, "rng": digest("cpu", step) + "0" * 32}, "nonfinite": {}}

    start = records.start(rank, world_size=world_size, environment=environment or {})
    put(start.to_json())
    put({"kind": "event", "name": "job", "step": 0,
         "detail": {"first_step": first_step, "every": every}})  # fmt: skip
    held = {group: [*shapes] if group != "rng" else ["", ""] for group in NAMES}
    put({"kind": "names", "step": -1, "tensors": NAMES, "shapes": held, "taps": TAPS})
    put({"kind": "initial", **state(first_step - 1)})
    for step in steps:
        due = not step % every
        loss = FloatBits.from_bits(0x3F800000 + 16 * step + (0 if shared else rank))
        rows = "".join(digest(seed, tap, own, step) + f"{i:08x}" for i, tap in enumerate(TAPS))
        put({
            **records.step(step, rank, loss=loss, microbatch_losses=(loss,)).to_json(),
            **(state(step) if due else {"digests": {}}), "taps": rows if due else "",
        })  # fmt: skip
    if is_over:
        put(records.end(rank, steps=10).to_json())
    file.close()
    assert not stopped


def flipped(kind: str, step: int, group: str, place: int = 0) -> Alter:
    """One bit of one digest of a group, or of a tap."""

    def alter(record: dict[str, Any]) -> None:
        if record["kind"] == kind and record.get("step", -1) == step:
            held = record if group == "taps" else record["digests"]
            text = held[group]
            held[group] = text[:place] + f"{int(text[place], 16) ^ 1:x}" + text[place + 1 :]

    return alter


def told(done: Comparison) -> list[tuple[str, int, int, str, str]]:
    """Of each kind of difference where it is first."""
    return [(f.kind, f.difference.step, f.difference.rank, f.difference.quantity,
             f.difference.tensor) for f in done.findings]  # fmt: skip


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders, of which the first holds two ranks of ten steps."""
    for rank in (0, 1):
        write(tmp_path / "a", rank=rank, world_size=2)
    return tmp_path / "a", tmp_path / "b"


def test_equal_recordings_are_equal_and_say_what_was_compared(two: tuple[Path, Path]) -> None:
    """Other lengths and intervals: only what both have counts, and the rest is told in numbers."""
    for rank in (0, 1):
        write(two[1], rank=rank, world_size=2, steps=range(6), every=2)
    done = compare(*two)
    assert (done.exit_code, done.findings, done.problems) == (0, (), ())
    # Three steps and the state before them, on two ranks: of 4 tensors and 1 seeded generator.
    assert done.compared == {"rank": 2, "step": 6, "digest": 40, "call": 12, "value": 48}
    assert done.a["only"] == {"digested step": 6, "step": 4}
    assert (done.a["steps_with_digests"], done.b["steps_with_digests"]) == (10, 3)


@pytest.mark.parametrize(
    ("kind", "step", "group", "place", "expected"),
    [
        ("step", 7, "weights", 40, ("state", 7, 1, "weights", "b")),
        ("step", 3, "taps", 41, ("modules", 3, 1, "taps", "1:output[0]")),
        ("initial", -1, "weights", 0, ("before", 0, 1, "weights", "a")),
        ("step", 0, "rng", 31, ("state", 0, 1, "rng", "cpu")),
    ],
)
def test_one_bit_is_found_where_it_is(
    two: tuple[Path, Path], kind: str, step: int, group: str, place: int, expected: tuple[Any, ...]
) -> None:
    """Step, rank, group and tensor, or the module's call, or the state before step 0."""
    write(two[1], rank=0, world_size=2)
    write(two[1], rank=1, world_size=2, alter=flipped(kind, step, group, place))
    done = compare(*two)
    assert (done.exit_code, told(done)) == (1, [expected])
    assert (done.findings[0].places, done.findings[0].records) == (1, 1)


def test_the_first_of_many_differences_comes_first(two: tuple[Path, Path]) -> None:
    """Losses have a line of their own; a skipped step that the other takes is a difference."""

    def alter(record: dict[str, Any]) -> None:
        if record["kind"] == "step" and record["step"] >= 4:
            record["digests"]["weights"] = digest("x", record["step"]) * 2
            if record["step"] == 8:
                record["loss"] = FloatBits.from_bits(0).to_json()
                record["skipped"] = "inf"

    write(two[1], rank=0, world_size=2)
    write(two[1], rank=1, world_size=2, alter=alter)
    done = compare(*two)
    assert sorted(told(done)) == [
        ("losses", 8, 1, "loss", ""), ("skipped", 8, 1, "skipped", ""),
        ("state", 4, 1, "weights", "a"),
    ]  # fmt: skip
    assert done.findings[0].kind == "state"
    assert (done.findings[0].places, done.findings[0].records) == (2, 6)


def test_twins_of_which_one_side_has_more_tell_nothing(tmp_path: Path) -> None:
    """Their numbers are in the order of digests: as many on both sides are compared."""

    def alter(*twins: str) -> Alter:
        def add(record: dict[str, Any]) -> None:
            if record["kind"] == "names":
                held = [f"EMA{'' if i == 1 else f'#{i}'}.bias" for i in range(1, len(twins) + 1)]
                record["tensors"] = {**NAMES, "others": held}
            if record["kind"] in ("step", "initial"):
                texts = (digest(each, record.get("step")) for each in twins)
                record["digests"] = {**record["digests"], "others": "".join(texts)}

        return add

    for name, twins in {"a": "x", "more": "wx", "b": "xy", "c": "xz"}.items():
        write(tmp_path / name, alter=alter(*twins))
    assert compare(tmp_path / "a", tmp_path / "more").exit_code == 0
    done = compare(tmp_path / "b", tmp_path / "c")
    assert told(done)[0][-2:] == ("others", "EMA#2.bias")


def test_nothing_in_common_is_not_equal(tmp_path: Path) -> None:
    """Other steps: 5. The same folder twice, or none of a recording, is a mistake: 4."""
    write(tmp_path / "a", steps=range(5), every=100)
    write(tmp_path / "b", steps=range(5, 9), first_step=5, every=100)
    assert compare(tmp_path / "a", tmp_path / "b").exit_code == 5
    (tmp_path / "empty").mkdir()
    for other in ("a", "empty", "missing"):
        assert main(["diff", str(tmp_path / "a"), str(tmp_path / other)]) == 4


def test_ranks_that_only_one_has_are_told(two: tuple[Path, Path]) -> None:
    """What rank 0 has is compared; that two were due is said."""
    write(two[1], rank=0, world_size=2)
    done = compare(*two)
    assert (done.exit_code, done.compared["rank"], done.a["only"]["rank"]) == (0, 1, 1)
    assert len(done.notes) == 1


def test_other_world_sizes_are_compared_by_means_alone(tmp_path: Path) -> None:
    """Losses and norms of the same mean are equal; shards say nothing, copies before step 0 do."""
    for size, name in ((1, "a"), (2, "b"), (4, "c")):
        for rank in range(size):
            alter = flipped("initial", -1, "weights") if name == "c" else lambda record: None
            write(tmp_path / name, rank=rank, world_size=size, shared=True, alter=alter)
    done = compare(tmp_path / "a", tmp_path / "b")
    assert (done.exit_code, done.same_world_size) == (0, False)
    assert done.compared == {"rank": 0, "step": 10, "digest": 4, "call": 0, "value": 20}
    found = compare(tmp_path / "a", tmp_path / "c")
    assert told(found) == [("before", 0, 0, "weights", "a")]
    write(tmp_path / "d", rank=0, world_size=2, shared=True)
    write(tmp_path / "d", rank=1, world_size=2)
    done = compare(tmp_path / "a", tmp_path / "d")
    assert told(done) == [("losses", 0, 0, "mean loss", "")]
    assert done.compared["digest"] == 0  # none that both ranks hold alike
    assert 0 < done.largest_gap["losses"] < 1e-6


def test_tensors_of_other_shapes_are_neither_equal_nor_different(tmp_path: Path) -> None:
    """They are of another layout or dtype: no verdict."""
    write(tmp_path / "a")
    write(tmp_path / "b", shapes=("bfloat16[4]", "float32[8]"))
    done = compare(tmp_path / "a", tmp_path / "b")
    assert (done.exit_code, done.other_shapes, done.compared["digest"]) == (6, 2, 33)
    write(tmp_path / "c", shapes=("bfloat16[4]", "float32[8]"), seed=1)
    done = compare(tmp_path / "a", tmp_path / "c")
    assert (done.exit_code, done.findings[0].difference.tensor) == (1, "b")


def test_environments_are_told_and_decide_nothing(two: tuple[Path, Path]) -> None:
    """What differs of the fingerprint and the commit, with the ranks."""
    for rank in (0, 1):
        facts = {"torch": "2.13", "environment": {"NCCL_ALGO": "Ring"} if rank else {}}
        write(two[1], rank=rank, world_size=2,
              environment={"fingerprint": facts, "commit": "c0ffee"})  # fmt: skip
        write(two[1].parent / "c", rank=rank, world_size=2,
              environment={"fingerprint": {"torch": "2.12"}, "commit": "beef"})  # fmt: skip
    done = compare(two[1], two[1].parent / "c")
    found = {f.difference.quantity: (f.difference.reference, f.difference.candidate, f.ranks)
             for f in done.environment}  # fmt: skip
    assert found == {
        "torch": ("2.13", "2.12", (0, 1)), "commit": ("c0ffee", "beef", (0, 1)),
        "environment.NCCL_ALGO": ("Ring", "absent", (1,)),
    }  # fmt: skip
    assert done.exit_code == 0


# --- parts, rings and damage ------------------------------------------------------------------


def test_a_job_that_went_on_is_one_and_its_parts_are_compared(tmp_path: Path) -> None:
    """The latest part that has a step is used; a part that does not repeat another is found."""
    write(tmp_path / "a", steps=range(10))
    write(tmp_path / "b", steps=range(7), is_over=False)
    write(tmp_path / "b", steps=range(4, 10), first_step=4)
    done = compare(tmp_path / "a", tmp_path / "b")
    assert (done.exit_code, done.b["parts"], done.compared["step"]) == (0, 2, 10)
    write(tmp_path / "c", steps=range(7), is_over=False, alter=flipped("step", 5, "weights"))
    write(tmp_path / "c", steps=range(4, 10), first_step=4)
    done = compare(tmp_path / "a", tmp_path / "c")
    assert told(done) == [("state", 5, 0, "weights", "a")]
    assert (done.exit_code, done.findings[0].within) == (1, "B, parts")
    write(tmp_path / "d", steps=range(7), is_over=False)
    write(tmp_path / "d", steps=range(4, 10), first_step=4, alter=flipped("step", 5, "weights"))
    assert {f.within for f in compare(tmp_path / "a", tmp_path / "d").findings} == {"", "B, parts"}


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "rank0").glob("part*/[0-9]*.jsonl"))


def test_a_ring_keeps_the_newest_within_its_bytes(tmp_path: Path) -> None:
    """The oldest segments go, of all parts; the start, names and the state before step 0 stay."""
    ring = 96 << 10
    write(tmp_path / "a", steps=range(300))
    write(tmp_path / "b", steps=range(150), ring=ring, is_over=False)
    (first,) = read_parts(tmp_path / "b", 0)
    assert first.records.steps[0].step > 0
    assert first.records.initial is not None
    write(tmp_path / "b", steps=range(150, 300), first_step=150, ring=ring)
    write(tmp_path / "b", steps=range(290, 300), first_step=290, ring=ring)
    assert sum(p.stat().st_size for p in (tmp_path / "b").rglob("*.jsonl")) <= ring
    parts = read_parts(tmp_path / "b", 0)
    assert [part.number for part in parts] == [0, 1, 2]
    assert (parts[0].records.steps, len(parts[2].records.steps)) == ((), 10)
    kept = [step.step for step in parts[1].records.steps]
    assert kept == list(range(300 - len(kept), 300))
    done = compare(tmp_path / "a", tmp_path / "b")
    assert (done.exit_code, done.problems) == (0, ())
    assert done.a["only"] == {"step": 300 - len(kept)}


def test_a_last_line_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    """At any byte; it is told, is no damage, and loses that line alone."""
    write(tmp_path / "a")
    write(tmp_path / "b", is_over=False)
    (path,) = segments(tmp_path / "b")
    data = path.read_bytes()
    for cut in (1, 20, 400):
        path.write_bytes(data[:-cut])
        done = compare(tmp_path / "a", tmp_path / "b")
        assert (done.exit_code, done.compared["step"], done.problems) == (0, 9, ())
        assert len(done.notes) == 1


def damaged(path: Path, how: Callable[[list[bytes]], object]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    how(lines)
    path.write_bytes(b"".join(lines))


def flip(line: int, place: int = 60) -> Callable[[list[bytes]], None]:
    def how(lines: list[bytes]) -> None:
        held = bytearray(lines[line])
        held[place] ^= 1
        lines[line] = bytes(held)

    return how


@pytest.mark.parametrize(
    ("how", "steps", "digests"),
    [
        (flip(4), 9, 45), (flip(4, -3), 9, 45), (flip(4, -12), 8, 40), (flip(9, -1), 8, 40),
        (flip(1), 9, 45), (flip(0), 10, 0), (lambda lines: lines.pop(4), 8, 40),
    ],
    ids=["byte", "names", "checksum", "newline", "first", "names line", "line gone"],
)  # fmt: skip
def test_damage_in_the_middle_is_named_and_gives_no_verdict(
    tmp_path: Path, how: Callable[[list[bytes]], object], steps: int, digests: int
) -> None:
    """What has a right checksum is compared; digests whose names are damaged are not."""
    write(tmp_path / "a")
    write(tmp_path / "b")
    (path,) = segments(tmp_path / "b")
    damaged(path, how)
    done = compare(tmp_path / "a", tmp_path / "b")
    assert (done.exit_code, done.findings) == (6, ())
    assert done.problems
    assert done.compared["step"] == steps
    assert done.compared["digest"] == digests + 5  # and the state before step 0


def test_a_missing_segment_and_a_damaged_start_are_named(tmp_path: Path) -> None:
    """The steps that are gone in the middle are told; without names no digest is compared."""
    write(tmp_path / "a", steps=range(100))
    for name in ("b", "c"):
        write(tmp_path / name, steps=range(100), ring=LEAST_BYTES * 4)
    segments(tmp_path / "b")[1].unlink()
    done = compare(tmp_path / "a", tmp_path / "b")
    assert (done.exit_code, len(done.problems)) == (6, 2)
    assert done.compared["step"] < 100
    damaged(tmp_path / "c" / "rank0" / "part0" / "start.jsonl", flip(0))
    done = compare(tmp_path / "a", tmp_path / "c")
    assert (done.exit_code, done.compared["digest"]) == (6, 0)


def test_what_people_and_programs_see(two: tuple[Path, Path], capsys: Capsys) -> None:
    """The answer is the last line; JSON has it all."""
    write(two[1], rank=0, world_size=2)
    write(two[1], rank=1, world_size=2, alter=flipped("step", 7, "weights", 40))
    assert main(["diff", *map(str, two)]) == 1
    assert "step 7, rank 1, state: b (weights)" in capsys.readouterr().out.splitlines()[-1]
    assert main(["diff", *map(str, two), "--json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert plain.pop("exit_code") == 1
    assert Comparison.from_json(plain) == compare(*two)


def test_rings_are_given_as_people_write_bytes() -> None:
    """Decimal and binary units; what is no size, or none for a job, is refused."""
    sizes = (num_bytes("256MB"), num_bytes("1.5GiB"), num_bytes(70000))
    assert sizes == (256_000_000, 3 << 29, 70000)
    for wrong in ("256 parsecs", "MB", "1KB", -1, "nan", "1e999"):
        with pytest.raises(ValueError, match="ring"):
            num_bytes(wrong)
