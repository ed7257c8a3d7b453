"""Trainings under stressors, with and without a fault in their order."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core.config import TrainConfig
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import make_trainer
from harness.worker.plants import act_before_step
from tests.dist.train_layout_programs import STEPS, Run, bits


def device() -> Device:
    """This rank's: its GPU where it has one, as `RankPool` says."""
    if dist.get_backend() == "nccl":
        return Device("cuda", torch.cuda.current_device())
    return Device("cpu")


@dataclass(frozen=True)
class Stressed:
    """A run under some stressors."""

    run: Run
    stress: tuple[str, ...] = ()
    seed: int = 0
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> TrainConfig:
        """The run as the trainer takes it."""
        return replace(self.run.config, stress=self.stress, stress_seed=self.seed, **self.changes)


def train(stressed: Stressed) -> tuple[list[Any], int]:
    """What every step shows, as bits, and how often graphs were replayed."""
    config = stressed.config
    trainer = make_trainer(config, build_axes(config.parallel, device()), device())
    try:
        return [bits(trainer, step) for step in range(STEPS)], trainer.counts.replays
    finally:
        trainer.close()


def train_in_turns(stressed: Stressed, turns: list[tuple[str, ...]]) -> tuple[list[Any], int, int]:
    """As `train`, with other stressors from step to step; how many graphs were made, too."""
    config = stressed.config
    trainer = make_trainer(config, build_axes(config.parallel, device()), device())
    assert trainer.stressors is not None
    seen = []
    try:
        for step in range(STEPS):
            if step < len(turns):
                trainer.take_turn(turns[step])
            seen.append(bits(trainer, step))
        return seen, trainer.counts.replays, trainer.counts.captured
    finally:
        trainer.close()


def other_steps(stressed: Stressed) -> list[Any]:
    """A step, evaluation, state digested again, and a step after the graphs."""
    config = stressed.config
    trainer = make_trainer(config, build_axes(config.parallel, device()), device())
    seen: list[Any] = [bits(trainer, step) for step in range(STEPS - 1)]
    seen.append(trainer.evaluate(7).item())
    trainer.redigest_state()
    trainer.close()
    return [*seen, bits(trainer, STEPS)]


def train_each(runs: list[Stressed]) -> list[tuple[list[Any], int]]:
    """One run after another."""
    return [train(run) for run in runs]


def train_misordered_each(
    runs: list[Stressed], fault: str, steps: list[int]
) -> list[tuple[str, Any]]:
    """One run after another, each with the fault from its step on."""
    return [train_misordered(run, fault, step) for run, step in zip(runs, steps, strict=True)]


def train_misordered(stressed: Stressed, fault: str, step: int) -> tuple[str, Any]:
    """All steps with a fault of `harness.worker.plants` on every rank: what was raised, or seen."""
    config = stressed.config
    trainer = make_trainer(config, build_axes(config.parallel, device()), device())
    seen = []
    try:
        for number in range(STEPS):
            if number == step:
                act_before_step(fault, trainer)
            seen.append(bits(trainer, number))
    except Exception as error:  # noqa: BLE001 - the answer
        return type(error).__name__, str(error)
    return "", seen
