"""Where ranks were, by notes, answers and NCCL; what CUDA left; who kept whom waiting."""

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.codec import dumps
from harness.engine.collective_log import (
    SIZE_BYTES,
    Place,
    PlaceFile,
    Recorded,
    answer_path,
    fault_words,
    find_mismatch,
    find_missing,
    odd_one,
    place_path,
    read_place,
)
from harness.engine.evidence import (
    ANSWER_S,
    ask_for_dumps,
    dumps_take_s,
    evidence_environment,
    kernel_words,
    last_place,
    prepare_to_ask,
    read_dump,
    remove_pipes,
)
from harness.provenance import variables
from harness.recorder.collectives import fitting
from harness.records import RunSpec
from harness.soaking import SoakSpec
from tests.unit.harness.engine.nccl_dump import GATHER, dump

ALL = (0, 1, 2, 3)


def place(entered: dict[str, int], group: tuple[int, ...] = ALL, *, inside: bool = True) -> Place:
    return Place(
        step=7, operator="c10d::_allgather_base_", label="layers.1", group=group,
        is_inside=inside, entered=entered,
    )  # fmt: skip


WAITING = place({"0,1,2,3": 12})
ABSENT = place({"0,1,2,3": 11}, inside=False)
REDUCES = replace(WAITING, operator="c10d::allreduce_")
TWELFTH = "in step 7 (collective 12 of ranks 0,1,2,3)"


def recent(*operators: str, first: int = 10, sizes: str = "") -> tuple[Recorded, ...]:
    return tuple(
        Recorded(key="0,1,2,3", number=number, operator=operator, sizes=sizes, step=5)
        for number, operator in enumerate(operators, first)
    )


MISSING: dict[str, tuple[dict[int, Place], str, int | None]] = {
    "one is outside": (
        {0: WAITING, 1: WAITING, 2: ABSENT, 3: WAITING},
        f"rank 2 never entered allgather_base of layers.1 {TWELFTH}", 2,
    ),
    "0 waits for 1, which waits for 3": (
        {0: place({"0,1": 5}, (0, 1)), 1: place({"0,1": 4, "1,3": 9}, (1, 3)),
         3: place({"1,3": 8}, (1, 3), inside=False)},
        "rank 3 never entered allgather_base of layers.1 in step 7 (collective 9 of ranks 1,3)", 3,
    ),
    "nobody is known": ({}, "None", None),
    "all inside": ({0: WAITING, 1: WAITING}, "None", None),
    "none inside": ({0: ABSENT, 2: ABSENT}, "None", None),
    "the others unknown": ({0: WAITING}, "None", None),
    "a circle": (
        {0: place({"0,1": 5, "0,1,2,3": 1}, (0, 1)), 1: place({"0,1": 4, "0,1,2,3": 2})},
        "None", None,
    ),
}  # fmt: skip
MISMATCH: dict[str, tuple[dict[int, Place], str, int | None]] = {
    "one call was another": (
        {0: WAITING, 1: WAITING, 2: WAITING, 3: REDUCES},
        "rank 3 entered allreduce of layers.1 where ranks 0, 1, 2 entered allgather_base of "
        f"layers.1 {TWELFTH}", 3,
    ),
    "one was left out": (
        {0: WAITING, 1: replace(WAITING, label="layers.2"), 3: WAITING},
        "rank 1 entered allgather_base of layers.2 where ranks 0, 3 entered allgather_base of "
        f"layers.1 {TWELFTH}", 1,
    ),
    "which of two was due cannot be known": (
        {0: REDUCES, 1: WAITING},
        "rank 1 entered allgather_base of layers.1 where rank 0 entered allreduce of layers.1 "
        f"{TWELFTH}", None,
    ),
    "NCCL's hosts go on after they parted": (
        {0: replace(WAITING, recent=recent("all_gather", "broadcast", "all_reduce")),
         1: replace(WAITING, recent=recent("all_reduce", "broadcast", first=11)),
         2: replace(WAITING, recent=recent("all_gather", "broadcast", "all_reduce"))},
        "rank 1 entered all_reduce where ranks 0, 2 entered broadcast in step 5 "
        "(collective 11 of ranks 0,1,2,3)", 1,
    ),
    "buffers that begin elsewhere, sizes that one did not record": (
        {0: replace(ABSENT, recent=recent("all_gather", "broadcast", sizes="[[8]]")),
         1: replace(ABSENT, recent=recent("broadcast", "all_reduce", first=11))}, "None", None,
    ),
    "agree": ({0: WAITING, 1: WAITING}, "None", None),
    "unknown owner": ({0: WAITING, 1: replace(WAITING, label="")}, "None", None),
    "came back": ({0: WAITING, 1: replace(REDUCES, is_inside=False)}, "None", None),
    "another number": ({0: WAITING, 1: replace(REDUCES, entered={"0,1,2,3": 13})}, "None", None),
    "another group": ({0: WAITING, 1: replace(REDUCES, group=(1, 3))}, "None", None),
    "no group": ({0: REDUCES, 1: replace(WAITING, group=())}, "None", None),
}  # fmt: skip


@pytest.mark.parametrize("row", [*MISSING, *MISMATCH])
def test_who_kept_whom_waiting(row: str) -> None:
    """By name, with the collective; where places do not single anybody out, nobody is named."""
    find = find_missing if row in MISSING else find_mismatch
    places, told, at_fault = (MISSING | MISMATCH)[row]
    fault = find(places)
    assert (told == "None") if fault is None else (fault_words(fault) == told)
    assert (None if fault is None else odd_one(fault)) == at_fault


def test_a_place_is_there_whatever_becomes_of_the_writer(tmp_path: Path) -> None:
    """The last one is read while the file is open, a shorter one whole; a damaged one is none."""
    path = place_path(tmp_path, 3)
    assert read_place(path) is None
    file, shorter = PlaceFile(path), replace(WAITING, label="", entered={})
    assert read_place(path) is None
    for written in (WAITING, shorter):
        file.write(written)
        assert read_place(path) == written
    file.write(replace(WAITING, label="x" * SIZE_BYTES))
    assert read_place(path) == shorter
    file.remove()
    assert not path.exists()
    for damage in (b"", b"{}", b"\xff", b'{"step": 1', b"[]\n"):
        path.write_bytes(damage)
        assert read_place(path) is None


@pytest.mark.parametrize("ranks", [8, 200, 1000])
def test_an_answer_is_as_long_as_the_leader_reads(ranks: int, tmp_path: Path) -> None:
    """Of groups of many ranks it names fewer collectives, the latest; its place is there."""
    key = ",".join(map(str, range(ranks)))
    told = [
        {"key": key, "number": number, "operator": "all_reduce", "step": 3} for number in range(32)
    ]
    answer = {
        "step": 3, "operator": "all_reduce", "label": "", "group": list(range(ranks)),
        "is_inside": True, "entered": {key: 31}, "recent": told,
    }  # fmt: skip
    path = tmp_path / "rank0.answer"
    path.write_text(fitting(answer))
    found = read_place(path)
    assert found is not None
    numbers = [each.number for each in found.recent]
    assert numbers == list(range(32))[32 - len(numbers) :]
    assert (len(numbers) == 32) == (ranks == 8)


# --- NCCL's flight recorder -------------------------------------------------------------------


def places_in(folder: Path) -> dict[int, Place]:
    found = {rank: last_place(folder, rank) for rank in range(2)}
    return {rank: place for rank, place in found.items() if place is not None}


def missing_words(folder: Path) -> str:
    fault = find_missing(places_in(folder))
    return "" if fault is None else fault_words(fault)


def test_the_rank_that_a_collective_lacks_is_named_by_dumps(tmp_path: Path) -> None:
    """Rank 0 has enqueued more collectives than rank 1, and waits in the first of them."""
    done, waits, later = (("0", GATHER, how) for how in ("completed", "started", "scheduled"))
    dump(tmp_path / "nccl_rank0", done, waits, later, later, first=6, frames=False)
    dump(tmp_path / "nccl_rank1", done, done, first=5, frames=False)
    expected = "rank 1 never entered all_gather_base (collective 7 of ranks 0,1)"
    assert missing_words(tmp_path) == expected


def test_two_groups_of_the_same_ranks_are_counted_each(tmp_path: Path) -> None:
    """As a mesh makes them: the first has more collectives, the rank lacks one of the second."""
    done = [("0", "all_reduce", "completed")] * 3
    dump(tmp_path / "nccl_rank0", *done, ("7", "all_reduce", "started"))
    dump(tmp_path / "nccl_rank1", *done)
    assert missing_words(tmp_path) == (
        "rank 1 never entered all_reduce (collective 1 of ranks 0,1, called at train.py:4 in main)"
    )


def test_ranks_that_call_different_collectives_are_told_from_their_dumps(tmp_path: Path) -> None:
    """What each waits in, and the lines that called them; the step is the program's own note."""
    calls = [("0", "all_reduce", "started"), ("0", "broadcast", "scheduled")]
    dump(tmp_path / "nccl_rank0", *calls)
    dump(tmp_path / "nccl_rank1", *reversed(calls))
    own = Place(
        step=5, operator="all_reduce", label="", group=(0, 1), is_inside=False, entered={"0,1": 9}
    )
    for rank in range(2):
        place_path(tmp_path, rank).write_text(dumps(own) + "\n")
    places = places_in(tmp_path)
    assert [place.entered for place in places.values()] == [{"0,1": 1}] * 2
    fault = find_mismatch(places)
    assert fault is not None
    assert fault_words(fault) == (
        "rank 1 entered broadcast, called at train.py:1 in main, where rank 0 entered all_reduce "
        "in step 5 (collective 1 of ranks 0,1, called at train.py:1 in main)"
    )


def test_an_answer_comes_before_a_dump_and_a_dump_before_notes(tmp_path: Path) -> None:
    """The answer knows module and phase; a dump has what C++ called; notes are what is left."""
    told = Place(step=3, operator="x", label="", group=(0, 1), is_inside=True, phase="backward")
    place_path(tmp_path, 0).write_text(dumps(replace(told, operator="own")) + "\n")
    assert last_place(tmp_path, 0) == replace(told, operator="own")
    dump(tmp_path / "nccl_rank0", ("0", "all_reduce", "started"), frames=False)
    found = last_place(tmp_path, 0)
    assert found is not None
    assert (found.operator, found.called_at, found.step) == ("all_reduce", "", 3)
    answer_path(tmp_path, 0).write_text(dumps(told) + "\n")
    assert last_place(tmp_path, 0) == told


class Making:
    """What a pickle can make whoever reads it do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_dump_that_cannot_be_understood_says_nothing(tmp_path: Path) -> None:
    """It is data: no class in it is looked up, nothing in it is called, and no damage raises."""
    path, made = tmp_path / "nccl_rank0", tmp_path / "made"
    assert read_dump(path) is None
    groups = {"0": {"name": "0", "ranks": "import"}}
    plains: list[Any] = [
        [], {"pg_config": {}, "entries": []}, {"pg_config": groups, "entries": [{}]}, Path,
        {"pg_config": {}, "entries": [Making(made)]},
    ]  # fmt: skip
    for plain in plains:
        path.write_bytes(pickle.dumps(plain))
        assert read_dump(path) is None
    for damage in (b"", b"text"):
        path.write_bytes(damage)
        assert read_dump(path) is None
    assert not made.exists()


# --- what is asked for ------------------------------------------------------------------------


def spec(**changes: Any) -> RunSpec:
    held: dict[str, Any] = {"config": {}, "device": "cuda", "world_size": 2, "timeout_s": 9.0}
    return RunSpec(**held | {"soak": SoakSpec(by="replays", amount=5)} | changes)


PROGRAM = spec(soak=None, config={"program": {"kind": "script", "target": "/x", "folder": "/"}})


def test_soaks_and_programs_on_gpus_leave_evidence(tmp_path: Path) -> None:
    """An error that a program catches must not cost it a core dump; what the user set stands."""
    soak, program = (evidence_environment(each, tmp_path, 3, {}) for each in (spec(), PROGRAM))
    assert soak["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == str(tmp_path / "nccl_rank")
    assert soak["CUDA_COREDUMP_FILE"] == str(tmp_path / "cuda3.core")
    assert program == {n: value for n, value in soak.items() if not n.startswith("CUDA_")}
    # A soak has these variables, and its reference has not: their environments are the same.
    assert variables(soak) == variables(program) == {}
    mine = {"CUDA_COREDUMP_FILE": "/mine"}
    assert soak.keys() - evidence_environment(spec(), tmp_path, 3, mine).keys() == mine.keys()
    for other in (spec(device="cpu"), spec(soak=None), replace(PROGRAM, device="cpu")):
        assert evidence_environment(other, tmp_path, 0, {}) == {}


def test_ranks_of_a_program_have_time_to_answer() -> None:
    """Alone it waits for nobody, and is not asked."""
    of_cpu = replace(PROGRAM, device="cpu")
    assert dumps_take_s(of_cpu) == ANSWER_S < dumps_take_s(PROGRAM)
    assert dumps_take_s(replace(of_cpu, world_size=1)) == 0.0


def test_pipes_go_with_the_run_and_places_with_one_that_ended_well(tmp_path: Path) -> None:
    """A run folder has plain files only."""

    def names() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    prepare_to_ask(PROGRAM, tmp_path, range(2))
    assert names() == {"rank0.ask", "rank1.ask"}
    os.mkfifo(tmp_path / "nccl_rank0.pipe")
    place_path(tmp_path, 0).touch()
    remove_pipes(tmp_path, range(2), all_went_well=False)
    assert names() == {"rank0.place"}
    remove_pipes(tmp_path, range(2), all_went_well=True)
    prepare_to_ask(spec(soak=None), tmp_path, range(2))
    assert names() == set()


def test_ranks_without_a_pipe_are_passed_over(tmp_path: Path) -> None:
    """No pipe, a pipe that nobody reads, and one that is read."""
    for rank in (1, 2):
        os.mkfifo(tmp_path / f"nccl_rank{rank}.pipe")
    reader = os.open(tmp_path / "nccl_rank2.pipe", os.O_RDONLY | os.O_NONBLOCK)
    ask_for_dumps(tmp_path, range(3))
    assert os.read(reader, 10) == b"1\n"
    os.close(reader)


TOLD = "coredump: Detected an exception of type CUDBG_EXCEPTION_WARP_ILLEGAL_ADDRESS (14)\n"
"""As CUDA 13's driver writes it on an H200."""


def test_words_of_a_core_dump_go_as_far_as_it_does(tmp_path: Path) -> None:
    """A kernel that is named, a dump that has it, an exception without a dump, nothing."""
    what = "CUDBG_EXCEPTION_WARP_ILLEGAL_ADDRESS"
    assert kernel_words("noise", tmp_path, 1) == ""
    assert kernel_words(TOLD, tmp_path, 1) == (
        f"CUDA says {what}; it left no core dump, so the kernel is not known"
    )
    (tmp_path / "cuda1.core").touch()
    assert "target cudacore cuda1.core" in kernel_words(TOLD, tmp_path, 1)
    named = TOLD + "[07:05:01.106483] coredump:   #0\t0x7f3c43786350\tmemcpy128\n"
    assert kernel_words(named, tmp_path, 1).endswith(f"{what} in kernel memcpy128")
    named += "[07:05:01.106484] coredump:   #1\t0x7f3c43786000\tcopy_kernel(float*)\n"
    assert kernel_words(named, tmp_path, 1).endswith("in memcpy128 of kernel copy_kernel(float*)")
