"""The trainer as a program, on the layouts and in the modes that faults are planted in."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
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
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import make_trainer
from tests.graph_faults.programs import STEPS, WARMUP, Digests, Leg

_SMALL = {"vocab_size": 48, "hidden": 32, "ffn": 48, "seq": 16, "layers": 2}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A model on a layout with a graph scope."""

    graph: tuple[str, ...]
    degrees: dict[str, Any] = field(default_factory=lambda: {"dp": 2})
    preset: str = "dense_tiny_dropout"
    overrides: dict[str, Any] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 2

    def config(self, leg: Leg, device: Device) -> TrainConfig:
        """The mode as the trainer takes it."""
        return TrainConfig(
            model=model_from_preset(self.preset, _SMALL | self.overrides),
            parallel=ParallelConfig(**self.degrees),
            fsdp=FsdpConfig(**self.fsdp),
            optim=OptimConfig(lr=1e-2),
            graph=self.graph if leg.graphed else (),
            dtype="bf16" if device.is_cuda else "fp32",
            steps=STEPS,
            microbatches=self.microbatches,
            seed=5,
            graph_warmup_steps=WARMUP,
            ledger=leg.ledger,
            stress=leg.stress,
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the layout."""
        return ParallelConfig(**self.degrees).world_size


class Training:
    """The trainer as a program."""

    def __init__(self, mode: Mode, leg: Leg, device: Device) -> None:
        config = mode.config(leg, device)
        self.device = device
        self.trainer = make_trainer(config, build_axes(config.parallel, device), device)

    def step(self, index: int) -> None:
        """See `Program`."""
        self.trainer.step(index)

    def loss(self) -> torch.Tensor:
        """See `Program`."""
        return self.trainer.outputs.loss

    def digests(self) -> Digests:
        """See `Program`."""
        rows = self.trainer.outputs.digests
        found = {group: tuple(digest.flatten().tolist()) for group, digest in rows.items()}
        for name, state in self.trainer.rng_states().items():
            found[name] = tuple(hashlib.sha256(state.numpy().tobytes()).digest())
        return found

    def weights(self) -> list[torch.Tensor]:
        """See `Program`."""
        return [group.main_weight for group in self.trainer.groups]

    def close(self) -> None:
        """See `Program`."""
        self.trainer.close()


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        "attn": Mode(graph=("attn",)),
        "layer": Mode(graph=("layer",)),
        "full": Mode(graph=("full_iteration",)),
        "hsdp": Mode(graph=("full_iteration",), degrees={"dp_outer": 2, "dp": 2}),
        "router": Mode(graph=("attn", "moe_router"), preset="mla_moe_tiny"),
    }
)


def maker_of(mode: str) -> Callable[[Leg, Device], Training]:
    """Makes the trainer in a mode."""
    return lambda leg, device: Training(MODES[mode], leg, device)
