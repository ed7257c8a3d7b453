"""What NCCL and CUDA leave behind: asked for, read, and never trusted further than it goes."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from harness.engine.gpu_evidence import (
    ask_for_dumps,
    evidence_environment,
    kernel_words,
    read_dump,
)
from harness.engine.whereabouts import find_missing
from harness.records import RunSpec
from harness.soaking import SoakSpec
from tests.unit.harness.engine.nccl_dump import dump


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
