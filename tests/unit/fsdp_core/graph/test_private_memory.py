"""What a capture allocated past torch's dispatcher is its own; what was there before is not."""

import weakref

import pytest
import torch

from fsdp_core.graph import cuda_graph
from fsdp_core.graph.cuda_graph import PrivateMemory
from fsdp_core.graph.recorder import Recording, StorageEntry


class Pool:
    """A memory pool whose blocks a test sets, and what recorders have seen of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: list[tuple[int, int]] = []
        self.held: list[torch.UntypedStorage] = []
        monkeypatch.setattr(cuda_graph, "blocks_of", lambda _: list(self.blocks))

    def entry(self, address: int, *, internal: bool = False) -> StorageEntry:
        """A storage of 64 bytes at `address`, as a recorder met it; it lives until `drop`."""
        storage = torch.UntypedStorage(64)
        self.held.append(storage)
        return StorageEntry(64, address, internal, weakref.ref(storage), 0, 0, False, "aten.mm.out")

    def drop(self) -> None:
        """Let the storage that was made first die."""
        self.held.pop(0)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    return Pool(monkeypatch)


def test_memory_that_was_allocated_during_the_capture_is_its_own(pool: Pool) -> None:
    """Its block is in the pool after the capture, and was not there before."""
    memory = PrivateMemory((0, 1), [])
    made = pool.entry(4096)
    pool.blocks = [(4096, 4608)]
    memory.mark_own(Recording([made]))
    assert made.internal


def test_memory_outside_the_pool_stays_external(pool: Pool) -> None:
    """A program's tensor is the ledger's to watch."""
    memory = PrivateMemory((0, 1), [])
    tensor = pool.entry(65536)
    pool.blocks = [(4096, 4608)]
    memory.mark_own(Recording([tensor]))
    assert not tensor.internal


def test_memory_that_an_earlier_graph_left_stays_external(pool: Pool) -> None:
    """If its holder dies, the next capture may be given it: that must be seen."""
    pool.blocks = [(4096, 4608)]
    old = pool.entry(4096, internal=True)
    memory = PrivateMemory((0, 1), [Recording([old])])
    met = StorageEntry(64, 4096, False, old.reference, 0, 0, False, "aten.mm.out")
    memory.mark_own(Recording([met]))
    assert not met.internal


def test_memory_that_was_freed_and_used_again_during_the_capture_is_its_own(pool: Pool) -> None:
    """The saved tensor of a forward dies in the backward, whose code takes its block."""
    pool.blocks = [(4096, 4608)]
    saved = pool.entry(4096, internal=True)
    memory = PrivateMemory((0, 1), [Recording([saved])])
    pool.drop()
    made = pool.entry(4096)
    memory.mark_own(Recording([made]))
    assert made.internal


def test_what_died_before_the_capture_says_nothing(pool: Pool) -> None:
    """A temporary of an earlier graph lay where a tensor lies that lives since then."""
    temporary = pool.entry(4096, internal=True)
    pool.drop()
    pool.blocks = [(4096, 4608)]
    memory = PrivateMemory((0, 1), [Recording([temporary])])
    kept = pool.entry(4096)
    memory.mark_own(Recording([kept]))
    assert not kept.internal


def test_what_only_this_capture_saw_die_frees_its_memory_too(pool: Pool) -> None:
    """A compiled backward reads a saved tensor that no earlier recording knows, and drops it."""
    pool.blocks = [(4096, 4608)]
    memory = PrivateMemory((0, 1), [])
    saved = pool.entry(4096)
    pool.drop()
    made = pool.entry(4096)
    memory.mark_own(Recording([saved, made]))
    assert made.internal
