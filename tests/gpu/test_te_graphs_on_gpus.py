"""TransformerEngine's parts under graph scopes on GPUs: eager's bits, scales of fp8 included."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from fsdp_core.config import FsdpConfig, ParallelConfig, TrainConfig, model_from_preset
from fsdp_core.model.decoder import make_layers
from fsdp_core.model.te import layers as experts
from fsdp_core.parallel.mesh import Axes, build_axes
from fsdp_core.train import Trainer
from tests.dist.rank_pool import RankPool
from tests.gpu.test_fsdp_on_gpus import device_here
from tests.gpu.test_te_layouts_on_gpus import forget_dead_models
from tests.gpu.test_te_on_gpus import recipe_of

STEPS, WARMUP = 5, 2
Step = dict[str, bytes]


def config_of(
    fp8: str, preset: str = "moe_tiny", *, packs: tuple[int, ...] = (), **parallel: Any
) -> TrainConfig:
    """A tiny model that fp8 has widths for, two microbatches a step."""
    overrides: dict[str, Any] = {"layers": 2, "seq": 64}
    if preset.startswith("moe"):
        overrides |= {"capacity_factor": 1.25, "kv_heads": 4, "expert_ffn": 64}
    return TrainConfig(
        model=model_from_preset(preset, overrides),
        parallel=ParallelConfig(**parallel, dynamic_cp=packs),
        fsdp=FsdpConfig(strategy="optim_grads_params", pool="double"),
        backend="te", fp8=fp8, steps=STEPS, microbatches=2,
        micro_batch_size=1 if packs else 2, graph_warmup_steps=WARMUP, seed=5,
    )  # fmt: skip


def train(config: TrainConfig, axes: Axes) -> tuple[list[Step], int, int]:
    """Bits of steps' outputs, random states and scales; captured graphs; unnamed memory."""
    if config.fp8 != "none":
        forget_dead_models()
    device = device_here()
    trainer, steps = Trainer(config, axes, device), []
    for index in range(config.steps):
        outputs = trainer.step(index)
        device.synchronize()
        seen = dict(outputs.named_tensors()) | {
            f"random state {name}": state for name, state in trainer.rng_states().items()
        }
        for stage in trainer.stages:
            held = ((name, get()) for name, get in stage.around.state(stage))
            seen |= {name: tensor for name, tensor in held if tensor is not None}
        steps.append({n: t.detach().cpu().numpy().tobytes() for n, t in seen.items()})
    counts = trainer.counts
    trainer.close()
    return steps, counts.captured, counts.unnamed_externals


def compare(eager: TrainConfig, scopes: Sequence[str]) -> dict[str, str]:
    """By scope, where its run parts from the eager one; and how many scales eager's moved."""
    axes = build_axes(eager.parallel, device_here())
    expected, _, _ = train(eager, axes)
    scales = [name for name in expected[0] if name.endswith(" scale")]
    found = {"scales that moved": str(sum(expected[0][n] != expected[-1][n] for n in scales))}
    for scope in scopes:
        steps, captured, unnamed = train(replace(eager, graph=tuple(scope.split("+"))), axes)
        parts = (
            f"step {index}: {name}"
            for index, (a, b) in enumerate(zip(expected, steps, strict=True))
            for name in a
            if a[name] != b.get(name)
        )
        found[scope] = next(parts, "") if captured else "nothing was captured"
        found[scope] += f" and {unnamed} unnamed" if unnamed else ""
    return found


def fuses(fp8: str) -> bool:
    """Whether this machine has grouped kernels that take sizes on the device."""
    te = cast("Any", make_layers("te")).te
    recipe = None if fp8 == "none" else recipe_of(fp8)
    return experts.fuses(te, recipe, torch.bfloat16)


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
    for found in ranks.run(compare, config, scopes, world_size=world_size):
        moved = int(found.pop("scales that moved"))
        assert (moved > 0) == (config.fp8 == "delayed")
        assert found == dict.fromkeys(scopes, "")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("fp8", RECIPES)
@pytest.mark.parametrize("scope", EXPERTS)
def test_experts_on_one_gpu(gpu_ranks: RankPool, scope: str, fp8: str) -> None:
    """Every recipe in every kind of scope; experts in whichever way this machine has them."""
    check(gpu_ranks, config_of(fp8, dp=1), EXPERTS[scope], 1)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("fp8", ["none", "delayed"])
def test_dense_layers_on_one_gpu(gpu_ranks: RankPool, fp8: str) -> None:
    """Branches apart, and together."""
    check(gpu_ranks, config_of(fp8, "dense_tiny", dp=1), ["mlp", "attn+mlp"], 1)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("fp8", ["none", "delayed"])
def test_packs_on_one_gpu(gpu_ranks: RankPool, fp8: str) -> None:
    """Packs whose offsets are inputs of the graph, by cuDNN's attention of padded sequences."""
    check(gpu_ranks, config_of(fp8, "dense_tiny", packs=(1,), dp=1), ["attn"], 1)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("fp8", ["none", "delayed"])
def test_packs_in_banks(gpu_ranks: RankPool, fp8: str) -> None:
    """Two sizes in turn: one by TransformerEngine's attention, one by ours."""
    config = config_of(fp8, "dense_tiny", packs=(1, 2), dp=2)
    check(gpu_ranks, config, ["attn"], 2)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("layout", TWO)
def test_delayed_scales_over_ranks(gpu_ranks: RankPool, layout: str) -> None:
    """Largest values over tp, microbatches in flight over pp, experts over ep."""
    config = config_of("delayed", **TWO[layout])
    check(gpu_ranks, config, ["attn+moe_router+moe_preprocess", "layer"], 2)


@pytest.mark.gpu(1)
def test_which_experts_are_fused(gpu_ranks: RankPool) -> None:
    """Delayed scaling has no grouped kernels that take sizes on the device, on any machine."""
    (found,) = gpu_ranks.run(fuses, "delayed", world_size=1)
    assert found is False
    (found,) = gpu_ranks.run(fuses, "none", world_size=1)
    assert found in (False, True)
