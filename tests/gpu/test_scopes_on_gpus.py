"""Every graph scope on GPUs trains to the bits of its eager run: torch's backend and TE's."""

import importlib.util

import pytest

from tests.dist.rank_pool import RankPool
from tests.gpu import scopes_on_gpus as programs

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
needs_te = pytest.mark.skipif(not HAS_TE, reason="needs transformer_engine")
MOE = ("dp4", "tp2", "ep2 etp2")
FP8 = ("delayed", "current", "block")


def check(
    ranks: RankPool, preset: str, layout: str, *, world_size: int = 4, **options: str
) -> None:
    """All scopes of a model on one layout."""
    config = programs.config_of(preset, layout, **options)
    scopes = programs.SCOPES[preset]
    for found in ranks.run(programs.compare, "cuda", config, scopes, world_size=world_size):
        assert found == dict.fromkeys(("again", *scopes), "")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("preset", programs.SCOPES)
@pytest.mark.parametrize("backend", ["torch", pytest.param("te", marks=needs_te)])
def test_scopes_on_one_gpu(gpu_ranks: RankPool, preset: str, backend: str) -> None:
    """Alone, where a rank gathers from itself."""
    check(gpu_ranks, preset, "alone", world_size=1, backend=backend)


@pytest.mark.gpu(1)
@needs_te
@pytest.mark.parametrize("fp8", FP8)
def test_scopes_in_fp8_on_one_gpu(gpu_ranks: RankPool, fp8: str) -> None:
    """In every recipe of Hopper."""
    check(gpu_ranks, "moe_tiny", "alone", world_size=1, backend="te", fp8=fp8)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("layout", ["dp2", "tp2 alone", "ep2"])
def test_scopes_of_experts_on_two_gpus(gpu_ranks: RankPool, layout: str) -> None:
    """Each kind of collective alone, between GPUs that need not be shared."""
    check(gpu_ranks, "moe_tiny", layout, world_size=2)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("layout", ["dp2", "tp2 alone", "pp2"])
def test_scopes_of_dense_models_on_two_gpus(gpu_ranks: RankPool, layout: str) -> None:
    """With dropout, and in a pipeline, where two microbatches are in flight."""
    check(gpu_ranks, "dense_tiny_dropout", layout, world_size=2, pool="traced")


@pytest.mark.gpu(2)
@needs_te
@pytest.mark.parametrize("layout", ["dp2", "tp2 alone", "ep2"])
@pytest.mark.parametrize("fp8", ["none", *FP8])
def test_scopes_of_transformer_engine_on_two_gpus(
    gpu_ranks: RankPool, layout: str, fp8: str
) -> None:
    """In bf16 and in every recipe of Hopper."""
    check(gpu_ranks, "moe_tiny", layout, world_size=2, backend="te", fp8=fp8)


@pytest.mark.gpu(4)
@pytest.mark.parametrize("layout", MOE)
@pytest.mark.parametrize("pool", ["double", "traced"])
def test_scopes_of_experts(gpu_ranks: RankPool, layout: str, pool: str) -> None:
    """Sharded, tensor-parallel and expert-parallel, in both stable pools."""
    check(gpu_ranks, "moe_tiny", layout, pool=pool)


@pytest.mark.gpu(4)
@pytest.mark.parametrize("layout", ["dp4", "tp2", "tp2 pp2"])
def test_scopes_of_dense_models(gpu_ranks: RankPool, layout: str) -> None:
    """With dropout, and in pipelines, where a graph a microbatch is in flight."""
    check(gpu_ranks, "dense_tiny_dropout", layout)


@pytest.mark.gpu(4)
@needs_te
@pytest.mark.parametrize("layout", MOE)
@pytest.mark.parametrize("fp8", ["none", *FP8])
def test_scopes_of_transformer_engine(gpu_ranks: RankPool, layout: str, fp8: str) -> None:
    """In bf16 and in every recipe of Hopper."""
    check(gpu_ranks, "moe_tiny", layout, backend="te", fp8=fp8)
