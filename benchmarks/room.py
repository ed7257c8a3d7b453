"""How many ranks a benchmark has and which GPU each has: `--ranks` and `--ranks-per-gpu`."""

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from harness.engine.machine import shared
from harness.errors import UsageError

MOST_RANKS = 8
CPU_RANKS = 2
MEANINGLESS = "TIMES MEAN NOTHING, several ranks share a GPU"


class NoGpus(Exception):
    """Fewer GPUs than the ranks need."""


@dataclass(frozen=True)
class Room:
    """The ranks of every measurement.

    Attributes:
        devices: GPU of each rank, as a number among those that this process sees; empty on the CPU.
    """

    num_ranks: int
    devices: tuple[str, ...] = ()

    @property
    def num_gpus(self) -> int:
        """GPUs that have a rank."""
        return len(set(self.devices))

    @property
    def shares_gpus(self) -> bool:
        """Whether a GPU has several ranks: then times say nothing."""
        return self.num_gpus < len(self.devices)

    def described(self) -> dict[str, Any]:
        """For the JSON and the line about the machine."""
        return {"gpus": self.num_gpus, "ranks": self.num_ranks, "shared_gpus": self.shares_gpus}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `find_room` reads."""
    parser.add_argument(
        "--ranks", type=int, metavar="N",
        help=f"default: one on every GPU, up to {MOST_RANKS}; on the CPU {CPU_RANKS}",
    )  # fmt: skip
    parser.add_argument(
        "--ranks-per-gpu", type=int, metavar="N",
        help="let up to N ranks share a GPU: shows that many ranks run, times mean nothing",
    )  # fmt: skip


def find_room(device: str, ranks: int | None, ranks_per_gpu: int | None) -> Room:
    """The ranks that the options ask for, with their GPUs. Every GPU is used before one is shared.

    Raises:
        UsageError: options that cannot be.
        NoGpus: they can be, on a larger machine.
    """
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks {ranks}: expected at least 1")
    if ranks_per_gpu is not None and ranks_per_gpu < 1:
        raise UsageError(f"--ranks-per-gpu {ranks_per_gpu}: expected at least 1")
    if device == "cpu":
        if ranks_per_gpu is not None:
            raise UsageError(
                f"--ranks-per-gpu {ranks_per_gpu}: expected --device cuda, this is on the CPU"
            )
        return Room(ranks or CPU_RANKS)
    gpus = [str(gpu) for gpu in range(torch.cuda.device_count())]
    slots = shared(gpus, ranks_per_gpu or 1)
    wanted = ranks or min(len(slots), MOST_RANKS)
    if not 0 < wanted <= len(slots):
        needed = -(-max(wanted, 1) // (ranks_per_gpu or 1))
        raise NoGpus(
            f"{max(wanted, 1)} ranks, {ranks_per_gpu or 1} a GPU, need {needed} GPUs, "
            f"found {len(gpus)}"
        )
    return Room(wanted, slots[:wanted])
