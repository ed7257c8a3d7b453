"""TransformerEngine's modules as its documentation has them, in plain torch, on any device.

For what does not need its kernels: names and cuts of parameters, the order of tokens, groups that
are passed, offsets of packed sequences. Signatures are those of version 2.20, as far as they are
used; fp8 is in `te_fp8_stand_in`. Sequence parallel gathers and scatters dim 0, whatever that is;
context parallel takes each sequence in 2 * cp chunks, rank r those of r and 2 * cp - 1 - r.
"""

import math
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_core.model.layers import Precision
from fsdp_core.model.te import fp8 as precision
from fsdp_core.model.te.layers import TeLayers
from fsdp_core.parallel.collectives import copy_to, gather_from, reduce_from, reduce_scatter_to
from fsdp_core.parallel.mesh import Axes, Axis
from tests.dist import te_fp8_stand_in as fp8


def axis_of(group: Any) -> Axis:
    """An axis over a group, which may be None."""
    if group is None:
        return Axis("group", 1, 0, cast("Any", None))
    return Axis("group", dist.get_world_size(group), dist.get_rank(group), group)


def _parameter(*shape: int, device: Any = "cpu") -> nn.Parameter:
    return nn.Parameter(torch.full(shape, torch.nan, device=device))


class Linear(nn.Module):
    """Column, row or whole; with `parameters_split` one parameter each."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        bias: bool = True,
        params_dtype: Any = None,
        parallel_mode: str | None = None,
        parameters_split: dict[str, int] | None = None,
    ) -> None:
        super().__init__()
        assert not bias
        assert params_dtype == torch.float32
        self.axis, self.sp, self.mode = axis_of(tp_group), sequence_parallel, parallel_mode
        self.fp8_meta: dict[str, Any] = {}
        size = self.axis.size
        if parallel_mode == "row":
            in_features //= size
        split = parameters_split or {"": out_features}
        assert sum(split.values()) == out_features
        self.weight_names = [f"{name}_weight".lstrip("_") for name in split]
        for name, width in zip(self.weight_names, split.values(), strict=True):
            local = width // size if parallel_mode == "column" else width
            self.register_parameter(name, _parameter(local, in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[d, ..., in] -> [d, ..., out]; d is what sequence parallel cuts."""
        if fp8.Manager.enabled:
            fp8.prepare(self, 1)
        if self.mode == "column":
            x = gather_from(x, self.axis, 0) if self.sp else copy_to(x, self.axis)
        weight = torch.cat([getattr(self, name) for name in self.weight_names])
        out = fp8.multiply(self, x, weight)
        if self.mode == "row":
            out = reduce_scatter_to(out, self.axis, 0) if self.sp else reduce_from(out, self.axis)
        return out


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


class LayerNormLinear(Linear):
    """RMSNorm of this rank's tokens, then a column layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None:
        assert (normalization, zero_centered_gamma) == ("RMSNorm", False)
        super().__init__(in_features, out_features, **options)
        assert self.mode == "column"
        self.eps, self.layer_norm_weight = eps, _parameter(in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `Linear`."""
        return super().forward(_norm(x, self.layer_norm_weight, self.eps))


class LayerNormMLP(nn.Module):
    """RMSNorm, gate above up, SwiGLU, down."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        params_dtype: Any = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
    ) -> None:
        super().__init__()
        assert (normalization, zero_centered_gamma, activation) == ("RMSNorm", False, "swiglu")
        assert (bias, set_parallel_mode, params_dtype) == (False, True, torch.float32)
        self.axis, self.sp, self.eps = axis_of(tp_group), sequence_parallel, eps
        self.fp8_meta: dict[str, Any] = {}
        width = ffn_hidden_size // self.axis.size
        self.layer_norm_weight = _parameter(hidden_size)
        self.fc1_weight = _parameter(2 * width, hidden_size)
        self.fc2_weight = _parameter(hidden_size, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[d, ..., H] -> the same."""
        if fp8.Manager.enabled:
            fp8.prepare(self, 2)
        x = _norm(x, self.layer_norm_weight, self.eps)
        x = gather_from(x, self.axis, 0) if self.sp else copy_to(x, self.axis)
        gate, up = fp8.multiply(self, x, self.fc1_weight).chunk(2, -1)
        out = fp8.multiply(self, F.silu(gate) * up, self.fc2_weight, 1)
        return reduce_scatter_to(out, self.axis, 0) if self.sp else reduce_from(out, self.axis)


# ---- attention


class DotProductAttention(nn.Module):
    """Causal; context parallel by gathering keys, with a mask of where tokens are.

    Attributes:
        total: calls of all of them in this process.
    """

    total = 0

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
    ) -> None:
        super().__init__()
        assert (attention_dropout, qkv_format, attn_mask_type) == (0.0, "bshd", "causal")
        widths = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.heads, self.groups, self.widths = num_attention_heads, num_gqa_groups, widths
        self.axis = axis_of(None)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """As TransformerEngine's."""
        assert cp_comm_type in ("p2p", "all_gather")
        assert cp_group is None or cp_global_ranks == dist.get_process_group_ranks(cp_group)
        del cp_stream
        self.axis = axis_of(cp_group)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, qkv_format: str = "bshd",
        attn_mask_type: str = "causal", cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None, cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None, max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None, pad_between_seqs: bool | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """[B, T, heads, width] or [T, heads, width] -> the same with heads joined."""
        assert q.is_contiguous()
        assert (q.shape[-2], k.shape[-2]) == (self.heads, self.groups)
        assert (q.shape[-1], v.shape[-1]) == self.widths
        type(self).total += 1
        if qkv_format == "bshd":
            assert attn_mask_type == "causal"
            length = q.shape[1] * self.axis.size
            starts = torch.arange(2) * length
            return self._attend(q, k, v, starts, starts.diff())
        assert (qkv_format, attn_mask_type, pad_between_seqs) == ("thd", "padding_causal", True)
        assert cu_seqlens_q is cu_seqlens_kv
        assert cu_seqlens_q_padded is cu_seqlens_kv_padded
        assert cu_seqlens_q is not None
        assert cu_seqlens_q_padded is not None
        assert cu_seqlens_q.dtype == cu_seqlens_q_padded.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_kv
        assert max_seqlen_q is not None
        with _disable_current_modes():  # kernels read offsets on the device
            assert int(cu_seqlens_q_padded[-1]) == q.shape[0] * self.axis.size
            assert max_seqlen_q >= int(cu_seqlens_q_padded.diff().max())
        out = self._attend(q[None], k[None], v[None], cu_seqlens_q_padded, cu_seqlens_q.diff())
        return out[0]

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        axis = self.axis
        k, v = (gather_from(t, axis, 1) for t in (k, v))
        tokens = [_tokens(starts, lengths, q.shape[1], axis.size, r) for r in range(axis.size)]
        mine, theirs = tokens[axis.rank], torch.cat(tokens, 1)
        same = mine[0][:, None] == theirs[0][None, :]
        sees = same & (mine[1][:, None] >= theirs[1][None, :])
        sees = sees & mine[2][:, None].bool() & theirs[2][None, :].bool()
        repeat = q.shape[2] // k.shape[2]
        k, v = (t.repeat_interleave(repeat, 2) for t in (k, v))
        scores = torch.einsum("btnd,bsnd->bnts", q, k) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~sees, -math.inf).softmax(-1)
        valid = mine[2].bool()[:, None]
        weights = weights.masked_fill(~valid, 0.0)
        out = torch.einsum("bnts,bsne->btne", weights, v).flatten(2)
        # Rows of padding are not written by kernels: whatever was there.
        return torch.where(valid, out, torch.nan)


def _tokens(
    starts: torch.Tensor, lengths: torch.Tensor, local: int, size: int, rank: int
) -> torch.Tensor:
    """Sequence, place in it and whether it counts, of a rank's `local` tokens: int64 [3, T]."""
    here, token = starts.long() // size, torch.arange(local)
    number = torch.searchsorted(here, token, right=True) - 1
    inside, chunk = token - here[number], here.diff()[number] // 2
    part = torch.where(inside < chunk, rank, 2 * size - 1 - rank)
    place = part * chunk + inside % chunk
    return torch.stack([number, place, (place < lengths[number]).long()])


# ---- experts


class GroupedLinear(nn.Module):
    """A parameter an expert."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, bias: bool = True,
        params_dtype: Any = None, device: Any = "cuda", dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert not bias
        assert torch.float32 in (params_dtype, dtype)
        self.num_gemms = num_gemms
        self.fp8_meta: dict[str, Any] = {}
        for i in range(num_gemms):
            shape = (out_features, in_features)
            self.register_parameter(f"weight{i}", _parameter(*shape, device=device))

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        """Rows by expert."""
        if fp8.Manager.enabled:
            fp8.prepare(self, self.num_gemms)
            weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
            parts = zip(inp.split(m_splits), weights, strict=True)
            return torch.cat(
                [fp8.multiply(self, *each, i, asks=False) for i, each in enumerate(parts)]
            )
        return _grouped(inp, m_splits, [getattr(self, f"weight{i}") for i in range(self.num_gemms)])


def _grouped(x: torch.Tensor, sizes: list[int], weights: list[torch.Tensor]) -> torch.Tensor:
    assert sum(sizes) == x.shape[0] > 0
    result: torch.Tensor = _Grouped.apply(x, sizes, *weights)
    return result


class _Grouped(torch.autograd.Function):
    """With gradients of the weights in one allocation, as TransformerEngine's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], *weights: torch.Tensor) -> Any:
        ctx.save_for_backward(x, *weights)
        ctx.sizes = sizes
        return torch.cat([F.linear(p, w) for p, w in zip(x.split(sizes), weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        parts, inputs = grad.split(ctx.sizes), x.split(ctx.sizes)
        packed = grad.new_empty(len(weights), *weights[0].shape)
        for place, part, rows in zip(packed, parts, inputs, strict=True):
            torch.mm(part.t(), rows, out=place)
        grad_x = torch.cat([p @ w for p, w in zip(parts, weights, strict=True)])
        return grad_x, None, *packed.unbind(0)


class OpsGroupedLinear(GroupedLinear):
    """The operator: its splits are a tensor."""

    def __init__(self, num_groups: int, in_features: int, out_features: int, **options: Any):
        super().__init__(num_groups, in_features, out_features, **options)


class ScaledSwiGLU(nn.Module):
    """silu of the first half times the second, times a scale a row."""


class Sequential(nn.Sequential):
    """Makes its fuser at the first call; the fuser lists parameters when it is made."""

    _module_groups: Any = None

    def forward(self, x: torch.Tensor, *extra: torch.Tensor) -> torch.Tensor:
        """Rows, then sizes, scales and sizes."""
        if self._module_groups is None:
            listed = [list(op.parameters()) for op in self]
            flat = [p for each in listed for p in each]
            self._module_groups = [
                SimpleNamespace(_basic_op_params=listed, _flat_basic_op_params=flat)
            ]
        first, scales, last = extra
        weights = list(self._module_groups[0]._flat_basic_op_params)
        count = len(weights) // 2
        gate, up = _grouped(x, first.tolist(), weights[:count]).chunk(2, -1)
        return _grouped(F.silu(gate) * up * scales[:, None], last.tolist(), weights[count:])


def apply_rotary_pos_emb(
    t: torch.Tensor, freqs: torch.Tensor, tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None, interleaved: bool = False, fused: bool = False,
    cu_seqlens: torch.Tensor | None = None, cp_size: int = 1, cp_rank: int = 0,
) -> torch.Tensor:  # fmt: skip
    """As fused_rope.cu walks sequences: rows of none are left as memory was, here NaN."""
    assert fused
    assert start_positions is None
    assert not interleaved
    if tensor_format == "bshd":
        assert cu_seqlens is None
        assert t.shape[1] * cp_size <= freqs.shape[0]
        ends = torch.tensor([0, t.shape[1] * cp_size])
        rows = [apply_rotary_pos_emb(one, freqs, "thd", None, False, True, ends, cp_size, cp_rank)
                for one in t]  # fmt: skip
        return torch.stack(rows)
    assert tensor_format == "thd"
    assert cu_seqlens is not None
    assert t.dim() == 3
    table, written = torch.full((t.shape[0],), -1), cu_seqlens // cp_size
    for start, end in zip(written[:-1].tolist(), written[1:].tolist(), strict=True):
        length = end - start
        for inside in range(min(length, freqs.shape[0])):  # its grid is as long as the table
            late = cp_size > 1 and inside >= length // 2
            chunk = 2 * cp_size - 1 - cp_rank if late else cp_rank
            begin = chunk * (length // 2) - late * (length // 2) if cp_size > 1 else 0
            table[start + inside] = begin + inside
    return cast("torch.Tensor", _Turned.apply(t, freqs[table, 0], table >= 0))


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, angles: torch.Tensor, written: Any) -> torch.Tensor:
        ctx.save_for_backward(angles, written)
        a, b = t.float().chunk(2, -1)
        turned = t.float() * angles.cos() + torch.cat((-b, a), -1) * angles.sin()
        return turned.to(t.dtype).masked_fill(~written[:, None, None], torch.nan)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        angles, written = ctx.saved_tensors
        return _Turned.apply(grad, -angles, written), None, None


class StandIn(TeLayers):
    """The backend over these modules."""

    def __init__(
        self, *, fused_experts: bool, fp8_recipe: str = "none", fused_rope: bool = False
    ) -> None:
        ops = SimpleNamespace(
            GroupedLinear=OpsGroupedLinear, ScaledSwiGLU=ScaledSwiGLU, Sequential=Sequential
        )
        self.te = SimpleNamespace(
            RMSNorm=fp8.RMSNorm, Linear=Linear, LayerNormLinear=LayerNormLinear,
            LayerNormMLP=LayerNormMLP, DotProductAttention=DotProductAttention,
            GroupedLinear=GroupedLinear, ops=ops,
            attention=SimpleNamespace(
                rope=SimpleNamespace(apply_rotary_pos_emb=apply_rotary_pos_emb)
            ),
            autocast=fp8.autocast,
            quantization=SimpleNamespace(FP8GlobalStateManager=fp8.Manager),
        )  # fmt: skip
        self.recipe, self.fused_experts = fp8_recipe, fused_experts
        self.fused_rope = fused_rope

    def rms_norm(self, width: int, eps: float) -> nn.Module:
        """On the CPU."""
        return fp8.RMSNorm(width, eps)

    def precision(self, axes: Axes) -> Precision:
        """With the stand-in's recipe."""
        return precision.precision(self.te, self.recipe, axes, fp8.Delayed())
