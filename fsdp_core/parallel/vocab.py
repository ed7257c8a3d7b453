"""The vocabulary cut over the tensor-parallel axis: embedding and cross entropy.

    tokens [B, T] -> VocabEmbedding -> [B, T, H], or [B, T / tp, H] under sequence parallel
    logits [B, T, V / tp], targets [B, T] -> vocab_cross_entropy -> loss [B, T], float32

No rank ever has more than its V / tp columns of the logits. B batch, T time, H hidden, V
vocabulary.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_core.parallel.axes import Axis
from fsdp_core.parallel.collectives import all_gather
from fsdp_core.parallel.cuts import Cut, CutModule, chunk_of
from fsdp_core.parallel.tensor import leave

IGNORED = -100
"""The target of a token that has no loss, as in `F.cross_entropy`."""

BLOCK_NUMEL = 2**22
"""Elements of logits that are widened to float32 at a time: 16 MiB, enough to keep a GPU busy."""


class VocabEmbedding(CutModule):
    """An embedding whose rows are cut over `axis`.

    Equal in every bit to the embedding that is whole: all ranks but one add a negative zero, which
    alone changes no number. A token outside the vocabulary is the error that `F.embedding` makes
    of it. Weights are NaN until they are initialised or loaded.

    Raises:
        ValueError: the vocabulary is not a multiple of the ranks.
    """

    weight: nn.Parameter

    def __init__(self, vocab: int, hidden: int, axis: Axis, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.vocab, self.hidden = vocab, hidden
        self.axis, self.sequence_parallel = axis, sequence_parallel
        local = chunk_of(vocab, "the vocabulary", axis.name, axis.size)
        weight = nn.Parameter(torch.full((local, hidden), torch.nan))
        self.register_cut("weight", weight, Cut(axis.name, 0, axis.size, axis.rank))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [B, T] -> [B, T, H], or [B, T / tp, H] under sequence parallel."""
        if self.axis.size == 1:
            return F.embedding(tokens, self.weight)
        rows = self.weight.shape[0]
        row, is_here = _local(tokens, self.axis.rank * rows, rows, self.vocab)
        partial = F.embedding(row, self.weight).masked_fill(~is_here[..., None], -0.0)
        return leave(partial, self.axis, sequence_parallel=self.sequence_parallel)

    def extra_repr(self) -> str:
        """Global sizes and the axis."""
        return (
            f"{self.vocab}, {self.hidden}, {self.axis.name}={self.axis.size}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


def _local(
    index: torch.Tensor, first: int, rows: int, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of this rank for each global `index`, and whether the rank has it.

    Others read row 0; an index outside the vocabulary reads past the end on every rank, so that the
    operator that reads complains, on a GPU too, where nothing could be checked without a sync.
    """
    row = index - first
    is_here = (row >= 0) & (row < rows)
    is_legal = (index >= 0) & (index < vocab)
    return row.masked_fill(~is_here, 0).masked_fill(~is_legal, rows), is_here


def vocab_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    axis: Axis,
    *,
    loss_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy of each token over a vocabulary of which every rank has V / tp columns.

    Of its columns a rank finds the largest logit, the sum of exponentials relative to it, and the
    target's logit; one all-gather of these three numbers a token brings them together, in rank
    order, so every rank has the same bits. No tensor as large as the logits is made but their
    gradient, in their dtype: `BLOCK_NUMEL` elements at a time are widened to float32 (float64
    stays). Logits that are not contiguous are copied.

    Logits may be -inf (masked out of the vocabulary). Where the target is `IGNORED` or the mask is
    off, loss and gradient are zero whatever the logits are, NaN included.

    Args:
        logits: [..., V / tp], this rank's columns.
        targets: int64 [...], the same on every rank, in the whole vocabulary or `IGNORED`.
        loss_mask: bool [...], True where a token counts; None: all that are not `IGNORED`.

    Returns:
        float32 [...] (float64 for float64 logits), the same on every rank. The mean over the tokens
        that count is the caller's, who knows how many there are on the other ranks.

    Raises:
        ValueError: shapes or dtypes that do not fit. A target outside the vocabulary is the error
            that `torch.gather` makes of it.
    """
    _check(logits, targets, loss_mask)
    if loss_mask is not None:
        targets = targets.masked_fill(~loss_mask, IGNORED)
    flat = logits.reshape(-1, logits.shape[-1])
    return _CrossEntropy.apply(flat, targets.reshape(-1), axis).view(targets.shape)


def _check(logits: torch.Tensor, targets: torch.Tensor, loss_mask: torch.Tensor | None) -> None:
    if logits.shape[:-1] != targets.shape or targets.dtype != torch.int64:
        raise ValueError(
            f"Expected int64 targets of shape {tuple(logits.shape[:-1])}, got {targets.dtype} "
            f"{tuple(targets.shape)}."
        )
    if loss_mask is not None and (
        loss_mask.shape != targets.shape or loss_mask.dtype != torch.bool
    ):
        raise ValueError(
            f"Expected a bool mask of shape {tuple(targets.shape)}, got {loss_mask.dtype} "
            f"{tuple(loss_mask.shape)}."
        )


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Rows of `logits` [N, V / tp] to widen at a time."""
    rows, columns = logits.shape
    step = max(1, BLOCK_NUMEL // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, axis: Axis) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        columns = logits.shape[1]
        counts = targets != IGNORED
        legal = targets.masked_fill(~counts, 0)
        column, is_here = _local(legal, axis.rank * columns, columns, columns * axis.size)
        top = logits.amax(dim=1).to(wide)
        total = torch.empty_like(top)
        for rows in _blocks(logits):
            total[rows] = _exponentials(logits[rows], top[rows], wide).sum(dim=1)
        hit = logits.gather(1, column[:, None])[:, 0].to(wide).masked_fill(~is_here, -math.inf)
        top, total, hit = _join(torch.stack((top, total, hit)), axis)
        log_total = total.log()
        ctx.save_for_backward(logits, column, is_here, counts, top, log_total)
        return (log_total - (hit - top)).masked_fill(~counts, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        logits, column, is_here, counts, top, log_total = ctx.saved_tensors
        grad = grad.masked_fill(~counts, 0.0)
        out = torch.empty_like(logits)
        for rows in _blocks(logits):
            block = logits[rows].to(top.dtype, copy=True)
            block.sub_(top[rows, None]).sub_(log_total[rows, None]).exp_()
            # Not scatter_add_, which has no deterministic kernel: each row has one place.
            hit = block.gather(1, column[rows, None])
            block.scatter_(1, column[rows, None], hit - is_here[rows, None].to(hit.dtype))
            block.mul_(grad[rows, None]).masked_fill_(~counts[rows, None], 0.0)
            out[rows] = block
        return out, None, None


def _exponentials(logits: torch.Tensor, top: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """exp(logits - top) in the wide dtype; a row that is all -inf has no top, and gives zeros."""
    safe = top.masked_fill(top == -math.inf, 0.0)
    return logits.to(wide, copy=True).sub_(safe[:, None]).exp_()


def _join(mine: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Top, total relative to it, and target's logit over the whole vocabulary, out of each rank's.

    Args:
        mine: [3, N], the same three of this rank's columns.
    """
    parts = all_gather(mine[None], axis, 0)  # [tp, 3, N]
    tops, totals, hits = parts.unbind(1)
    top = tops.amax(dim=0)
    # A rank whose columns are all -inf adds nothing, also where every rank's are.
    scale = (tops - top).exp().masked_fill(tops == -math.inf, 0.0)
    return top, (totals * scale).sum(dim=0), hits.amax(dim=0)
