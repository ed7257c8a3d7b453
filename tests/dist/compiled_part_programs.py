"""Runs of the trainer with compiled parts, and what the compiler did in them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fsdp_core.config import TrainConfig
from fsdp_core.device import Device
from fsdp_core.graph.capture_session import CaptureAborted
from fsdp_core.parallel.mesh import Axes, build_axes
from fsdp_core.train import Trainer, make_trainer
from fsdp_core.train.compiled import StaleGuards
from tests.dist.scope_programs import STEPS, WARMUP, act
from tests.dist.train_layout_programs import DEVICE, Run


@dataclass(frozen=True)
class Compiled:
    """One training; of `run` all but these is that of other trainings of it."""

    run: Run
    parts: tuple[str, ...]
    graph: tuple[str, ...] = ()
    backend: str = "aot_eager"
    options: dict[str, Any] = field(default_factory=dict)
    events: tuple[tuple[Any, ...], ...] = tuple(("step", index) for index in range(STEPS))

    @property
    def config(self) -> TrainConfig:
        """As the trainer takes it."""
        return replace(
            self.run.config, graph=self.graph, compile=self.parts, compile_backend=self.backend,
            steps=STEPS, graph_warmup_steps=WARMUP, **self.options,
        )  # fmt: skip


@dataclass
class Seen:
    """What a rank saw.

    Attributes:
        bits: after every event.
        compilations: part, reason and lateness of each.
        moved: tensors that moved in each step.
    """

    bits: list[Any]
    compilations: list[tuple[str, str, bool]]
    moved: list[int]
    captured: int
    replays: int
    unnamed: int
    names: list[str]


def train(compiled: Compiled, axes: Axes, device: Device = DEVICE) -> Seen:
    """All events of a run."""
    torch.set_num_threads(1)
    trainer = make_trainer(compiled.config, axes, device)
    pointers, moved, bits = trainer.pointer_changes(), [], []
    for event in compiled.events:
        bits.append(act(trainer, event))
        moved.append(pointers.count())
    counts = trainer.counts
    found = [(each.part, each.reason, each.late) for each in trainer.compilations]
    trainer.close()
    return Seen(bits, found, moved, counts.captured, counts.replays, counts.unnamed_externals,
                counts.external_names)  # fmt: skip


def train_all(runs: list[Compiled]) -> list[Seen]:
    """Runs of one layout, one after another."""
    axes = build_axes(runs[0].run.parallel, DEVICE)
    return [train(run, axes) for run in runs]


def counted(compiled: Compiled) -> list[tuple[str, str, bool]]:
    """What is compiled while live memory is counted, as the harness does."""
    device = Device("cpu")
    axes = build_axes(compiled.run.parallel, device)
    with device.counting_memory():
        return train(compiled, axes, device).compilations


# ---- planted


Plant = Callable[[Trainer, int], None]


def _change(trainer: Trainer) -> None:
    """A number that the code of a branch reads in Python."""
    norm: Any = trainer.stages[0].numbered_layers["0"].attn.norm
    norm.eps *= 1000.0


def change_before_the_capture(trainer: Trainer, index: int) -> None:
    """In the step that captures, after others have compiled."""
    if index == WARMUP:
        _change(trainer)


def change_after_the_capture(trainer: Trainer, index: int) -> None:
    """In the step after."""
    if index == WARMUP + 1:
        _change(trainer)


@dataclass
class Planted:
    """What became of a run with a plant: the error, its step (-1: none), and what was seen."""

    error: str
    step: int
    bits: list[Any]
    compilations: list[str]


def planted(compiled: Compiled, plant: str) -> Planted:
    """Train with a plant before each step."""
    torch.set_num_threads(1)
    trainer = Trainer(compiled.config, build_axes(compiled.run.parallel, DEVICE), DEVICE)
    found, index = Planted("", -1, [], []), 0
    try:
        for index in range(STEPS):
            globals()[plant](trainer, index)
            found.bits.append(act(trainer, ("step", index)))
    except (CaptureAborted, StaleGuards) as error:
        found.error, found.step = f"{type(error).__name__}: {error}", index
    found.compilations = [str(each) for each in trainer.compilations if each.reason]
    trainer.close()
    return found


def planted_all(runs: list[Compiled], plant: str) -> list[Planted]:
    """Runs, one after another."""
    return [planted(run, plant) for run in runs]
