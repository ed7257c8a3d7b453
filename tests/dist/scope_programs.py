"""Runs of the trainer under graph scopes, and what of them can be compared bit by bit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp_core.config import TrainConfig
from fsdp_core.parallel.mesh import Axes, build_axes
from fsdp_core.train import Trainer
from tests.dist.library_graphs_stand_in import stood_in
from tests.dist.train_layout_programs import DEVICE, Run, bits

STEPS, WARMUP = 3, 1
CAPACITY: dict[str, Any] = {"capacity_factor": 1.25}
MIXED: dict[str, Any] = {"first_dense_layers": 1, "dropout": 0.1}
"""A dense layer, then one of experts, with dropout."""

Event = tuple[Any, ...]
STEADY: tuple[Event, ...] = tuple(("step", index) for index in range(STEPS))


@dataclass(frozen=True)
class Scoped:
    """One training under graph scopes; of `run` all but the scopes is that of the eager run.

    Attributes:
        events: what is done in order: ("step", index), ("evaluate", index), ("shown",) or
            ("close",).
    """

    run: Run
    graph: tuple[str, ...] = ()
    graph_optimizer: bool = True
    graph_layers: tuple[int, ...] = ()
    capture_by: str = "ours"
    events: tuple[Event, ...] = STEADY

    @property
    def config(self) -> TrainConfig:
        return replace(
            self.run.config, graph=self.graph, graph_optimizer=self.graph_optimizer,
            graph_layers=self.graph_layers, capture_by=self.capture_by, steps=STEPS,
            graph_warmup_steps=WARMUP,
        )  # fmt: skip

    @property
    def world_size(self) -> int:
        return self.run.parallel.world_size


@dataclass
class Seen:
    """What a rank saw: bits after every event, and what graphs did."""

    bits: list[Any]
    captured: int
    replays: int


def act(trainer: Trainer, event: Event) -> Any:
    """Do it; what it shows, as bits."""
    kind, *values = event
    if kind == "step":
        return bits(trainer, values[0])
    if kind == "evaluate":
        return trainer.evaluate(values[0]).view(-1).view(torch.int32).tolist()
    if kind == "shown":
        return _state(trainer)
    trainer.close()
    return None


def _state(trainer: Trainer) -> Any:
    outputs = trainer.outputs
    digests = {group: rows.tolist() for group, rows in outputs.digests.items()}
    return outputs.losses.tolist(), outputs.loss.item(), outputs.grad_norm.item(), digests


def train(scoped: Scoped, axes: Axes) -> Seen:
    """All events of a run; libraries that capture are stood in for."""
    trainer = Trainer(scoped.config, axes, DEVICE)
    with stood_in():
        seen = [act(trainer, event) for event in scoped.events]
    counts = trainer.counts
    trainer.close()
    return Seen(seen, counts.captured, counts.replays)


def train_all(runs: Sequence[Scoped]) -> list[Seen]:
    """Runs of one layout, one after another."""
    axes = build_axes(runs[0].run.parallel, DEVICE)
    return [train(run, axes) for run in runs]
