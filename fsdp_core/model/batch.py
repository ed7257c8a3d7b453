"""What one rank has of a microbatch: packed sequences, its part of them, and the loss's weight.

Several sequences are packed in one row of tokens of fixed capacity. Each is padded to a multiple
that context (and sequence) parallelism can cut, the rest of the row is the tail. Two rows of
offsets, of all ranks together, tell tokens from padding:

    tokens            a a a a a . . . b b b . . . . . . . . .      capacity 20, multiple 4
    padded offsets    0               8       12              20   20   20
    valid offsets     0               5       8               8    8    8
                      a               b       tail            unused slots

Numbers of tokens and of slots never change, and the longest sequence is taken to be the capacity,
so a graph can hold what works on them. What does not fit is refused: a sequence is never cut short.
The tail is a sequence of its own without a valid token, whose slot is always kept free; or it is
hidden: padded offsets end with the last sequence, at 12 above.

The loss of a step is the mean over all tokens that count, N of them, in all M microbatches on all
R = dp_outer * dp * cp ranks that hold different tokens. It is put together so:

    stage       sum of this rank's token losses * weight, weight = R * M / N      `loss_weight`
    trainer     mean over microbatches: 1 / M before backward                     `Pipeline`
    FSDP        mean over ranks: sums over the mesh are divided by R              `sharding`

FSDP divides by R on the expert mesh too, whatever its size: an expert's gradient is already summed
over the tokens that came to it from other ranks. Tensor-parallel ranks have the same loss, and
their part of its gradient: nothing is divided by tp.

B batch, T local tokens of the context axis (before sequence parallel cuts them), S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp_core.parallel.context import ContextPlan, packed_plan
from fsdp_core.parallel.mesh import Axes, Axis, all_reduce
from fsdp_core.parallel.tensor_parallel import SEQUENCE_DIM

Weight = float | torch.Tensor


# ---- packs


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a pack holds, over all ranks that share it.

    tokens: padding and tail included.
    slots: for sequences; one is kept for the tail.
    multiple: that each sequence is padded to. See `padding_multiple`.
    longest: tokens of the longest sequence that the model has positions for; None: any. A position
        past the end of a table is an error that a GPU does not survive.
    hides_tail: padded offsets end with the last sequence; else a slot has the tail.
    """

    tokens: int
    slots: int
    multiple: int
    longest: int | None = None
    hides_tail: bool = False

    def padded(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple


def padding_multiple(cp: int, tp: Axis) -> int:
    """What sequences are padded to a multiple of: 2 * cp, times tp under sequence parallel. Either
    half of a sequence on a context rank can then be cut over tp.
    """
    return 2 * cp * (tp.size if tp.cuts_sequence else 1)


@dataclass(frozen=True)
class Document:
    """One sequence: token ids and the id to predict at each, int64 [n]. `counted` bool [n] says
    which predictions count; all if None.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    counted: torch.Tensor | None = None


@dataclass(frozen=True)
class PackedBatch:
    """A row of packed sequences, whole: before it is cut over context ranks.

    tokens, targets: int64 [T], 0 in padding.
    loss_mask: float32 [T], 1 where a prediction counts.
    offsets: int32 [S + 1], first valid token of each slot, padding not counted.
    padded_offsets: int32 [S + 1], first token of each slot, padding counted; the last is T, or
        where a hidden tail begins.
    multiple: that each of these is a multiple of.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    offsets: torch.Tensor
    padded_offsets: torch.Tensor
    multiple: int

    def to(self, device: torch.device) -> "PackedBatch":
        tokens, targets, mask = (t.to(device) for t in (self.tokens, self.targets, self.loss_mask))
        offsets, padded = self.offsets.to(device), self.padded_offsets.to(device)
        return PackedBatch(tokens, targets, mask, offsets, padded, self.multiple)

    def plan(self, size: int, rank: int) -> ContextPlan:
        """What attention needs to know of the part of context rank `rank` of `size`. Operators
        only, which a graph can hold.
        """
        assert size == 1 or self.multiple % (2 * size) == 0, f"padded to {self.multiple}, cp {size}"
        lengths = self.offsets[1:] - self.offsets[:-1]
        return packed_plan(lengths, self.padded_offsets, self.tokens.shape[0], size, rank)


def pack(documents: Sequence[Document], capacity: Capacity) -> PackedBatch:
    """Put sequences, which must fit, into one row of tokens, in order."""
    lengths = [len(document.tokens) for document in documents]
    padded = [capacity.padded(length) for length in lengths]
    # Nothing is cut short; a position past the end of a table is an error no GPU survives.
    assert len(documents) < capacity.slots, f"{lengths} in {capacity}"
    assert capacity.longest is None or max(lengths, default=0) <= capacity.longest, lengths
    assert sum(padded) <= capacity.tokens, f"{lengths} in {capacity}"
    batch = PackedBatch(
        tokens=torch.zeros(capacity.tokens, dtype=torch.int64),
        targets=torch.zeros(capacity.tokens, dtype=torch.int64),
        loss_mask=torch.zeros(capacity.tokens, dtype=torch.float32),
        offsets=_offsets(lengths, sum(lengths), capacity.slots),
        padded_offsets=_offsets(
            padded, sum(padded) if capacity.hides_tail else capacity.tokens, capacity.slots
        ),
        multiple=capacity.multiple,
    )
    start = 0
    for document, taken in zip(documents, padded, strict=True):
        place = slice(start, start + len(document.tokens))
        batch.tokens[place] = document.tokens
        batch.targets[place] = document.targets
        batch.loss_mask[place] = 1.0 if document.counted is None else document.counted.float()
        start += taken
    return batch


def _offsets(lengths: Sequence[int], end: int, slots: int) -> torch.Tensor:
    """int32 [slots + 1]: where each of `lengths` begins, then `end` for all that is left."""
    offsets = torch.full((slots + 1,), end, dtype=torch.int32)
    offsets[0] = 0
    if lengths:
        offsets[1 : len(lengths) + 1] = torch.tensor(lengths).cumsum(0)
    return offsets


# ---- a rank's part


@dataclass(frozen=True)
class Part:
    """A rank's part of a microbatch, as every stage of the pipeline sees it.

    plan: which tokens these are, to attention.
    cp: the context axis of this microbatch.
    targets: int64 [B, T].
    counted: bool [B, T], the tokens whose loss counts; None: all.
    weight: what the sum of this rank's token losses is multiplied by, see the module.
    packed: of packed sequences the logical and the padded offsets of the whole pack, int32 [slots +
        1], before it is cut over cp; None where rows are one sequence each.
    """

    plan: ContextPlan
    cp: Axis
    targets: torch.Tensor
    counted: torch.Tensor | None
    weight: Weight
    packed: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_counted(self) -> torch.Tensor:
        """How many of this rank's tokens count: float64 scalar."""
        if self.counted is None:
            number, device = float(self.targets.numel()), self.targets.device
            return torch.full((), number, dtype=torch.float64, device=device)
        return self.counted.sum(dtype=torch.float64)

    def valid(self, tp: Axis) -> torch.Tensor | None:
        """bool, tokens that are no padding, laid out as activations are; None where all are."""
        if self.plan.valid is None:
            return None
        valid = self.plan.valid.expand(self.targets.shape)
        return valid.chunk(tp.size, SEQUENCE_DIM)[tp.rank] if tp.cuts_sequence else valid


@dataclass(frozen=True)
class LocalTokens:
    """Input of the first stage, int64 [B, T], and the part that goes with it."""

    tokens: torch.Tensor
    part: Part


def packed_part(batch: PackedBatch, cp: Axis, weight: Weight) -> LocalTokens:
    """This context rank's part of packed sequences; `weight` is that of `loss_weight`. Operators
    only: a graph can hold it, and follows the contents of `batch`.
    """
    plan = batch.plan(cp.size, cp.rank)
    whole = batch.tokens, batch.targets, batch.loss_mask
    tokens, targets, mask = (t[plan.rows][None] for t in whole)
    offsets = (batch.offsets, batch.padded_offsets)
    return LocalTokens(tokens, Part(plan, cp, targets, mask > 0, weight, offsets))


def loss_weight(num_counted: torch.Tensor, num_microbatches: int, axes: Axes) -> torch.Tensor:
    """R * M / N as a float64 scalar: see the module. A collective over dp_outer, dp and cp.
    `num_counted`: float64 scalar, tokens of this rank that count in all its microbatches.
    """
    total = num_counted
    for axis in axes.averaged:
        total = all_reduce(total, axis)
    # A step in which nothing counts has a loss of zero.
    return axes.num_averaged * num_microbatches / total.clamp(min=1.0)
