"""Ranks of the real worker, the last of which stops taking part at step 20, each in its own way.

Entries for an engine: `tests.hang_kinds.ranks:stopped` and so on; what they do is in `KINDS`.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdp_core.fsdp import layout as collectives
from fsdp_core.train import Trainer
from harness.records import RunSpec
from harness.worker import plant
from harness.worker.main import rank_main

STEP = 20
Act = Callable[[], None]


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _loop() -> None:
    while True:
        pass


def _leave() -> None:
    os._exit(0)


def _with_next(name: str, instead: Callable[..., Any]) -> None:
    """Have the next call of a collective of sharding do something else, once."""
    real = getattr(collectives, name)

    def once(*arguments: Any, **named: Any) -> None:
        setattr(collectives, name, real)
        instead(*arguments, **named)

    setattr(collectives, name, once)


def _reduce_for_gather() -> None:
    def reduce(full: torch.Tensor, shard: torch.Tensor, group: Any) -> None:
        collectives.all_reduce(full, group)

    _with_next("_all_gather", reduce)


def _skip_a_gather() -> None:
    _with_next("_all_gather", lambda *arguments, group: None)


def _skip_a_reduction() -> None:
    _with_next("_reduce_scatter", lambda *arguments, group: None)


KINDS: dict[str, Act] = {
    "stopped": _stop,
    "looping": _loop,
    "leaving": _leave,
    "reducing": _reduce_for_gather,
    "skipping_a_gather": _skip_a_gather,
    "skipping_a_reduction": _skip_a_reduction,
}


IN_REPLAYS = ("stopped", "looping", "leaving")


def _entry(act: Act) -> Callable[[RunSpec, Path, int, int], int]:
    def main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
        before = plant.Plant.before_step

        def acting(self: plant.Plant, trainer: Trainer, step: int) -> None:
            before(self, trainer, step)
            if step == STEP:
                act()

        if rank == spec.world_size - 1:
            plant.Plant.before_step = acting  # type: ignore[method-assign]
        return rank_main(spec, folder, rank, store_port)

    return main


stopped, looping, leaving = (_entry(KINDS[kind]) for kind in ("stopped", "looping", "leaving"))
reducing, skipping_a_gather, skipping_a_reduction = (
    _entry(KINDS[kind]) for kind in ("reducing", "skipping_a_gather", "skipping_a_reduction")
)
