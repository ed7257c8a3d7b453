"""GQA and MLA by TransformerEngine's layers: norm and projections in one, then attention.

    GQA    LayerNormLinear(norm, wq, wk, wv) -> (norms of heads) -> RoPE -> Core -> Linear(wo)
    MLA    norm -> Linear(wq_down) -> LayerNormLinear(q_norm, wq) -----------> RoPE -> Core -> wo
                -> Linear(wkv_down) -> LayerNormLinear(kv_norm, wk, wv)
                -> wk_rope, of torch: too narrow for fp8

Weights that share an input are parameters of their own (`parameters_split`), so they have the names
and cuts of `model.layers`; TransformerEngine multiplies them as one. Under sequence parallel its
layers gather and scatter along dim 0, so activations [B, T / tp, H] become [tp * B, T / tp, H],
ranks outermost, which only attention must undo.

`Core` is attention itself, by DotProductAttention where it has what is asked for:

| microbatch | by | why |
| --- | --- | --- |
| no context parallel | TransformerEngine | |
| the layout's cp, 16 bits, GQA | TransformerEngine: p2p | its order of chunks is ours |
| another cp than the layout's (dynamic cp) | ours | its modules hold one context group |
| cp and float32 | ours | none of its kernels with cp takes float32 |
| MLA with cp, or packed | ours | few of its kernels take values of another width |
| packed and long, deterministic | ours | its backward would want over 100 GiB |

Its context parallelism wants each sequence in 2 * cp chunks, rank r with chunks r and
2 * cp - 1 - r (`attn_forward_func_with_cp`, "DualChunkSwap"), as `parallel.context` has them.
Packed sequences go by logical and padded offsets of the whole pack, before it is cut over cp.
Nothing is dropped in attention, so TransformerEngine draws no random numbers.
"""

import functools
from collections.abc import Callable
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.config import ModelConfig
from fsdp_core.model import layers
from fsdp_core.model.batch import Part
from fsdp_core.model.cp_attention import causal_attention
from fsdp_core.model.layers import MakeLinear, MakeNorm, RopeTable
from fsdp_core.parallel.mesh import Axes, Axis
from fsdp_core.parallel.tensor_parallel import Cut, Stretch, reduce_replicated_of, set_stretches

_NARROW = (torch.bfloat16, torch.float16)
_MOST_SCORES = 1 << 30
"""Of packed sequences with deterministic kernels on Hopper (its utils.py, "Determinism")."""
_BROKEN_UP_TO, _LENGTHS = 91500, 128
"""cuDNN whose captured backward passes need lengths of that multiple."""


# ---- the order of tokens, and options


def by_sequence(x: torch.Tensor, tp: Axis) -> torch.Tensor:
    """[tp * B, T / tp, ...] as a column layer returns it -> [B, T, ...]."""
    if not tp.cuts_sequence:
        return x
    return x.unflatten(0, (tp.size, -1)).transpose(0, 1).flatten(1, 2)


def by_rank(x: torch.Tensor, tp: Axis) -> torch.Tensor:
    """[B, T, ...] -> [tp * B, T / tp, ...] as a row layer wants it: the inverse."""
    if not tp.cuts_sequence:
        return x
    return x.unflatten(1, (tp.size, -1)).transpose(0, 1).flatten(0, 1)


def layer_options(tp: Axis) -> dict[str, Any]:
    """Keywords of all of TransformerEngine's linear layers: no bias, float32 main weights."""
    return {
        "bias": False,
        "params_dtype": torch.float32,
        "tp_group": tp.group if tp.size > 1 else None,
        "sequence_parallel": tp.cuts_sequence,
    }


def columns(tp: Axis) -> tuple[Cut, ...]:
    """The cut of a layer whose outputs are cut."""
    return (Cut(tp.name, 0, tp.size, tp.rank),)


def rows(tp: Axis) -> tuple[Cut, ...]:
    """The cut of a layer whose inputs are cut."""
    return (Cut(tp.name, 1, tp.size, tp.rank),)


# ---- attention itself


def _require_capturable(length: int) -> None:
    """Refuse a capture that this cuDNN cannot hold, of the kernel that is chosen eagerly.
    TransformerEngine knows of it in graphs of its own only (`nvte_get_fused_attn_backend`).
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
            return causal_attention(q, k, v, plan=plan, axis=part.cp).flatten(2)
        self._set_context(part)
        if part.packed is None:
            _require_capturable(plan.rows.shape[0] * plan.size)
            out = self.attention(q.contiguous(), k.contiguous(), v.contiguous())
            return cast("torch.Tensor", out)
        return self._packed(q, k, v, part)

    def _set_context(self, part: Part) -> None:
        if part.cp.size > 1:
            self.attention.set_context_parallel_group(
                part.cp.group, self._ranks, self._stream, "p2p"
            )
        elif self._cp.size > 1:
            self.attention.set_context_parallel_group(None, None, None)

    def _packed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part
    ) -> torch.Tensor:
        assert part.packed is not None
        plan, (offsets, padded) = part.plan, part.packed
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


# ---- rotary positions


class FusedRope(layers.FusedRope):
    """By TransformerEngine's kernel, which takes sine and cosine of float32 angles by itself. The
    kernel rounds elsewhere than torch's operators do. Angles are made once: a graph reads them.
    `te`: the module `transformer_engine.pytorch`.
    """

    angles: torch.Tensor

    def __init__(self, te: Any, num_positions: int, width: int, theta: float) -> None:
        super().__init__(num_positions, width, theta)
        self._turned = te.attention.rope.apply_rotary_pos_emb
        self.register_buffer("angles", self._angles(), persistent=False)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002  (torch's signature)
        super()._apply(fn, recurse)
        if self.angles.device != self.cos.device:
            self.angles = self._angles().to(self.cos.device)
        return self

    def _angles(self) -> torch.Tensor:
        """Float32 [positions, 1, 1, width], for either half of a head."""
        angles = layers.rope_angles(*self._formula)
        return torch.cat((angles, angles), -1).float()[:, None, None]

    def forward(  # type: ignore[override]
        self, x_BTND: torch.Tensor, offsets: torch.Tensor | None, cp: Axis
    ) -> torch.Tensor:
        options = {"fused": True, "cp_size": cp.size, "cp_rank": cp.rank}
        if offsets is None:
            return cast("torch.Tensor", self._turned(x_BTND, self.angles, "bshd", **options))
        turned = self._turned(x_BTND[0], self.angles, "thd", cu_seqlens=offsets, **options)
        return cast("torch.Tensor", turned[None])


# ---- layers


def projection(
    te: Any, kind: str, in_features: int, out_features: int, tp: Axis, **options: Any
) -> nn.Module:
    """A te.Linear whose outputs (`kind` column) or inputs (`row`) are cut over tp."""
    options |= layer_options(tp)
    layer: nn.Module = te.Linear(in_features, out_features, parallel_mode=kind, **options)
    return layer


def _normed(te: Any, in_features: int, widths: dict[str, int], tp: Axis, eps: float) -> nn.Module:
    """An RMSNorm and the layers `widths` behind it, whose outputs are cut over tp."""
    layer: nn.Module = te.LayerNormLinear(
        in_features,
        sum(widths.values()),
        eps=eps,
        normalization="RMSNorm",
        zero_centered_gamma=False,
        parallel_mode="column",
        parameters_split=widths,
        **layer_options(tp),
    )
    if tp.cuts_sequence:
        reduce_replicated_of(layer, "layer_norm_weight", tp)
    return layer


class _Attention(nn.Module):
    """Queries, keys and values through `Core` and wo."""

    tp: Axis
    core: Core
    wo: nn.Module

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part
    ) -> torch.Tensor:
        result: torch.Tensor = self.wo(by_rank(self.core(q, k, v, part), self.tp))
        return result


class GroupedQueryAttention(_Attention, layers.GroupedQueryAttention):
    """[B, T, H] -> [B, T, H], norm included, residual not. `te`: the module
    `transformer_engine.pytorch`.
    """

    def __init__(
        self, te: Any, config: ModelConfig, axes: Axes, rope: RopeTable, norm: MakeNorm
    ) -> None:
        self._te = te
        super().__init__(config, axes, rope, norm)

    def _make_projections(self, config: ModelConfig, axes: Axes) -> None:
        te, width, tp = self._te, self.head_dim, axes.tp
        self._widths = (self.heads * width, self.kv_heads * width, self.kv_heads * width)
        q_width, kv_width = config.heads * width, config.kv_heads * width
        names = {"wq": q_width, "wk": kv_width, "wv": kv_width}
        self.qkv = _normed(te, config.hidden, names, tp, config.norm_eps)
        self.wo = projection(te, "row", q_width, config.hidden, tp)
        self.core = Core(te, self.heads, self.kv_heads, (width, width), axes.cp)
        table = {f"qkv.{n}_weight": Stretch(f"{n}.weight", columns(tp)) for n in names}
        set_stretches(self, table | {
            "qkv.layer_norm_weight": Stretch("../norm.weight"),
            "wo.weight": Stretch("wo.weight", rows(tp)),
        })  # fmt: skip

    def _project(self, x_BTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        projected = by_sequence(self.qkv(x_BTH), self.tp)
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)) for t in projected.split(self._widths, dim=-1)
        )
        return (q, k, v) if self.q_norm is None else (q.contiguous(), k.contiguous(), v)


class LatentAttention(_Attention, layers.LatentAttention):
    """[B, T, H] -> [B, T, H], norm included, residual not. `te`: the module
    `transformer_engine.pytorch`.
    """

    def __init__(
        self, te: Any, config: ModelConfig, axes: Axes, rope: RopeTable,
        norm: MakeNorm, linear: MakeLinear,
    ) -> None:  # fmt: skip
        self._te = te
        super().__init__(config, axes, rope, norm, linear)

    def _make_projections(
        self, config: ModelConfig, axes: Axes, norm: MakeNorm, linear: MakeLinear
    ) -> None:
        te, tp, heads, hidden = self._te, axes.tp, config.heads, config.hidden
        q_rank = config.q_lora_rank
        q_width = heads * (self.nope_dim + self.rope_dim)
        self.norm = norm(hidden, sees_part=tp.cuts_sequence)
        self.wq_down = None
        names: dict[str, Stretch] = {"norm.weight": Stretch("../norm.weight")}
        wq: nn.Module
        if q_rank is None:
            wq = projection(te, "column", hidden, q_width, tp)
            names["wq.weight"] = Stretch("wq.weight", columns(tp))
        else:
            self.wq_down = linear(hidden, q_rank)
            wq = _normed(te, q_rank, {"wq": q_width}, tp, config.norm_eps)
            names["wq.layer_norm_weight"] = Stretch("q_norm.weight")
            names["wq.wq_weight"] = Stretch("wq.weight", columns(tp))
        self.wq = wq  # type: ignore[assignment]
        self.wkv_down = linear(hidden, config.kv_lora_rank)
        self.wk_rope = nn.Linear(hidden, self.rope_dim, bias=False)
        if tp.cuts_sequence:
            reduce_replicated_of(self.wk_rope, "weight", tp)
        self._widths = (self.heads * self.nope_dim, self.heads * self.v_dim)
        both = {"wk": heads * self.nope_dim, "wv": heads * self.v_dim}
        self.wkv = _normed(te, config.kv_lora_rank, both, tp, config.norm_eps)
        self.wo = projection(te, "row", heads * self.v_dim, hidden, tp)
        widths = (self.nope_dim + self.rope_dim, self.v_dim)
        self.core = Core(te, self.heads, self.heads, widths, axes.cp)
        set_stretches(self, names | {
            "wkv.layer_norm_weight": Stretch("kv_norm.weight"),
            "wkv.wk_weight": Stretch("wk.weight", columns(tp)),
            "wkv.wv_weight": Stretch("wv.weight", columns(tp)),
            "wo.weight": Stretch("wo.weight", rows(tp)),
        })  # fmt: skip

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        return super().forward(self.norm(x_BTH), part)

    def _queries(self, x_BTH: torch.Tensor) -> torch.Tensor:
        q = self.wq(x_BTH if self.wq_down is None else self.wq_down(x_BTH))
        return self._by_head(by_sequence(q, self.tp))

    def _keys_and_values(self, x_BTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = by_sequence(self.wkv(self.wkv_down(x_BTH)), self.tp)
        k_nope, v = (self._by_head(t) for t in both.split(self._widths, dim=-1))
        return k_nope, v
