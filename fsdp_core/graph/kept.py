"""Copies of what is digested, taken on the same stream right after the digest.

    Copies    of tensors that stay where they are, each with a buffer of its own
    Calls     of what goes through modules: which call it was is counted on the device

A copy is of bits: elements travel as integers of their size. Buffers never move and are made before
anything is captured, so a graph may hold the copying, and each replay overwrites them. On CUDA they
lie in a memory pool of their own: the program's tensors get the addresses that they get without.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_core.graph.digest_words import INT_OF_SIZE


class Room:
    """Memory for copies, up to a number of bytes.

    Attributes:
        used_bytes: by buffers so far.
    """

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        self.max_bytes, self.used_bytes, self.device = max_bytes, 0, device
        self._pool = torch.cuda.MemPool() if device.type == "cuda" else None

    def bytes_for(self, name: str, num_bytes: int) -> Tensor:
        """A buffer of zero bytes.

        Raises:
            ValueError: there is no room for it.
        """
        self.used_bytes += num_bytes
        if self.used_bytes > self.max_bytes:
            raise ValueError(
                f"Expected copies of at most {self.max_bytes} bytes on a rank, got "
                f"{self.used_bytes} with {name}; name fewer tensors, or allow more."
            )
        with self._inside():
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """A contiguous buffer of the shape of `tensor`, of integers of the size of its elements."""
        flat = self.bytes_for(name, tensor.nbytes)
        return flat.view(INT_OF_SIZE[tensor.itemsize]).view(tensor.shape)

    def _inside(self) -> contextlib.AbstractContextManager[Any]:
        if self._pool is None:
            return contextlib.nullcontext()
        return torch.cuda.use_mem_pool(self._pool, self.device)


class Copies:
    """Copies of tensors of a fixed shape, and of a fixed place unless `follow` says otherwise.

    Attributes:
        buffers: by name, as integers.
    """

    def __init__(self, named: Mapping[str, Tensor], room: Room) -> None:
        self._tensors = dict(named)
        self.buffers = {name: room.like(name, tensor) for name, tensor in named.items()}

    def follow(self, named: Mapping[str, Tensor]) -> None:
        """Copy from these from now on: the same names, shapes and dtypes elsewhere."""
        self._tensors = {name: named[name] for name in self._tensors}

    def take(self) -> None:
        """Copy all; device work alone."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                buffer = self.buffers[name]
                buffer.copy_(tensor.detach().view(buffer.dtype))

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Names and the copies, in the dtypes of what was copied."""
        for name, tensor in self._tensors.items():
            yield name, self.buffers[name].view(tensor.dtype)


class _Kind:
    """The tensors of one call, of certain shapes, in the memory of its row."""

    def __init__(self, tensors: Sequence[Tensor], memory: Sequence[Tensor], written: Tensor):
        self.dtypes = [tensor.dtype for tensor in tensors]
        self.written = written
        self.buffers = [
            room[: tensor.nbytes].view(INT_OF_SIZE[tensor.itemsize]).view(tensor.shape)
            for room, tensor in zip(memory, tensors, strict=True)
        ]

    def take(self, tensors: Sequence[Tensor], hit: Tensor) -> None:
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            buffer.copy_(torch.where(hit, tensor.view(buffer.dtype), buffer))
        self.written.logical_or_(hit)


class Calls:
    """Copies of the tensors of certain calls in a step.

    Shapes may change from step to step and from call to call: those of one row share its memory,
    which grows, at twice what it has at least, where no graph has seen such a shape before.

    Args:
        wanted: names of rows, by the number of the tap and of the call.
    """

    def __init__(self, wanted: Mapping[tuple[int, int], str], room: Room) -> None:
        self._room = room
        self._calls: dict[int, list[int]] = {}
        for tap, call in wanted:
            self._calls.setdefault(tap, []).append(call)
        self._names = dict(wanted)
        self._memory: dict[tuple[tuple[int, int], int], Tensor] = {}
        self._outgrown: list[Tensor] = []
        self._kinds: dict[tuple[int, int], dict[Any, _Kind]] = {row: {} for row in wanted}

    def begin(self) -> None:
        """A step begins: nothing is written."""
        for kinds in self._kinds.values():
            for kind in kinds.values():
                kind.written.zero_()

    def record(self, tap: int, seen: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of a call into each wanted row whose turn it is.

        Args:
            seen: calls of the tap before this one: integer scalar on the device.
        """
        signature = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        for call in self._calls.get(tap, ()):
            kinds = self._kinds[tap, call]
            if signature not in kinds:
                kinds[signature] = self._new_kind((tap, call), tensors)
            kinds[signature].take(tensors, seen == call)

    def _new_kind(self, row: tuple[int, int], tensors: Sequence[Tensor]) -> _Kind:
        memory = [self._memory_of(row, i, tensor.nbytes) for i, tensor in enumerate(tensors)]
        written = self._room.bytes_for(self._names[row], 1).view(torch.bool)[0]
        return _Kind(tensors, memory, written)

    def _memory_of(self, row: tuple[int, int], part: int, num_bytes: int) -> Tensor:
        have = self._memory.get((row, part))
        if have is not None and have.numel() >= num_bytes:
            return have
        size = num_bytes if have is None else max(num_bytes, 2 * have.numel())
        if have is not None:
            self._outgrown.append(have)  # a graph may write there
        made = self._memory[row, part] = self._room.bytes_for(self._names[row], size)
        return made

    def read(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Names of rows that were written in this step, with their tensors. Waits for the device.

        Of a row that no call has written there is nothing.
        """
        for row, kinds in self._kinds.items():
            for kind in kinds.values():
                if bool(kind.written):
                    pairs = zip(kind.buffers, kind.dtypes, strict=True)
                    yield self._names[row], [buffer.view(dtype) for buffer, dtype in pairs]

    def tensors(self) -> Iterator[Tensor]:
        """Everything that a captured call reads or writes beside its arguments."""
        yield from self._memory.values()
        yield from self._outgrown
        for kinds in self._kinds.values():
            for kind in kinds.values():
                yield kind.written
