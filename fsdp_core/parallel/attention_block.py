"""Attention in blocks: queries that look at some keys, and how blocks join to causal attention.

A kernel gives, for its keys alone, the output and the log of the sum of exponentials. Outputs over
disjoint keys join exactly (Rabe and Staats, 2021; Dao et al., 2022):

    lse = log(exp(lse_a) + exp(lse_b))      out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Backward needs no joining: with the joined `lse` and `out` every block gives its own share of the
gradients. Joins and sums are in float32, in float64 for float64.

Two ways bring a rank's queries and the keys of all ranks together: `ring` and `gather_attention`.

B batch, T local tokens, N query heads, K key-value heads, D width of queries and keys, E of values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch.autograd.function import once_differentiable

from fsdp_core.parallel.context import Block, ContextPlan, Spans
from fsdp_core.parallel.mesh import Axis

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, or their gradients."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""Output and log-sum-exp."""


class BlockKernel(Protocol):
    """Attention of queries [B, T, N, D] to keys [B, S, K, D] and values [B, S, K, E].

    `out` is [B, T, N, E] and `lse` [B, T, N], the logarithm of what the softmax divides by. With
    spans that have offsets B is 1. Neither pass waits for the device. Every query has a key.
    """

    def forward(
        self, qkv: Three, spans: tuple[Spans, Spans], *, causal: bool, scale: float
    ) -> Pair:
        """`out`, in the inputs' dtype or a wider one, and `lse`, in float32 or wider.

        Args:
            spans: where sequences lie in the queries and in the keys.
            causal: queries and keys of a sequence end together, and a query sees none after it.
            scale: of the products of queries and keys.
        """

    def backward(
        self,
        grad_out: torch.Tensor,
        qkv: Three,
        out_lse: Pair,
        spans: tuple[Spans, Spans],
        *,
        causal: bool,
        scale: float,
    ) -> Three:
        """Gradients of q, k and v through this block, given the joined `out` and `lse`."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in."""
    # Not `torch.promote_types`: it is an operator, which every dispatch mode is asked about.
    return dtype if dtype == torch.float64 else torch.float32


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in another dtype, for results of an `autograd.Function`.

    Compiled by torch 2.11, one that ends in a `to` that changes nothing has gradients of zero: the
    tensor that comes back is also among the intermediates, which are marked to have none.
    """
    return x if x.dtype == dtype else x.to(dtype)


def merge(one: Pair, other: Pair) -> Pair:
    """Join attention over disjoint keys; a query keeps its bits where the other `lse` is -inf."""
    total = torch.logaddexp(one[1], other[1])
    weights = [torch.exp(lse - total)[..., None] for _, lse in (one, other)]
    return one[0] * weights[0] + other[0] * weights[1], total


@dataclass(frozen=True)
class Task:
    """What one attention call is made of, besides its tensors."""

    plan: ContextPlan
    axis: Axis
    kernel: BlockKernel
    scale: float

    def block_forward(self, block: Block, qkv: Three) -> Pair:
        """A block's output for all queries, wide; queries outside the block have 0 and -inf."""
        spans = (block.query_spans, block.key_spans)
        out, lse = self.kernel.forward(
            _taken(block, qkv), spans, causal=block.causal, scale=self.scale
        )
        out = as_dtype(out, wide(out.dtype))
        if block.queries is None:
            return out, lse
        return block.queries.spread(out), block.queries.spread(lse, -math.inf)

    def block_backward(
        self, block: Block, grad_out: torch.Tensor, qkv: Three, out_lse: Pair
    ) -> Three:
        """A block's share of the gradients of all queries, keys and values, wide."""
        rows, spans = block.queries, (block.query_spans, block.key_spans)
        if rows is not None:
            grad_out, out_lse = rows.take(grad_out), (rows.take(out_lse[0]), rows.take(out_lse[1]))
        grads = self.kernel.backward(
            grad_out, _taken(block, qkv), out_lse, spans, causal=block.causal, scale=self.scale
        )
        dq, dk, dv = (grad.to(wide(grad.dtype)) for grad in grads)
        if rows is not None:
            dq = rows.spread(dq)
        if block.keys is not None:
            dk, dv = block.keys.spread(dk), block.keys.spread(dv)
        return dq, dk, dv


def _taken(block: Block, qkv: Three) -> Three:
    q, k, v = qkv
    if block.queries is not None:
        q = block.queries.take(q)
    if block.keys is not None:
        k, v = block.keys.take(k), block.keys.take(v)
    return q, k, v


class Way(Protocol):
    """A way to bring a rank's queries and the keys of all ranks together."""

    def forward(self, qkv: Three, task: Task) -> Pair:
        """Joined output and log-sum-exp of this rank's queries."""

    def backward(self, grad_out: torch.Tensor, qkv: Three, out_lse: Pair, task: Task) -> Three:
        """Gradients of this rank's queries, keys and values, summed over all ranks."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, way: Way, task: Task
    ) -> torch.Tensor:
        plan = task.plan
        # What lies in rows of padding may be anything, NaN too, and 0 times NaN is NaN.
        qkv = (plan.blank(q), plan.blank(k), plan.blank(v))
        out, lse = way.forward(qkv, task)
        # A kernel leaves rows of padding as they come.
        out, lse = as_dtype(plan.blank(out), q.dtype), plan.blank(lse)
        ctx.save_for_backward(*qkv, out, lse)
        ctx.way, ctx.task = way, task
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        task: Task = ctx.task
        blanked = task.plan.blank(grad_out)
        grads = ctx.way.backward(blanked, (q, k, v), (out, lse), task)
        return *(task.plan.blank(grad).to(q.dtype) for grad in grads), None, None


def attend(qkv: Three, way: Way, task: Task) -> torch.Tensor:
    """Causal attention [B, T, N, E] of this rank's queries to the keys of all ranks.

    Rows of padding are zero, and so are their gradients.

    Raises:
        ValueError: shapes or dtypes that no attention has, or a plan for other tokens or ranks.
    """
    _check_tensors(*qkv)
    plan, axis, q = task.plan, task.axis, qkv[0]
    if (plan.size, plan.rank) != (axis.size, axis.rank):
        raise ValueError(
            f"Expected a plan for rank {axis.rank} of {axis.size}, got one for rank {plan.rank} "
            f"of {plan.size}."
        )
    if q.shape[1] != plan.rows.shape[0]:
        raise ValueError(f"Expected {plan.rows.shape[0]} local tokens, got {q.shape[1]}.")
    if plan.spans.offsets is not None and q.shape[0] != 1:
        raise ValueError(f"Expected a batch of 1 for packed sequences, got {q.shape[0]}.")
    return cast("torch.Tensor", _Attention.apply(*qkv, way, task))


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
    if any(t.dim() != 4 for t in (q, k, v)):
        raise ValueError(f"Expected q, k and v of [B, T, heads, width], got {shapes}.")
    if not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ValueError(f"Expected q, k and v of the same batch and tokens, got {shapes}.")
    if k.shape[2] != v.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(f"Expected as many heads in v as in k, and a multiple in q, got {shapes}.")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"Expected q and k of equal width, got {shapes}.")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"Expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}.")


def pack_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Several tensors of one dtype as one flat one, so that they travel together."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unpack_tensors(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `flat` [..., n] in the shapes of `like` behind its leading dims: the inverse."""
    parts = flat.split([t.numel() for t in like], dim=-1)
    return [part.unflatten(-1, t.shape) for part, t in zip(parts, like, strict=True)]
