"""Stressor `scramble`: memory that is free between steps moves, and what it held is NaN.

A graph remembers addresses. If a program frees such memory between replays and allocates the like
again, an allocator as a rule gives the same block back, and nothing shows. So at the start of every
step the free memory is churned:

    1. blocks of the sizes that the pools have released are taken, filled with NaN and held through
       the step; those of the step before are given back after that, so they cannot be the same
    2. many blocks of random sizes are taken, filled with NaN, and given back in random order
    3. on CUDA, every free block of the current stream's cache is filled with NaN

What is held is 64 MiB at most. Seeded; the default generators are not touched.
"""

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_core.device import Device
from fsdp_core.fsdp.pool import Key
from fsdp_core.stress.pools import fill

MOST_HELD_BYTES = 64 << 20
NUM_RANDOM = 64
_MAX_RANDOM_BYTES = 1 << 16
_GRAIN_BYTES = 512  # what the caching allocator counts in
_SMALL_BYTES = 1 << 20  # of the caching allocator: such requests have a pool of their own


class Scramble:
    """Churns free memory at each call, a `PoolWatcher` for the sizes that matter."""

    def __init__(self, device: Device, seed: int) -> None:
        self._device, self._random = device, random.Random(seed)
        self._sizes: dict[Key, int] = {}
        self._held: list[torch.Tensor] = []

    def acquired(self, key: Key, buffer: torch.Tensor, stream: Any) -> None:
        """See `PoolWatcher`."""
        del stream
        self._sizes[key] = buffer.numel() * buffer.element_size()

    def released(self, key: Key, buffer: torch.Tensor, stream: Any) -> None:
        """See `PoolWatcher`."""

    def churn(self) -> None:
        """Take and give back memory of the current stream. Not inside a capture."""
        # Nobody's modes: what is taken here is no memory of the program's.
        with _disable_current_modes(), torch.no_grad():
            sizes = list(self._sizes.values())
            self._random.shuffle(sizes)
            held, room = [], MOST_HELD_BYTES
            for nbytes in sizes:
                if nbytes <= room:
                    held.append(self._poisoned(nbytes))
                    room -= nbytes
            self._held = held
            self._shuffle(self._random.randrange(1, _MAX_RANDOM_BYTES) for _ in range(NUM_RANDOM))
            if self._device.is_cuda:
                self._shuffle(self._free_blocks())

    @property
    def held_bytes(self) -> int:
        """What is held among the memory that is counted: on the CPU nobody counts it."""
        if not self._device.is_cuda:
            return 0
        return sum(-(-block.numel() // _GRAIN_BYTES) * _GRAIN_BYTES for block in self._held)

    def release(self) -> None:
        """Give everything back."""
        self._held = []

    def _poisoned(self, nbytes: int) -> torch.Tensor:
        block = torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)
        fill(block)
        return block

    def _shuffle(self, sizes: Iterable[int]) -> None:
        blocks = [self._poisoned(nbytes) for nbytes in sizes]
        self._random.shuffle(blocks)
        while blocks:
            blocks.pop()

    def _free_blocks(self) -> list[int]:
        """Sizes of the free blocks that the current stream may have, largest first."""
        stream = torch.cuda.current_stream(self._device.torch_device)
        found = []
        for segment in torch.cuda.memory_snapshot():
            is_ours = segment["device"] == stream.device_index
            is_ours &= segment["stream"] == stream.cuda_stream
            is_ours &= tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
            if not is_ours:
                continue
            least = _SMALL_BYTES if segment["segment_type"] == "large" else 0
            found += [
                block["size"]
                for block in segment["blocks"]
                if block["state"] == "inactive" and block["size"] > least
            ]
        return sorted(found, reverse=True)
