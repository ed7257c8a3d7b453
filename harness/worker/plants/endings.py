"""How the process of a rank ends, or fills its memory: what faults of several classes do."""

import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

import torch

from fsdp_core.train import Trainer
from harness.worker.plants.planting import Act

wait_s: Callable[[float], None] = time.sleep
"""What one that hangs does."""


class PlantedError(RuntimeError):
    """The exception that faults raise."""


def sent(number: signal.Signals) -> Act:
    """The process is sent a signal by itself."""

    def act(trainer: Trainer) -> None:
        del trainer
        os.kill(os.getpid(), number)

    return act


def leave() -> NoReturn:
    """End the process at once, without a word."""
    os._exit(13)


def sleep_for_ever() -> NoReturn:
    """Take part in nothing any more."""
    while True:
        wait_s(3600)


def before(end: Callable[[], NoReturn]) -> Act:
    """What ends a process, as an act."""

    def act(trainer: Trainer) -> None:
        del trainer
        end()

    return act


def raise_error(trainer: Trainer) -> NoReturn:
    """As a program of a user that fails.

    Raises:
        PlantedError: always.
    """
    del trainer
    raise PlantedError("planted exception")


def ask_for_too_much(trainer: Trainer) -> NoReturn:
    """Allocate more and more, untouched, until the allocator itself refuses."""
    held, nbytes = [], 1 << 30
    while True:
        held.append(torch.empty(nbytes, dtype=torch.uint8, device=trainer.device.torch_device))
        # The CPU hands out address space without memory behind it: ask for more than exists.
        nbytes = nbytes if trainer.device.is_cuda else nbytes * 1024
