"""Grouped-query causal attention, its heads cut over tp and its tokens over cp.

    x [B, T, H] --enter--> wq, wk, wv --(norm of heads)--> RoPE --> attention over cp --> wo --leave

Every tp rank has whole heads: N / tp of the queries', K / tp of the keys' and values'. B batch, T
local tokens, H hidden, N query heads, K key-value heads, D head_dim, which need not be H / N. Under
sequence parallel x and the output are [B, T / tp, H].
"""

from dataclasses import dataclass

import torch
from torch import nn

from fsdp_core.model.backend import Backend
from fsdp_core.model.microbatch import Part
from fsdp_core.model.norm import make_norm
from fsdp_core.model.rope import RopeTable
from fsdp_core.model.sdpa import causal_attention
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.param_sharding import chunk_of
from fsdp_core.parallel.tensor_parallel import ColumnLinear, RowLinear, enter


@dataclass(frozen=True, kw_only=True)
class GqaShape:
    """Sizes of the whole layer, over all tp ranks.

    Attributes:
        norm_eps: of an RMSNorm on every query and key head (Qwen3); None: there is none.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float | None = None


class GroupedQueryAttention(nn.Module):
    """[B, T, H] -> [B, T, H], without norm and residual.

    Raises:
        ValueError: tp does not divide the heads.
    """

    def __init__(
        self,
        shape: GqaShape,
        rope: RopeTable,
        tp: Axis,
        *,
        sequence_parallel: bool,
        backend: Backend,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel, self.rope = tp, sequence_parallel, rope
        self.head_dim = width = shape.head_dim
        chunk_of(shape.heads, "heads", tp.name, tp.size)
        chunk_of(shape.kv_heads, "kv_heads", tp.name, tp.size)
        cut = {"sequence_parallel": sequence_parallel}
        self.wq = ColumnLinear(shape.hidden, shape.heads * width, tp, **cut)
        self.wk = ColumnLinear(shape.hidden, shape.kv_heads * width, tp, **cut)
        self.wv = ColumnLinear(shape.hidden, shape.kv_heads * width, tp, **cut)
        self.wo = RowLinear(shape.heads * width, shape.hidden, tp, **cut)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if shape.norm_eps is not None:
            # A rank's heads are a part of what these weights act on, whatever cuts the sequence.
            self.q_norm = make_norm(backend, width, shape.norm_eps, tp, sees_part=True)
            self.k_norm = make_norm(backend, width, shape.norm_eps, tp, sees_part=True)

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        whole = enter(x_BTH, self.tp, sequence_parallel=self.sequence_parallel)
        q, k, v = (
            layer(whole, entered=True).unflatten(-1, (-1, self.head_dim))
            for layer in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        positions = part.plan.positions
        q, k = self.rope(q, positions), self.rope(k, positions)
        out = causal_attention(q, k, v, plan=part.plan, axis=part.cp, way=part.way)
        result: torch.Tensor = self.wo(out.flatten(2))
        return result
