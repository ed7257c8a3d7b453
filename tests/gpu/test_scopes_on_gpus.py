"""Every graph scope on GPUs trains to the bits of its eager run: torch's backend and TE's."""

import importlib.util
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_core.config import FsdpConfig, ParallelConfig, TrainConfig, model_from_preset, scope_sets
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import Axes, build_axes
from fsdp_core.train import Trainer
from tests.conftest import RANKS_PER_GPU
from tests.dist.rank_pool import RankPool

STEPS, WARMUP = 20 if RANKS_PER_GPU < 4 else 8, 2
"""Many ranks of one GPU are slow: their collectives go through sockets."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "tp2 alone": {"tp": 2, "sequence_parallel": True},
    "ep2": {"dp": 2, "ep": 2},
    "pp2": {"pp": 2},
    "dp4": {"dp": 4},
    "tp2": {"dp": 2, "tp": 2, "sequence_parallel": True},
    "ep2 etp2": {"dp": 4, "ep": 2, "etp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "alone": {"dp": 1},
}
Step = dict[str, bytes]


def config_of(
    preset: str, layout: str, scope: str = "", *, backend: str = "torch", fp8: str = "none",
    pool: str = "double", strategy: str = "optim_grads_params",
) -> TrainConfig:  # fmt: skip
    """A run: tiny models, steps of 2 microbatches, or 4 in pipelines."""
    degrees = dict(LAYOUTS[layout])
    overrides: dict[str, Any] = {}
    if preset.startswith("moe"):
        overrides["capacity_factor"] = 1.25
        # Experts under tp are cut by etp, or their tokens lie along the sequence.
        degrees |= {"etp": degrees.get("tp", degrees.get("etp", 1))}
    return TrainConfig(
        model=model_from_preset(preset, overrides),
        parallel=ParallelConfig(**degrees),
        fsdp=FsdpConfig(strategy=strategy, pool=pool),
        graph=tuple(scope.split("+")) if scope else (),
        backend=backend,
        fp8=fp8,
        steps=STEPS,
        microbatches=4 if "pp" in degrees else 2,
        micro_batch_size=4,
        graph_warmup_steps=WARMUP,
        seed=5,
    )


def train(config: TrainConfig, axes: Axes, device: Device) -> tuple[list[Step], int]:
    """Bits of every step's outputs and random states by name, and how many graphs there were."""
    if state := sys.modules.get("transformer_engine.pytorch.quantization"):
        # Else TransformerEngine goes on to reduce the amaxes of models that are gone.
        state.FP8GlobalStateManager.reset()
    trainer, steps = Trainer(config, axes, device), []
    for index in range(config.steps):
        trainer.step(index)
        device.synchronize()
        steps.append(look(trainer))
    graphs = trainer.counts.captured
    trainer.close()
    return steps, graphs


def look(trainer: Trainer) -> Step:
    """Bits of the last step, once the device is done with it."""
    seen = dict(trainer.outputs.named_tensors()) | {
        f"random state {name}": state for name, state in trainer.rng_states().items()
    }
    return {name: t.detach().cpu().numpy().tobytes() for name, t in seen.items()}


def first_difference(one: list[Step], other: list[Step]) -> str:
    """Where two runs part: step and name, or empty."""
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        for name in a:
            if a[name] != b[name]:
                return f"step {index}: {name}"
    return ""


def compare(kind: str, eager: TrainConfig, scopes: tuple[str, ...]) -> dict[str, str]:
    """By scope, where its run parts from the eager one; "again" is eager's second run."""
    device = Device(kind, torch.cuda.current_device() if kind == "cuda" else 0)
    axes = build_axes(eager.parallel, device)
    expected, _ = train(eager, axes, device)
    found = {"again": first_difference(expected, train(eager, axes, device)[0])}
    for scope in scopes:
        steps, graphs = train(replace(eager, graph=tuple(scope.split("+"))), axes, device)
        found[scope] = first_difference(expected, steps) if graphs else "nothing was captured"
    dist.barrier()
    return found


HAS_TE = importlib.util.find_spec("transformer_engine") is not None
needs_te = pytest.mark.skipif(not HAS_TE, reason="needs transformer_engine")
MOE = ("dp4", "tp2", "ep2 etp2")
FP8 = ("delayed", "current", "block")


def check(
    ranks: RankPool, preset: str, layout: str, *, world_size: int = 4, **options: str
) -> None:
    """All scopes of a model on one layout."""
    config = config_of(preset, layout, **options)
    scopes = tuple("+".join(scopes) for scopes in scope_sets(config.model))
    for found in ranks.run(compare, "cuda", config, scopes, world_size=world_size):
        assert found == dict.fromkeys(("again", *scopes), "")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("preset", ["moe_tiny", "dense_tiny_dropout"])
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
