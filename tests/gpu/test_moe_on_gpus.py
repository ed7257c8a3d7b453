"""A mixture of 64 experts on a GPU: who waits, which kernels run, what graphs replay."""

import pytest

from tests.dist.rank_pool import RankPool
from tests.gpu import moe_on_gpus as programs


@pytest.mark.gpu(1)
def test_the_host_waits_once_where_it_must(gpu_ranks: RankPool) -> None:
    """A dropless step reads its sizes once, drop-and-pad never waits, backward included."""
    (found,) = gpu_ranks.run(programs.waits_on_gpu, world_size=1)
    assert found == {"dropless": 1, "gathered": 1, "padded": 0, "padded by weight": 0}


@pytest.mark.gpu(1)
def test_replays_have_eagers_bits(gpu_ranks: RankPool) -> None:
    """Drop-and-pad forward, backward and bias in one CUDA graph, with NaN in padding."""
    (found,) = gpu_ranks.run(programs.replays_on_gpu, world_size=1)
    assert found == {drop: [True] * programs.STEPS for drop in ("position", "probs")}


@pytest.mark.gpu(1)
def test_grouped_products_do_not_count_experts(gpu_ranks: RankPool) -> None:
    """A bfloat16 step is nine grouped products; gradients of empty experts are zero, bits stay."""
    (found,) = gpu_ranks.run(programs.grouped_on_gpu, world_size=1)
    assert found == {
        "calls": 9, "same bits": True, "finite": True, "empty are zero": True,
        "others are not": True,
    }  # fmt: skip
