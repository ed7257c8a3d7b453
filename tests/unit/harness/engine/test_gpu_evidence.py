"""What NCCL and CUDA leave behind: asked for, read, and never trusted further than it goes."""

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.codec import dumps
from harness.engine.collective_log import (
    Place,
    answer_path,
    find_mismatch,
    find_missing,
    place_path,
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
from harness.records import RunSpec
from harness.soaking import SoakSpec
from tests.unit.harness.engine.nccl_dump import dump, dump_of


def spec(**changes: Any) -> RunSpec:
    held: dict[str, Any] = {"config": {}, "device": "cuda", "world_size": 2, "timeout_s": 9.0}
    return RunSpec(**held | {"soak": SoakSpec(by="replays", amount=5)} | changes)


def test_the_rank_that_a_collective_lacks_is_named(tmp_path: Path) -> None:
    """Rank 0 has enqueued three more collectives than rank 1, and waits in the first of them."""
    dump(tmp_path / "nccl_rank0", "completed", "started", "scheduled", "scheduled", at=9)
    dump(tmp_path / "nccl_rank1", "completed", "completed", at=6)
    places = {rank: read_dump(tmp_path / f"nccl_rank{rank}") for rank in range(2)}
    missing = find_missing({rank: place for rank, place in places.items() if place is not None})
    assert str(missing) == "rank 1 never entered all_gather_base (collective 7 of ranks 0,1)"


def test_two_groups_of_the_same_ranks_are_counted_each(tmp_path: Path) -> None:
    """As a mesh makes them: the first has more collectives, the rank lacks one of the second."""
    done = [("0", "all_reduce", "completed")] * 3
    dump_of(tmp_path / "nccl_rank0", *done, ("7", "all_reduce", "started"))
    dump_of(tmp_path / "nccl_rank1", *done)
    places = {rank: last_place(tmp_path, rank) for rank in range(2)}
    missing = find_missing({rank: place for rank, place in places.items() if place is not None})
    assert str(missing) == (
        "rank 1 never entered all_reduce (collective 1 of ranks 0,1, group 7, "
        "called at train.py:4 in main)"
    )


def test_ranks_that_call_different_collectives_are_told_from_their_dumps(tmp_path: Path) -> None:
    """What each waits in, and the lines that called them; the step is the program's own note."""
    calls = [("0", "all_reduce", "started"), ("0", "broadcast", "scheduled")]
    dump_of(tmp_path / "nccl_rank0", *calls)
    dump_of(tmp_path / "nccl_rank1", *reversed(calls))
    own = Place(
        step=5, operator="all_reduce", label="", group=(0, 1), is_inside=False, entered={"0,1": 9}
    )
    for rank in range(2):
        place_path(tmp_path, rank).write_text(dumps(own) + "\n")
    places = {rank: last_place(tmp_path, rank) for rank in range(2)}
    assert all(place is not None and place.entered == {"0,1": 1} for place in places.values())
    mismatch = find_mismatch({rank: place for rank, place in places.items() if place is not None})
    assert str(mismatch) == (
        "rank 1 entered broadcast, called at train.py:1 in main, where rank 0 entered all_reduce "
        "in step 5 (collective 1 of ranks 0,1, called at train.py:1 in main)"
    )


def test_an_answer_comes_before_a_dump_and_a_dump_before_notes(tmp_path: Path) -> None:
    """The answer knows module and phase; a dump has what C++ called; notes are what is left."""
    told = Place(step=3, operator="x", label="", group=(0, 1), is_inside=True, phase="backward")
    place_path(tmp_path, 0).write_text(dumps(replace(told, operator="own")) + "\n")
    assert last_place(tmp_path, 0) == replace(told, operator="own")
    dump_of(tmp_path / "nccl_rank0", ("0", "all_reduce", "started"), frames=False)
    place = last_place(tmp_path, 0)
    assert place is not None
    assert (place.operator, place.called_at, place.step) == ("all_reduce", "", 3)
    answer_path(tmp_path, 0).write_text(dumps(told) + "\n")
    assert last_place(tmp_path, 0) == told


@pytest.mark.parametrize(
    "content",
    [
        b"", b"text", pickle.dumps([]), pickle.dumps({"pg_config": {}, "entries": []}),
        pickle.dumps({"pg_config": {"0": {"name": "0", "ranks": "import"}}, "entries": [{}]}),
        pickle.dumps(Path),
    ],
    ids=["empty", "text", "a list", "no entries", "no ranks", "a class"],
)  # fmt: skip
def test_a_dump_that_cannot_be_understood_says_nothing(tmp_path: Path, content: bytes) -> None:
    """It is data: no class in it is looked up, and no damage raises."""
    path = tmp_path / "nccl_rank0"
    assert read_dump(path) is None
    path.write_bytes(content)
    assert read_dump(path) is None


class Making:
    """What a pickle can make whoever reads it do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_dump_runs_nothing(tmp_path: Path) -> None:
    """One that was tampered with calls no function as it is read."""
    path, made = tmp_path / "nccl_rank0", tmp_path / "made"
    path.write_bytes(pickle.dumps({"pg_config": {}, "entries": [Making(made)]}))
    assert read_dump(path) is None
    assert not made.exists()


PROGRAM = {"program": {"kind": "script", "target": "/train.py", "folder": "/"}}


def test_programs_on_gpus_have_nccls_recorder_and_no_core_dump(tmp_path: Path) -> None:
    """An error that a program catches must not cost it a dump."""
    found = evidence_environment(spec(soak=None, config=PROGRAM), tmp_path, 0, {})
    assert found["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == str(tmp_path / "nccl_rank")
    assert not any(name.startswith("CUDA_") for name in found)
    of_cpu = spec(soak=None, device="cpu", config=PROGRAM)
    assert evidence_environment(of_cpu, tmp_path, 0, {}) == {}
    assert dumps_take_s(of_cpu) == ANSWER_S
    assert dumps_take_s(replace(of_cpu, world_size=1)) == 0.0


def test_pipes_go_with_the_run_and_places_with_one_that_ended_well(tmp_path: Path) -> None:
    """A run folder has plain files only."""
    prepare_to_ask(spec(soak=None, config=PROGRAM), tmp_path, range(2))
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.ask", "rank1.ask"}
    os.mkfifo(tmp_path / "nccl_rank0.pipe")
    place_path(tmp_path, 0).touch()
    remove_pipes(tmp_path, range(2), all_went_well=False)
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.place"}
    remove_pipes(tmp_path, range(2), all_went_well=True)
    assert not list(tmp_path.iterdir())
    prepare_to_ask(spec(soak=None), tmp_path, range(2))
    assert not list(tmp_path.iterdir())


def test_only_soaks_on_gpus_ask_for_evidence(tmp_path: Path) -> None:
    """What the user set stands."""
    assert evidence_environment(spec(device="cpu"), tmp_path, 0, {}) == {}
    assert evidence_environment(spec(soak=None), tmp_path, 0, {}) == {}
    mine = {"CUDA_COREDUMP_FILE": "/mine"}
    found = evidence_environment(spec(), tmp_path, 3, mine)
    assert "CUDA_COREDUMP_FILE" not in found
    assert found["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == str(tmp_path / "nccl_rank")
    assert evidence_environment(spec(), tmp_path, 3, {})["CUDA_COREDUMP_FILE"].endswith(
        "cuda3.core"
    )


@pytest.mark.parametrize("kind", [spec(), spec(soak=None, config=PROGRAM)])
def test_what_makes_a_rank_leave_evidence_decides_no_bits(kind: RunSpec, tmp_path: Path) -> None:
    """A soak has these variables, and its reference has not: their environments are the same."""
    found = evidence_environment(kind, tmp_path, 0, {})
    assert found
    assert variables(found) == {}


def test_ranks_without_a_pipe_are_passed_over(tmp_path: Path) -> None:
    """No pipe, a pipe that nobody reads, and one that is read."""
    os.mkfifo(tmp_path / "nccl_rank1.pipe")
    os.mkfifo(tmp_path / "nccl_rank2.pipe")
    reader = os.open(tmp_path / "nccl_rank2.pipe", os.O_RDONLY | os.O_NONBLOCK)
    ask_for_dumps(tmp_path, range(3))
    assert os.read(reader, 10) == b"1\n"
    os.close(reader)


TOLD = """\
[07:05:01.102923] coredump: Starting GPU coredump generation
[07:05:01.106296] coredump: Detected an exception of type CUDBG_EXCEPTION_WARP_ILLEGAL_ADDRESS (14)
[07:05:01.106331] coredump:   - Warp: 5
[07:05:01.106479] coredump: Stack trace (lane masks: active 0xFFFFFFFF, valid 0xFFFFFFFF):
"""
"""As CUDA 13's driver writes it on an H200."""


def test_words_of_a_core_dump_go_as_far_as_it_does(tmp_path: Path) -> None:
    """A kernel that is named, a dump that has it, an exception without a dump, nothing."""
    assert kernel_words("noise", tmp_path, 1) == ""
    assert kernel_words(TOLD, tmp_path, 1) == (
        "CUDA says CUDBG_EXCEPTION_WARP_ILLEGAL_ADDRESS; it left no core dump, so the kernel is "
        "not known"
    )
    (tmp_path / "cuda1.core").touch()
    assert "target cudacore cuda1.core" in kernel_words(TOLD, tmp_path, 1)
    named = TOLD + "[07:05:01.106483] coredump:   #0\t0x7f3c43786350\tmemcpy128\n"
    assert kernel_words(named, tmp_path, 1).endswith("_ADDRESS in kernel memcpy128")
    named += "[07:05:01.106484] coredump:   #1\t0x7f3c43786000\tcopy_kernel(float*)\n"
    assert kernel_words(named, tmp_path, 1).endswith(
        "_ADDRESS in memcpy128 of kernel copy_kernel(float*)"
    )
