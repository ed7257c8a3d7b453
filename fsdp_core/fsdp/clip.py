"""Clip gradients by their total norm, over parameters that are sharded in different ways.

    gradients -> groups of one (mesh, cutting axes) -> local norms, foreach
      -> total power of each group over its ranks (see `row_reductions`) -> total -> scale in place

torch's own `clip_grad_norm_` works on one mesh at a time, and needs a gradient on every rank. Here
which collectives run follows from the parameters alone, so a rank that has no gradient still takes
part. Nothing waits for the device, so the whole may be captured into a CUDA graph.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from fsdp_core.fsdp.row_reductions import combine_powers, norm_of, total_power
from fsdp_core.fsdp.row_sharded import RowSharded

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

    Args:
        parameters: one or more parameters.
        max_norm: the largest total norm that is left as it is; inf: no gradient is touched.
        norm_type: p > 0, inf included.
        error_if_nonfinite: raise if the norm is not finite; waits for the device.
        foreach: taken for torch's sake; torch's foreach operators know when to go one by one.

    Returns:
        The norm before clipping, 0-d, the same bits on every rank: float32, or float64 where any
        parameter is.

    Raises:
        ValueError: `norm_type` is not positive, or a gradient is laid out otherwise than its
            parameter.
        NotImplementedError: a DTensor gradient that is pending a reduction.
        RuntimeError: the norm is not finite and `error_if_nonfinite`.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"Expected norm_type > 0, got {norm_type}.")
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not listed:
        return torch.tensor(0.0)
    groups = _groups(listed)
    total = _total(listed, groups, order, torch.float32)
    if all(parameter.dtype != torch.float64 for parameter in listed):
        total = total.float()
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"Expected a finite gradient norm of order {order}, got {total.item()}; pass "
            "error_if_nonfinite=False to scale by it all the same."
        )
    _scale([piece for group in groups.values() for piece in group], max_norm, total)
    return total


@torch.no_grad()
def total_norm(parameters: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients, as `clip_grad_norm_` has it but float64 throughout.

    So the order of its sums, and with it how ranks cut the gradients, leaves its float32 alone.

    Raises:
        ValueError, NotImplementedError: as `clip_grad_norm_`; no parameters.
    """
    listed = list(parameters)
    return _total(listed, _groups(listed), float(norm_type), torch.float64)


@torch.no_grad()
def scale_to(parameters: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale all gradients, whose total norm is `norm`, as `clip_grad_norm_` does.

    Raises:
        ValueError, NotImplementedError: as `clip_grad_norm_`.
    """
    groups = _groups(list(parameters)).values()
    _scale([piece for group in groups for piece in group], max_norm, norm)


def _scale(pieces: list[Any], max_norm: float, norm: torch.Tensor) -> None:
    if max_norm == math.inf:
        return  # inf / inf would be NaN, in every gradient
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for alike in _alike(pieces):
        # Single precision at least: a factor in bfloat16 would miss the norm by 0.4 %.
        dtype = torch.promote_types(alike[0].dtype, torch.float32)
        torch._foreach_mul_(alike, factor.to(alike[0].device, dtype))


def _total(
    listed: list[torch.Tensor], groups: dict[_Layout, list[Any]], order: float, least: torch.dtype
) -> torch.Tensor:
    """Norm of the gradients in `groups`, float64; that of each one in `least` or wider."""
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
        return tensor.device_mesh, tensor.row_spec.axes
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
