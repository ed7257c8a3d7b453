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
from typing import Any, NoReturn, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from fsdp_core.fsdp.collectives import all_gather

Handler = Callable[["Plan", Sequence[Any], dict[str, Any]], Any]
_Kind = tuple[float, DeviceMesh, tuple[int, ...]]  # see PendingNorm.kind


@dataclass(frozen=True)
class Plan:
    """How one operator runs on tensors of the row-sharded type `cls`.

    Attributes:
        cls: the type.
        func: the operator.
        handler: what runs it.
        writes: positions, or names of keywords, that it writes to.
    """

    cls: type[Any]
    func: Any
    handler: Handler
    writes: tuple[int | str, ...]

    def refuse(self, why: str = "") -> NoReturn:
        """Raise NotImplementedError, naming the operator and what to do instead."""
        raise NotImplementedError(
            f"{self.func} does not work on {self.cls.__name__} tensors{why}: use .full_tensor() "
            "of it, or .to_local() for this rank's rows."
        )

    def refused(self, args: Sequence[Any], kwargs: dict[str, Any]) -> NoReturn:
        """The handler of operators that have none."""
        self.refuse()


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

    A rank without any gradient that an axis cuts takes no part, and the others would wait for it in
    vain: `fsdp_core.fsdp.clip.clip_grad_norm_` follows parameters, not gradients, and has no such
    limit. It also scales plain gradients one by one, which torch's cannot by a DTensor.

    Attributes:
        kind: order, which is p > 0, inf, or 0 for counts of elements; mesh of the tensors; and
            the mesh axes that cut them, coarsest first.
        parts: norms of rows that lie here, 0-d.
        once: norms that are the same on every rank, 0-d.
    """

    kind: _Kind
    parts: list[torch.Tensor]
    once: list[torch.Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def make(
        parts: list[torch.Tensor], kind: _Kind, once: list[torch.Tensor] | None = None
    ) -> "PendingNorm":
        """One norm whose part here is `parts[0]`, or, with `once`, a stack of all of them."""
        values = [*parts, *(once or ())]
        self = torch.Tensor._make_wrapper_subclass(
            PendingNorm,
            () if once is None else (len(values),),
            dtype=functools.reduce(torch.promote_types, (value.dtype for value in values)),
            device=values[0].device,
        )
        self.parts, self.once, self.kind = parts, list(once or ()), kind
        return self

    def reduced(self) -> DTensor:
        """The norm of all, replicated on every axis of the mesh: a collective over `axes`."""
        order, mesh, axes = self.kind
        powers = [total_power(self.parts, order, mesh, axes)] if self.parts else []
        if self.once:
            powers.append(total_power(self.once, order, None, ()))
        total = norm_of(combine_powers(torch.stack(powers), order), order)
        return _replicated(total.to(self.dtype), mesh)

    @torch.compiler.disable
    def full_tensor(self) -> torch.Tensor:
        """The norm of all, plain: a collective over `axes`."""
        return cast("DTensor", self * 1).full_tensor()  # through autograd, if it records

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PendingNorm(kind={self.kind}, parts={self.parts}, once={self.once})"

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name == "aten::stack":
            return _stack(args[0])
        if name == "aten::_to_copy" and not args[0].ndim:
            moved = [func(part, **kwargs) for part in args[0].parts]
            return PendingNorm.make(moved, args[0].kind)
        if name == "aten::linalg_vector_norm" and args[0].ndim:
            order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
            own = args[0].kind[0]
            if order != own or order == 0 or len(args) > 2 or kwargs:
                raise _unmixable(f"their own order {own}, not 0", f"{order}, {kwargs}")
            return args[0].reduced()

        def scalar(norm: PendingNorm) -> DTensor:
            if norm.ndim:
                raise _unmixable("torch.linalg.vector_norm", func)
            return norm.reduced()

        args, kwargs = tree_map_only(PendingNorm, scalar, (args, kwargs))
        return func(*args, **kwargs)


def _unmixable(expected: str, got: object) -> NotImplementedError:
    return NotImplementedError(
        f"Expected norms of sharded gradients to meet in {expected}, got {got}: use "
        "fsdp_core.fsdp.clip.clip_grad_norm_, which takes gradients on any meshes."
    )


def _stack(norms: Sequence[Any]) -> PendingNorm:
    kinds = (norm.kind for norm in norms if isinstance(norm, PendingNorm))
    kind = max(kinds, key=lambda kind: len(kind[2]))
    parts: list[torch.Tensor] = []
    once: list[torch.Tensor] = []
    for norm in norms:
        known = norm.kind if isinstance(norm, PendingNorm) else None
        if known == kind and not norm.ndim:
            parts += norm.parts
        elif known == (*kind[:2], ()) and not norm.ndim:
            once += norm.parts
        elif type(norm) is torch.Tensor and not norm.ndim:
            once.append(norm)
        else:
            raise _unmixable(f"one order, mesh and axes {kind}", norm)
    return PendingNorm.make(parts, kind, once)


def _norm(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Norms of tensors of a list, or of one tensor over all of it."""
    is_list = plan.func._schema.name == "aten::_foreach_norm"
    names = ("self", "ord", "dtype") if is_list else ("self", "ord", "dim", "keepdim")
    given = dict(zip(names, args, strict=False)) | kwargs
    order, dtype = float(given.get("ord", 2)), given.get("dtype")
    tensors = given["self"] if is_list else [given["self"]]
    if not is_list:
        _check_whole(plan, tensors[0], given)
    if not order >= 0 or "out" in given:
        plan.refuse(f" for order {order} or with out")
    pieces = [t._local_tensor if type(t) is plan.cls else t for t in tensors]
    # Where there are no elements torch's inf norm would raise.
    some = [piece if piece.numel() else piece.new_zeros(1) for piece in pieces]
    norms: list[Any] = list(torch._foreach_norm(some, order, dtype=dtype))
    for index, tensor in enumerate(tensors):
        if type(tensor) is plan.cls:
            kind = (order, tensor.row_spec.mesh, tensor.row_spec.axes)
            norms[index] = PendingNorm.make([norms[index]], kind)
    return norms if is_list else norms[0]


def _total(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Sum, any or all of a whole tensor."""
    given = dict(zip(("self", "dim", "keepdim"), args, strict=False)) | kwargs
    tensor = given["self"]
    _check_whole(plan, tensor, given)
    combine = getattr(torch, plan.func._schema.name.removeprefix("aten::"))
    options = {"dtype": given["dtype"]} if "dtype" in given else {}
    part = combine(tensor._local_tensor, **options)
    spec = tensor.row_spec
    return _replicated(over_ranks(part, spec.mesh, spec.axes, combine), spec.mesh)


def _check_whole(plan: Plan, tensor: Any, given: dict[str, Any]) -> None:
    """Raise unless a reduction goes over all dims and to a scalar."""
    dim = given.get("dim")
    dims = dim if isinstance(dim, (list, tuple)) else [] if dim is None else [dim]
    if {d % max(tensor.ndim, 1) for d in dims or range(tensor.ndim)} != set(
        range(tensor.ndim)
    ) or given.get("keepdim"):
        plan.refuse(" over some dims only, or keeping them")
    if "out" in given or type(tensor) is not plan.cls:
        plan.refuse(" with out")


REDUCTIONS: dict[str, Handler] = {
    **dict.fromkeys(("_foreach_norm", "linalg_vector_norm"), _norm),
    **dict.fromkeys(("sum", "any", "all"), _total),
}
