"""Streams, events and memory counters of cuda and cpu: the one place that asks which device it is.

On the CPU every stream is a `HostStream`: work runs at once and in order, so waiting costs nothing
and is always satisfied. Memory on the CPU is counted as live tensor storage (`StorageCounter`).

Here, too, is every switch that decides whether two runs of one program give the same bits:
`prepare_environment` before CUDA starts (cuBLAS reads its workspace setting once),
`make_deterministic` before the model is built.
"""

import contextlib
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fsdp_core.memory_counter import StorageCounter


class HostEvent:
    """An event of a `HostStream`: always complete, because host work runs when it is issued."""

    def synchronize(self) -> None:
        """Return at once."""


class HostStream:
    """A stream of the CPU: work runs when it is issued, so every wait is already satisfied."""

    def wait_stream(self, stream: "HostStream") -> None:
        """Order after another stream's work: already so."""

    def wait_event(self, event: HostEvent) -> None:
        """Order after an event: already so."""

    def record_event(self) -> HostEvent:
        return HostEvent()


_HOST_STREAM = HostStream()


class HostStreams:
    """The streams of the CPU, and what stands for them in `Device.modelling_streams`."""

    def new_stream(self, name: str) -> Any:
        del name
        return _HOST_STREAM

    def current_stream(self) -> Any:
        return _HOST_STREAM

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        del stream
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """The host waits for all issued work."""


_HOST_STREAMS = HostStreams()


@dataclass
class _Watched:
    """Who follows the memory and the streams of a device, shared by all `Device` objects of it."""

    counter: StorageCounter | None = None
    watchers: list[Any] = field(default_factory=list)
    streams: HostStreams = _HOST_STREAMS


_WATCHED: dict[torch.device, _Watched] = {}


class Device:
    """One rank's device: `kind` is cpu or cuda, `index` its number among the visible ones. `Objects
    are interchangeable`: memory counted through one is counted through all.
    """

    def __init__(self, kind: str, index: int = 0) -> None:
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"Expected device cpu or cuda, got {kind!r}.")
        if kind == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("device cuda was asked for, but torch sees no CUDA device")
        self.kind = kind
        self.torch_device = torch.device(kind, index) if kind == "cuda" else torch.device("cpu")
        self._watched = _WATCHED.setdefault(self.torch_device, _Watched())
        if kind == "cuda":
            torch.cuda.set_device(self.torch_device)

    @property
    def counter(self) -> StorageCounter | None:
        return self._watched.counter

    @property
    def storage_watchers(self) -> tuple[Any, ...]:
        return tuple(self._watched.watchers)

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def collective_backend(self) -> str:
        return "nccl" if self.is_cuda else "gloo"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else "cpu"

    def new_stream(self, name: str = "") -> Any:
        """A new side stream; who watches streams calls it by its name."""
        if self.is_cuda:
            return torch.cuda.Stream(self.torch_device)
        return self._watched.streams.new_stream(name)

    def current_stream(self) -> Any:
        if self.is_cuda:
            return torch.cuda.current_stream(self.torch_device)
        return self._watched.streams.current_stream()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream) if self.is_cuda else self._watched.streams.on(stream)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)
        else:
            self._watched.streams.synchronize()

    @contextlib.contextmanager
    def modelling_streams(self, streams: HostStreams) -> Iterator[None]:
        """Let `streams` stand for those of the CPU inside (`RuntimeError`: it has others)."""
        if self.is_cuda or self._watched.streams is not _HOST_STREAMS:
            got = "cuda" if self.is_cuda else "one"
            raise RuntimeError(f"Expected device cpu and no other model of its streams, got {got}.")
        self._watched.streams = streams
        try:
            yield
        finally:
            self._watched.streams = _HOST_STREAMS

    @contextlib.contextmanager
    def counting_memory(self, counter: StorageCounter | None = None) -> Iterator[None]:
        """Count inside: the allocator's counters on cuda, storages on the CPU, by `counter`."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch_device)
            yield
            return
        if self.counter is not None:
            raise RuntimeError("Expected no other counting of this device's memory, got one.")
        self._watched.counter = counter or StorageCounter()
        try:
            with self._watched.counter:
                yield
        finally:
            self._watched.counter = None

    def live_bytes(self) -> int:
        """Bytes in use now; 0 on the CPU outside `counting_memory`."""
        if self.is_cuda:
            return torch.cuda.memory_allocated(self.torch_device)
        if self.counter is None:
            return 0
        self.counter.settle()
        return self.counter.live_bytes

    def peak_bytes(self) -> int:
        """Highest bytes in use since counting began; 0 on the CPU outside `counting_memory`."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.torch_device)
        return self.counter.peak_bytes if self.counter else 0

    def used_bytes(self) -> int | None:
        """What the driver says is used on the whole GPU, of all processes; None on the CPU."""
        if not self.is_cuda:
            return None
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(total - free)

    @contextlib.contextmanager
    def watching_storages(self, watcher: Any) -> Iterator[None]:
        """Call `watcher.resized(storage)` for every storage of this device that is resized."""
        self._watched.watchers.append(watcher)
        try:
            yield
        finally:
            self._watched.watchers.remove(watcher)

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Resize a storage in place, keeping its identity and the memory count right."""
        storage.resize_(nbytes)
        for follower in (self.counter, *self.storage_watchers):
            if follower is not None:
                follower.resized(storage)

    def rng_states(self) -> list[torch.Tensor]:
        """Copies of every default generator state of this rank, in a fixed order."""
        states = [torch.get_rng_state()]
        if self.is_cuda:
            states.append(torch.cuda.get_rng_state(self.torch_device))
        return states

    def set_rng_states(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.is_cuda:
            torch.cuda.set_rng_state(states[1], self.torch_device)


class RngStates:
    """States of a device's default generators and of others; put back at the end of a `with`."""

    def __init__(self, device: Device, generators: Iterable[torch.Generator] = ()) -> None:
        self._device, self._defaults = device, device.rng_states()
        self._others = [(generator, generator.get_state()) for generator in generators]

    def put_back(self) -> None:
        self._device.set_rng_states(self._defaults)
        for generator, state in self._others:
            generator.set_state(state)

    def __enter__(self) -> "RngStates":
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()


# ---- what decides whether two runs give the same bits


def prepare_environment() -> None:
    """Set the variables that libraries read once; a value that the user set is kept."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def make_deterministic(seed: int) -> None:
    """Ask for deterministic kernels and seed every default generator with `seed`."""
    torch.use_deterministic_algorithms(True)
    # Filling new memory would hide what a graph leaves in it and costs a kernel an allocation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    seed_all(seed)


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and every torch generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
