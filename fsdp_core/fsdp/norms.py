"""Norms and other scalars of which each rank holds a part; what makes one of them; and clipping.

    gradients -> groups of one (mesh, cutting axes) -> local norms, foreach
      -> total power of each group over its ranks -> total -> scale in place

torch's own `clip_grad_norm_` works on one mesh at a time, and needs a gradient on every rank. Here
which collectives run follows from the parameters alone, so a rank that has no gradient still takes
part. Nothing waits for the device, so the whole may be captured into a CUDA graph.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_core.fsdp.layout import all_gather


def over_ranks(
    part: torch.Tensor,
    mesh: Any,
    axes: Sequence[int],
    combine: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`combine` of all ranks' 0-d parts, the same bits on every rank: a collective an axis.

    Every rank does the same sums in the same order, whatever algorithm a backend chooses, and NaN
    stays NaN, which the maximum of NCCL forgets. Nothing waits for the device.

    Parts, 0-d, differ along `axes`, coarsest first; without axes `mesh` is unused. `combine` makes
    one part of those along an axis [size], in rank order.
    """
    for axis in reversed(axes):
        # As bytes: backends do not know every dtype, and bits arrive as they are.
        sent = part.to(mesh.device_type).reshape(1).view(torch.uint8)
        parts = sent.new_empty(mesh.size(axis) * sent.numel())
        all_gather(parts, sent, mesh.get_group(axis))
        part = combine(parts.view(part.dtype)).to(part.device)
    return part


def total_power(
    norms: Sequence[torch.Tensor], order: float, mesh: DeviceMesh | None, axes: Sequence[int]
) -> torch.Tensor:
    """Sum of the `order`-th powers of norms (maximum for inf) here and over ranks, float64, 0-d.

    In float64 the powers of float32 norms neither overflow nor round to zero.
    """
    powers = torch.stack(list(norms)).double()
    powers = powers if order in (0, math.inf) else powers.pow(order)
    combine = functools.partial(combine_powers, order=order)
    return over_ranks(combine(powers), mesh, axes, combine)


def combine_powers(powers: torch.Tensor, order: float) -> torch.Tensor:
    """Total of powers [n]. amax keeps NaN, as torch's inf norm does."""
    return powers.amax() if order == math.inf else powers.sum()


def norm_of(power: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of which this is the power."""
    return power if order in (0, math.inf) else power.pow(1.0 / order)


def replicated(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """The DTensor on `mesh` that is `value` on every rank."""
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


class PendingNorm(torch.Tensor):
    """A norm [], or a stack of norms [n], of which each rank holds its `parts`, by the axes that
    cut them, coarsest first.

    torch's `clip_grad_norm_` and `get_total_norm` work on them: a stack may be of different length
    on each rank, and its norm of the same order is, for each way to cut, one collective of one
    scalar an axis. Any other operator on a 0-d one reduces it first. A rank without any gradient
    takes no part, and the others would wait for it in vain: `fsdp_core.fsdp.clip_grad_norm_` has no
    such limit. `kind` is the order (p > 0, inf, or 0 for counts), and the mesh.
    """

    kind: tuple[float, DeviceMesh]
    parts: dict[tuple[int, ...], list[torch.Tensor]]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def make(
        parts: dict[tuple[int, ...], list[torch.Tensor]], kind: Any, shape: tuple[int, ...] = ()
    ) -> "PendingNorm":
        """One norm, whose part here is the only one, or a stack of all of them."""
        each = [part for alike in parts.values() for part in alike]
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in each))
        self = torch.Tensor._make_wrapper_subclass(
            PendingNorm, shape, dtype=dtype, device=each[0].device
        )
        self.parts, self.kind = parts, kind
        return self

    def reduced(self) -> DTensor:
        """The norm of all, replicated on all axes of the mesh: collectives over those that cut."""
        order, mesh = self.kind
        powers = [total_power(self.parts[axes], order, mesh, axes) for axes in sorted(self.parts)]
        total = norm_of(combine_powers(torch.stack(powers), order), order)
        return replicated(total.to(self.dtype), mesh)

    @torch.compiler.disable
    def full_tensor(self) -> torch.Tensor:
        """The norm of all, plain: see `reduced`."""
        return cast("DTensor", self * 1).full_tensor()  # through autograd, if it records

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PendingNorm(kind={self.kind}, parts={self.parts})"

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        norms: list[Any] = [n for n in tree_leaves((args, kwargs)) if isinstance(n, torch.Tensor)]
        alike = {n.kind if type(n) is cls and not n.ndim else None for n in norms}
        if name == "aten::stack" and len(alike) == 1 and alike != {None}:
            parts: dict[tuple[int, ...], list[torch.Tensor]] = {}
            for axes, (part,) in (item for norm in norms for item in norm.parts.items()):
                parts.setdefault(axes, []).append(part)
            return cls.make(parts, norms[0].kind, (len(norms),))
        if name == "aten::_to_copy" and not args[0].ndim:
            ((axes, (part,)),) = args[0].parts.items()
            return cls.make({axes: [func(part, **kwargs)]}, args[0].kind)
        if name == "aten::linalg_vector_norm" and args[0].ndim and not (args[2:] or kwargs):
            order = args[1] if len(args) > 1 else 2
            if order == args[0].kind[0] != 0:
                return args[0].reduced()
        if name == "aten::stack" or any(type(n) is cls and n.ndim for n in norms):
            raise NotImplementedError(
                "Expected norms of sharded gradients of one order and mesh to meet in "
                f"torch.stack, and in its norm of that order, not 0, got {func} of {norms}: use "
                "fsdp_core.fsdp.clip_grad_norm_, which takes gradients on any meshes."
            )
        args, kwargs = tree_map_only(cls, cls.reduced, (args, kwargs))
        return func(*args, **kwargs)


# ---- clipping

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
        local: Any = grad
        if hasattr(local, "to_local"):
            local = local.to_local()
        if local is not None and local.numel():
            pieces.append(local)
    return groups


def _layout(tensor: torch.Tensor) -> _Layout:
    """The mesh and its axes over which parts of a tensor differ; None and () for a plain tensor."""
    if (spec := getattr(tensor, "row_spec", None)) is not None:
        return spec.mesh, spec.cut_axes
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
