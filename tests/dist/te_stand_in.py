"""TransformerEngine's modules as its documentation has them, in plain torch, on any device.

For what does not need its kernels: experts by groups, fused RoPE over offsets, and when scales of
eight-bit numbers move, which is in `te_fp8_stand_in`. Signatures are those of version 2.20. Layouts
are compared with the library itself, by `tests.dist.parity_table --device cuda --backend te`.
"""

from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.model.layers import Precision
from fsdp_core.model.te import fp8 as precision
from fsdp_core.model.te.layers import TeLayers
from fsdp_core.parallel.mesh import Axes
from tests.dist import te_fp8_stand_in as fp8


def _parameter(*shape: int, device: Any = "cpu") -> nn.Parameter:
    return nn.Parameter(torch.full(shape, torch.nan, device=device))


class Linear(nn.Module):
    """Whole, of one parameter."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, params_dtype: Any = None
    ) -> None:
        super().__init__()
        assert not bias
        assert params_dtype == torch.float32
        self.fp8_meta: dict[str, Any] = {}
        self.weight = _parameter(out_features, in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if fp8.Manager.enabled:
            fp8.prepare(self, 1)
        return fp8.multiply(self, x, self.weight)


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
            RMSNorm=fp8.RMSNorm, Linear=Linear,
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
