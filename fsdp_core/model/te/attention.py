"""Attention itself by TransformerEngine's DotProductAttention, where it has what is asked for.

| microbatch | by | why |
| --- | --- | --- |
| no context parallel | TransformerEngine | |
| the layout's cp, 16 bits, GQA | TransformerEngine: p2p | its order of chunks is ours |
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

GQA and MLA with TransformerEngine's layers: norm and projections in one, then attention.

    GQA    LayerNormLinear(norm, wq, wk, wv) -> (norms of heads) -> RoPE -> Core -> Linear(wo)
    MLA    norm -> Linear(wq_down) -> LayerNormLinear(q_norm, wq) -----------> RoPE -> Core -> wo
                -> Linear(wkv_down) -> LayerNormLinear(kv_norm, wk, wv)
                -> wk_rope, of torch: too narrow for fp8

Weights that share an input are parameters of their own (`parameters_split`), so they have the names
and cuts of `model.gqa` and `model.mla`; TransformerEngine multiplies them as one.
"""

import functools
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.model.attention import GqaShape, MlaShape
from fsdp_core.model.backend import Backend, TorchBackend
from fsdp_core.model.batch import Part
from fsdp_core.model.cp_attention import causal_attention
from fsdp_core.model.norm import make_norm, make_replicated_linear
from fsdp_core.model.rope import RopeTable
from fsdp_core.parallel.context import ContextPlan
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.param_sharding import Cut, Stretch, chunk_of, set_stretches
from fsdp_core.parallel.tensor_parallel import enter, reduce_replicated_of


def by_sequence(x: torch.Tensor, tp: Axis, *, sequence_parallel: bool) -> torch.Tensor:
    """[tp * B, T / tp, ...] as a column layer returns it -> [B, T, ...]."""
    if not sequence_parallel or tp.size == 1:
        return x
    return x.unflatten(0, (tp.size, -1)).transpose(0, 1).flatten(1, 2)


def by_rank(x: torch.Tensor, tp: Axis, *, sequence_parallel: bool) -> torch.Tensor:
    """[B, T, ...] -> [tp * B, T / tp, ...] as a row layer wants it: the inverse."""
    if not sequence_parallel or tp.size == 1:
        return x
    return x.unflatten(1, (tp.size, -1)).transpose(0, 1).flatten(0, 1)


def layer_options(tp: Axis, *, sequence_parallel: bool) -> dict[str, Any]:
    """Keywords of all of TransformerEngine's linear layers: no bias, float32 main weights."""
    return {
        "bias": False,
        "params_dtype": torch.float32,
        "tp_group": tp.group if tp.size > 1 else None,
        "sequence_parallel": sequence_parallel and tp.size > 1,
    }


def columns(tp: Axis) -> tuple[Cut, ...]:
    """The cut of a layer whose outputs are cut."""
    return (Cut(tp.name, 0, tp.size, tp.rank),)


def rows(tp: Axis) -> tuple[Cut, ...]:
    """The cut of a layer whose inputs are cut."""
    return (Cut(tp.name, 1, tp.size, tp.rank),)


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
            return causal_attention(q, k, v, plan=plan, axis=part.cp).flatten(2)
        self._set_context(part)
        if part.packed is None:
            _require_capturable(plan.rows.shape[0] * plan.size)
            out = self.attention(q.contiguous(), k.contiguous(), v.contiguous())
            return cast("torch.Tensor", out)
        return self._packed(q, k, v, part, plan)

    def _set_context(self, part: Part) -> None:
        if part.cp.size > 1:
            self.attention.set_context_parallel_group(
                part.cp.group, self._ranks, self._stream, "p2p"
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


class _Split:
    """A layer's options on a layout: what every projection is made with."""

    def __init__(self, te: Any, tp: Axis, eps: float, *, sequence_parallel: bool) -> None:
        self._te, self._tp, self._eps = te, tp, eps
        self._sp = sequence_parallel and tp.size > 1
        self._options = layer_options(tp, sequence_parallel=sequence_parallel)

    def normed(self, in_features: int, widths: dict[str, int]) -> nn.Module:
        """An RMSNorm and the layers `widths` behind it, whose outputs are cut over tp."""
        layer: nn.Module = self._te.LayerNormLinear(
            in_features,
            sum(widths.values()),
            eps=self._eps,
            normalization="RMSNorm",
            zero_centered_gamma=False,
            parallel_mode="column",
            parameters_split=widths,
            **self._options,
        )
        if self._sp:
            reduce_replicated_of(layer, ["layer_norm_weight"], self._tp)
        return layer

    def column(self, in_features: int, out_features: int) -> nn.Module:
        """A layer whose outputs are cut over tp."""
        layer: nn.Module = self._te.Linear(
            in_features, out_features, parallel_mode="column", **self._options
        )
        return layer

    def row(self, in_features: int, out_features: int) -> nn.Module:
        """A layer whose inputs are cut over tp."""
        layer: nn.Module = self._te.Linear(
            in_features, out_features, parallel_mode="row", **self._options
        )
        return layer


class GroupedQueryAttention(nn.Module):
    """[B, T, H] -> [B, T, H], norm included, residual not; see `model.gqa` for the layout.

    Args:
        te: the module `transformer_engine.pytorch`.
        eps: of the norm before the projections.

    Raises:
        ValueError: tp does not divide the heads.
    """

    def __init__(
        self,
        te: Any,
        shape: GqaShape,
        rope: RopeTable,
        axes: tuple[Axis, Axis],
        eps: float,
        *,
        sequence_parallel: bool,
        backend: Backend,
    ) -> None:
        super().__init__()
        tp, cp = axes
        self.tp, self.sequence_parallel, self.rope = tp, sequence_parallel, rope
        self.head_dim = width = shape.head_dim
        heads = chunk_of(shape.heads, "heads", tp.name, tp.size)
        kv_heads = chunk_of(shape.kv_heads, "kv_heads", tp.name, tp.size)
        self._widths = (heads * width, kv_heads * width, kv_heads * width)
        make = _Split(te, tp, eps, sequence_parallel=sequence_parallel)
        kv_width = shape.kv_heads * width
        self.qkv = make.normed(
            shape.hidden, {"wq": shape.heads * width, "wk": kv_width, "wv": kv_width}
        )
        self.wo = make.row(shape.heads * width, shape.hidden)
        self.core = Core(te, heads, kv_heads, (width, width), cp)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if shape.norm_eps is not None:
            self.q_norm = make_norm(backend, width, shape.norm_eps, tp, sees_part=True)
            self.k_norm = make_norm(backend, width, shape.norm_eps, tp, sees_part=True)
        table = {f"qkv.{n}_weight": Stretch(f"{n}.weight", columns(tp)) for n in ("wq", "wk", "wv")}
        set_stretches(self, table | {
            "qkv.layer_norm_weight": Stretch("../norm.weight"),
            "wo.weight": Stretch("wo.weight", rows(tp)),
        })  # fmt: skip

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        cut: dict[str, Any] = {"sequence_parallel": self.sequence_parallel}
        projected = by_sequence(self.qkv(x_BTH), self.tp, **cut)
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)) for t in projected.split(self._widths, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        positions = part.plan.positions
        out = self.core(self.rope(q, positions), self.rope(k, positions), v, part)
        result: torch.Tensor = self.wo(by_rank(out, self.tp, **cut))
        return result


class LatentAttention(nn.Module):
    """[B, T, H] -> [B, T, H], norm included, residual not; see `model.mla` for the layout.

    Args:
        te: the module `transformer_engine.pytorch`.

    Raises:
        ValueError: tp does not divide the heads.
    """

    def __init__(
        self,
        te: Any,
        shape: MlaShape,
        rope: RopeTable,
        axes: tuple[Axis, Axis],
        *,
        sequence_parallel: bool,
        backend: Backend,
    ) -> None:
        super().__init__()
        tp, cp = axes
        self.shape, self.tp, self.sequence_parallel, self.rope = shape, tp, sequence_parallel, rope
        heads, hidden = shape.heads, shape.hidden
        local = chunk_of(heads, "heads", tp.name, tp.size)
        make = _Split(te, tp, shape.norm_eps, sequence_parallel=sequence_parallel)
        part: dict[str, Any] = {"sees_part": sequence_parallel}
        q_width = heads * (shape.nope_dim + shape.rope_dim)
        self.norm = make_norm(backend, hidden, shape.norm_eps, tp, **part)
        self.wq_down: nn.Module | None = None
        names: dict[str, Stretch] = {"norm.weight": Stretch("../norm.weight")}
        if shape.q_lora_rank is None:
            self.wq = make.column(hidden, q_width)
            names["wq.weight"] = Stretch("wq.weight", columns(tp))
        else:
            self.wq_down = make_replicated_linear(backend, hidden, shape.q_lora_rank, tp, **part)
            self.wq = make.normed(shape.q_lora_rank, {"wq": q_width})
            names["wq.layer_norm_weight"] = Stretch("q_norm.weight")
            names["wq.wq_weight"] = Stretch("wq.weight", columns(tp))
        self.wkv_down = make_replicated_linear(backend, hidden, shape.kv_lora_rank, tp, **part)
        self.wk_rope = make_replicated_linear(TorchBackend(), hidden, shape.rope_dim, tp, **part)
        self._widths = (local * shape.nope_dim, local * shape.v_dim)
        self.wkv = make.normed(
            shape.kv_lora_rank, {"wk": heads * shape.nope_dim, "wv": heads * shape.v_dim}
        )
        self.wo = make.row(heads * shape.v_dim, hidden)
        self.core = Core(te, local, local, (shape.nope_dim + shape.rope_dim, shape.v_dim), cp)
        set_stretches(self, names | {
            "wkv.layer_norm_weight": Stretch("kv_norm.weight"),
            "wkv.wk_weight": Stretch("wk.weight", columns(tp)),
            "wkv.wv_weight": Stretch("wv.weight", columns(tp)),
            "wo.weight": Stretch("wo.weight", rows(tp)),
        })  # fmt: skip

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        shape, positions, cut = self.shape, part.plan.positions, self.sequence_parallel
        x_BTH = self.norm(x_BTH)
        q = self._heads(self.wq(x_BTH if self.wq_down is None else self.wq_down(x_BTH)))
        q_nope, q_rope = q.split((shape.nope_dim, shape.rope_dim), dim=-1)
        q = torch.cat((q_nope, self.rope(q_rope, positions)), dim=-1)
        both = by_sequence(self.wkv(self.wkv_down(x_BTH)), self.tp, sequence_parallel=cut)
        k_nope, v = (t.unflatten(-1, (q.shape[2], -1)) for t in both.split(self._widths, dim=-1))
        k_rope = enter(self.wk_rope(x_BTH), self.tp, sequence_parallel=cut)
        k_rope = self.rope(k_rope.unsqueeze(2), positions).expand(-1, -1, k_nope.shape[2], -1)
        out = self.core(q, torch.cat((k_nope, k_rope), dim=-1), v, part)
        result: torch.Tensor = self.wo(by_rank(out, self.tp, sequence_parallel=cut))
        return result

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, heads * width] in the layers' order of tokens -> [B, T, heads, width]."""
        whole = by_sequence(x, self.tp, sequence_parallel=self.sequence_parallel)
        return whole.unflatten(-1, (self.shape.heads // self.tp.size, -1))
