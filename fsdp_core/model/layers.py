"""What makes the modules of a decoder's layers: of torch here, of TransformerEngine in `model.te`.

`decoder.make_layers` chooses; attention and experts take what they are made of as arguments. A
library may have norm and projection in one: its norm is then the identity, and its parameters still
have the global names of torch's (`parallel.tensor_parallel`).

| a replicated norm or linear layer sees | gradient of its weight |
| --- | --- |
| all tokens, all of each | whole on every tp rank: nothing to do |
| T / tp tokens (sequence parallel) | a part: summed over tp in the backward pass |
| this rank's heads (norms of q and k) | a part, with and without sequence parallel |

What layers compute in (fp8) is a `Precision`, eagerly and where graphs stand in for parts of them:

    eager     with precision(): the layers            scales move at its end, and in the backward
    warm-up,  with precision.captured(): a part       nothing moves but what kernels of it write
    capture
    replay    begin(); replay; after its backward, what `begin` returned

Whoever captures puts back what those kernels wrote.

Causal attention of a layer: grouped-query or latent, with rotary positions.

    GQA    x --enter--> wq, wk, wv --(norm of heads)--> RoPE --> attention over cp --> wo --leave
    MLA    x --wq_down--> norm --enter--> wq ----------> q = nope | rope      of each head
             --wkv_down-> norm --enter--> wk, wv ------> k nope, v            of each head
             --wk_rope--------- --enter-----------> RoPE k rope               one for all heads

Every tp rank has whole heads: N / tp of the queries', K / tp of the keys' and values'; head_dim
need not be H / N. Under sequence parallel x and the output are [B, T / tp, H].

Of latent attention (DeepSeek-V2, 2024) what lies before `enter` is small, and every tp rank has its
weights whole. With sequence parallel it is computed on T / tp tokens a rank, and only the latents
are gathered; the gradients of its weights are then parts, summed over tp in the backward pass. The
key's part with position is used by the heads of every rank: `enter` sums its gradient. Attention is
that of N key heads, of the width of nope and rope together; value heads may be of another width.

B batch, T local tokens, H hidden, N query heads, K key-value heads, D width of a head.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self, cast

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.config import ModelConfig
from fsdp_core.model.batch import Part
from fsdp_core.model.cp_attention import causal_attention
from fsdp_core.model.moe.experts import Experts, make_fused_experts
from fsdp_core.parallel.context import positions_of, with_tail
from fsdp_core.parallel.mesh import Axes, Axis
from fsdp_core.parallel.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    chunk_of,
    enter,
    reduce_replicated_of,
)

# ---- rotary positions


def rope_angles(seq: int, head_dim: int, theta: float) -> torch.Tensor:
    """Angle of each position and pair, float64 [seq, head_dim / 2]."""
    # On the CPU, whatever the default device: every device then has the same bits.
    wide: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    exponent = torch.arange(0, head_dim, 2, **wide) / head_dim
    return torch.outer(torch.arange(seq, **wide), theta**-exponent)


def rope_tables(
    seq: int, head_dim: int, theta: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine tables, float32 [seq, head_dim / 2]."""
    angles = rope_angles(seq, head_dim, theta)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def apply_rope(x_BTND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate by position (Su et al., 2021), pairs (i, i + d/2), in float32 or wider."""
    wide = torch.promote_types(x_BTND.dtype, torch.float32)
    # As [1, 1, B, T, N, D]: of four or five dims torch.cat, which the gradient of a chunk is, too,
    # guesses a layout from the strides of dims of size 1. Those differ between gradients that
    # autograd adds in place and the same ones under a recorder, where it does not; then sums over
    # them differ in their last bits, and a graph from the eager run.
    a, b = x_BTND.to(wide).unsqueeze(0).unsqueeze(0).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    whole = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return whole.squeeze(0).squeeze(0).to(x_BTND.dtype)


class RopeTable(nn.Module):
    """Cosines and sines of every position, made once and kept as long as the model.

    Positions are looked up inside of what a graph captures: it reads this table, which is always
    there, and positions, which are its input. The table stays in float32 through casts of the
    model; another device makes it anew, as one that comes from meta has no values to copy.

    num_positions: positions 0 to num_positions - 1 may be looked up.
    width: of the part of a head that is turned, even.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, num_positions: int, width: int, theta: float, device: torch.device | None = None
    ) -> None:
        super().__init__()
        assert not width % 2, width
        self._formula = num_positions, width, theta
        cos, sin = rope_tables(*self._formula, device or torch.device("cpu"))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002  (torch's signature)
        """For `Module.to` and its kin: only the device may change."""
        del recurse
        device = fn(self.cos[:1]).device
        if device != self.cos.device:
            self.cos, self.sin = rope_tables(*self._formula, device)
        return self

    def forward(self, x_BTND: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Rotate [B, T, N, D]; a position past the table is the error that torch makes of it."""
        cos, sin = (table.index_select(0, positions_T) for table in (self.cos, self.sin))
        return apply_rope(x_BTND, cos, sin)

    def turn(self, x_BTND: torch.Tensor, part: Part) -> torch.Tensor:
        return cast("torch.Tensor", self(x_BTND, part.plan.positions))


class FusedRope(RopeTable):
    """RoPE as one kernel has it, which finds positions from where sequences begin.

    TransformerEngine's (fused_rope.cu) walks the sequences that offsets name. It writes no row
    behind the last offset, forward or backward: there its results are what was in memory. So it is
    given the tail as one more sequence, whether or not the pack has a slot for it. The gradient
    needs that most: attention blanks what it takes, but nobody blanks what goes to weights. Here,
    in plain operators, rows that are not written are NaN, and all others have the bits of
    `RopeTable`.
    """

    def turn(self, x_BTND: torch.Tensor, part: Part) -> torch.Tensor:
        offsets = None
        if part.packed is not None:
            offsets = with_tail(part.packed[1], part.plan.rows.shape[0] * part.plan.size)
        return cast("torch.Tensor", self(x_BTND, offsets, part.cp))

    def forward(  # type: ignore[override]
        self, x_BTND: torch.Tensor, offsets: torch.Tensor | None, cp: Axis
    ) -> torch.Tensor:
        """Rotate [B, T, N, D]. `offsets`: int32 [S + 1], first token of each sequence over all
        ranks of `cp`, padding counted; None: every row of the batch is one sequence.
        """
        time = x_BTND.shape[1]
        if offsets is None:
            offsets = torch.arange(2, device=x_BTND.device) * (time * cp.size)
        positions, written = positions_of(offsets, time, cp.size, cp.rank)
        cos, sin = (table.index_select(0, positions) for table in (self.cos, self.sin))
        return cast("torch.Tensor", _RotateWritten.apply(x_BTND, cos, sin, written))


class _RotateWritten(torch.autograd.Function):
    """`apply_rope`, and its gradient, in the rows `written`; others are what was in memory."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, written: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin, written)
        return _unwritten_nan(apply_rope(x, cos, sin), written)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, written = ctx.saved_tensors
        return _unwritten_nan(apply_rope(grad, cos, -sin), written), None, None, None


def _unwritten_nan(x_BTND: torch.Tensor, written_T: torch.Tensor) -> torch.Tensor:
    return x_BTND.masked_fill(~written_T[:, None, None], math.nan)


# ---- attention


class MakeNorm(Protocol):
    """Makes an RMSNorm of a width; `sees_part`: of the tokens or heads of this tp rank alone."""

    def __call__(self, width: int, *, sees_part: bool) -> nn.Module:
        """Its gradient is summed over tp where it sees a part."""


MakeLinear = Callable[[int, int], nn.Module]
"""Makes a linear layer that every tp rank has whole: in features, out features."""


class _Attention(nn.Module):
    """What both kinds do with queries, keys and values."""

    wo: nn.Module

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part
    ) -> torch.Tensor:
        """Attention and wo: [B, T, H]."""
        out = causal_attention(q, k, v, plan=part.plan, axis=part.cp)
        result: torch.Tensor = self.wo(out.flatten(2))
        return result


class GroupedQueryAttention(_Attention):
    """[B, T, H] -> [B, T, H], without norm and residual; a library may override what multiplies."""

    def __init__(self, config: ModelConfig, axes: Axes, rope: RopeTable, norm: MakeNorm) -> None:
        super().__init__()
        tp, self.tp, self.rope = axes.tp, axes.tp, rope
        self.head_dim = config.head_dim
        self.heads = chunk_of(config.heads, "heads", tp.name, tp.size)
        self.kv_heads = chunk_of(config.kv_heads, "kv_heads", tp.name, tp.size)
        self._make_projections(config, axes)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.qk_norm:
            # A rank's heads are a part of what these weights act on, whatever cuts the sequence.
            self.q_norm = norm(self.head_dim, sees_part=True)
            self.k_norm = norm(self.head_dim, sees_part=True)

    def _make_projections(self, config: ModelConfig, axes: Axes) -> None:
        hidden, width, kv_width = config.hidden, config.heads, config.kv_heads
        width, kv_width = width * self.head_dim, kv_width * self.head_dim
        self.wq = ColumnLinear(hidden, width, axes.tp)
        self.wk = ColumnLinear(hidden, kv_width, axes.tp)
        self.wv = ColumnLinear(hidden, kv_width, axes.tp)
        self.wo = RowLinear(width, hidden, axes.tp)

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        q, k, v = self._project(x_BTH)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self._attend(self.rope.turn(q, part), self.rope.turn(k, part), v, part)

    def _project(self, x_BTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each [B, T, heads, D]."""
        whole = enter(x_BTH, self.tp)
        q, k, v = (
            layer(whole, entered=True).unflatten(-1, (-1, self.head_dim))
            for layer in (self.wq, self.wk, self.wv)
        )
        return q, k, v


class LatentAttention(_Attention):
    """[B, T, H] -> [B, T, H], without norm and residual; a library may override what multiplies."""

    wq_down: nn.Module | None

    def __init__(
        self, config: ModelConfig, axes: Axes, rope: RopeTable, norm: MakeNorm, linear: MakeLinear
    ) -> None:
        super().__init__()
        tp, self.tp, self.rope = axes.tp, axes.tp, rope
        self.heads = chunk_of(config.heads, "heads", tp.name, tp.size)
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v_dim = config.v_head_dim
        self._make_projections(config, axes, norm, linear)

    def _make_projections(
        self, config: ModelConfig, axes: Axes, norm: MakeNorm, linear: MakeLinear
    ) -> None:
        hidden, heads, latent, q_rank = (
            config.hidden, config.heads, config.kv_lora_rank, config.q_lora_rank,
        )  # fmt: skip
        tp, sees_part = axes.tp, axes.tp.cuts_sequence
        self.wq_down = None if q_rank is None else linear(hidden, q_rank)
        self.q_norm = None if q_rank is None else norm(q_rank, sees_part=sees_part)
        self.wq = ColumnLinear(q_rank or hidden, heads * (self.nope_dim + self.rope_dim), tp)
        self.wkv_down, self.kv_norm = linear(hidden, latent), norm(latent, sees_part=sees_part)
        self.wk_rope = linear(hidden, self.rope_dim)
        self.wk = ColumnLinear(latent, heads * self.nope_dim, tp)
        self.wv = ColumnLinear(latent, heads * self.v_dim, tp)
        self.wo = RowLinear(heads * self.v_dim, hidden, tp)

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        q_nope, q_rope = self._queries(x_BTH).split((self.nope_dim, self.rope_dim), dim=-1)
        q = torch.cat((q_nope, self.rope.turn(q_rope, part)), dim=-1)
        k_nope, v = self._keys_and_values(x_BTH)
        k_rope = enter(self.wk_rope(x_BTH), self.tp)
        k_rope = self.rope.turn(k_rope.unsqueeze(2), part).expand(-1, -1, k_nope.shape[2], -1)
        return self._attend(q, torch.cat((k_nope, k_rope), dim=-1), v, part)

    def _queries(self, x_BTH: torch.Tensor) -> torch.Tensor:
        if self.wq_down is not None and self.q_norm is not None:
            x_BTH = self.q_norm(self.wq_down(x_BTH))
        return self._by_head(self.wq(x_BTH))

    def _keys_and_values(self, x_BTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent = enter(self.kv_norm(self.wkv_down(x_BTH)), self.tp)
        k_nope = self._by_head(self.wk(latent, entered=True))
        return k_nope, self._by_head(self.wv(latent, entered=True))

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, heads * width] -> [B, T, heads, width], this rank's heads."""
        return x.unflatten(-1, (self.heads, -1))


# ---- what modules compute in, and what makes them

Getter = Callable[[], torch.Tensor | None]
"""Looks a tensor up where it is kept; None while there is none."""
After = Callable[[], None]
"""What is to be done once a backward has been replayed."""
Begin = Callable[[], After | None]
"""Called before each forward replay that stands in for the same modules."""


class BackendMissing(RuntimeError):
    """The chosen backend is not installed on this machine."""


class Precision:
    """What a stage's layers compute in: here nothing but their dtype."""

    def __call__(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def captured(self) -> AbstractContextManager[Any]:
        """Of a part that is warmed up or captured: what happens once a pass is left out."""
        return contextlib.nullcontext()

    def replays(self, modules: Iterable[nn.Module]) -> Begin:
        """What replays do for these modules that their forward and backward would have done."""
        del modules
        return _nothing

    def state(self, root: nn.Module) -> Iterator[tuple[str, Getter]]:
        """Names of what kernels of the modules inside write from pass to pass, past torch."""
        del root
        return iter(())

    def remember(self, root: nn.Module) -> Callable[[], None]:
        """Puts the state back to what it is now; what did not exist, to what it began with."""
        del root
        return _nothing


def _nothing() -> None:
    return None


class RmsNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich, 2019), statistics in float32 or wider."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden] in the input's dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)): SwiGLU (Shazeer, 2020), its width cut over tp."""

    def __init__(self, hidden: int, ffn: int, axes: Axes) -> None:
        super().__init__()
        self.tp = axes.tp
        self.gate = ColumnLinear(hidden, ffn, axes.tp)
        self.up = ColumnLinear(hidden, ffn, axes.tp)
        self.down = RowLinear(ffn, hidden, axes.tp)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        whole = enter(x_BTH, self.tp)
        inner = F.silu(self.gate(whole, entered=True)) * self.up(whole, entered=True)
        result: torch.Tensor = self.down(inner)
        return result


class LayerFactory:
    """Makes the modules of one rank's layers, each anew, by torch. `fused_experts`: gate, up and
    down of experts as one autograd function. `fused_rope`: RoPE by a kernel that walks the
    sequences of a pack.
    """

    def __init__(self, *, fused_experts: bool = False, fused_rope: bool = False) -> None:
        self.fused_experts, self.fused_rope = fused_experts, fused_rope

    # ---- what a library has

    def rms_norm(self, width: int, eps: float) -> nn.Module:
        return RmsNorm(width, eps)

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """A linear layer without bias: [..., in] -> [..., out]."""
        return nn.Linear(in_features, out_features, bias=False)

    def rope(self, config: ModelConfig) -> RopeTable:
        """What turns queries and keys: one for all layers of a stage."""
        make = FusedRope if self.fused_rope else RopeTable
        return make(config.seq, config.rope_dim, config.rope_theta)

    def precision(self, axes: Axes) -> Precision:
        """What a stage's layers compute in. All ranks call it together."""
        del axes
        return Precision()

    # ---- parts of layers

    def norm(self, config: ModelConfig, axes: Axes) -> nn.Module:
        """A norm of the residual stream."""
        return self._norm(config, axes, config.hidden, sees_part=axes.tp.cuts_sequence)

    def _norm(self, config: ModelConfig, axes: Axes, width: int, *, sees_part: bool) -> nn.Module:
        return _summed(self.rms_norm(width, config.norm_eps), axes, sees_part=sees_part)

    def _replicated(self, axes: Axes, in_features: int, out_features: int) -> nn.Module:
        layer = self.linear(in_features, out_features)
        return _summed(layer, axes, sees_part=axes.tp.cuts_sequence)

    def attention(
        self, config: ModelConfig, axes: Axes, rope: RopeTable
    ) -> tuple[nn.Module, nn.Module]:
        """What a branch applies one after the other: norm, and attention of x and `Part`."""
        norm = functools.partial(self._norm, config, axes)
        first = self.norm(config, axes)
        if config.attention == "mla":
            linear = functools.partial(self._replicated, axes)
            return first, LatentAttention(config, axes, rope, norm, linear)
        return first, GroupedQueryAttention(config, axes, rope, norm)

    def mlp(self, config: ModelConfig, axes: Axes) -> tuple[nn.Module, nn.Module]:
        return self.norm(config, axes), Mlp(config.hidden, config.ffn, axes)

    def shared_experts(self, config: ModelConfig, axes: Axes) -> nn.Module | None:
        """What every token passes beside the experts, without norm; None: the model has none."""
        if not config.shared_expert_ffn:
            return None
        return Mlp(config.hidden, config.shared_expert_ffn, axes)

    def experts(self, config: ModelConfig, axes: Axes) -> nn.Module:
        """Routed experts of this rank: rows and groups as `moe.dispatcher` has them."""
        make = make_fused_experts if self.fused_experts else Experts
        return make(config.experts, config.hidden, config.expert_ffn, axes)


def _summed(module: nn.Module, axes: Axes, *, sees_part: bool) -> nn.Module:
    """A module whose weight's gradient is summed over tp where it sees a part."""
    if sees_part and axes.tp.size > 1:
        reduce_replicated_of(module, "weight", axes.tp)
    return module
