"""Causal attention as the model calls it: kernels of blocks, and the choice between them.

    TorchKernel     any device and dtype; scores of a block in memory, in float32 or float64
    FlashKernel     CUDA, bf16 or fp16: FlashAttention 2 (Dao, 2023) as torch carries it

Both are `fsdp_core.parallel.attention_block.BlockKernel`s. A kernel has no state and waits for
nothing, so that a graph can hold it.

B batch, T local tokens, N query heads, K key-value heads, D width of queries and keys, E of values.
"""

import math

import torch
import torch.nn.functional as F

from fsdp_core.parallel.attention_block import BlockKernel, Pair, Three, wide
from fsdp_core.parallel.context import ContextPlan, Spans
from fsdp_core.parallel.gather_attention import gather_attention
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.ring import ring_attention

WAYS = ("ring", "gather")
"""How keys and values reach the ranks of a context axis."""
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_MAX_WIDTH = 256
FLASH_WIDTH_MULTIPLE = 8


class TorchKernel:
    """Plain operators. Scores [B, N, T, S] of a block are in memory, in both passes."""

    def forward(
        self, qkv: Three, spans: tuple[Spans, Spans], *, causal: bool, scale: float
    ) -> Pair:
        """See `BlockKernel.forward`; the output is wide."""
        time, kv_heads = qkv[0].shape[1], qkv[1].shape[2]
        q, k, v = (_by_head(t, kv_heads) for t in qkv)
        scores = _scores(q, k, time, spans, causal=causal, scale=scale)
        lse = torch.logsumexp(scores, -1, keepdim=True)
        out = torch.exp(scores - lse) @ v
        return _by_token(out, time), _by_token(lse, time)[..., 0]

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
        """See `BlockKernel.backward`; gradients are wide."""
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
    """The inverse of `_by_head`, but for the dtype."""
    return x.unflatten(2, (-1, time)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    time: int,
    spans: tuple[Spans, Spans],
    *,
    causal: bool,
    scale: float,
) -> torch.Tensor:
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
        """See `BlockKernel.forward`."""
        width, packed = _flash_width(qkv), spans[0].offsets is not None
        q, k, v = (_flash_layout(t, width, packed=packed) for t in qkv)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_flash_spans(spans), 0.0, causal, False, scale=scale
        )
        # [B, N, T], or [N, T] of packed sequences.
        lse = lse[None] if packed else lse
        out = out[None] if packed else out
        return out[..., : qkv[2].shape[-1]], lse.transpose(1, 2)

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
        """See `BlockKernel.backward`."""
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


def kernel_for(q: torch.Tensor, v: torch.Tensor) -> BlockKernel:
    """The kernel for queries [..., D] and values [..., E] of this device and dtype."""
    fits = max(q.shape[-1], v.shape[-1]) <= FLASH_MAX_WIDTH
    if q.is_cuda and q.dtype in FLASH_DTYPES and fits:
        return FlashKernel()
    return TorchKernel()


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: ContextPlan,
    axis: Axis,
    way: str = "ring",
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention of this rank's queries to the keys of all ranks of a context axis.

    Args:
        q, k, v: this rank's part, [B, T, N, D], [B, T, K, D], [B, T, K, E]; N a multiple of K.
        plan: which tokens these are; `way` "gather" needs one made with `prefixes=True`.
        way: "ring" or "gather".
        scale: of the products of queries and keys, 1 / sqrt(D) unless given.

    Returns:
        [B, T, N, E]; rows of padding are zero.

    Raises:
        ValueError: an unknown way, shapes or dtypes that no attention has, or a plan for other
            tokens or ranks.
    """
    if way not in WAYS:
        raise ValueError(f"Expected way to be one of {', '.join(WAYS)}, got {way!r}.")
    attention = ring_attention if way == "ring" else gather_attention
    return attention(
        q,
        k,
        v,
        plan=plan,
        axis=axis,
        kernel=kernel_for(q, v),
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
    )
