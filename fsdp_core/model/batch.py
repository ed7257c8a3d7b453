"""Packed sequences: several of them in one row of tokens of fixed capacity.

Each sequence is padded to a multiple that context (and sequence) parallelism can cut, the rest of
the row is the tail. Two rows of offsets, of all ranks together, tell tokens from padding:

    tokens            a a a a a . . . b b b . . . . . . . . .      capacity 20, multiple 4
    padded offsets    0               8       12              20   20   20
    valid offsets     0               5       8               8    8    8
                      a               b       tail            unused slots

Number of tokens and of slots never change, so a graph can hold what works on them: offsets and
masks are tensors, copied into from microbatch to microbatch (`PackedBatch.copy_from`), and the
longest sequence is taken to be the capacity, a constant. What does not fit is refused: a sequence
is never cut short, and a slot never used twice.

The tail is a sequence of its own, whose slot is always kept free, with no valid token
(`Tail.EMPTY`). Two other readings of it are in use elsewhere: its tokens count as valid tokens of
that sequence (`Tail.COUNTED`), or as padding of the last one (`Tail.EXTEND_LAST`). None of them
adds to the loss, and no other token looks at them.

What one rank has of a microbatch, and what its loss is multiplied by.

The loss of a step is the mean over all tokens that count, N of them, in all M microbatches on all
R = dp_outer * dp * cp ranks that hold different tokens. It is put together so:

    stage       sum of this rank's token losses * weight, weight = R * M / N      `loss_weight`
    trainer     mean over microbatches: 1 / M before backward                     `Pipeline`
    FSDP        mean over ranks: sums over the mesh are divided by R              `sharding`

so a rank's loss is the plain mean of its own tokens where each rank has equally many, and in any
case the mean over ranks and microbatches of what stages return is the loss of the step. FSDP
divides by R on the expert mesh too, whatever its size: an expert's gradient is already summed over
the tokens that came to it from other ranks. Tensor-parallel ranks have the same loss, and their
part of its gradient: nothing is divided by tp.

B batch, T local tokens of the context axis (before sequence parallel cuts them).
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from fsdp_core.parallel.collectives import all_reduce
from fsdp_core.parallel.context import ContextPlan, dense_plan, packed_plan, split
from fsdp_core.parallel.mesh import Axes, Axis
from fsdp_core.parallel.tensor_parallel import SEQUENCE_DIM


class Tail(enum.Enum):
    """What the tokens behind the last sequence belong to. See the module's docstring."""

    EMPTY = "empty"
    COUNTED = "counted"
    EXTEND_LAST = "extend_last"


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a pack holds, over all ranks that share it.

    Attributes:
        tokens: padding and tail included.
        slots: for sequences; one is kept for the tail.
        multiple: that each sequence is padded to. See `padding_multiple`.
        tail: what the tail belongs to.
        longest: tokens of the longest sequence that the model has positions for; None: any. A
            position past the end of a table is an error that a GPU does not survive.

    Raises:
        ValueError: not a whole number of multiples, no slot for a sequence, or no tokens in it.
    """

    tokens: int
    slots: int
    multiple: int
    tail: Tail = Tail.EMPTY
    longest: int | None = None

    def __post_init__(self) -> None:
        if self.multiple < 1 or self.tokens < 1 or self.tokens % self.multiple:
            raise ValueError(
                f"Expected a capacity that is a multiple of {self.multiple} tokens, "
                f"got {self.tokens}."
            )
        if self.slots < 2:
            raise ValueError(
                f"Expected at least 2 slots, one of which is kept for the tail, got {self.slots}."
            )
        if self.longest is not None and self.longest < 1:
            raise ValueError(f"Expected longest to be None or at least 1, got {self.longest}.")

    @property
    def max_sequences(self) -> int:
        """Sequences that a pack can hold."""
        return self.slots - 1

    def padded(self, length: int) -> int:
        """Tokens that a sequence of `length` tokens takes."""
        return -(-length // self.multiple) * self.multiple


def padding_multiple(cp: int, tp: int, *, sequence_parallel: bool) -> int:
    """What sequences are padded to a multiple of: 2 * cp, times tp under sequence parallel.

    Either half of a sequence on a context rank can then be cut over tp.
    """
    return 2 * cp * (tp if sequence_parallel else 1)


@dataclass(frozen=True)
class Document:
    """One sequence: token ids and the id to predict at each, int64 [n].

    `counted` bool [n] says which predictions count; all if None.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    counted: torch.Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.tokens.shape)
        if self.tokens.dim() != 1 or not shape[0]:
            raise ValueError(f"Expected tokens of [n], n at least 1, got {shape}.")
        for name in ("targets", "counted"):
            other = getattr(self, name)
            if other is not None and tuple(other.shape) != shape:
                # Neither cut short nor filled up: a mask of other length is of another sequence.
                raise ValueError(f"Expected {name} of {shape}, got {tuple(other.shape)}.")


@dataclass(frozen=True)
class PackedBatch:
    """A row of packed sequences, whole: before it is cut over context ranks.

    Attributes:
        tokens: int64 [T], 0 in padding.
        targets: int64 [T], 0 in padding.
        loss_mask: float32 [T], 1 where a prediction counts.
        offsets: int32 [S + 1], first valid token of each slot, padding not counted.
        padded_offsets: int32 [S + 1], first token of each slot, padding counted; the last is T.
        multiple: that each of these is a multiple of.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    offsets: torch.Tensor
    padded_offsets: torch.Tensor
    multiple: int

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}

    @property
    def max_len(self) -> int:
        """No sequence is longer: the capacity, the same constant for all that is packed."""
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> "PackedBatch":
        """The batch on a device."""
        return replace(self, **{name: t.to(device) for name, t in self._tensors.items()})  # type: ignore[arg-type]

    def copy_from(self, other: "PackedBatch") -> None:
        """Take over the contents of another batch of the same capacity; tensors stay the same.

        Raises:
            ValueError: another capacity, or one padded for fewer context ranks.
        """
        if other.multiple % self.multiple:
            raise ValueError(
                f"Expected sequences padded to a multiple of {self.multiple}, got {other.multiple}."
            )
        theirs = other._tensors
        for name, mine in self._tensors.items():
            if mine.shape != theirs[name].shape:
                raise ValueError(
                    f"Expected {name} of {tuple(mine.shape)}, got {tuple(theirs[name].shape)}."
                )
        for name, mine in self._tensors.items():
            mine.copy_(theirs[name])

    def plan(self, size: int, rank: int, *, prefixes: bool = False) -> ContextPlan:
        """What attention needs to know of the part of context rank `rank` of `size`.

        Operators only, which a graph can hold.

        Raises:
            ValueError: the capacity, or each sequence in it, cannot be cut evenly.
        """
        if size > 1 and self.multiple % (2 * size):
            raise ValueError(
                f"Expected sequences padded to a multiple of {2 * size} (2 * cp {size}), got "
                f"{self.multiple}: pack them for that context size."
            )
        lengths = self.offsets[1:] - self.offsets[:-1]
        return packed_plan(
            lengths, self.padded_offsets, self.max_len, size, rank, prefixes=prefixes
        )

    def part(self, plan: ContextPlan) -> "PackedPart":
        """The tokens of the rank that `plan` is for."""
        return PackedPart(*(t[plan.rows] for t in (self.tokens, self.targets, self.loss_mask)))


@dataclass(frozen=True)
class PackedPart:
    """A context rank's part of a `PackedBatch`, as it goes through the model.

    Attributes:
        tokens, targets: int64 [T].
        loss_mask: float32 [T], 1 where a prediction counts.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor


def pack(documents: Sequence[Document], capacity: Capacity) -> PackedBatch:
    """Put sequences into one row of tokens, in order.

    Raises:
        ValueError: more sequences or more tokens than fit, or a sequence that is too long.
    """
    if len(documents) > capacity.max_sequences:
        raise ValueError(
            f"Expected at most {capacity.max_sequences} sequences in a pack of {capacity.slots} "
            f"slots, of which one is kept for the tail, got {len(documents)}; give it more slots "
            "or pack fewer."
        )
    lengths = [len(document.tokens) for document in documents]
    padded = [capacity.padded(length) for length in lengths]
    if capacity.longest is not None and max(lengths, default=0) > capacity.longest:
        raise ValueError(
            f"Expected sequences of at most {capacity.longest} tokens, as many as the model has "
            f"positions for, got one of {max(lengths)}: cut it into several documents."
        )
    if sum(padded) > capacity.tokens:
        raise ValueError(
            f"Expected at most {capacity.tokens} tokens in a pack, got {sum(padded)}: lengths "
            f"{lengths}, each padded to a multiple of {capacity.multiple}."
        )
    tail = capacity.tokens - sum(padded)
    if capacity.tail is Tail.EXTEND_LAST and documents:
        padded[-1] += tail
    elif capacity.tail is Tail.COUNTED:
        lengths.append(tail)
    batch = PackedBatch(
        tokens=torch.zeros(capacity.tokens, dtype=torch.int64),
        targets=torch.zeros(capacity.tokens, dtype=torch.int64),
        loss_mask=torch.zeros(capacity.tokens, dtype=torch.float32),
        offsets=_offsets(lengths, sum(lengths), capacity.slots),
        padded_offsets=_offsets(padded, capacity.tokens, capacity.slots),
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


def masked_sum(losses: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses that count, in their dtype, and their number, in float32: two scalars.

    A rank may have none that counts, so the mean is for the caller to take: the sums of all ranks
    over the numbers of all ranks. Losses that do not count may be anything, NaN too.
    """
    counts = loss_mask > 0
    kept = torch.where(counts, losses, torch.zeros((), dtype=losses.dtype, device=losses.device))
    return (kept * loss_mask).sum(), loss_mask.sum()


Weight = float | torch.Tensor


@dataclass(frozen=True)
class Part:
    """A rank's part of a microbatch, as every stage of the pipeline sees it.

    Attributes:
        plan: which tokens these are, to attention.
        cp: the context axis of this microbatch.
        targets: int64 [B, T].
        counted: bool [B, T], the tokens whose loss counts; None: all.
        weight: what the sum of this rank's token losses is multiplied by, see the module.
        way: how attention brings keys together, "ring" or "gather".
        packed: of packed sequences the logical and the padded offsets of the whole pack, int32
            [slots + 1], before it is cut over cp; None where rows are one sequence each.
    """

    plan: ContextPlan
    cp: Axis
    targets: torch.Tensor
    counted: torch.Tensor | None
    weight: Weight
    way: str = "ring"
    packed: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_counted(self) -> torch.Tensor:
        """How many of this rank's tokens count: float64 scalar."""
        if self.counted is None:
            number, device = float(self.targets.numel()), self.targets.device
            return torch.full((), number, dtype=torch.float64, device=device)
        return self.counted.sum(dtype=torch.float64)

    def valid(self, tp: Axis, *, sequence_parallel: bool) -> torch.Tensor | None:
        """bool, tokens that are no padding, laid out as activations are; None where all are."""
        if self.plan.valid is None:
            return None
        valid = self.plan.valid.expand(self.targets.shape)
        return valid.chunk(tp.size, SEQUENCE_DIM)[tp.rank] if sequence_parallel else valid


@dataclass(frozen=True)
class LocalTokens:
    """Input of the first stage, int64 [B, T], and the part that goes with it."""

    tokens: torch.Tensor
    part: Part


def dense_part(
    tokens_BT: torch.Tensor, targets_BT: torch.Tensor, cp: Axis, way: str = "ring"
) -> LocalTokens:
    """This context rank's part of rows that are one sequence each, all of whose tokens count.

    Args:
        tokens_BT, targets_BT: int64, whole sequences, the same on every rank of `cp`.

    Raises:
        ValueError: the sequence cannot be cut evenly.
    """
    plan = dense_plan(
        tokens_BT.shape[1], cp.size, cp.rank, tokens_BT.device, prefixes=way == "gather"
    )
    tokens, targets = (split(t, 1, cp.size, cp.rank) for t in (tokens_BT, targets_BT))
    return LocalTokens(tokens, Part(plan, cp, targets, None, 1.0 / targets.numel(), way))


def packed_part(batch: PackedBatch, cp: Axis, weight: Weight, way: str = "ring") -> LocalTokens:
    """This context rank's part of packed sequences; `weight` is that of `loss_weight`.

    Operators only: a graph can hold it, and follows the contents of `batch`.

    Raises:
        ValueError: the capacity cannot be cut evenly.
    """
    plan = batch.plan(cp.size, cp.rank, prefixes=way == "gather")
    mine = batch.part(plan)
    counted = mine.loss_mask[None] > 0
    offsets = (batch.offsets, batch.padded_offsets)
    part = Part(plan, cp, mine.targets[None], counted, weight, way, offsets)
    return LocalTokens(mine.tokens[None], part)


def loss_weight(num_counted: torch.Tensor, num_microbatches: int, axes: Axes) -> torch.Tensor:
    """R * M / N as a float64 scalar: see the module. A collective over dp_outer, dp and cp.

    Args:
        num_counted: float64 scalar, tokens of this rank that count in all its microbatches.
    """
    total = num_counted
    for axis in (axes.dp_outer, axes.dp, axes.cp):
        total = all_reduce(total, axis)
    # A step in which nothing counts has a loss of zero.
    return num_averaged(axes) * num_microbatches / total.clamp(min=1.0)


def num_averaged(axes: Axes) -> int:
    """R: ranks that hold different tokens, and over which gradients are averaged."""
    return axes.dp_outer.size * axes.dp.size * axes.cp.size
