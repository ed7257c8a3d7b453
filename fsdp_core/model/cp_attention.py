"""Causal attention over a context axis: blocks of it by a kernel, joined as keys travel round.

A kernel gives, for its keys alone, the output and the log of the sum of exponentials. Outputs over
disjoint keys join exactly (Rabe and Staats, 2021; Dao et al., 2022):

    lse = log(exp(lse_a) + exp(lse_b))      out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

    step       0            1              2            ...
    rank r     own keys     those of r-1   those of r-2

At each step a rank sends on the keys and values that it works with and receives the next ones
meanwhile (Liu, Zaharia and Abbeel, 2023). Backward needs no joining: with the joined `lse` and
`out` every block gives its own share of the gradients. Keys and values make the same round, and
their gradients follow one step behind, until the last hop brings them home. Joins and sums are in
float32, in float64 for float64.

    TorchKernel     any device and dtype; scores of a block in memory, in float32 or float64
    FlashKernel     CUDA, bf16 or fp16: FlashAttention 2 (Dao, 2023) as torch carries it

Kernels have no state and wait for nothing, so a graph can hold them. B batch, T local tokens, N
query heads, K key-value heads, D width of queries and keys, E of values.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fsdp_core.parallel.context import Block, ContextPlan, Spans
from fsdp_core.parallel.mesh import Axis

FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_MAX_WIDTH = 256
FLASH_WIDTH_MULTIPLE = 8

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, or their gradients."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""Output and log-sum-exp."""


# ---- kernels


class TorchKernel:
    """Attention of queries [B, T, N, D] to keys [B, S, K, D] and values [B, S, K, E].

    `out` is [B, T, N, E], in the inputs' dtype or wider, and `lse` [B, T, N], the logarithm of what
    the softmax divides by, in float32 or wider. `spans` say where sequences lie in the queries and
    in the keys; with offsets B is 1. Every query has a key. With `causal` queries and keys of a
    sequence end together, and a query sees none after it; `scale` is that of the products of
    queries and keys.

    Plain operators: scores [B, N, T, S] of a block are in memory in both passes; results are wide.
    """

    def forward(
        self, qkv: Three, spans: tuple[Spans, Spans], *, causal: bool, scale: float
    ) -> Pair:
        """`out` and `lse`."""
        time, kv_heads = qkv[0].shape[1], qkv[1].shape[2]
        q, k, v = (_by_head(t, kv_heads) for t in qkv)
        scores = _scores(q, k, time, spans, causal=causal, scale=scale)
        lse = torch.logsumexp(scores, -1, keepdim=True)
        out = torch.exp(scores - lse) @ v
        return _by_token(out, time), _by_token(lse, time)[..., 0]

    def backward(
        self, grad_out: torch.Tensor, qkv: Three, out_lse: Pair, spans: tuple[Spans, Spans],
        *, causal: bool, scale: float,
    ) -> Three:  # fmt: skip
        """Gradients of q, k and v through this block, given the joined `out` and `lse`."""
        time, kv_heads = qkv[0].shape[1], qkv[1].shape[2]
        q, k, v = (_by_head(t, kv_heads) for t in qkv)
        grad, out, lse = (
            _by_head(t, kv_heads) for t in (grad_out, out_lse[0], out_lse[1][..., None])
        )
        weights = torch.exp(_scores(q, k, time, spans, causal=causal, scale=scale) - lse)
        shift = (grad * out).sum(-1, keepdim=True)
        dscores = weights * (grad @ v.transpose(-1, -2) - shift) * scale
        dq = _by_token(dscores @ k, time)
        dk = (dscores.transpose(-1, -2) @ q).transpose(1, 2)
        dv = (weights.transpose(-1, -2) @ grad).transpose(1, 2)
        return dq, dk, dv


def _by_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[B, T, N, width] -> wide [B, K, N / K * T, width]: queries of a key-value head as rows."""
    heads = x.to(wide(x.dtype)).unflatten(2, (kv_heads, -1))
    return heads.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_token(x: torch.Tensor, time: int) -> torch.Tensor:
    return x.unflatten(2, (-1, time)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _scores(
    q: torch.Tensor, k: torch.Tensor, time: int, spans: tuple[Spans, Spans],
    *, causal: bool, scale: float,
) -> torch.Tensor:  # fmt: skip
    """[B, K, N / K * T, S], -inf where a query does not see a key."""
    scores = q @ k.transpose(-1, -2) * scale
    if not causal and spans[0].offsets is None:
        return scores
    hidden = _hidden((time, k.shape[2]), spans, causal=causal, device=q.device)
    return scores.unflatten(2, (-1, time)).masked_fill(hidden, -math.inf).flatten(2, 3)


def _hidden(
    shape: tuple[int, int], spans: tuple[Spans, Spans], *, causal: bool, device: torch.device
) -> torch.Tensor:
    """bool [T, S]: which keys a query does not see."""
    if causal and spans[0].offsets is None and spans[1].offsets is None:
        query, key = (num - torch.arange(num, device=device) for num in shape)
        return query[:, None] > key[None, :]
    sequences, to_end = zip(
        *(_from_end(num, s, device) for num, s in zip(shape, spans, strict=True)), strict=True
    )
    hidden = sequences[0][:, None] != sequences[1][None, :]
    if causal:
        hidden = hidden | (to_end[0][:, None] > to_end[1][None, :])
    return hidden


def _from_end(num: int, spans: Spans, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each of `num` tokens, and its distance from that sequence's end."""
    token = torch.arange(num, device=device)
    if spans.offsets is None:
        return torch.zeros_like(token), num - token
    ends = spans.offsets[1:].to(torch.int64)
    sequence = torch.searchsorted(ends, token, right=True)
    return sequence, ends[sequence] - token


class FlashKernel:
    """FlashAttention 2 through torch's own operators, which need equal widths of q, k and v.
    Narrower heads are padded with zeros, which change no product.
    """

    def forward(
        self, qkv: Three, spans: tuple[Spans, Spans], *, causal: bool, scale: float
    ) -> Pair:
        width, packed = _flash_width(qkv), spans[0].offsets is not None
        q, k, v = (_flash_layout(t, width, packed=packed) for t in qkv)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_flash_spans(spans), 0.0, causal, False, scale=scale
        )
        if packed:  # [T, N, E] and [N, T]
            out, lse = out[None], lse[None]
        return out[..., : qkv[2].shape[-1]], lse.transpose(1, 2)

    def backward(
        self, grad_out: torch.Tensor, qkv: Three, out_lse: Pair, spans: tuple[Spans, Spans],
        *, causal: bool, scale: float,
    ) -> Three:  # fmt: skip
        width, packed = _flash_width(qkv), spans[0].offsets is not None
        grad, q, k, v, out = (
            _flash_layout(t, width, packed=packed) for t in (grad_out, *qkv, out_lse[0])
        )
        # The kernel takes rows of lse to be contiguous, without asking.
        lse = out_lse[1].transpose(1, 2).contiguous()
        lse = lse[0] if packed else lse
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # state of dropout
        grads = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *_flash_spans(spans), 0.0, causal, unused, unused, scale=scale
        )
        dq, dk, dv = (g[None] if packed else g for g in grads)
        narrow = qkv[0].shape[-1]
        return dq[..., :narrow], dk[..., :narrow], dv[..., : qkv[2].shape[-1]]


def _flash_width(qkv: Three) -> int:
    widest = max(qkv[0].shape[-1], qkv[2].shape[-1])
    return -(-widest // FLASH_WIDTH_MULTIPLE) * FLASH_WIDTH_MULTIPLE


def _flash_layout(x: torch.Tensor, width: int, *, packed: bool) -> torch.Tensor:
    padded = F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] != width else x
    return padded[0] if packed else padded


def _flash_spans(
    spans: tuple[Spans, Spans],
) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
    """Offsets and longest sequences, as the operators take them."""
    queries, keys = spans
    # With a longest query of 1 the kernel takes it that no sequence is empty.
    return queries.offsets, keys.offsets, max(queries.max_len, 2), max(keys.max_len, 2)


BlockKernel = TorchKernel | FlashKernel


def kernel_for(q: torch.Tensor, v: torch.Tensor) -> BlockKernel:
    """The kernel for queries [..., D] and values [..., E] of this device and dtype."""
    fits = max(q.shape[-1], v.shape[-1]) <= FLASH_MAX_WIDTH
    if q.is_cuda and q.dtype in FLASH_DTYPES and fits:
        return FlashKernel()
    return TorchKernel()


# ---- joined over the ranks of an axis


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in."""
    # Not `torch.promote_types`: it is an operator, which every dispatch mode is asked about.
    return dtype if dtype == torch.float64 else torch.float32


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in another dtype, for results of an `autograd.Function`. Compiled by torch 2.11, one that
    ends in a `to` that changes nothing has gradients of zero: the tensor that comes back is also
    among the intermediates, which are marked to have none.
    """
    return x if x.dtype == dtype else x.to(dtype)


def merge(one: Pair, other: Pair) -> Pair:
    """Join attention over disjoint keys; a query keeps its bits where the other `lse` is -inf."""
    total = torch.logaddexp(one[1], other[1])
    weights = [torch.exp(lse - total)[..., None] for _, lse in (one, other)]
    return one[0] * weights[0] + other[0] * weights[1], total


def _block_forward(block: Block, qkv: Three, kernel: BlockKernel, scale: float) -> Pair:
    """A block's output for all queries, wide; queries outside the block have 0 and -inf."""
    spans = (block.query_spans, block.key_spans)
    out, lse = kernel.forward(_taken(block, qkv), spans, causal=block.causal, scale=scale)
    out = as_dtype(out, wide(out.dtype))
    if block.queries is None:
        return out, lse
    return block.queries.spread(out), block.queries.spread(lse, -math.inf)


def _block_backward(
    block: Block, grad_out: torch.Tensor, qkv: Three, out_lse: Pair,
    kernel: BlockKernel, scale: float,
) -> Three:  # fmt: skip
    """A block's share of the gradients of all queries, keys and values, wide."""
    rows, spans = block.queries, (block.query_spans, block.key_spans)
    if rows is not None:
        grad_out, out_lse = rows.take(grad_out), (rows.take(out_lse[0]), rows.take(out_lse[1]))
    grads = kernel.backward(
        grad_out, _taken(block, qkv), out_lse, spans, causal=block.causal, scale=scale
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


def pack_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Several tensors of one dtype as one flat one, so that they travel together."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unpack_tensors(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `flat` [..., n] in the shapes of `like` behind its leading dims: the inverse."""
    parts = flat.split([t.numel() for t in like], dim=-1)
    return [part.unflatten(-1, t.shape) for part, t in zip(parts, like, strict=True)]


class Hop:
    """A tensor on its way to the next rank of an axis, while that of the rank before arrives."""

    def __init__(self, sent: torch.Tensor, axis: Axis) -> None:
        to_ranks, from_ranks = [0] * axis.size, [0] * axis.size
        to_ranks[(axis.rank + 1) % axis.size] = sent.numel()
        from_ranks[(axis.rank - 1) % axis.size] = sent.numel()
        # Kept until the hop is over: its memory must not be given out again before.
        self._sent = sent
        self._received = torch.empty_like(sent)
        self._work = dist.all_to_all_single(
            self._received, sent, from_ranks, to_ranks, group=axis.group, async_op=True
        )

    def wait(self) -> torch.Tensor:
        """What has arrived; on a GPU the stream waits, not the host."""
        assert self._work is not None
        self._work.wait()
        return self._received


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        plan: ContextPlan, axis: Axis, kernel: BlockKernel, scale: float,
    ) -> torch.Tensor:  # fmt: skip
        # What lies in rows of padding may be anything, NaN too, and 0 times NaN is NaN.
        qkv = q, k, v = plan.blank(q), plan.blank(k), plan.blank(v)
        joined = None
        travelling = pack_tensors((k, v)) if axis.size > 1 else None
        for step in range(axis.size):
            hop = Hop(travelling, axis) if travelling is not None and step + 1 < axis.size else None
            block = plan.ring_block((axis.rank - step) % axis.size)
            part = _block_forward(block, (q, k, v), kernel, scale=scale)
            joined = part if joined is None else merge(joined, part)
            if hop is not None:
                travelling = hop.wait()
                k, v = unpack_tensors(travelling, (k, v))
        assert joined is not None
        # A kernel leaves rows of padding as they come.
        out, lse = as_dtype(plan.blank(joined[0]), q.dtype), plan.blank(joined[1])
        ctx.save_for_backward(*qkv, out, lse)
        ctx.how = plan, axis, kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan, axis, kernel, scale = ctx.how
        grad_out = plan.blank(grad_out)
        block = plan.ring_block(axis.rank)
        dq, dk, dv = _block_backward(block, grad_out, (q, k, v), (out, lse), kernel, scale=scale)
        if axis.size > 1:
            travelling, gathering = pack_tensors((k, v)), pack_tensors((dk, dv))
            for step in range(1, axis.size):
                hop, grad_hop = Hop(travelling, axis), Hop(gathering, axis)
                travelling = hop.wait()
                k, v = unpack_tensors(travelling, (k, v))
                block = plan.ring_block((axis.rank - step) % axis.size)
                more_dq, dk, dv = _block_backward(
                    block, grad_out, (q, k, v), (out, lse), kernel, scale=scale
                )
                dq = dq + more_dq
                gathering = grad_hop.wait() + pack_tensors((dk, dv))
            dk, dv = unpack_tensors(Hop(gathering, axis).wait(), (dk, dv))
        grads = (plan.blank(grad).to(q.dtype) for grad in (dq, dk, dv))
        return *grads, None, None, None, None


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, plan: ContextPlan, axis: Axis
) -> torch.Tensor:
    """Causal attention of this rank's queries to the keys of all ranks of a context axis.

    q, k, v: this rank's part, [B, T, N, D], [B, T, K, D], [B, T, K, E]; N a multiple of K.
    plan: which tokens these are.
    Returns [B, T, N, E]; rows of padding are zero, and so are their gradients.
    """
    assert (plan.size, plan.rank) == (axis.size, axis.rank), f"a plan for {plan.rank} on {axis}"
    assert q.shape[1] == plan.rows.shape[0], f"{q.shape[1]} local tokens of {plan.rows.shape[0]}"
    assert plan.spans.offsets is None or q.shape[0] == 1, q.shape
    scale = 1.0 / math.sqrt(q.shape[-1])
    out = _RingAttention.apply(q, k, v, plan, axis, kernel_for(q, v), scale)
    return cast("torch.Tensor", out)
