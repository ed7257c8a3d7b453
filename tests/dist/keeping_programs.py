"""Trainings that keep contents, on ranks; and whole tensors put together out of what they kept."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_core.config import FsdpConfig, ParallelConfig, TrainConfig, model_from_preset
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer
from fsdp_core.train.taps import Snapshot

DEVICE = Device("cpu")
SMALL: dict[str, Any] = {"vocab_size": 48, "hidden": 32, "ffn": 48, "seq": 16}


@dataclass(frozen=True)
class Run:
    """One training that keeps something in every step."""

    degrees: dict[str, Any]
    names: tuple[str, ...] = ("grads:*", "weights:*", "optim:*")
    preset: str = "dense_tiny"
    overrides: dict[str, Any] = field(default_factory=dict)
    graph: tuple[str, ...] = ()
    taps: tuple[str, ...] = ()
    steps: int = 3
    strategy: str = "optim_grads_params"
    max_bytes: int = 1 << 24

    @property
    def config(self) -> TrainConfig:
        """The run as the trainer takes it."""
        return TrainConfig(
            model=model_from_preset(self.preset, SMALL | self.overrides),
            parallel=ParallelConfig(**self.degrees),
            fsdp=FsdpConfig(pool="double", strategy=self.strategy),
            graph=self.graph, dtype="fp32", steps=self.steps, microbatches=2, taps=self.taps,
            seed=5,
        )  # fmt: skip


def keep(run: Run) -> list[list[Snapshot]]:
    """What a rank has kept of every step."""
    trainer = Trainer(run.config, build_axes(run.config.parallel, DEVICE), DEVICE)
    keeping = trainer.keep(run.names, run.max_bytes)
    found = []
    for step in range(run.steps):
        outputs = trainer.step(step)
        found.append(keeping.read(outputs.digests))
    assert not trainer.counts.external_places
    trainer.close()
    return found


def keep_all(runs: list[Run]) -> list[list[list[Snapshot]]]:
    """The same of runs one after another."""
    return [keep(run) for run in runs]


def initial(runs: list[Run]) -> list[list[Snapshot]]:
    """The weights that each of some runs begins with."""
    found = []
    for run in runs:
        trainer = Trainer(run.config, build_axes(run.config.parallel, DEVICE), DEVICE)
        keeping = trainer.keep(("weights:*",), run.max_bytes)
        trainer.redigest_state()
        found.append(keeping.read(trainer.outputs.digests))
        trainer.close()
    return found


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def whole(ranks: Iterable[list[Snapshot]]) -> dict[str, torch.Tensor]:
    """Whole tensors of float32 out of every rank's pieces, by group and global name.

    Where two ranks have the same element they must agree; every element must be had by some rank.
    """
    found: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    for kept in (each for rank in ranks for each in rank):
        group = kept.name.partition(":")[0]
        for place in kept.places:
            name = f"{group}:{place.name}"
            tensor = found.setdefault(name, torch.zeros(place.shape))
            seen = covered.setdefault(name, torch.zeros(place.shape, dtype=torch.bool))
            into, out = boxes(place.offsets, place.sizes), boxes(place.local_offsets, place.sizes)
            mine = kept.tensor[out].float()
            twice = seen[into]
            assert torch.equal(tensor[into][twice], mine[twice]), name
            tensor[into] = mine
            seen[into] = True
    assert all(bool(seen.all()) for seen in covered.values())
    return found


def boxes(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices of a box."""
    return tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
