"""The dynamic pool: memory is allocated on acquire and freed on release.

A key keeps its tensor and storage object for ever; only the storage's memory comes and goes. All of
it comes from the stream that is current at the acquire, whatever stream it is for: the caching
allocator keeps blocks by stream, and what is allocated on a side stream cannot use what activations
freed. So call `acquire` while the compute stream is current. The user's stream is made to come
after the current one, and at the release the current one after the user's.
"""

from dataclasses import dataclass
from typing import Any

import torch

from fsdp_core.device import Device
from fsdp_core.fsdp.traced_pool import Key, Timeline


def empty_buffer(numel: int, dtype: torch.dtype, device: Device) -> torch.Tensor:
    """Memory from the current stream.

    Also in inference mode an ordinary tensor: one of that mode can never be saved for a backward.
    """
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device=device.torch_device)


def check_size(key: Key, numel: int, dtype: torch.dtype, had: torch.Tensor) -> None:
    """Raise ValueError if a key asks for another size than it had."""
    if had.numel() != numel or had.dtype != dtype:
        had_size = f"{had.numel()} x {had.dtype}"
        raise ValueError(f"Expected {key} to have {had_size} as before, got {numel} x {dtype}.")


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory of one key of the dynamic pool; `home` is the stream it came from while held."""

    tensor: torch.Tensor
    home: Any = None


class DynamicPool:
    """Frees storage on release, so that memory holds only what is acquired now.

    It keeps no event: a next acquire gets a block that the current stream may use, and the user's
    stream comes after that one.
    """

    def __init__(self, device: Device, timeline: Timeline | None = None) -> None:
        self._device = device
        self._timeline = timeline
        self._buffers: dict[Key, _Buffer] = {}

    def acquire(self, key: Key, numel: int, dtype: torch.dtype, stream: Any) -> torch.Tensor:
        """See `pool.Pool`. A key's tensor and storage object are the same at every acquire."""
        buffer = self._buffers.get(key)
        current = self._device.current_stream()
        if buffer is None:
            buffer = self._buffers[key] = _Buffer(empty_buffer(numel, dtype, self._device), current)
        check_size(key, numel, dtype, buffer.tensor)
        if buffer.home is None:
            nbytes = numel * dtype.itemsize
            self._device.resize_storage(buffer.tensor.untyped_storage(), nbytes)
            buffer.home = current
        if stream != current:
            stream.wait_stream(current)
        if self._timeline is not None:
            self._timeline.acquired(key, numel, dtype)
        return buffer.tensor

    def release(self, key: Key, stream: Any) -> None:
        """See `pool.Pool`."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.home is None:
            raise RuntimeError(f"Expected {key} to be held, got a release without an acquire.")
        # The allocator gives the block to the next work of the stream that it came from, as a rule
        # the current one. Both must come after the last use.
        current = self._device.current_stream()
        if stream != current or stream != buffer.home:
            event = stream.record_event()
            current.wait_event(event)
            if buffer.home != current:
                buffer.home.wait_event(event)
        buffer.home = None
        self._device.resize_storage(buffer.tensor.untyped_storage(), 0)
        if self._timeline is not None:
            self._timeline.released(key)

    def holds(self, key: Key) -> bool:
        """Whether the key is acquired now."""
        return key in self._buffers and self._buffers[key].home is not None

    def can_acquire(self, key: Key) -> bool:
        """See `pool.Pool`. Always."""
        return True

    def end_of_pass(self) -> None:
        """See `pool.Pool`. Nothing to do: a key's storage object never changes."""

    def freeze(self) -> None:
        """Nothing to do: only full_iteration graphs may use this pool, and they hold no address."""

    def forget_events(self) -> None:
        """See `pool.Pool`. There are none."""

    def reserved_bytes(self) -> int:
        """See `pool.Pool`."""
        return sum(buffer.tensor.untyped_storage().nbytes() for buffer in self._buffers.values())
