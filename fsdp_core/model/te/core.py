"""Attention itself by TransformerEngine's DotProductAttention, where it has what is asked for.

| microbatch | by | why |
| --- | --- | --- |
| no context parallel | TransformerEngine | |
| the layout's cp, 16 bits, GQA | TransformerEngine: p2p, all_gather | its order of chunks is ours |
| another cp than the layout's (dynamic cp) | ours | its modules hold one context group |
| cp and float32 | ours | none of its kernels with cp takes float32 |
| MLA with cp, or packed | ours | few of its kernels take values of another width |
| packed and long, deterministic | ours | its backward would want over 100 GiB |

Its context parallelism wants each sequence in 2 * cp chunks, rank r with chunks r and
2 * cp - 1 - r (`attn_forward_func_with_cp`, "DualChunkSwap"), which is `parallel.context`'s order.
Packed sequences go by logical and padded offsets of the whole pack, before it is cut over cp.

Nothing is dropped in attention: dropout of the model is that of branches, which draws from
`parallel.rng` whatever the backend. So TransformerEngine draws no random numbers, and there is no
tracker of its states to agree with ours.
"""

import functools
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.model.microbatch import Part
from fsdp_core.model.sdpa import causal_attention
from fsdp_core.parallel.context import ContextPlan
from fsdp_core.parallel.mesh import Axis

_WAYS = {"ring": "p2p", "gather": "all_gather"}
_NARROW = (torch.bfloat16, torch.float16)
_MOST_SCORES = 1 << 30
"""Of packed sequences with deterministic kernels on Hopper (its utils.py, "Determinism")."""
_BROKEN_UP_TO, _LENGTHS = 91500, 128
"""cuDNN whose captured backward passes need lengths of that multiple."""


def _require_capturable(length: int) -> None:
    """Refuse a capture that this cuDNN cannot hold, of the kernel that is chosen eagerly.

    TransformerEngine knows of it in graphs of its own only (`nvte_get_fused_attn_backend`).

    Raises:
        RuntimeError: see above.
    """
    version = torch.backends.cudnn.version()
    if not length % _LENGTHS or version is None or version > _BROKEN_UP_TO:
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"Expected sequences of a multiple of {_LENGTHS} tokens, as attention of cuDNN "
            f"{version} has no backward pass of others that can be captured, got {length}. Take "
            "cuDNN 9.15.1 or newer, or other sequences."
        )


@functools.cache
def _second_stream() -> Any:
    """What context parallelism computes every other step on: one, as torch has only 32 in all."""
    return torch.cuda.Stream() if torch.cuda.is_available() else None


class Core(nn.Module):
    """Causal attention of [B, T, N, D] queries to [B, T, K, D] keys and [B, T, K, E] values.

    Args:
        te: the module `transformer_engine.pytorch`.
        heads, kv_heads: of this rank.
        widths: D and E.
        cp: the layout's context axis.
    """

    def __init__(
        self, te: Any, heads: int, kv_heads: int, widths: tuple[int, int], cp: Axis
    ) -> None:
        super().__init__()
        self._cp, self._is_even, self._heads = cp, widths[0] == widths[1], heads
        self.attention = te.DotProductAttention(
            heads,
            widths[0] if self._is_even else widths,
            num_gqa_groups=kv_heads,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal",
        )
        if cp.size > 1:
            self._ranks = dist.get_process_group_ranks(cp.group)
            self._stream = _second_stream()

    def why_ours(self, part: Part, dtype: torch.dtype) -> str | None:
        """Why TransformerEngine cannot attend for this microbatch; None where it does."""
        size = part.cp.size
        if size > 1 and part.cp.group is not self._cp.group:
            return "another context group than the layout's: TransformerEngine's modules hold one"
        if size > 1 and dtype not in _NARROW:
            return f"context parallelism in {dtype}: TransformerEngine has it in 16 bits only"
        if not self._is_even and (size > 1 or part.packed is not None):
            return "values of another width than keys, with context parallelism or packed"
        return None if part.packed is None else self._why_not_packed(part, dtype)

    def _why_not_packed(self, part: Part, dtype: torch.dtype) -> str | None:
        assert part.packed is not None
        if dtype not in _NARROW:
            return f"packed sequences in {dtype}: TransformerEngine has them in 16 bits only"
        slots, longest = part.packed[0].shape[0] - 1, part.plan.rows.shape[0] * part.plan.size
        is_large = slots * self._heads * longest**2 >= _MOST_SCORES
        if is_large and getattr(self.attention, "deterministic", False):
            return "packed sequences of this length with deterministic kernels: no room"
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part
    ) -> torch.Tensor:
        """-> [B, T, N * E]."""
        plan = part.plan
        if self.why_ours(part, q.dtype) is not None:
            return causal_attention(q, k, v, plan=plan, axis=part.cp, way=part.way).flatten(2)
        self._set_context(part)
        if part.packed is None:
            _require_capturable(plan.rows.shape[0] * plan.size)
            out = self.attention(q.contiguous(), k.contiguous(), v.contiguous())
            return cast("torch.Tensor", out)
        return self._packed(q, k, v, part, plan)

    def _set_context(self, part: Part) -> None:
        if part.cp.size > 1:
            self.attention.set_context_parallel_group(
                part.cp.group, self._ranks, self._stream, _WAYS[part.way]
            )
        elif self._cp.size > 1:
            self.attention.set_context_parallel_group(None, None, None)

    def _packed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, plan: ContextPlan
    ) -> torch.Tensor:
        assert part.packed is not None
        offsets, padded = part.packed
        longest = plan.rows.shape[0] * plan.size
        # Kernels neither read nor write rows of padding, in either direction: whatever is in them
        # must not count, and comes out as zero.
        q, k, v = (plan.blank(t)[0].contiguous() for t in (q, k, v))
        out = self.attention(
            q,
            k,
            v,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            pad_between_seqs=True,
        )
        return plan.blank(out[None])
