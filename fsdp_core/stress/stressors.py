"""The stressors of one rank, as a configuration names them; seeded, each rank otherwise.

jitter    streams and ranks run early and late. On CUDA a kernel that spins is put on the stream
          that an operator is issued on: always where it is another than the last operator's (so
          gathers and reductions are late), else now and then; inside a capture it becomes part of
          the graph. On the CPU work runs as it is issued, so only ranks can be late: they sleep.
poison    what pools hand out and take back is NaN: bytes 0xFF in every type that is trained in.
          Both fills are work of the caller's stream, so they come before its first use and after
          its last, in captures, too. Cost: one write of the buffer each, no synchronisation.
scramble  memory that is free between steps moves, and what it held is NaN. A graph remembers
          addresses, and an allocator gives a freed block back as a rule, so that nothing shows.
races     on the CPU, accesses that no wait orders are found (`races`)
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_core.data import mix
from fsdp_core.device import Device
from fsdp_core.dispatch import ObservingMode, opens_itself
from fsdp_core.fsdp.pool import Key, Pool
from fsdp_core.stress.races import Races

CYCLES = (200_000, 2_000_000)
"""Length of a spin, in GPU clock cycles: 0.1 to 1 ms at 2 GHz."""
SLEEP_S = (1e-5, 3e-4)
"""Length of a sleep of the host, in seconds."""
OPERATORS = (32, 256)
"""Between two delays on one stream."""
POISON_BYTE = 0xFF
MOST_HELD_BYTES = 64 << 20
NUM_RANDOM = 64
_MAX_RANDOM_BYTES = 1 << 16
_GRAIN_BYTES = 512  # what the caching allocator counts in
_SMALL_BYTES = 1 << 20  # of the caching allocator: such requests have a pool of their own

Watcher = Callable[[Key, torch.Tensor, Any], None]
"""Of a pool's buffer: its key, the buffer, and the stream that may write it."""


class StressorMissing(RuntimeError):
    """A stressor that this device does not have."""


class Jitter(ObservingMode):
    """Delays operators; `delays` counts how many were."""

    def __init__(self, device: Device, seed: int) -> None:
        super().__init__()
        self.delays = 0
        self._device, self._random = device, random.Random(seed)
        self._stream: Any = None
        self._left = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


class Scramble:
    """Churns free memory at each call.

    1. blocks of the sizes that the pools have handed out are taken, filled with NaN and held
       through the step; those of the step before are given back after that, so they cannot be the
       same; 64 MiB at most
    2. many blocks of random sizes are taken, filled with NaN, and given back in random order
    3. on CUDA, every free block of the current stream's cache is filled with NaN
    """

    def __init__(self, device: Device, seed: int) -> None:
        self._device, self._random = device, random.Random(seed)
        self._sizes: dict[Key, int] = {}
        self._held: list[torch.Tensor] = []

    def note(self, key: Key, buffer: torch.Tensor, stream: Any) -> None:
        """A `Watcher`: the size matters."""
        del stream
        self._sizes[key] = buffer.numel() * buffer.element_size()

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
        self._held = []

    def _poisoned(self, nbytes: int) -> torch.Tensor:
        device = self._device.torch_device
        return torch.full((nbytes,), POISON_BYTE, dtype=torch.uint8, device=device)

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


class WatchedPool:
    """A pool that tells of the buffers it hands out, and of those it takes back, before it does.
    All else is `inner`'s (see `pool.Pool`).
    """

    def __init__(
        self, inner: Pool, given: Sequence[Watcher] = (), returned: Sequence[Watcher] = ()
    ) -> None:
        self.inner, self._given, self._returned = inner, given, returned
        self._held: dict[Key, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def acquire(self, key: Key, numel: int, dtype: torch.dtype, stream: Any) -> torch.Tensor:
        """Hand a buffer out; watchers are told unless the key has it already."""
        buffer = self.inner.acquire(key, numel, dtype, stream)
        if key not in self._held:
            self._held[key] = buffer
            for watcher in self._given:
                watcher(key, buffer, stream)
        return buffer

    def release(self, key: Key, stream: Any) -> None:
        """Take a buffer back, after telling watchers."""
        if (buffer := self._held.pop(key, None)) is not None:
            for watcher in self._returned:
                watcher(key, buffer, stream)
        self.inner.release(key, stream)


class Stressors:
    """Some of the stressors, on one device.

    names: out of `config.STRESSORS`.
    seed: of what is random in them.
    rank: of this process; each has other delays and other churn.
    Raises StressorMissing: `races` on another device than the CPU.
    """

    def __init__(self, names: Sequence[str], *, device: Device, seed: int, rank: int) -> None:
        if "races" in names and device.is_cuda:
            raise StressorMissing(
                "Expected device cpu for stressor races, got cuda, whose streams cannot be "
                "watched; jitter is what finds missing waits there."
            )
        self.names, self._device = tuple(names), device
        self.jitter = Jitter(device, mix(seed, rank, 1)) if "jitter" in names else None
        self.scramble = Scramble(device, mix(seed, rank, 2)) if "scramble" in names else None
        self.races = Races() if "races" in names else None
        self._on = frozenset(names)

    def only(self, names: Sequence[str]) -> None:
        """From now on these alone are at work, between steps; `races` always is if it is one of us.
        What an earlier one did inside of a capture stays in the graph: capture again (`ValueError`:
        a name that is not among `names` of this object).
        """
        if unknown := set(names).difference(self.names):
            raise ValueError(f"Expected some of {', '.join(self.names)}, got {min(unknown)}.")
        self._on = frozenset(names)
        if "scramble" not in self._on:
            self.close()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Under stress inside. Streams that are made inside are to be used inside only."""
        with contextlib.ExitStack() as stack:
            if self.races is not None:
                stack.enter_context(self._device.modelling_streams(self.races.clocks))
                stack.enter_context(self._device.watching_storages(self.races))
                stack.enter_context(self.races)
            if self.jitter is not None and "jitter" in self._on:
                stack.enter_context(self.jitter)
            yield

    def watched(self, pool: Pool) -> Pool:
        """`pool`, or one around it that stressors are told of."""
        given: list[Watcher] = []
        if (races := self.races) is not None:
            # First: what poison does to a buffer is done for its new holder.
            given.append(lambda key, buffer, stream: races.label(key, buffer))
        poison = [self._poison] if "poison" in self.names else []
        given += poison
        if self.scramble is not None:
            given.append(self.scramble.note)
        return cast("Pool", WatchedPool(pool, given, poison)) if given else pool

    def before_step(self) -> None:
        """Do what is done once a step, on the stream that it runs on, as around other work."""
        if self.scramble is not None and "scramble" in self._on:
            self.scramble.churn()

    def after_step(self) -> None:
        """Say what was found (`RaceFound`: accesses that no wait orders)."""
        if self.races is not None:
            self.races.require_none()

    def close(self) -> None:
        if self.scramble is not None:
            self.scramble.release()

    def _poison(self, key: Key, buffer: torch.Tensor, stream: Any) -> None:
        del key
        if "poison" in self._on:
            with self._device.on(stream), torch.no_grad():
                buffer.view(torch.uint8).fill_(POISON_BYTE)
