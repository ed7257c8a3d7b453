"""Ranks of a benchmark: as many as there are GPUs up to eight, or several to a GPU."""

import pytest
import torch

from benchmarks.room import NoGpus, find_room


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
