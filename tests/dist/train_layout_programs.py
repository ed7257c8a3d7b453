"""Runs of the trainer on layouts, and what of a run can be compared bit by bit."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_core.config import (
    FsdpConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    model_from_preset,
)
from fsdp_core.device import Device
from fsdp_core.mesh import build_axes
from fsdp_core.parallel.axes import Axes
from fsdp_core.train import Trainer

STEPS, WARMUP = 5, 2
SMALL: dict[str, Any] = {"vocab_size": 48, "hidden": 32, "ffn": 48, "seq": 16}
DEVICE = Device("cpu")


@dataclass(frozen=True)
class Run:
    """One training: a model on a layout, in a mode."""

    degrees: dict[str, Any]
    preset: str = "dense_tiny"
    overrides: dict[str, Any] = field(default_factory=dict)
    graph: tuple[str, ...] = ()
    dtype: str = "fp32"
    microbatches: int = 2
    micro_batch_size: int = 1
    fsdp: dict[str, Any] = field(default_factory=dict)
    clip: float = 1.0
    lr: float = 1e-2

    @property
    def parallel(self) -> ParallelConfig:
        """The layout."""
        return ParallelConfig(**self.degrees)

    @property
    def config(self) -> TrainConfig:
        """The run as the trainer takes it."""
        return TrainConfig(
            model=model_from_preset(self.preset, SMALL | self.overrides),
            parallel=self.parallel,
            fsdp=FsdpConfig(**self.fsdp),
            optim=OptimConfig(clip_grad_norm=self.clip, lr=self.lr),
            graph=self.graph,
            dtype=self.dtype,
            steps=STEPS,
            microbatches=self.microbatches,
            micro_batch_size=self.micro_batch_size,
            seed=5,
            graph_warmup_steps=WARMUP,
        )


@dataclass
class Seen:
    """What a rank saw: bits of every step, names, and the graphs' counts."""

    floats: list[tuple[int, ...]]
    digests: list[dict[str, tuple[int, ...]]]
    rng: list[str]
    names: dict[str, list[str]]
    captured: int
    replays: int
    unnamed: int


def bits(trainer: Trainer, step: int) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]], str]:
    """One step: losses, loss and norm; digests; random states."""
    outputs = trainer.step(step)
    floats = torch.cat((outputs.losses, outputs.loss[None], outputs.grad_norm[None]))
    digests = {group: tuple(rows.flatten().tolist()) for group, rows in outputs.digests.items()}
    states = b"".join(state.numpy().tobytes() for state in trainer.rng_states().values())
    return tuple(floats.view(torch.int32).tolist()), digests, hashlib.sha256(states).hexdigest()


def train(run: Run, axes: Axes) -> Seen:
    """All steps of a run."""
    trainer = Trainer(run.config, axes, DEVICE)
    steps = [bits(trainer, step) for step in range(STEPS)]
    floats, digests, rng = (list(each) for each in zip(*steps, strict=True))
    counts = trainer.counts
    names = {group: named for group, (named, _) in trainer.digested.items()}
    trainer.close()
    return Seen(floats, digests, rng, names, counts.captured, counts.replays,
                counts.unnamed_externals)  # fmt: skip


def train_all(runs: list[Run]) -> list[Seen]:
    """Runs of one layout, one after another."""
    axes = build_axes(runs[0].parallel, DEVICE)
    return [train(run, axes) for run in runs]
