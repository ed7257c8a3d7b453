"""How long each step takes, without waiting for any.

A step ends where the trainer's stream has done its work and packed its outputs. On CUDA that is an
event, read when records are written and the device has passed it; on the CPU, where work is done
when it is issued, the host's clock. A step's time is from the end of the one before, so that the
times of a run add up to all of it: writing records counts for the step that follows.
"""

import itertools
import time
from typing import Any

import torch

from fsdp_core.device import Device


class StepClock:
    """Marks ends of steps, and tells the seconds between them later.

    Args:
        stream: where steps are issued.
        most: steps between two calls of `drain`.
    """

    def __init__(self, device: Device, stream: Any, most: int) -> None:
        self._device, self._stream = device, stream
        self._events: list[Any] = []
        if device.is_cuda:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(most + 1)]
        self._marks: list[Any] = []
        self._mark()

    def tick(self) -> None:
        """The work of a step has been issued."""
        self._mark()

    def drain(self) -> list[float]:
        """Seconds of each step since the last call; the device has done their work."""
        pairs = itertools.pairwise(self._marks)
        if self._device.is_cuda:
            seconds = [1e-3 * before.elapsed_time(after) for before, after in pairs]
            self._events += self._marks[:-1]  # to be recorded again
        else:
            seconds = [after - before for before, after in pairs]
        self._marks = self._marks[-1:]
        return seconds

    def _mark(self) -> None:
        if not self._device.is_cuda:
            self._marks.append(time.perf_counter())
            return
        event = self._events.pop()
        event.record(self._stream)
        self._marks.append(event)
