"""Trainings by other engines, on ranks."""

from dataclasses import dataclass, replace

import torch

from fsdp_core.config import TrainConfig
from fsdp_core.device import Device
from fsdp_core.graph.digest import digest_tensors, empty_rows
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer, make_trainer
from fsdp_core.train.taps import Snapshot
from harness.worker.plants import act_before_step
from tests.dist.train_layout_programs import STEPS, Run, bits

DEVICE = Device("cpu")
Taps = list[int]
Steps = list[tuple[tuple[int, ...], dict[str, tuple[int, ...]], dict[str, str]]]


@dataclass(frozen=True)
class Engined:
    """A run by an engine, with a fault planted before step 2 on the last rank, or none."""

    run: Run
    engine: str
    taps: tuple[str, ...] = ()
    fault: str = ""

    @property
    def config(self) -> TrainConfig:
        """The run as the trainer takes it."""
        return replace(self.run.config, engine=self.engine, taps=self.taps)


@dataclass
class Seen:
    """What a rank saw.

    Attributes:
        steps: floats, digests and random states of every step, as bits.
        taps: rows of every step.
        names: of the tensors that it digests, by group.
        kept: copies of all these after the last step, with their places in the whole tensors.
    """

    steps: Steps
    taps: list[Taps]
    names: dict[str, list[str]]
    kept: list[Snapshot]


def train(engined: Engined) -> Seen:
    """All steps of a run."""
    trainer = _made(engined)
    keeping = trainer.keep(("grads:*", "weights:*", "optim:*"), 1 << 24)
    steps, taps, kept = [], [], list[Snapshot]()
    for step in range(STEPS):
        if engined.fault and step == 2 and trainer.axes.dp.rank == trainer.axes.dp.size - 1:
            act_before_step(engined.fault, trainer)
        steps.append(bits(trainer, step))
        taps.append(trainer.taps.rows.flatten().tolist())
        kept = keeping.read(trainer.outputs.digests)
        assert all(each.as_digested for each in kept)
    names = {group: list(named) for group, (named, _) in trainer.digested.items()}
    trainer.close()
    return Seen(steps, taps, names, kept)


def train_all(runs: list[Engined]) -> list[Seen]:
    """Runs one after another."""
    return [train(run) for run in runs]


def look_at_memory(run: Engined) -> None:
    """Digests are of what the engine computes with: a write to it shows."""
    trainer = _made(run)
    trainer.step(0)
    held = dict(trainer.stages[0].named_parameters())
    names = trainer.digested["weights"][0]
    locals_ = [_local(held[name]) for name in names]
    own = empty_rows(len(names), "cpu")
    digest_tensors(locals_, own)
    assert torch.equal(own, trainer.outputs.digests["weights"])
    trainer.digested["weights"][1][0].view(-1)[:1].add_(1.0)  # as a planted fault does
    trainer.redigest_state()
    changed = (trainer.outputs.digests["weights"] != own).any(dim=1)
    digest_tensors(locals_, own)
    assert torch.equal(own, trainer.outputs.digests["weights"])
    assert changed.tolist() == [True] + [False] * (len(names) - 1)
    counts = trainer.digested["optim"][1][-1]
    assert counts.item() == 1.0
    trainer.close()


def refused(run: Engined) -> list[str]:
    """What a trainer says to an evaluation."""
    trainer, told = _made(run), []
    try:
        trainer.evaluate(0)
    except NotImplementedError as error:
        told.append(str(error))
    trainer.close()
    return told


def make(run: Engined) -> None:
    """Make a trainer and no step."""
    _made(run).close()


def _made(engined: Engined) -> Trainer:
    config = engined.config
    return make_trainer(config, build_axes(config.parallel, DEVICE), DEVICE)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach()
