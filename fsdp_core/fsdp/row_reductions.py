"""Reductions of row-sharded tensors to a scalar: norms, which wait, and sums, any and all, at once.

    gradients here -> one `PendingNorm` each -> torch.stack -> total power of this rank's parts
      -> one element a rank, gathered over each cutting axis, combined in rank order -> total norm

A rank holds gradient objects only for parameters of which it has rows, so ranks stack different
numbers of norms, and a collective of one entry a gradient could not meet. One of one entry can.
Every rank does the same sums in the same order, so all get the same bits whatever algorithm a
backend chooses, and NaN stays NaN, which the maximum of NCCL forgets. Nothing waits for the device.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from fsdp_core.fsdp.collectives import all_gather

Handler = Callable[[type[Any], "Plan", Sequence[Any], dict[str, Any]], Any]


@dataclass(frozen=True)
class Plan:
    """How one operator runs. `writes`: positions, or names of keywords, that it writes to."""

    func: Any
    handler: Handler
    writes: tuple[int | str, ...]


def refuse(
    cls: type[Any], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any], why: str = ""
) -> NoReturn:
    """Raise NotImplementedError, naming the operator and what to do instead."""
    raise NotImplementedError(
        f"{plan.func} does not work on {cls.__name__} tensors{why}: use .full_tensor() of it, or "
        ".to_local() for this rank's rows."
    )


# --- over ranks -------------------------------------------------------------------------------


def over_ranks(
    part: torch.Tensor,
    mesh: DeviceMesh | None,
    axes: Sequence[int],
    combine: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`combine` of all ranks' 0-d parts, the same bits on every rank: a collective an axis.

    Args:
        part: this rank's, 0-d.
        mesh: unused without axes.
        axes: mesh axes along which ranks hold different parts, coarsest first.
        combine: from the parts along one axis [size], in rank order, to theirs together, 0-d.
    """
    for axis in reversed(axes):
        assert mesh is not None
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


def _replicated(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


# --- norms ------------------------------------------------------------------------------------


class PendingNorm(torch.Tensor):
    """A norm of rows [], or several stacked [n], of which each rank holds its part.

    torch's `clip_grad_norm_` and `get_total_norm` work on them: a stack may be of different length
    on each rank, and its norm of the same order is one collective of one scalar an axis. Beside
    them in a stack, norms that are the same on every rank count once: plain 0-d tensors, and those
    of tensors that no axis cuts. Any other operator on a 0-d one reduces it first, a collective.

    A rank that has no gradient at all never gets here, and the others would wait for it in vain:
    `fsdp_core.fsdp.clip.clip_grad_norm_` follows parameters, not gradients, and has no such limit.

    Attributes:
        order: p > 0, inf, or 0 for counts of elements.
        mesh: of the tensors.
        axes: mesh axes that cut them, coarsest first.
        parts: norms of rows that lie here, 0-d.
        once: norms that are the same on every rank, 0-d.
    """

    __slots__ = ("axes", "mesh", "once", "order", "parts")
    order: float
    mesh: DeviceMesh
    axes: tuple[int, ...]
    parts: list[torch.Tensor]
    once: list[torch.Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def make(
        parts: list[torch.Tensor],
        layout: tuple[float, DeviceMesh, tuple[int, ...]],
        once: Sequence[torch.Tensor] | None = None,
    ) -> "PendingNorm":
        """One norm whose part here is `parts[0]`, or, with `once`, a stack of all of them."""
        values = [*parts, *(once or ())]
        self = torch.Tensor._make_wrapper_subclass(
            PendingNorm,
            () if once is None else (len(values),),
            dtype=functools.reduce(torch.promote_types, (value.dtype for value in values)),
            device=values[0].device,
        )
        self.parts, self.once = parts, list(once or ())
        self.order, self.mesh, self.axes = layout
        return self

    def reduced(self) -> DTensor:
        """The norm of all, replicated on every axis of the mesh: a collective over `axes`."""
        powers = [total_power(self.parts, self.order, self.mesh, self.axes)] if self.parts else []
        if self.once:
            powers.append(total_power(self.once, self.order, None, ()))
        total = norm_of(combine_powers(torch.stack(powers), self.order), self.order)
        return _replicated(total.to(self.dtype), self.mesh)

    def full_tensor(self) -> torch.Tensor:
        """The norm of all, plain: a collective over `axes`."""
        scalar: Any = self * 1  # through autograd, if it records
        whole: torch.Tensor = scalar.full_tensor()
        return whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PendingNorm(order={self.order}, axes={self.axes}, parts={self.parts})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name == "aten::stack":
            return _stack(args[0])
        if name == "aten::_to_copy" and not args[0].ndim:
            moved = [func(part, **kwargs) for part in args[0].parts]
            return PendingNorm.make(moved, _layout(args[0]))
        if name == "aten::linalg_vector_norm" and args[0].ndim:
            order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
            if order != args[0].order or order == 0 or len(args) > 2 or kwargs:
                raise _unmixable(f"their own order {args[0].order}, not 0", f"{order}, {kwargs}")
            return args[0].reduced()

        def scalar(norm: PendingNorm) -> DTensor:
            if norm.ndim:
                raise _unmixable("torch.linalg.vector_norm", func)
            return norm.reduced()

        args, kwargs = tree_map_only(PendingNorm, scalar, (args, kwargs))
        return func(*args, **kwargs)


def _layout(norm: PendingNorm) -> tuple[float, DeviceMesh, tuple[int, ...]]:
    return norm.order, norm.mesh, norm.axes


def _unmixable(expected: str, got: object) -> NotImplementedError:
    return NotImplementedError(
        f"Expected norms of sharded gradients to meet in {expected}, got {got}: use "
        "fsdp_core.fsdp.clip.clip_grad_norm_, which takes gradients on any meshes."
    )


def _stack(norms: Sequence[Any]) -> PendingNorm:
    pending = [norm for norm in norms if isinstance(norm, PendingNorm)]
    layout = max((_layout(norm) for norm in pending), key=lambda layout: len(layout[2]))
    parts: list[torch.Tensor] = []
    once: list[torch.Tensor] = []
    for norm in norms:
        is_pending = isinstance(norm, PendingNorm)
        known = (
            _layout(norm) in (layout, (*layout[:2], ()))
            if is_pending
            else type(norm) is torch.Tensor
        )
        if not known or norm.ndim:
            raise _unmixable(f"one order, mesh and axes {layout}", norm)
        if is_pending:
            (parts if norm.axes else once).append(norm.parts[0])
        else:
            once.append(norm)
    return PendingNorm.make(parts, layout, once)


def _norm(cls: type[Any], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Norms of tensors of a list, or of one tensor over all of it."""
    is_list = plan.func._schema.name == "aten::_foreach_norm"
    names = ("self", "ord", "dtype") if is_list else ("self", "ord", "dim", "keepdim")
    given = dict(zip(names, args, strict=False)) | kwargs
    order, dtype = float(given.get("ord", 2)), given.get("dtype")
    tensors = given["self"] if is_list else [given["self"]]
    if not is_list:
        _check_whole(cls, plan, tensors[0], given)
    if not order >= 0 or "out" in given:
        refuse(cls, plan, (), {}, f" for order {order} or with out")
    pieces = [t._local_tensor if type(t) is cls else t for t in tensors]
    some = [piece for piece in pieces if piece.numel()]
    norms = iter(torch._foreach_norm(some, order, dtype=dtype) if some else ())
    out = []
    for tensor, piece in zip(tensors, pieces, strict=True):
        # 0 of a piece without elements, where torch's inf norm would raise.
        norm = next(norms) if piece.numel() else torch.linalg.vector_norm(piece, 2, dtype=dtype)
        if type(tensor) is cls:
            norm = PendingNorm.make([norm], (order, tensor.row_spec.mesh, tensor.row_spec.axes))
        out.append(norm)
    return out if is_list else out[0]


def _total(cls: type[Any], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Sum, any or all of a whole tensor."""
    given = dict(zip(("self", "dim", "keepdim"), args, strict=False)) | kwargs
    tensor = given["self"]
    _check_whole(cls, plan, tensor, given)
    combine = getattr(torch, plan.func._schema.name.removeprefix("aten::"))
    options = {"dtype": given["dtype"]} if "dtype" in given else {}
    part = combine(tensor._local_tensor, **options)
    spec = tensor.row_spec
    return _replicated(over_ranks(part, spec.mesh, spec.axes, combine), spec.mesh)


def _check_whole(cls: type[Any], plan: Plan, tensor: Any, given: dict[str, Any]) -> None:
    """Raise unless a reduction goes over all dims and to a scalar."""
    dim = given.get("dim")
    dims: Sequence[int] = dim if isinstance(dim, (list, tuple)) else [] if dim is None else [dim]
    dims = dims or range(tensor.ndim)
    if {d % max(tensor.ndim, 1) for d in dims} != set(range(tensor.ndim)) or given.get("keepdim"):
        refuse(cls, plan, (), {}, " over some dims only, or keeping them")
    if "out" in given or type(tensor) is not cls:
        refuse(cls, plan, (), {}, " with out")


REDUCTIONS: dict[str, Handler] = {
    "_foreach_norm": _norm,
    "linalg_vector_norm": _norm,
    "sum": _total,
    "any": _total,
    "all": _total,
}
