"""Reductions of row-sharded tensors to a scalar, which then is a standard DTensor.

Each rank reduces its rows, and the DTensor's placement says how the ranks' results come together,
once somebody asks: pending over the axes that cut rows, replicated over the others. This is how
the gradients of torch's FSDP2 behave, so torch's own clipping works on ours.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement

from fsdp_core.fsdp.row_spec import RowSpec

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


def _pending_norm(cls: type[Any], plan: Plan, order: float) -> Placement:
    if order == math.inf:
        return Replicate()  # reduced at once, see `_reduce_max`
    if order == 0:
        return Partial("sum")
    if order < 0:
        refuse(cls, plan, (), {}, f" for order {order}")
    return _NormPartial(order)


def _scalar(value: torch.Tensor, spec: RowSpec, pending: Placement) -> DTensor:
    """The 0-d DTensor whose part on this rank is `value`, to be reduced over the cutting axes."""
    key = (value.dtype, pending)
    found = spec.cache.get(key)
    if found is None:
        placements = tuple(
            pending if axis in spec.axes else Replicate() for axis in range(spec.mesh.ndim)
        )
        meta = TensorMeta(torch.Size(()), (), value.dtype)
        found = spec.cache[key] = DTensorSpec(spec.mesh, placements, tensor_meta=meta)
    return DTensor(value, found, requires_grad=False)


def _norms(locals_: list[torch.Tensor], order: float, dtype: Any) -> list[torch.Tensor]:
    """Norms of pieces; 0 of those without elements, where torch's inf norm would raise."""
    some = [local for local in locals_ if local.numel()]
    norms = iter(torch._foreach_norm(some, order, dtype=dtype) if some else ())
    return [
        next(norms) if local.numel() else torch.linalg.vector_norm(local, 2, dtype=dtype)
        for local in locals_
    ]


def _reduce_max(norms: list[torch.Tensor], specs: Sequence[RowSpec | None]) -> None:
    """Bring inf norms together over the ranks, in place, one collective a layout and dtype.

    At once and by bits, not by a pending Partial("max"), because the maximum of NCCL forgets NaN,
    and a gradient that is NaN on one rank would pass for finite. Norms have no sign, and the bits
    of floats without sign are ordered as integers, NaN highest.
    """
    alike: dict[Any, list[int]] = {}
    for index, spec in enumerate(specs):
        if spec is not None and spec.axes:
            alike.setdefault((spec.mesh, spec.axes, norms[index].dtype), []).append(index)
    for (mesh, axes, dtype), members in alike.items():
        wide = torch.stack([norms[i] for i in members]).abs()
        wide = wide if dtype == torch.float64 else wide.float()
        bits = wide.view(torch.int64 if dtype == torch.float64 else torch.int32)
        for axis in axes:
            dist.all_reduce(bits, dist.ReduceOp.MAX, mesh.get_group(axis))
        for i, norm in zip(members, bits.view(wide.dtype).to(dtype).unbind(), strict=True):
            norms[i] = norm


def _foreach_norm(
    cls: type[Any], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Any]:
    tensors, order = args[0], float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    if "out" in kwargs:
        refuse(cls, plan, args, kwargs, " with out")
    pending = _pending_norm(cls, plan, order)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    specs = [t.row_spec if type(t) is cls else None for t in tensors]
    norms = _norms([t._local_tensor if type(t) is cls else t for t in tensors], order, dtype)
    if order == math.inf:
        _reduce_max(norms, specs)
    return [
        norm if spec is None else _scalar(norm, spec, pending)
        for norm, spec in zip(norms, specs, strict=True)
    ]


def _vector_norm(cls: type[Any], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    names = ("self", "ord", "dim", "keepdim")
    given = dict(zip(names, args, strict=False)) | kwargs
    tensor, order = given["self"], float(given.get("ord", 2))
    _check_whole(cls, plan, tensor, given)
    pending = _pending_norm(cls, plan, order)
    norms = _norms([tensor._local_tensor], order, given.get("dtype"))
    if order == math.inf:
        _reduce_max(norms, [tensor.row_spec])
    return _scalar(norms[0], tensor.row_spec, pending)


def _total(cls: type[Any], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("self", "dim", "keepdim"), args, strict=False)) | kwargs
    tensor = given["self"]
    _check_whole(cls, plan, tensor, given)
    total = tensor._local_tensor.sum(dtype=given.get("dtype"))
    return _scalar(total, tensor.row_spec, Partial("sum"))


def _verdict(cls: type[Any], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("self", "dim", "keepdim"), args, strict=False)) | kwargs
    tensor = given["self"]
    _check_whole(cls, plan, tensor, given)
    spec: RowSpec = tensor.row_spec
    is_any = plan.func._schema.name == "aten::any"
    found = (torch.any if is_any else torch.all)(tensor._local_tensor).to(torch.int32)
    for axis in spec.axes:
        group = spec.mesh.get_group(axis)
        dist.all_reduce(found, dist.ReduceOp.MAX if is_any else dist.ReduceOp.MIN, group)
    return _scalar(found.bool(), spec, Replicate())


def _check_whole(cls: type[Any], plan: Plan, tensor: Any, given: dict[str, Any]) -> None:
    """Raise unless a reduction goes over all dims and to a scalar."""
    dim = given.get("dim")
    dims = range(tensor.ndim) if dim is None or dim == [] else (dim if _is_list(dim) else [dim])
    if {d % max(tensor.ndim, 1) for d in dims} != set(range(tensor.ndim)) or given.get("keepdim"):
        refuse(cls, plan, (), {}, " over some dims only, or keeping them")
    if "out" in given or type(tensor) is not cls:
        refuse(cls, plan, (), {}, " with out")


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


REDUCTIONS: dict[str, Handler] = {
    "_foreach_norm": _foreach_norm,
    "linalg_vector_norm": _vector_norm,
    "sum": _total,
    "any": _verdict,
    "all": _verdict,
}
