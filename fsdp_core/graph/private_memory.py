"""Which storages a CUDA graph made in its private memory although no operator did.

Code that a compiler generated allocates past torch's dispatcher, so a recorder meets such a storage
first when an operator writes it, as it meets one of the program's. The allocator knows better: in
the private pool only captures allocate. A storage that lies there is the capture's own, unless its
block was there before; and even then, if what held that block has died during the capture.
"""

from collections.abc import Iterable
from typing import Any

import torch

from fsdp_core.graph.recorder import Recording, StorageEntry

Blocks = list[tuple[int, int]]
"""Allocated memory as (first byte, byte past the last one)."""


def blocks_of(pool: Any) -> Blocks:
    """What is allocated in a graph memory pool now, by address; no device work."""
    return [
        (block["address"], block["address"] + block["size"])
        for segment in torch.cuda.memory_snapshot(pool, include_traces=False)
        if tuple(segment["segment_pool_id"]) == tuple(pool)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]


class PrivateMemory:
    """What is in a memory pool when a capture into it begins.

    Args:
        pool: id of the pool.
        earlier: recordings of the graphs that are in it.
    """

    def __init__(self, pool: Any, earlier: Iterable[Recording]) -> None:
        self._pool = pool
        self._before = blocks_of(pool)
        self._held = [
            entry
            for recording in earlier
            for entry in recording.storages
            if entry.reference() is not None and _in(entry, self._before)
        ]

    def mark_own(self, recording: Recording) -> None:
        """After the capture: enter as internal what it allocated unseen."""
        external = recording.external()
        met = [entry for entry in external if entry.reference() is not None and entry.address]
        after = blocks_of(self._pool) if met else []
        died = [entry for entry in (*self._held, *external) if entry.reference() is None]
        for entry in met:
            if _in(entry, after):
                entry.internal = not _in(entry, self._before) or any(
                    _overlap(entry, other) for other in died
                )


def _in(entry: StorageEntry, blocks: Blocks) -> bool:
    return any(first <= entry.address < end for first, end in blocks)


def _overlap(one: StorageEntry, other: StorageEntry) -> bool:
    return one.address < other.address + other.nbytes and other.address < one.address + one.nbytes
