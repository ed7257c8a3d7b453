"""What each operator does on row-sharded tensors: every operator has one of these kinds, or raises.

    kind          operators                                  does
    elementwise   tagged pointwise by torch, `_ELEMENTWISE`  runs on the pieces
    lists         `_foreach_*` of those, fused optimizers    runs on lists of pieces
    draw          normal_, uniform_, ...                     draws the whole tensor, keeps its rows
    norm          vector_norm, _foreach_norm                 a `PendingNorm` of this rank's part
    total         sum, any, all                              a scalar DTensor, reduced at once
    same          detach, alias                              another object over the same piece

Tensors in one call share one layout. Beside them may stand tensors of one element, and tensors of
the global shape, of which each rank takes its rows. Nothing else: shapes that fit only because of
how many rows a rank happens to hold must not pass. In-place operators also raise the version
counter of the piece, hence of the flat buffer under it, as they would on the piece itself.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, compress, zip_longest
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fsdp_core.fsdp.row_reductions import REDUCTIONS, Handler, Plan
from fsdp_core.fsdp.row_spec import RowSpec


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = _words(
    "clone copy_ _to_copy zero_ fill fill_ zeros_like ones_like full_like empty_like lerp lerp_ "
    "masked_fill_ isfinite isinf isnan isposinf isneginf _pin_memory"
)
_DRAW = _words("normal_ uniform_ bernoulli_ exponential_ log_normal_ random_ cauchy_ geometric_")
_FOREACH = _words(
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf "
    "erfc exp expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow "
    "reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero"
)
_FUSED = _words("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_")

_plans: dict[Any, Plan] = {}


def run(cls: type[Any], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `func`, some of whose tensors are of the row-sharded type `cls`.

    Raises:
        NotImplementedError: `func` has no kind, or this form of it does not.
        ValueError: layouts differ, or a plain tensor is neither one element nor the global shape.
    """
    plan = _plans.get(func) or _plans.setdefault(func, _plan(cls, func))
    return plan.handler(plan, args, kwargs)


def _plan(cls: type[Any], func: Any) -> Plan:
    writes = tuple(
        argument.name if argument.kwarg_only else index
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        # _fused_adagrad_ declares that it writes to them, and does not.
        and argument.name != "state_steps"
    )
    return Plan(cls, func, _handler(func, bool(writes)), writes)


def _handler(func: Any, writes: bool) -> Handler:  # noqa: FBT001  (private, one caller)
    name = func._schema.name.removeprefix("aten::")
    if name in _HANDLERS:
        return _HANDLERS[name]
    foreach = name.removeprefix("_foreach_").removesuffix("_")
    is_foreach = name.startswith("_foreach_") and writes == name.endswith("_")
    draws = torch.Tag.nondeterministic_seeded in func.tags
    tensors_only = all(str(value.type) == "Tensor" for value in func._schema.returns)
    pointwise = torch.Tag.pointwise in func.tags and tensors_only and not draws
    is_known = name in _ELEMENTWISE | _FUSED or (is_foreach and foreach in _FOREACH)
    return _on_pieces if is_known or pointwise else lambda plan, *_: plan.refuse()


def _on_pieces(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run on this rank's rows: of tensors, or of those at each position of lists."""
    is_listed, cls = _is_tensors(args[0]), plan.cls
    tensors = [[v] for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    specs = _specs(plan, [v for v in args if _is_tensors(v)] if is_listed else tensors)

    def pieces(key: int | str, value: Any) -> Any:
        if is_listed and _is_tensors(value):
            return [
                t._local_tensor
                if type(t) is cls and spec.local_numel
                else _piece(plan, key, t, spec)
                for t, spec in zip(value, specs, strict=False)
            ]
        spec = None if is_listed else specs[0]
        return _piece(plan, key, value, spec) if isinstance(value, torch.Tensor) else value

    local = [pieces(*item) for item in enumerate(args)]
    named = {key: pieces(key, value) for key, value in kwargs.items()}
    if plan.func._schema.name.startswith("aten::_fused"):
        # No fused kernel ever sees a piece without elements.
        here = [spec is None or bool(spec.local_numel) for spec in specs]
        local = [list(compress(v, here)) if isinstance(v, list) else v for v in local]
    out = plan.func(*local, **named) if not is_listed or local[0] else []
    if written := [args[at] if isinstance(at, int) else kwargs[at] for at in plan.writes]:
        changed = chain(*written) if is_listed else written
        increment_version([t._local_tensor for t in changed if type(t) is cls])
        return None if is_listed else written[0] if len(written) == 1 else tuple(written)
    if is_listed:
        return [_wrap(plan, *pair) for pair in zip(out, specs, strict=True)]
    if isinstance(out, torch.Tensor):
        return _wrap(plan, out, specs[0])
    return tuple(_wrap(plan, value, specs[0]) for value in out)


def _is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def _specs(plan: Plan, lists: Iterable[Sequence[Any]]) -> list[Any]:
    """Layout at each position of the lists; None where all tensors are plain."""
    found: list[RowSpec | None] = []
    for tensors in zip_longest(*lists):
        specs = [tensor.row_spec for tensor in tensors if type(tensor) is plan.cls]
        for spec in specs[1:]:
            if spec is not specs[0] and spec != specs[0]:
                raise ValueError(
                    f"Expected {plan.cls.__name__} tensors of one layout in {plan.func}, "
                    f"got {spec} and {specs[0]}."
                )
        found.append(specs[0] if specs else None)
    return found


def _piece(plan: Plan, key: int | str, value: Any, spec: RowSpec | None) -> torch.Tensor:
    """This rank's part of argument `key`, or of its tensor at a position of layout `spec`.

    None is the layout of positions of plain tensors, and of what holds for all positions.
    """
    if type(value) is plan.cls:
        if spec is None:
            plan.refuse(" that stand for a scalar")
        local: torch.Tensor = value._local_tensor
        # A scalar that is elsewhere: an element to compute with, so that types promote as there.
        return local.new_zeros(()) if spec.is_absent_scalar else local
    if spec is not None and key in plan.writes:
        raise ValueError(
            f"Expected {plan.func} to write to a {plan.cls.__name__} tensor, got one of "
            f"{type(value).__name__}: take .full_tensor() of the other arguments."
        )
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if spec is None or (value.numel() == 1 and value.ndim <= len(spec.shape)):
        return value
    if value.shape == spec.shape:
        return spec.own_rows(value)
    raise ValueError(
        f"Expected a tensor of one element or of the global shape {tuple(spec.shape)} beside a "
        f"{plan.cls.__name__} tensor in {plan.func}, got {tuple(value.shape)}."
    )


def _wrap(plan: Plan, out: torch.Tensor, spec: RowSpec | None) -> Any:
    if spec is None:
        return out
    if spec.is_absent_scalar and not out.ndim:
        out = out.new_empty(0)
    assert out.shape == spec.local_shape, f"{plan.func} made {out.shape} of {spec.local_shape}"
    if not out.is_contiguous():
        plan.refuse(" in another memory format")
    return plan.cls._wrap(out, spec)


def _draw(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Draw what one process would draw for the whole tensor: same values, same generator state."""
    if [type(value) is plan.cls for value in args] != [True] + [False] * (len(args) - 1):
        plan.refuse(" as its parameters, or a plain one as its target")
    full = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
    return args[0].copy_(plan.func(full, *args[1:], **kwargs))


def _same(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return plan.cls._wrap(args[0]._local_tensor, args[0].row_spec)


def _new_empty(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of the global shape, as staging of checkpoints asks: a tensor of the same layout."""
    spec: RowSpec = args[0].row_spec
    if torch.Size(args[1]) != spec.shape:
        plan.refuse(" for another shape than the tensor's own")
    return plan.cls._wrap(plan.func(args[0]._local_tensor, spec.local_shape, **kwargs), spec)


def _fill_where(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`tensor[mask] = number`: rows need no other ranks' rows for it."""
    target, indices, value, *_ = args
    masks = [index for index in indices if type(index) is plan.cls and index.dtype == torch.bool]
    if kwargs or len(args) > 3 or len(masks) != len(indices) or value.numel() != 1:
        plan.refuse(" but for setting what a mask of their layout marks to a number")
    return target.masked_fill_(masks[0], value.to(target.dtype).reshape(()))


_HANDLERS: dict[str, Handler] = {
    "detach": _same,
    "alias": _same,
    "detach_": lambda plan, args, kwargs: args[0],
    "new_empty": _new_empty,
    "is_pinned": lambda plan, args, kwargs: args[0]._local_tensor.is_pinned(),
    "index_put_": _fill_where,
    **dict.fromkeys(_DRAW, _draw),
    **REDUCTIONS,
}
