"""TransformerEngine's parts under graph scopes on GPUs: eager's bits, scales of fp8 included."""

import importlib.util
from typing import Any

import pytest

from tests.dist.rank_pool import RankPool
from tests.gpu import te_graphs_on_gpus as programs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs the extra te (transformer-engine), which is not installed",
)
RECIPES = ("none", "delayed", "current", "block")
EXPERTS = {
    "parts": ["attn+moe_router+moe_preprocess"],
    "experts": ["attn+moe"],
    "layer": ["layer"],
    "step": ["full_iteration"],
}
TWO: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2, "etp": 2, "sequence_parallel": True},
    "ep2": {"dp": 2, "ep": 2},
    "pp2": {"pp": 2},
}


def check(ranks: RankPool, config: Any, scopes: list[str], world_size: int) -> None:
    """Each scope has eager's bits, where delayed scales move."""
    for found in ranks.run(programs.compare, config, scopes, world_size=world_size):
        moved = int(found.pop("scales that moved"))
        assert (moved > 0) == (config.fp8 == "delayed")
        assert found == dict.fromkeys(scopes, "")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("fp8", RECIPES)
@pytest.mark.parametrize("scope", EXPERTS)
def test_experts_on_one_gpu(gpu_ranks: RankPool, scope: str, fp8: str) -> None:
    """Every recipe in every kind of scope; experts in whichever way this machine has them."""
    check(gpu_ranks, programs.config_of(fp8, dp=1), EXPERTS[scope], 1)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("fp8", ["none", "delayed"])
def test_dense_layers_on_one_gpu(gpu_ranks: RankPool, fp8: str) -> None:
    """Branches apart, and together."""
    check(gpu_ranks, programs.config_of(fp8, "dense_tiny", dp=1), ["mlp", "attn+mlp"], 1)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("fp8", ["none", "delayed"])
def test_packs_on_one_gpu(gpu_ranks: RankPool, fp8: str) -> None:
    """Packs whose offsets are inputs of the graph, by cuDNN's attention of padded sequences."""
    check(gpu_ranks, programs.config_of(fp8, "dense_tiny", packs=(1,), dp=1), ["attn"], 1)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("fp8", ["none", "delayed"])
def test_packs_in_banks(gpu_ranks: RankPool, fp8: str) -> None:
    """Two sizes in turn: one by TransformerEngine's attention, one by ours."""
    config = programs.config_of(fp8, "dense_tiny", packs=(1, 2), dp=2)
    check(gpu_ranks, config, ["attn"], 2)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("layout", TWO)
def test_delayed_scales_over_ranks(gpu_ranks: RankPool, layout: str) -> None:
    """Largest values over tp, microbatches in flight over pp, experts over ep."""
    config = programs.config_of("delayed", **TWO[layout])
    check(gpu_ranks, config, ["attn+moe_router+moe_preprocess", "layer"], 2)


@pytest.mark.gpu(1)
def test_which_experts_are_fused(gpu_ranks: RankPool) -> None:
    """Delayed scaling has no grouped kernels that take sizes on the device, on any machine."""
    (found,) = gpu_ranks.run(programs.fuses, "delayed", world_size=1)
    assert found is False
    (found,) = gpu_ranks.run(programs.fuses, "none", world_size=1)
    assert found in (False, True)
