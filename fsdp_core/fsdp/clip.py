"""Clip gradients by their total norm, over parameters that are sharded in different ways.

    gradients -> groups of one (mesh, cutting axes) -> local norms, foreach
      -> sum of powers (or maximum) of the group's rows here
      -> gathered over each cutting axis, combined in rank order -> total -> scale in place

torch's own `clip_grad_norm_` works on one mesh at a time, and needs a gradient object on every rank
for every parameter. Here which collectives run follows from the parameters alone, so a rank that
has no rows, hence no gradient, still takes part. Ranks exchange their results and every rank does
the same sums in the same order, so all get the same bits whatever algorithm a backend chooses.
Nothing waits for the device, so the whole may be captured into a CUDA graph.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from fsdp_core.fsdp.collectives import all_gather
from fsdp_core.fsdp.row_sharded import RowSharded


@dataclass
class _Group:
    """Gradients cut over the same axes of the same mesh: `pieces` are this rank's parts."""

    mesh: DeviceMesh | None
    axes: tuple[int, ...]
    pieces: list[torch.Tensor] = field(default_factory=list)


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
        max_norm: the largest total norm that is left as it is.
        norm_type: p > 0, inf included.
        error_if_nonfinite: raise if the norm is not finite; waits for the device.
        foreach: False takes one kernel a gradient.

    Returns:
        The norm before clipping, 0-d, the same bits on every rank: float32, or float64 where any
        gradient is.

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
    device = next((t.device for g in groups for t in g.pieces), listed[0].device)
    parts = [_group_power(group, order, device, foreach is not False) for group in groups]
    combined = _combine(torch.stack(parts), order)
    total = combined if math.isinf(order) else combined.pow(1.0 / order)
    if all(piece.dtype != torch.float64 for group in groups for piece in group.pieces):
        total = total.float()
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"Expected a finite gradient norm of order {order}, got {total.item()}; pass "
            "error_if_nonfinite=False to scale by it all the same."
        )
    _scale(groups, torch.clamp(max_norm / (total + 1e-6), max=1.0), foreach is not False)
    return total


def _groups(parameters: list[torch.Tensor]) -> list[_Group]:
    """Gradients by layout, in the order in which the parameters first show each layout."""
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], _Group] = {}
    for parameter in parameters:
        key = _layout(parameter)
        group = groups.setdefault(key, _Group(*key))
        grad = parameter.grad
        if grad is None:
            continue
        if _layout(grad) != key:
            raise ValueError(
                f"Expected a gradient laid out as its parameter, {key}, got {_layout(grad)}."
            )
        local = grad.to_local() if isinstance(grad, (RowSharded, DTensor)) else grad
        if local.numel():
            group.pieces.append(local)
    return list(groups.values())


def _layout(tensor: torch.Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
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


def _group_power(
    group: _Group,
    order: float,
    device: torch.device,
    foreach: bool,  # noqa: FBT001  (private)
) -> torch.Tensor:
    """Sum of |x|^p (max of |x|) over all elements of a group, on every rank: float64, 0-d.

    In float64 the powers of float32 norms neither overflow nor round to zero.
    """
    part = torch.zeros((), dtype=torch.float64, device=device)
    if group.pieces:
        norms = [
            torch.stack(_norms(pieces, order, foreach)).to(device, torch.float64)
            for pieces in _by_device_and_dtype(group.pieces)
        ]
        part = _combine(_power(torch.cat(norms), order), order)
    for axis in reversed(group.axes):
        assert group.mesh is not None
        parts = part.new_empty(group.mesh.size(axis))
        all_gather(parts, part.reshape(1), group.mesh.get_group(axis))
        part = _combine(parts, order)
    return part


def _norms(
    pieces: list[torch.Tensor],
    order: float,
    foreach: bool,  # noqa: FBT001  (private)
) -> list[torch.Tensor]:
    wide = torch.float64 if pieces[0].dtype == torch.float64 else torch.float32
    if foreach:
        return list(torch._foreach_norm(pieces, order, dtype=wide))
    return [torch.linalg.vector_norm(piece, order, dtype=wide) for piece in pieces]


def _power(norms: torch.Tensor, order: float) -> torch.Tensor:
    return norms if math.isinf(order) else norms.pow(order)


def _combine(parts: torch.Tensor, order: float) -> torch.Tensor:
    """Total of parts [n]. amax keeps NaN, as torch's inf norm does."""
    return parts.amax() if math.isinf(order) else parts.sum()


def _scale(
    groups: list[_Group],
    factor: torch.Tensor,
    foreach: bool,  # noqa: FBT001  (private)
) -> None:
    for pieces in _by_device_and_dtype([piece for group in groups for piece in group.pieces]):
        here = factor.to(pieces[0].device)
        if foreach:
            torch._foreach_mul_(pieces, here)
        else:
            for piece in pieces:
                piece.mul_(here)


def _by_device_and_dtype(pieces: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for piece in pieces:
        alike.setdefault((piece.device, piece.dtype), []).append(piece)
    return list(alike.values())
