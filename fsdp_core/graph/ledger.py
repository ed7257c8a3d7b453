"""The address ledger: a graph may only be replayed while everything it reads is where it was.

A GPU that replays over a freed parameter does not fault, it reads what the allocator put there. So
at capture each external storage is entered with its address, size and the names of the tensors that
live in it; before each replay the names are resolved again and must give the same addresses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fsdp_core.graph.recorder import Recording, StorageEntry

Resolver = Callable[[], Mapping[str, torch.Tensor]]
"""Returns every named tensor that a graph may use, as the program would find it now."""


class StaleAddress(RuntimeError):
    """A graph was about to be replayed over memory that is no longer what it captured.

    Attributes:
        names: the tensors at fault, in the order in which the graph's owner names them.
    """

    def __init__(self, names: list[str], detail: str) -> None:
        self.names = names
        others = f" (and {', '.join(names[1:])})" if len(names) > 1 else ""
        super().__init__(f"stale_address: {names[0]}: {detail}{others}")


@dataclass(frozen=True)
class _Named:
    name: str
    address: int
    numel: int
    dtype: torch.dtype
    storage_bytes: int


class Ledger:
    """Addresses that one graph relies on.

    Args:
        recording: what the capture saw.
        resolve: looks names up again at each check; called now and before every replay.
        partner: recording of a graph that owns memory this one uses (forward, for a backward).
    """

    def __init__(
        self, recording: Recording, resolve: Resolver, partner: Recording | None = None
    ) -> None:
        self._resolve = resolve
        partners = partner.storages if partner else ()
        owned = {entry.address for entry in partners if entry.internal}
        # What died during the capture was a library's own buffer, in the graph's memory pool.
        entries = {
            entry.address: entry
            for entry in recording.external()
            if entry.address not in (0, *owned) and entry.reference() is not None
        }
        self._named: list[_Named] = []
        named_storages: set[int] = set()
        for name, tensor in resolve().items():
            storage = tensor.untyped_storage()
            if storage.data_ptr() in entries and tensor.numel():
                named_storages.add(storage.data_ptr())
                self._named.append(
                    _Named(name, tensor.data_ptr(), tensor.numel(), tensor.dtype, storage.nbytes())
                )
        self._unnamed: list[StorageEntry] = [
            entry for address, entry in entries.items() if address not in named_storages
        ]

    @property
    def names(self) -> list[str]:
        """Names of the external tensors that the graph relies on."""
        return [named.name for named in self._named]

    @property
    def num_unnamed(self) -> int:
        """External storages that no name was found for."""
        return len(self._unnamed)

    def check(self) -> None:
        """Compare every address with what it was at capture; no device work.

        Raises:
            StaleAddress: naming every tensor that moved, shrank, vanished or was freed.
        """
        now = self._resolve()
        stale = [(named.name, why) for named in self._named if (why := _moved(named, now))]
        if stale:
            raise StaleAddress([name for name, _ in stale], stale[0][1])
        for entry in self._unnamed:
            storage = entry.reference()
            if storage is None:
                raise StaleAddress([_describe(entry)], "freed since the capture")
            if storage.data_ptr() != entry.address or storage.nbytes() < entry.nbytes:
                raise StaleAddress(
                    [_describe(entry)],
                    f"captured at {entry.address:#x}, now at {storage.data_ptr():#x}",
                )


def _moved(named: _Named, now: Mapping[str, torch.Tensor]) -> str:
    """Why a named tensor is no longer what was captured; empty if it is."""
    tensor = now.get(named.name)
    if tensor is None:
        return "captured, but the program no longer has it"
    address = tensor.data_ptr()
    if address != named.address:
        freed = "" if address else " (its storage was freed)"
        return f"captured at {named.address:#x}, now at {address:#x}{freed}"
    if tensor.numel() != named.numel or tensor.dtype != named.dtype:
        return f"captured as {named.numel} x {named.dtype}, now {tensor.numel()} x {tensor.dtype}"
    if tensor.untyped_storage().nbytes() < named.storage_bytes:
        return "its storage has shrunk since the capture"
    return ""


def _describe(entry: StorageEntry) -> str:
    return f"unnamed storage of {entry.nbytes} bytes used by {entry.made_by}"
