"""Trainings that keep contents, on ranks; and whole tensors put together out of what they kept."""

from collections.abc import Iterable

import torch

from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer
from fsdp_core.train.taps import Snapshot
from tests.dist.train_layout_programs import DEVICE, Run

GROUPS = ("grads:*", "weights:*", "optim:*")


def keep(run: Run, names: tuple[str, ...] = GROUPS, most: int = 1 << 24) -> list[list[Snapshot]]:
    """What a rank has kept of every step; at most so many bytes."""
    trainer = Trainer(run.config, build_axes(run.parallel, DEVICE), DEVICE)
    keeping = trainer.keep(names, most)
    found = []
    for step in range(run.steps):
        outputs = trainer.step(step)
        found.append(keeping.read(outputs.digests))
    assert not trainer.counts.external_places
    trainer.close()
    return found


def keep_all(runs: list[Run], names: tuple[str, ...]) -> list[list[list[Snapshot]]]:
    """The same of runs one after another."""
    return [keep(run, names) for run in runs]


def initial(runs: list[Run]) -> list[list[Snapshot]]:
    """The weights that each of some runs begins with."""
    found = []
    for run in runs:
        trainer = Trainer(run.config, build_axes(run.parallel, DEVICE), DEVICE)
        keeping = trainer.keep(("weights:*",), 1 << 24)
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
