"""Programs that train eagerly and with graphs on GPUs, and say where the bits part."""

import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core.config import FsdpConfig, ParallelConfig, TrainConfig, model_from_preset
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import Axes, build_axes
from fsdp_core.train import Trainer
from tests.conftest import RANKS_PER_GPU

STEPS, WARMUP = 20 if RANKS_PER_GPU < 4 else 8, 2
"""Many ranks of one GPU are slow: their collectives go through sockets."""
SCOPES = {
    "moe_tiny": ("attn", "moe_router", "attn+moe_router+moe_preprocess", "attn+moe", "layer",
                 "full_iteration"),
    "dense_tiny_dropout": ("attn", "mlp", "attn+mlp", "layer", "full_iteration"),
}  # fmt: skip
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
