"""Tests of `harness.engine.gpus`: every rank its GPU, and hosts apart where a GPU is shared."""

from pathlib import Path

import pytest

from harness.engine.gpus import gpu_environment, mps_runs, shared


def test_a_gpu_a_rank_is_one_host() -> None:
    """Nothing is said to NCCL, and the rank's number is its GPU."""
    found = gpu_environment(("2", "3"), 1)
    assert found == {"CUDA_VISIBLE_DEVICES": "2,3", "LOCAL_RANK": "1"}


def test_ranks_without_gpus_see_none() -> None:
    """A run on the CPU must not find a GPU."""
    assert gpu_environment((), 3) == {"CUDA_VISIBLE_DEVICES": "", "LOCAL_RANK": "3"}


@pytest.mark.parametrize("ranks_per_gpu", [2, 3, 4])
def test_no_host_has_a_gpu_twice(ranks_per_gpu: int) -> None:
    """What NCCL refuses: two ranks of one host on one GPU. Each host has every GPU once."""
    devices = shared(("4", "7"), ranks_per_gpu)
    ranks = [gpu_environment(devices, rank) for rank in range(len(devices))]
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {"4,7"}
    places = {(rank["NCCL_HOSTID"], rank["LOCAL_RANK"]) for rank in ranks}
    assert len(places) == len(ranks) == 2 * ranks_per_gpu
    assert len({host for host, _ in places}) == ranks_per_gpu


def test_every_gpu_is_used_before_one_is_shared() -> None:
    """A run that fits one rank a GPU shares none."""
    assert shared(("0", "1"), 2) == ("0", "1", "0", "1")
    assert "NCCL_HOSTID" not in gpu_environment(shared(("0", "1"), 2)[:2], 0)


def test_less_than_one_rank_a_gpu_is_refused() -> None:
    """No rank would have a GPU."""
    with pytest.raises(ValueError, match="at least 1 rank a GPU, got 0"):
        shared(("0",), 0)


def test_mps_is_told_by_its_control_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's processes look for it where a variable says, and use MPS if it is there."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not mps_runs()
    (tmp_path / "control").touch()
    assert mps_runs()
