"""Delayed scaling as TransformerEngine 2.20.2 has it, in plain torch, for `te_stand_in`'s modules.

What happens when is that of its sources:

    quantization.py    `autocast`, `autocast_enter`, `autocast_exit`, `get_autocast_state`: what is
                       restored, and that the outermost exit moves scales of the forward;
                       `add_fp8_tensors_to_global_buffer`, `is_first_fp8_module`,
                       `reduce_and_update_fp8_tensors`, `_amax_and_scale_update`
    module/base.py     `prepare_forward`: modules make their scales at their first forward, and
                       register but in a capture; `init_fp8_metadata`
    module/linear.py   the first module's backward moves scales of the backward, but in a capture
    grouped_linear.py  so does its, in a capture, too
    ops/fuser.py       so does that of an operator, be it no product: `RMSNorm` is one

Kernels are operators that say of nothing that they write it, as no pybind function does: whoever
looks at operators does not see that largest values, histories and scales are written.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_core.graph.recorder import HostReadGuard
from fsdp_core.model.layers import RmsNorm

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
        """As there."""
        cls.registered, cls.groups, cls.moved = {}, {}, []

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """In a captured part, or a capture under way."""
        stack = _get_current_function_mode_stack()
        return cls.graph or any(isinstance(mode, HostReadGuard) for mode in stack)

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Once in each outermost autocast."""
        found, cls.is_first = cls.is_first, False
        return found

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, meta: dict[str, Any]) -> None:
        """Once a module."""
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
