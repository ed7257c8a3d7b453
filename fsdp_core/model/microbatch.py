"""What one rank has of a microbatch, and what its loss is multiplied by.

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

from dataclasses import dataclass

import torch

from fsdp_core.model.packing import PackedBatch
from fsdp_core.parallel.collectives import all_reduce
from fsdp_core.parallel.context import ContextPlan, dense_plan, split
from fsdp_core.parallel.mesh import Axes, Axis
from fsdp_core.parallel.tensor_parallel import SEQUENCE_DIM

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
