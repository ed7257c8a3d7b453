"""Compiled parts on GPUs, inside of graphs and beside them: the bits of compiled eager runs."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fsdp_core.device import Device
from fsdp_core.parallel.mesh import build_axes
from tests.dist.rank_pool import RankPool
from tests.gpu.test_scopes_on_gpus import config_of, first_difference, train


def compare(
    preset: str, layout: str, parts: tuple[str, ...], backend: str, scopes: tuple[str, ...]
) -> dict[str, str]:
    """By scope, where its run parts from the compiled eager one; "again" is eager's second run."""
    device = Device("cuda", torch.cuda.current_device())
    eager = replace(config_of(preset, layout), compile=parts, compile_backend=backend)
    axes = build_axes(eager.parallel, device)
    expected, _ = train(eager, axes, device)
    found = {"again": first_difference(expected, train(eager, axes, device)[0])}
    for scope in scopes:
        steps, graphs = train(replace(eager, graph=tuple(scope.split("+"))), axes, device)
        found[scope] = first_difference(expected, steps) if graphs else "nothing was captured"
    dist.barrier()
    return found


MODELS = {
    "dense_tiny_dropout": (("attn", "mlp"), ("attn", "mlp", "attn+mlp", "layer", "full_iteration")),
    "moe_tiny": (
        ("attn", "moe_router", "moe_preprocess", "experts"),
        ("attn", "attn+moe_router+moe_preprocess", "attn+moe", "layer", "full_iteration"),
    ),
}


def check(ranks: RankPool, preset: str, layout: str, backend: str, world_size: int) -> None:
    """All scopes around compiled parts of a model on one layout."""
    parts, scopes = MODELS[preset]
    args = (preset, layout, parts, backend, scopes)
    for found in ranks.run(compare, *args, world_size=world_size, timeout_s=600.0):
        assert found == dict.fromkeys(("again", *scopes), "")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("preset", MODELS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_parts_on_one_gpu(gpu_ranks: RankPool, preset: str, backend: str) -> None:
    """Kernels of either backend in CUDA graphs, and beside them."""
    check(gpu_ranks, preset, "alone", backend, world_size=1)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("preset", "layout"), [("dense_tiny_dropout", "tp2 alone"),
                                                ("moe_tiny", "ep2")])  # fmt: skip
def test_compiled_parts_on_two_gpus(gpu_ranks: RankPool, preset: str, layout: str) -> None:
    """With collectives inside of what is compiled."""
    check(gpu_ranks, preset, layout, "inductor", world_size=2)
