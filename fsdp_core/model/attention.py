"""Grouped-query causal attention, its heads cut over tp and its tokens over cp.

    x [B, T, H] --enter--> wq, wk, wv --(norm of heads)--> RoPE --> attention over cp --> wo --leave

Every tp rank has whole heads: N / tp of the queries', K / tp of the keys' and values'. B batch, T
local tokens, H hidden, N query heads, K key-value heads, D head_dim, which need not be H / N. Under
sequence parallel x and the output are [B, T / tp, H].

Multi-head latent attention (DeepSeek-V2, 2024), its heads cut over tp and its tokens over cp.

    x --wq_down--> norm --enter--> wq ----------------> q = nope | rope      of each head
      --wkv_down-> norm --enter--> wk, wv ------------> k nope, v            of each head
      --wk_rope--------- --enter-----------> RoPE ----> k rope               one for all heads

Without `q_lora_rank` wq takes x itself. What lies before `enter` is small and every tp rank has its
weights whole. With sequence parallel it is computed on T / tp tokens a rank, and only the latents
are gathered; the gradients of its weights are then parts, summed over tp in the backward pass. The
key's part with position is used by the heads of every rank: `enter` sums its gradient.

B batch, T local tokens, H hidden, N heads. Attention is that of N key heads, of the width of nope
and rope together; the value heads may be of another width.
"""

from dataclasses import dataclass

import torch
from torch import nn

from fsdp_core.model.backend import Backend
from fsdp_core.model.batch import Part
from fsdp_core.model.cp_attention import causal_attention
from fsdp_core.model.norm import make_norm, make_replicated_linear
from fsdp_core.model.rope import RopeTable
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
        out = causal_attention(q, k, v, plan=part.plan, axis=part.cp)
        result: torch.Tensor = self.wo(out.flatten(2))
        return result


@dataclass(frozen=True, kw_only=True)
class MlaShape:
    """Sizes of the whole layer, over all tp ranks.

    Attributes:
        q_lora_rank: width of the queries' latent; None: queries come from the hidden state.
        nope_dim, rope_dim: parts of a query or key head without and with position.
    """

    hidden: int
    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    norm_eps: float


class LatentAttention(nn.Module):
    """[B, T, H] -> [B, T, H], without norm and residual; [B, T / tp, H] under sequence parallel.

    Raises:
        ValueError: tp does not divide the heads.
    """

    def __init__(
        self,
        shape: MlaShape,
        rope: RopeTable,
        tp: Axis,
        *,
        sequence_parallel: bool,
        backend: Backend,
    ) -> None:
        super().__init__()
        self.shape, self.tp, self.sequence_parallel, self.rope = shape, tp, sequence_parallel, rope
        hidden, heads, latent = shape.hidden, shape.heads, shape.kv_lora_rank
        chunk_of(heads, "heads", tp.name, tp.size)
        cut = {"sequence_parallel": sequence_parallel}

        def down(width: int) -> nn.Module:
            return make_replicated_linear(backend, hidden, width, tp, sees_part=sequence_parallel)

        def norm(width: int) -> nn.Module:
            return make_norm(backend, width, shape.norm_eps, tp, sees_part=sequence_parallel)

        q_rank = shape.q_lora_rank
        self.wq_down = None if q_rank is None else down(q_rank)
        self.q_norm = None if q_rank is None else norm(q_rank)
        q_width = heads * (shape.nope_dim + shape.rope_dim)
        self.wq = ColumnLinear(q_rank or hidden, q_width, tp, **cut)
        self.wkv_down, self.kv_norm = down(latent), norm(latent)
        self.wk_rope = down(shape.rope_dim)
        self.wk = ColumnLinear(latent, heads * shape.nope_dim, tp, **cut)
        self.wv = ColumnLinear(latent, heads * shape.v_dim, tp, **cut)
        self.wo = RowLinear(heads * shape.v_dim, hidden, tp, **cut)

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        shape, positions = self.shape, part.plan.positions
        q = self._heads(self.wq(self._query_latent(x_BTH)))
        q_nope, q_rope = q.split((shape.nope_dim, shape.rope_dim), dim=-1)
        q = torch.cat((q_nope, self.rope(q_rope, positions)), dim=-1)
        latent = enter(
            self.kv_norm(self.wkv_down(x_BTH)), self.tp, sequence_parallel=self.sequence_parallel
        )
        k_nope = self._heads(self.wk(latent, entered=True))
        v = self._heads(self.wv(latent, entered=True))
        k_rope = enter(self.wk_rope(x_BTH), self.tp, sequence_parallel=self.sequence_parallel)
        k_rope = self.rope(k_rope.unsqueeze(2), positions).expand(-1, -1, k_nope.shape[2], -1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        out = causal_attention(q, k, v, plan=part.plan, axis=part.cp)
        result: torch.Tensor = self.wo(out.flatten(2))
        return result

    def _query_latent(self, x_BTH: torch.Tensor) -> torch.Tensor:
        if self.wq_down is None or self.q_norm is None:
            return x_BTH
        latent: torch.Tensor = self.q_norm(self.wq_down(x_BTH))
        return latent

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, heads * width] -> [B, T, heads, width], this rank's heads."""
        return x.unflatten(-1, (self.shape.heads // self.tp.size, -1))
