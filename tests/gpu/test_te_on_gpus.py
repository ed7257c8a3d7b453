"""TransformerEngine's fp8 weights and fused gradients under sharding, bit for bit."""

import importlib.util
import math

import pytest

from tests.dist.rank_pool import RankPool
from tests.gpu import te_on_gpus as programs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs the extra te (transformer-engine), which is not installed",
)


def check_fp8(ranks: RankPool, recipe: str, strategy: str, pool: str, world_size: int) -> None:
    """Training sharded fp8 weights is training them whole, and so is replaying it as a graph."""
    args = (recipe, strategy, pool)
    for found in ranks.run(programs.compare_fp8, *args, world_size=world_size):
        assert found["sharded"] == [], found
        assert found["graphed"] == [], found
        assert all(math.isfinite(loss) for loss in found["losses"])
        assert len(set(found["losses"])) == len(found["losses"])
        assert "torch.uint8" in found["dtypes"], "weights are gathered as bytes"
        assert strategy != "optim_grads_params" or found["columns"] == []


@pytest.mark.gpu(1)
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_fp8_on_one_gpu(gpu_ranks: RankPool, recipe: str, strategy: str) -> None:
    """One rank, so every bit is its own."""
    check_fp8(gpu_ranks, recipe, strategy, "dynamic", 1)


@pytest.mark.gpu(4)
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize(
    ("strategy", "pool"),
    [
        ("no_shard", "dynamic"),
        ("optim", "dynamic"),
        ("optim_grads", "double"),
        ("optim_grads_params", "dynamic"),
        ("optim_grads_params", "traced"),
    ],
)
def test_fp8_on_four_gpus(gpu_ranks: RankPool, recipe: str, strategy: str, pool: str) -> None:
    """Four ranks with equal data: scales are over all shards, sums of equal numbers are exact."""
    check_fp8(gpu_ranks, recipe, strategy, pool, 4)


@pytest.mark.gpu(1)
def test_mxfp8_is_refused(gpu_ranks: RankPool) -> None:
    """Below compute capability 10 the refusal says so, and what to use."""
    (said,) = gpu_ranks.run(programs.refuse_mxfp8, world_size=1)
    assert "compute capability 10" in said, said


@pytest.mark.gpu(1)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_fused_gradients(gpu_ranks: RankPool, strategy: str) -> None:
    """Kernels that add to `main_grad` give the bits that they give unsharded."""
    (found,) = gpu_ranks.run(programs.fused_gradients, strategy, world_size=1)
    assert found["wrong"] == []
    assert found["norm"] > 0
