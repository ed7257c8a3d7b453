"""TransformerEngine's fused gradients under sharding, bit for bit."""

import importlib.util

import pytest

from tests.dist.rank_pool import RankPool
from tests.gpu import te_on_gpus as programs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs the extra te (transformer-engine), which is not installed",
)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_fused_gradients(gpu_ranks: RankPool, strategy: str) -> None:
    """Kernels that add to `main_grad` give the bits that they give unsharded."""
    (found,) = gpu_ranks.run(programs.fused_gradients, strategy, world_size=1)
    assert found["wrong"] == []
    assert found["norm"] > 0
