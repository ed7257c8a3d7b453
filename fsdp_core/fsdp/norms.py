"""Norms and other scalars of which each rank holds a part, and what makes one of them."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
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
    """A norm [], or a stack of norms [n], of which each rank holds its `parts`.

    torch's `clip_grad_norm_` and `get_total_norm` work on them: a stack may be of different length
    on each rank, and its norm of the same order is one collective of one scalar an axis. Any other
    operator on a 0-d one reduces it first. A rank without any gradient takes no part, and the
    others would wait for it in vain: `fsdp_core.fsdp.clip_grad_norm_` has no such limit.
    `kind` is the order (p > 0, inf, or 0 for counts), and mesh and axes that cut, coarsest first.
    """

    kind: tuple[float, DeviceMesh, tuple[int, ...]]
    parts: list[torch.Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def make(parts: list[torch.Tensor], kind: Any, shape: tuple[int, ...] = ()) -> "PendingNorm":
        """One norm whose part here is `parts[0]`, or a stack of all of them."""
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        self = torch.Tensor._make_wrapper_subclass(
            PendingNorm, shape, dtype=dtype, device=parts[0].device
        )
        self.parts, self.kind = parts, kind
        return self

    def reduced(self) -> DTensor:
        """The norm of all, replicated on every axis of the mesh: a collective over `axes`."""
        order, mesh, axes = self.kind
        total = norm_of(total_power(self.parts, order, mesh, axes), order)
        return replicated(total.to(self.dtype), mesh)

    @torch.compiler.disable
    def full_tensor(self) -> torch.Tensor:
        """The norm of all, plain: a collective over `axes`."""
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
            return cls.make([n.parts[0] for n in norms], norms[0].kind, (len(norms),))
        if name == "aten::_to_copy" and not args[0].ndim:
            return cls.make([func(args[0].parts[0], **kwargs)], args[0].kind)
        if name == "aten::linalg_vector_norm" and args[0].ndim and not (args[2:] or kwargs):
            order = args[1] if len(args) > 1 else 2
            if order == args[0].kind[0] != 0:
                return args[0].reduced()
        if name == "aten::stack" or any(type(n) is cls and n.ndim for n in norms):
            raise NotImplementedError(
                "Expected norms of sharded gradients of one order, mesh and cut to meet in "
                f"torch.stack, and in its norm of that order, not 0, got {func} of {norms}: use "
                "fsdp_core.fsdp.clip_grad_norm_, which takes gradients on any meshes."
            )
        args, kwargs = tree_map_only(cls, cls.reduced, (args, kwargs))
        return func(*args, **kwargs)
