"""Ranks of a benchmark: as many as there are GPUs up to eight, or several to a GPU."""

import os

import pytest
import torch

from benchmarks import ranks
from benchmarks.room import NoGpus, Room, find_room
from harness.errors import UsageError


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (4, 4), (8, 8), (16, 8)])
def test_every_gpu_has_a_rank_up_to_eight(
    gpus: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without options nothing is left idle on a machine of eight, and nothing is shared."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    room = find_room("cuda", None, None)
    assert room.devices == tuple(str(gpu) for gpu in range(ranks))
    assert room.described() == {"gpus": ranks, "ranks": ranks, "shared_gpus": False}


@pytest.mark.usefixtures("_two_gpus")
def test_ranks_share_gpus_only_where_asked_and_needed() -> None:
    """Eight ranks on two GPUs are marked; two on two are not, whatever is allowed."""
    assert find_room("cuda", 8, 4).devices == ("0", "1") * 4
    assert find_room("cuda", None, 4).described() == {"gpus": 2, "ranks": 8, "shared_gpus": True}
    assert not find_room("cuda", 2, 4).shares_gpus
    for ranks_per_gpu in (None, 3):
        with pytest.raises(NoGpus, match="found 2"):
            find_room("cuda", 8, ranks_per_gpu)


def test_no_gpus_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs measures nothing on them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(NoGpus, match="found 0"):
        find_room("cuda", None, None)


def test_the_cpu_has_as_many_ranks_as_asked() -> None:
    """Two, or what is asked; it has no GPUs to share."""
    assert (find_room("cpu", None, None), find_room("cpu", 8, None)) == (Room(2), Room(8))
    with pytest.raises(UsageError, match="--ranks-per-gpu 2: expected --device cuda"):
        find_room("cpu", None, 2)


@pytest.mark.parametrize(("ranks", "ranks_per_gpu"), [(0, None), (-1, None), (8, 0)])
def test_numbers_below_one_are_refused(ranks: int, ranks_per_gpu: int | None) -> None:
    """Zero ranks would be a benchmark of nothing."""
    with pytest.raises(UsageError, match="expected at least 1"):
        find_room("cuda", ranks, ranks_per_gpu)


@pytest.mark.usefixtures("_two_gpus")
def test_a_rank_takes_its_gpu_and_a_host_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 5 of 8 on two GPUs is the third on the second one; what is visible is left alone."""
    taken: list[object] = []
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "6,7"})
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(ranks, "_await_idle", lambda device, others: taken.append(others))
    device = ranks._take_gpu(5, find_room("cuda", 8, 4).devices)
    assert taken == [device, 3]
    assert device == torch.device("cuda", 1)
    assert os.environ == {
        "CUDA_VISIBLE_DEVICES": "6,7", "LOCAL_RANK": "1",
        "NCCL_HOSTID": "shared-gpus-2", "NCCL_SOCKET_IFNAME": "lo",
    }  # fmt: skip
