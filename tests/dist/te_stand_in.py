"""TransformerEngine's modules as its documentation has them, in plain torch, on any device.

For what does not need its kernels: experts by groups, fused RoPE over offsets, and when scales of
eight-bit numbers move, which is in `te_fp8_stand_in`. Signatures are those of version 2.20. Layouts
are compared with the library itself, by `tests.dist.parity_table --device cuda --backend te`.
"""

from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_core.graph.recorder import HostReadGuard
from fsdp_core.model.layers import RmsNorm
from fsdp_core.model.te.layers import TeLayers

HISTORY, LARGEST = 3, 448.0
SCALES = (("scaling_fwd", "forward", 3), ("scaling_bwd", "backward", 2))

_KERNELS = torch.library.Library("te_stand_in", "DEF")
_KERNELS.define("quantize(Tensor x, Tensor scale, Tensor amax) -> Tensor")
_KERNELS.define("update(Tensor amax, Tensor[] histories, Tensor[] scales) -> Tensor")


def _quantize(x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():
        amax.copy_(torch.maximum(amax, x.detach().abs().amax().float()))
        wide = (x.float() * scale).clamp(-LARGEST, LARGEST)
        return (wide.to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


def _update(
    amax: torch.Tensor, histories: list[torch.Tensor], scales: list[torch.Tensor]
) -> torch.Tensor:
    """Returns something, or a recorder would take it for an operator without effect."""
    with _disable_current_modes():
        parts = amax.split([scale.numel() for scale in scales])
        for part, history, scale in zip(parts, histories, scales, strict=True):
            history[0].copy_(part)
            largest = history.amax(0)
            history.copy_(history.roll(-1, 0))
            history[0].zero_()
            scale.copy_(torch.where(largest > 0, LARGEST / largest, scale))
        return amax.clone()


_KERNELS.impl("quantize", _quantize, "CPU")
_KERNELS.impl("update", _update, "CPU")


class Delayed(SimpleNamespace):
    """Stands for the recipe."""

    def __str__(self) -> str:
        return "delayed"


class RecipeState:
    """Stands for `DelayedScalingRecipeState`: scales and histories of one direction."""

    def __init__(self, number: int) -> None:
        self.scale = torch.ones(number)
        self.amax_history = torch.zeros(HISTORY, number)


class FP8GlobalStateManager:
    """Stands for the class of that name; `reset` forgets every model."""

    enabled = is_first = graph = False
    group: Any = None
    depth = 0
    registered: dict[str, list[RecipeState]] = {}  # noqa: RUF012  (as it is there)
    groups: dict[str, Any] = {}  # noqa: RUF012
    is_capturing = False  # the flag of graph.py
    moved: list[str] = []  # noqa: RUF012  (for tests: what was moved, in order)

    @classmethod
    def reset(cls) -> None:
        cls.registered, cls.groups, cls.moved = {}, {}, []

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """In a captured part, or a capture under way."""
        stack = _get_current_function_mode_stack()
        return cls.graph or any(isinstance(mode, HostReadGuard) for mode in stack)

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        found, cls.is_first = cls.is_first, False
        return found

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, meta: dict[str, Any]) -> None:
        if "buffer_index_and_autocast_key" in meta or "scaling_fwd" not in meta:
            return
        meta["buffer_index_and_autocast_key"] = True
        for key, direction, _ in SCALES:
            name = f"{direction} {id(meta['fp8_group'])}"
            cls.registered.setdefault(name, []).append(meta[key])
            cls.groups[name] = meta["fp8_group"]

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Over ranks, then scales of all that registered."""
        cls.moved.append("forward" if forward else "backward")
        for name, states in cls.registered.items():
            if name.startswith("forward") != forward:
                continue
            amax, group = torch.cat([state.amax_history[0] for state in states]), cls.groups[name]
            if group is not None and dist.get_world_size(group) > 1:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
            torch.ops.te_stand_in.update(
                amax, [state.amax_history for state in states], [state.scale for state in states]
            )


Manager = FP8GlobalStateManager


class autocast:  # noqa: N801  (as it is there)
    """As there, as far as used."""

    def __init__(
        self, enabled: bool = True, calibrating: bool = False, recipe: Any = None,
        amax_reduction_group: Any = None, _graph: bool = False,
    ) -> None:  # fmt: skip
        assert not calibrating
        assert not enabled or recipe is not None
        group = amax_reduction_group
        if group is None and dist.is_initialized():
            group = dist.group.WORLD  # as collectives of torch take None
        self.options = (enabled, _graph, group if getattr(recipe, "reduce_amax", True) else None)

    def __enter__(self) -> "autocast":
        self.saved = (Manager.enabled, Manager.graph, Manager.group, Manager.is_first)
        Manager.enabled, Manager.graph, Manager.group = self.options
        if Manager.depth == 0:
            Manager.is_first = True
        Manager.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        Manager.enabled, Manager.graph, Manager.group, Manager.is_first = self.saved
        Manager.depth -= 1
        enabled, graph, _group = self.options
        if enabled and Manager.depth == 0 and not graph and torch.is_grad_enabled():
            Manager.reduce_and_update_fp8_tensors(forward=True)


# ---- modules


def prepare(module: Any, num_gemms: int) -> None:
    """What a module does in Python before it computes in fp8."""
    meta = module.fp8_meta
    if "scaling_fwd" not in meta:
        meta["fp8_group"] = Manager.group
        for key, _, each in SCALES:
            meta[key] = RecipeState(each * num_gemms)
    if not Manager.fp8_graph_capturing():
        Manager.add_fp8_tensors_to_global_buffer(meta)


def multiply(
    module: Any, x: torch.Tensor, weight: torch.Tensor, number: int = 0, *, asks: bool = True
) -> torch.Tensor:
    """x @ weight^T; in fp8 by the scales of the module's product of that number.

    Args:
        asks: whether the module's backward asks if TransformerEngine is capturing.
    """
    if not Manager.enabled:
        return F.linear(x, weight)
    forward, backward = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
    result: torch.Tensor = _Product.apply(x, weight, forward, backward, number, asks)
    return result


def _in_fp8(x: torch.Tensor, state: RecipeState, index: int) -> torch.Tensor:
    place = state.amax_history[0][index].reshape(1)
    result: torch.Tensor = torch.ops.te_stand_in.quantize(x, state.scale[index], place)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward: RecipeState,
        backward: RecipeState, number: int, asks: bool,
    ) -> torch.Tensor:  # fmt: skip
        x, weight = _in_fp8(x, forward, 3 * number), _in_fp8(weight, forward, 3 * number + 1)
        ctx.save_for_backward(x, weight)
        ctx.state, ctx.number, ctx.asks = backward, number, asks
        ctx.is_first = any(ctx.needs_input_grad) and Manager.is_first_fp8_module()
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = _in_fp8(grad, ctx.state, 2 * ctx.number)
        found = grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.is_first and not (ctx.asks and Manager.is_capturing):
            Manager.reduce_and_update_fp8_tensors(forward=False)
        return (*found, None, None, None, None)


class _Marks(torch.autograd.Function):
    """What an operator does beside computing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.is_first = Manager.is_first_fp8_module()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if ctx.is_first and not Manager.is_capturing:
            Manager.reduce_and_update_fp8_tensors(forward=False)
        return grad


class RMSNorm(RmsNorm):
    """An operator: the first in an autocast moves scales, fp8 or not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        return super().forward(_Marks.apply(x) if torch.is_grad_enabled() else x)


def states_of(root: nn.Module) -> list[torch.Tensor]:
    """Scales and histories of the modules inside."""
    metas = [meta for m in root.modules() if (meta := getattr(m, "fp8_meta", None))]
    found = [meta[key] for meta in metas for key, _, _ in SCALES if key in meta]
    return [tensor for state in found for tensor in (state.scale, state.amax_history)]


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
        if Manager.enabled:
            prepare(self, 1)
        return multiply(self, x, self.weight)


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
        if Manager.enabled:
            prepare(self, self.num_gemms)
            weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
            parts = zip(inp.split(m_splits), weights, strict=True)
            return torch.cat([multiply(self, *each, i, asks=False) for i, each in enumerate(parts)])
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
            RMSNorm=RMSNorm, Linear=Linear,
            GroupedLinear=GroupedLinear, ops=ops,
            attention=SimpleNamespace(
                rope=SimpleNamespace(apply_rotary_pos_emb=apply_rotary_pos_emb)
            ),
            autocast=autocast,
            quantization=SimpleNamespace(FP8GlobalStateManager=Manager),
        )  # fmt: skip
        self.recipe, self.fused_experts = fp8_recipe, fused_experts
        self.fused_rope = fused_rope

    def rms_norm(self, width: int, eps: float) -> nn.Module:
        return RMSNorm(width, eps)

    def made_recipe(self) -> Any:
        return Delayed()
