"""What must happen around an optimizer's step over sharded parameters, and clipping before it.

    before  an optimizer that would not train what the modules hold at rest is refused; one whose
            kernels take addresses is given this rank's rows, if it cannot find them itself
    after   copies of the main weights follow, once a group, inside a graph capture as well

Every `torch.optim.Optimizer` runs hooks that are registered once for the process, so nobody has to
say which optimizers there are. Version counters would not do for the copies: an optimizer may write
by a kernel of its own (TransformerEngine's FusedAdam does).

    gradients -> groups of one (mesh, cutting axes) -> local norms, foreach
      -> total power of each group over its ranks -> total -> scale in place

torch's own `clip_grad_norm_` works on one mesh at a time, and needs a gradient on every rank. Here
which collectives run follows from the parameters alone, so a rank that has no gradient still takes
part. Nothing waits for the device, so the whole may be captured into a CUDA graph.
"""

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_core.fsdp.norms import combine_powers, norm_of, total_power
from fsdp_core.fsdp.row_sharded import RowShard, RowSharded

_SOURCE = "the ones from before fully_shard"
_WHOLE = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)


class Tie(NamedTuple):
    """Parameter `number` of a group, or a stand-in of it; what it is when modules hold another."""

    group: "weakref.ref[Any]"
    number: int
    otherwise: str


_STAND_INS: Any = WeakIdKeyDictionary()
"""Ties of parameters that modules hold, or held, in place of those at rest."""

_STEPPED: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()
"""Optimizers that have been here: an SGD never has any state to tell by."""


def watch(group: Any, sources: Sequence[nn.Parameter] = ()) -> None:
    """Tell `group`, which is not kept alive, of every step of an optimizer of its parameters.
    Optimizers of others are refused: gathered ones, `sources`, replaced ones when called again.
    """
    _register_hooks()
    ref = weakref.ref(group)
    for number, sharded in enumerate(group.sharded):
        sharded.tie = Tie(ref, number, "the ones from before to_empty() or to()")
    for otherwise, stand_ins in ((_SOURCE, sources), ("gathered ones", group.unsharded)):
        for number, parameter in enumerate(stand_ins):
            _STAND_INS[parameter] = Tie(ref, number, otherwise)


@functools.cache
def _register_hooks() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


@torch.compiler.disable
def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Refuse what would not train rightly; give rows to kernels that take addresses."""
    _check_at_rest(optimizer)
    sharded = [p for p in _parameters(optimizer) if type(p) is RowSharded]
    if sharded and isinstance(optimizer, _WHOLE):
        raise NotImplementedError(
            "Expected an optimizer that treats each element alone, as AdamW does, got "
            f"{type(optimizer).__name__}, which needs whole tensors: ranks have rows of them."
        )
    if sharded and optimizer not in _STEPPED:
        _STEPPED.add(optimizer)
        optimizer.register_load_state_dict_post_hook(_adopt_states)
        # The states made in this step live for ever: in memory of their own, not in holes that
        # activations have left and will want again, whole.
        if sharded[0].is_cuda and not torch.cuda.is_current_stream_capturing():
            torch.cuda.empty_cache()
    # TransformerEngine's kernels take addresses, and would look for those of a DTensor.
    kinds = [kind.__module__ for kind in type(optimizer).__mro__]
    if not sharded or not any(kind.startswith("transformer_engine.") for kind in kinds):
        return None
    if any(option is not None for option in (*args[1:], *kwargs.values())):
        # Gradients of a closure would come too late, and a GradScaler would see this rank's only.
        raise NotImplementedError(
            f"Expected step() of {type(optimizer).__name__} over sharded parameters to have no "
            "closure and no grad_scaler."
        )
    return (_on_rows(optimizer, sharded),), {}


def _adopt_states(optimizer: torch.optim.Optimizer) -> None:
    """Cut anew what `torch.distributed` has cut evenly, from whole states: a collective."""
    for parameter in (p for p in _parameters(optimizer) if type(p) is RowSharded):
        spec, states = parameter.row_spec, optimizer.state.get(parameter, {})
        for key, value in states.items():
            if isinstance(value, DTensor) and type(value) is not RowSharded:
                cuts = [Shard(p.dim) if isinstance(p, RowShard) else p for p in value.placements]
                even = DTensor.from_local(
                    value.to_local(),
                    value.device_mesh,
                    cuts,
                    run_check=False,
                    shape=value.shape,
                    stride=value.stride(),
                )
                states[key] = RowSharded.make(spec.own_rows(even.full_tensor()).clone(), spec)


def _check_at_rest(optimizer: torch.optim.Optimizer) -> None:
    wrong: dict[str, list[str]] = {}
    for parameter in _parameters(optimizer):
        is_sharded = type(parameter) is RowSharded
        tie: Tie | None = parameter.tie if is_sharded else _STAND_INS.get(parameter)
        group = tie.group() if tie is not None else None
        if tie is None or group is None or group.sharded[tie.number] is parameter:
            continue
        if tie.otherwise != _SOURCE or parameter.grad is None:  # else a copy, trained as one
            wrong.setdefault(tie.otherwise, []).append(group.names[tie.number])
    if wrong:
        got = "; ".join(
            f"{kind} of {', '.join(names[:4])}{' ...' if names[4:] else ''}"
            for kind, names in wrong.items()
        )
        raise RuntimeError(
            f"Expected an optimizer of the parameters at rest, got {got}: build the optimizer "
            "after fully_shard and to_empty(), and before a forward, or call reshard() first."
        )


@torch.compiler.disable
def _after_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    del kwargs
    if args[0] is not optimizer:
        _off_rows(optimizer, args[0])
    ties = (p.tie for p in _parameters(optimizer) if type(p) is RowSharded)
    # A dict, not a set: every rank must go through the groups in the same order.
    groups = dict.fromkeys(tie.group() for tie in ties if tie is not None)
    with torch.no_grad():
        for group in groups:
            if group is not None:
                group.main_weight_changed()


def _on_rows(optimizer: torch.optim.Optimizer, sharded: list[Any]) -> torch.optim.Optimizer:
    """For one step, the same optimizer over this rank's rows, in the memory of `sharded`."""
    dtypes = getattr(optimizer, "name_to_dtype_map", {})
    if any(dtype != torch.float32 for dtype in dtypes.values()):
        raise NotImplementedError(
            f"Expected states of sharded parameters in float32, got {dtypes}."
        )
    rows = {parameter: parameter._local_tensor for parameter in sharded}
    groups = [
        group | {"params": [rows.get(parameter, parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state: Any = defaultdict(dict)
    state.update({p: optimizer.state[p] for p in _parameters(optimizer) if p not in rows})
    for parameter, local in rows.items():
        states = optimizer.state[parameter].items()
        state[local] = {key: getattr(value, "_local_tensor", value) for key, value in states}
        # TransformerEngine's kernels up to 2.17 go wrong over tensors without elements.
        has = parameter.grad is not None and local.numel()
        local.grad = parameter.grad._local_tensor if has else None
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__ | {"param_groups": groups, "state": state})
    return twin


def _off_rows(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer) -> None:
    """Give the optimizer what a step of its twin over rows has changed."""
    for group, changed in zip(optimizer.param_groups, twin.param_groups, strict=True):
        group.update(changed | {"params": group["params"]})
    for parameter, local in zip(_parameters(optimizer), _parameters(twin), strict=True):
        if parameter is local:
            optimizer.state[parameter] = twin.state[parameter]
            continue
        states, local.grad = optimizer.state[parameter], None
        for key, value in twin.state[local].items():
            if getattr(states.get(key), "_local_tensor", None) is not value:
                states[key] = RowSharded.make(value, parameter.row_spec)


# --- clipping

_Layout = tuple[DeviceMesh | None, tuple[int, ...]]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002  (torch's signature)
    foreach: bool | None = None,  # noqa: FBT001  (the same)
) -> torch.Tensor:
    """Scale all gradients so that their total norm is at most `max_norm`; return the total norm.

    As `torch.nn.utils.clip_grad_norm_`, and also for parameters on different meshes, sharded by
    rows or by DTensor's placements, with plain parameters among them, whose gradients are the same
    on every rank. A collective: every rank passes the same parameters in the same order. Gradients
    that are None count as zero.

    `max_norm` inf touches no gradient; `foreach` is not used. The norm before clipping is 0-d, and
    the same bits on every rank: float32, or float64 where any parameter is.

    Raises ValueError: `norm_type` is not positive, or a gradient is laid out otherwise than its
        parameter.
    Raises NotImplementedError: a DTensor gradient that is pending a reduction.
    Raises RuntimeError: the norm is not finite and `error_if_nonfinite`, which waits for the
        device.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"Expected norm_type > 0, got {norm_type}.")
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not listed:
        return torch.tensor(0.0)
    total = _total(listed, order, torch.float32)
    if all(parameter.dtype != torch.float64 for parameter in listed):
        total = total.float()
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"Expected a finite gradient norm of order {order}, got {total.item()}; pass "
            "error_if_nonfinite=False to scale by it all the same."
        )
    scale_to(listed, max_norm, total)
    return total


@torch.no_grad()
def total_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients, as `clip_grad_norm_` has it but float64 throughout. So the order
    of its sums, and with it how ranks cut the gradients, leaves its float32 alone.
    """
    return _total(list(parameters), 2.0, torch.float64)


@torch.no_grad()
def scale_to(parameters: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale all gradients, whose total norm is `norm`, as `clip_grad_norm_` does."""
    if max_norm == math.inf:
        return  # inf / inf would be NaN, in every gradient
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    groups = _groups(list(parameters)).values()
    for alike in _alike([piece for group in groups for piece in group]):
        # Single precision at least: a factor in bfloat16 would miss the norm by 0.4 %.
        dtype = torch.promote_types(alike[0].dtype, torch.float32)
        torch._foreach_mul_(alike, factor.to(alike[0].device, dtype))


def _total(listed: list[torch.Tensor], order: float, least: torch.dtype) -> torch.Tensor:
    """Norm of the gradients, float64; that of each one in `least` or wider."""
    groups = _groups(listed)
    device = next((piece for group in groups.values() for piece in group), listed[0]).device
    powers = [
        total_power(_norms(group, order, device, least), order, mesh, axes)
        for (mesh, axes), group in groups.items()
    ]
    return norm_of(combine_powers(torch.stack(powers), order), order)


def _groups(parameters: list[torch.Tensor]) -> dict[_Layout, list[torch.Tensor]]:
    """This rank's parts of gradients by layout, as the parameters first show each layout."""
    groups: dict[_Layout, list[torch.Tensor]] = {}
    for parameter in parameters:
        key, grad = _layout(parameter), parameter.grad
        pieces = groups.setdefault(key, [])
        if grad is not None and _layout(grad) != key:
            raise ValueError(
                f"Expected a gradient laid out as its parameter, {key}, got {_layout(grad)}."
            )
        local: Any = grad.to_local() if isinstance(grad, (RowSharded, DTensor)) else grad
        if local is not None and local.numel():
            pieces.append(local)
    return groups


def _layout(tensor: torch.Tensor) -> _Layout:
    """The mesh and its axes over which parts of a tensor differ; None and () for a plain tensor."""
    if isinstance(tensor, RowSharded):
        return tensor.device_mesh, tensor.row_spec.cut_axes
    if not isinstance(tensor, DTensor):
        return None, ()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise NotImplementedError(
            f"Expected gradients without pending reductions, got {tensor.placements}: "
            "redistribute them first."
        )
    cut = (a for a, placement in enumerate(tensor.placements) if placement != Replicate())
    return tensor.device_mesh, tuple(cut)


def _norms(
    pieces: list[Any], order: float, device: torch.device, least: torch.dtype
) -> list[torch.Tensor]:
    """Of each piece; beside them a zero, for there may be none."""
    found = [torch.zeros((), device=device, dtype=least)]
    for alike in _alike(pieces):
        wide = torch.promote_types(alike[0].dtype, least)
        found += [norm.to(device) for norm in torch._foreach_norm(alike, order, dtype=wide)]
    return found


def _alike(pieces: list[Any]) -> Iterable[list[Any]]:
    """By device and dtype, as fast foreach kernels need them."""
    alike: dict[Any, list[Any]] = {}
    for piece in pieces:
        alike.setdefault((piece.device, piece.dtype), []).append(piece)
    return alike.values()
