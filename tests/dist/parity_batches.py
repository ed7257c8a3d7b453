"""Global batches for comparisons of layouts, and which of their tokens a rank has.

A microbatch is a list of packs, a pack a list of documents; every token of a microbatch has a
number, so that what a rank computes for it can be compared with what one process does. A layout
gives each data-parallel rank some packs; one process has them all:

    dense     every pack is one document of `seq` tokens; rows of a batch
    packed    documents of many lengths, padded and packed as the layout needs it
"""

from dataclasses import dataclass, replace

import torch

from fsdp_core.model.batch import (
    Capacity,
    Document,
    LocalTokens,
    PackedBatch,
    dense_part,
    pack,
    packed_part,
    padding_multiple,
)
from fsdp_core.parallel.mesh import Axis

PACKS = 8
"""Packs of a microbatch at context size 1: as many as there are ranks at most."""


@dataclass(frozen=True)
class Batch:
    """The microbatches of a step.

    Attributes:
        vocab, seq: of the model.
        tokens: a rank has, padding included; of documents that are packed.
        sizes: for each microbatch how many ranks share a pack, which decides its documents; empty
            for rows of one document each.
        number: of microbatches.
    """

    vocab: int
    seq: int
    number: int
    tokens: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether documents are packed."""
        return bool(self.sizes)

    def packs(self, microbatch: int) -> list[list[Document]]:
        """Documents of every pack."""
        generator = torch.Generator().manual_seed(1000 + microbatch)
        if not self.is_packed:
            return [[self._document(self.seq, generator)] for _ in range(PACKS)]
        size = self.sizes[microbatch]
        return [self._filled(self.tokens * size, generator) for _ in range(PACKS // size)]

    def _filled(self, room: int, generator: torch.Generator) -> list[Document]:
        """Documents that leave little room: at most two thirds of what is left, at least 5."""
        found = []
        left = room - 2 * PACKS
        while left >= 2 * PACKS + 5:
            most = max(6, min(left * 2 // 3, self.seq))
            length = int(torch.randint(5, most, (), generator=generator))
            found.append(self._document(length, generator))
            left -= -(-length // (2 * PACKS)) * 2 * PACKS
        return found or [self._document(max(1, room // 3), generator)]

    def _document(self, length: int, generator: torch.Generator) -> Document:
        ids = torch.randint(0, self.vocab, (length + 1,), generator=generator)
        counted = None
        if self.is_packed:
            counted = torch.rand(length, generator=generator) < 0.8
        return Document(ids[:-1], ids[1:], counted)

    def num_counted(self) -> int:
        """Tokens of all microbatches whose loss counts."""
        documents = [d for m in range(self.number) for p in self.packs(m) for d in p]
        return sum(len(d.tokens) if d.counted is None else int(d.counted.sum()) for d in documents)

    def num_tokens(self, microbatch: int) -> int:
        """Numbers of tokens are below this."""
        return sum(len(d.tokens) for p in self.packs(microbatch) for d in p)


def numbered(packs: list[list[Document]]) -> list[list[Document]]:
    """The documents with the numbers of their tokens in place of the tokens."""
    first, found = 0, []
    for documents in packs:
        row = []
        for document in documents:
            ids = torch.arange(first, first + len(document.tokens))
            first += len(document.tokens)
            row.append(Document(ids, ids))
        found.append(row)
    return found


@dataclass(frozen=True)
class Share:
    """What a rank has of a microbatch: its tokens, and their numbers on the CPU.

    Both [B, T]; the number of padding is -1.
    """

    local: LocalTokens
    numbers: torch.Tensor


CPU = torch.device("cpu")


def whole_share(batch: Batch, microbatch: int, cp: Axis, weight: float) -> Share:
    """All of a microbatch, for one process."""
    packs = batch.packs(microbatch)
    if not batch.is_packed:
        return _dense(packs, cp)
    documents = [document for each in packs for document in each]
    room = sum(-(-len(d.tokens) // 2) * 2 for d in documents)
    return _packed([documents], numbered([documents]), Capacity(
        tokens=room, slots=len(documents) + 1, multiple=2), cp, weight)  # fmt: skip


def rank_share(
    batch: Batch, microbatch: int, place: tuple[int, int], cp: Axis, weight: float,
    multiple: tuple[int, bool] = (1, False), *, device: torch.device = CPU,
) -> Share:  # fmt: skip
    """The part of the data-parallel rank `place` = (rank, ranks), and of the rank of `cp`.

    Args:
        multiple: tp, and whether the sequence is cut over it: what documents are padded for.
        device: of the tokens.
    """
    packs, numbers = batch.packs(microbatch), numbered(batch.packs(microbatch))
    rank, ranks = place
    mine = slice(rank * len(packs) // ranks, (rank + 1) * len(packs) // ranks)
    if not batch.is_packed:
        return _dense(packs, cp, numbers, mine, device)
    tp, sequence_parallel = multiple
    merged = [[d for each in part[mine] for d in each] for part in (packs, numbers)]
    capacity = Capacity(
        tokens=PACKS * batch.tokens // ranks,
        slots=len(merged[0]) + 2,
        multiple=padding_multiple(cp.size, tp, sequence_parallel=sequence_parallel),
    )
    return _packed([merged[0]], [merged[1]], capacity, cp, weight, device)


def _dense(
    packs: list[list[Document]], cp: Axis,
    numbers: list[list[Document]] | None = None, mine: slice = slice(None),
    device: torch.device = CPU,
) -> Share:  # fmt: skip
    numbers = numbers or numbered(packs)
    tokens, targets = (
        torch.stack([getattr(p[0], key) for p in packs[mine]]).to(device)
        for key in ("tokens", "targets")
    )
    ids = torch.stack([p[0].tokens for p in numbers[mine]])
    return Share(dense_part(tokens, targets, cp), dense_part(ids, ids, cp).tokens)


def _packed(
    packs: list[list[Document]], numbers: list[list[Document]], capacity: Capacity, cp: Axis,
    weight: float, device: torch.device = CPU,
) -> Share:  # fmt: skip
    batch, ids = pack(packs[0], capacity), pack(numbers[0], capacity)
    local = packed_part(batch.to(device), cp, weight)
    there = packed_part(_like(ids, batch), cp, weight)
    own, valid = there.tokens, there.part.plan.valid
    return Share(local, own if valid is None else own.masked_fill(~valid[None], -1))


def _like(ids: PackedBatch, batch: PackedBatch) -> PackedBatch:
    return replace(ids, loss_mask=batch.loss_mask)
