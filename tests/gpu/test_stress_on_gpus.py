"""Stressors on GPUs: late streams show what does not wait for them."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fsdp_core.config import TrainConfig
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import make_trainer
from harness.records import PlantSpec
from harness.worker.plant import injections
from tests.dist.rank_pool import RankPool
from tests.dist.train_layout_programs import STEPS, Run, bits

SHARDED = Run({"dp": 2}, dtype="bf16", fsdp={"pool": "double"})


@dataclass(frozen=True)
class Stressed:
    """A run under some stressors."""

    run: Run
    stress: tuple[str, ...] = ()
    seed: int = 0

    @property
    def config(self) -> TrainConfig:
        """The run as the trainer takes it."""
        return replace(self.run.config, stress=self.stress, stress_seed=self.seed)


def train_misordered_each(
    runs: list[Stressed], fault: str, steps: list[int]
) -> list[tuple[str, Any]]:
    """One run after another, each with the fault from its step on."""
    return [train_misordered(run, fault, step) for run, step in zip(runs, steps, strict=True)]


def train_misordered(stressed: Stressed, fault: str, step: int) -> tuple[str, Any]:
    """All steps with a fault of `harness.worker.plants` on every rank: what was raised, or seen."""
    config, device = stressed.config, Device("cuda", torch.cuda.current_device())
    trainer = make_trainer(config, build_axes(config.parallel, device), device)
    seen = []
    try:
        for number in range(STEPS):
            if number == step:
                found = injections(PlantSpec(fault=fault))
                for act in found.get("") or found["capture"]:
                    act(trainer)
            seen.append(bits(trainer, number))
    except Exception as error:  # noqa: BLE001 - the answer
        return type(error).__name__, str(error)
    return "", seen


@pytest.mark.gpu(2)
@pytest.mark.parametrize("fault", ["compute_ignores_gather", "early_release"])
def test_what_does_not_wait_is_wrong_under_stress(fault: str, gpu_ranks: RankPool) -> None:
    """A gather that is late, into memory that is NaN, is read before it is there."""
    runs = [Stressed(SHARDED), Stressed(SHARDED, ("jitter", "poison"))]
    for right, wrong in gpu_ranks.run(train_misordered_each, runs, fault, [STEPS, 0], world_size=2):
        assert right[0] == wrong[0] == ""
        assert wrong != right
