"""Partial scopes captured by TransformerEngine and by torch on GPUs train to eager's bits."""

import importlib.util
from dataclasses import replace

import pytest

from tests.dist.rank_pool import RankPool
from tests.gpu import test_scopes_on_gpus as programs

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
needs_te = pytest.mark.skipif(not HAS_TE, reason="needs transformer_engine")
LIBRARIES = [pytest.param("te", marks=needs_te), "torch"]
SCOPES = {
    "moe_tiny": ("attn+moe_router+moe_preprocess", "attn+moe", "layer"),
    "dense_tiny_dropout": ("attn+mlp", "layer"),
}


def check(
    ranks: RankPool, by: str, preset: str, layout: str, world_size: int, **options: str
) -> None:
    """Scopes of a model on one layout, in a few steps."""
    config = replace(
        programs.config_of(preset, layout, **options), capture_by=by, steps=programs.WARMUP + 4
    )
    for found in ranks.run(programs.compare, "cuda", config, SCOPES[preset], world_size=world_size):
        assert found == dict.fromkeys(("again", *SCOPES[preset]), "")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("preset", SCOPES)
@pytest.mark.parametrize("by", LIBRARIES)
def test_every_scope_on_one_gpu(gpu_ranks: RankPool, by: str, preset: str) -> None:
    """Graphs draw dropout from the same random streams as eager."""
    check(gpu_ranks, by, preset, "alone", 1)


@pytest.mark.gpu(1)
@needs_te
@pytest.mark.parametrize("fp8", ["delayed", "current"])
@pytest.mark.parametrize("by", LIBRARIES)
def test_fp8_on_one_gpu(gpu_ranks: RankPool, by: str, fp8: str) -> None:
    """TransformerEngine moves delayed scales around its own graphs, we do around torch's."""
    check(gpu_ranks, by, "dense_tiny_dropout", "alone", 1, backend="te", fp8=fp8)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("preset", "layout"),
    [
        ("dense_tiny_dropout", "dp2"),
        ("dense_tiny_dropout", "tp2 alone"),
        ("dense_tiny_dropout", "pp2"),
        ("moe_tiny", "ep2"),
    ],
)
@pytest.mark.parametrize("by", LIBRARIES)
def test_layouts_on_two_gpus(gpu_ranks: RankPool, by: str, preset: str, layout: str) -> None:
    """Gathers around captures, collectives in graphs, and two microbatches in flight."""
    check(gpu_ranks, by, preset, layout, 2)
