"""Stressor `jitter`: streams, and ranks, run early and late.

    CUDA  before an operator, a kernel that spins is put on the stream that it is issued on: always
          where the stream is another than the last operator's (so gathers and reductions are late),
          else now and then. Inside a capture it becomes part of the graph.
    CPU   work runs as it is issued, so only ranks can be late: the process sleeps now and then.
          For streams there is the stressor `races`.

What is ordered by waits comes out the same to the bit. Seeded, each rank otherwise.
"""

import random
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_core.device import Device, opens_itself

CYCLES = (200_000, 2_000_000)
"""Length of a spin, in GPU clock cycles: 0.1 to 1 ms at 2 GHz."""
SLEEP_S = (1e-5, 3e-4)
"""Length of a sleep of the host, in seconds."""
OPERATORS = (32, 256)
"""Between two delays on one stream."""


class Jitter(TorchDispatchMode):
    """Delays operators; `delays` counts how many were."""

    def __init__(self, device: Device, seed: int) -> None:
        super().__init__()
        self.delays = 0
        self._device, self._random = device, random.Random(seed)
        self._stream: Any = None
        self._left = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper that keeps the compiler out: nothing here is compiled."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The compiler works as if nobody looked on; without this it steps aside."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, perhaps late."""
        if types and any(map(opens_itself, types)):
            return NotImplemented  # the wrapper opens itself up first
        self._left -= 1
        stream = self._device.current_stream() if self._device.is_cuda else None
        if stream != self._stream or self._left < 0:
            self._stream, self._left = stream, self._random.randrange(*OPERATORS)
            self._delay()
        return func(*args, **(kwargs or {}))

    def _delay(self) -> None:
        self.delays += 1
        if self._device.is_cuda:
            torch.cuda._sleep(self._random.randrange(*CYCLES))
        else:
            time.sleep(self._random.uniform(*SLEEP_S))
