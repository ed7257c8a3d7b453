"""What each operator does on row-sharded tensors: every operator has one of these kinds, or raises.

    kind          operators                                  does
    elementwise   tagged pointwise by torch, `_ELEMENTWISE`  runs on the pieces
    lists         `_foreach_*` of those, fused optimizers    runs on lists of pieces
    draw          normal_, uniform_, ..., rand_like, ...     draws the whole tensor, keeps its rows
    norm, total   vector_norm, _foreach_norm, sum            a scalar DTensor pending over the axes
    verdict       any, all                                   a scalar DTensor, reduced at once
    same          detach, alias                              another object over the same piece

Tensors in one call share one layout. Beside them may stand tensors of one element, and tensors of
the global shape, of which each rank takes its rows. Nothing else: shapes that fit only because of
how many rows a rank happens to hold must not pass. In-place operators also raise the version
counter of the piece, hence of the flat buffer under it, as they would on the piece itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fsdp_core.fsdp.row_reductions import REDUCTIONS, Handler, Plan, refuse
from fsdp_core.fsdp.row_spec import RowSpec


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = _words(
    "clone copy_ _to_copy zero_ fill fill_ zeros_like ones_like full_like empty_like lerp lerp_ "
    "masked_fill_ isfinite isinf isnan isposinf isneginf _pin_memory"
)
_NEW = _words("new_empty new_zeros new_ones new_full")
_DRAW_IN_PLACE = _words(
    "normal_ uniform_ bernoulli_ exponential_ log_normal_ random_ cauchy_ geometric_"
)
_DRAW_LIKE = _words("rand_like randn_like randint_like")
_FOREACH = _words(
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf "
    "erfc exp expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow "
    "reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero"
)
_FUSED = _words("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_")
_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)

_plans: dict[Any, Plan] = {}


def run(cls: type[Any], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `func`, some of whose tensors are of the row-sharded type `cls`.

    Raises:
        NotImplementedError: `func` has no kind, or this form of it does not.
        ValueError: layouts differ, or a plain tensor is neither one element nor the global shape.
    """
    plan = _plans.get(func)
    if plan is None:
        plan = _plans[func] = _plan(func)
    return plan.handler(cls, plan, args, kwargs)


def _plan(func: Any) -> Plan:
    writes: list[int | str] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else index)
    return Plan(func, _handler(func, bool(writes)), tuple(writes))


def _handler(func: Any, writes: bool) -> Handler:  # noqa: FBT001  (private, one caller)
    name = func._schema.name.removeprefix("aten::")
    draws = torch.Tag.nondeterministic_seeded in func.tags
    if name in _HANDLERS:
        return _HANDLERS[name]
    foreach = name.removeprefix("_foreach_").removesuffix("_")
    is_foreach = name.startswith("_foreach_") and foreach in _FOREACH
    if name in _FUSED or (is_foreach and writes == name.endswith("_")):
        return _lists
    if name in _DRAW_IN_PLACE | _DRAW_LIKE:
        return _draw
    tensors_only = all(str(value.type) == "Tensor" for value in func._schema.returns)
    pointwise = torch.Tag.pointwise in func.tags and tensors_only and not draws
    if name in _ELEMENTWISE or pointwise:
        return _elementwise
    return _new if name in _NEW else refuse


def _tensors(cls: type[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [value for value in (*args, *kwargs.values()) if type(value) is cls]


def _piece(cls: type[Any], plan: Plan, value: Any, spec: RowSpec) -> torch.Tensor:
    """This rank's part of any tensor that stands in a call beside others of layout `spec`."""
    if type(value) is cls:
        _check_layout(cls, plan, value.row_spec, spec)
        local: torch.Tensor = value._local_tensor
        # A scalar that is elsewhere: an element to compute with, so that types promote as there.
        return local.new_zeros(()) if spec.is_absent_scalar else local
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if value.numel() == 1 and value.ndim <= len(spec.shape):
        return value
    if value.shape == spec.shape:
        return spec.own_rows(value)
    raise ValueError(
        f"Expected a tensor of one element or of the global shape {tuple(spec.shape)} beside a "
        f"{cls.__name__} tensor in {plan.func}, got {tuple(value.shape)}."
    )


def _check_layout(cls: type[Any], plan: Plan, spec: RowSpec, other: RowSpec) -> None:
    if spec is not other and spec != other:
        raise ValueError(
            f"Expected {cls.__name__} tensors of one layout in {plan.func}, got {spec} and {other}."
        )


def _check_written(cls: type[Any], plan: Plan, written: Sequence[Any]) -> None:
    for value in written:
        if type(value) is not cls:
            raise ValueError(
                f"Expected {plan.func} to write to a {cls.__name__} tensor, got one of "
                f"{type(value).__name__}: take .full_tensor() of the other arguments."
            )


def _elementwise(cls: type[Any], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    spec = _tensors(cls, args, kwargs)[0].row_spec
    if kwargs and kwargs.get("memory_format") in _CHANNELS_LAST:
        refuse(cls, plan, args, kwargs, " with memory_format channels_last")
    written = [args[at] if isinstance(at, int) else kwargs[at] for at in plan.writes]
    _check_written(cls, plan, written)
    pieces = [_piece(cls, plan, a, spec) if isinstance(a, torch.Tensor) else a for a in args]
    named = {
        key: _piece(cls, plan, a, spec) if isinstance(a, torch.Tensor) else a
        for key, a in kwargs.items()
    }
    out = plan.func(*pieces, **named)
    if written:
        increment_version([value._local_tensor for value in written])
        return written[0] if len(written) == 1 else tuple(written)
    if isinstance(out, torch.Tensor):
        return _wrap(cls, plan, out, spec)
    return tuple(_wrap(cls, plan, value, spec) for value in out)


def _wrap(cls: type[Any], plan: Plan, out: torch.Tensor, spec: RowSpec) -> Any:
    if spec.is_absent_scalar and not out.ndim:
        out = out.new_empty(0)
    assert out.shape == spec.local_shape, f"{plan.func} made {out.shape} of {spec.local_shape}"
    return cls._wrap(out, spec)


def _lists(cls: type[Any], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    specs = _specs(cls, plan, [value for value in args if _is_tensors(value)])
    pieces = [
        _column(cls, plan, at, value, specs)
        if _is_tensors(value)
        else _one_element(cls, plan, value)
        for at, value in enumerate(args)
    ]
    named = {key: _one_element(cls, plan, value) for key, value in kwargs.items()}
    if plan.func._schema.name.startswith("aten::_fused"):
        # No fused kernel ever sees a piece without elements.
        kept = [i for i, spec in enumerate(specs) if spec is None or spec.local_numel]
        if len(kept) < len(specs):
            pieces = [[v[i] for i in kept] if isinstance(v, list) and v else v for v in pieces]
        if kept:
            plan.func(*pieces, **named)
    else:
        out = plan.func(*pieces, **named)
        if not plan.writes:
            return [
                value if spec is None else _wrap(cls, plan, value, spec)
                for value, spec in zip(out, specs, strict=True)
            ]
    for at in plan.writes:
        increment_version([t._local_tensor for t in args[int(at)] if type(t) is cls])
    return None


def _is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def _specs(cls: type[Any], plan: Plan, lists: Sequence[Sequence[Any]]) -> list[RowSpec | None]:
    """Layout at each position of the lists; None where all tensors are plain."""
    found: list[RowSpec | None] = [None] * max(len(value) for value in lists)
    for value in lists:
        here = [tensor.row_spec if type(tensor) is cls else None for tensor in value]
        if here == found:  # compares by identity first
            continue
        for index, spec in enumerate(here):
            known = found[index]
            if known is None:
                found[index] = spec
            elif spec is not None:
                _check_layout(cls, plan, spec, known)
    return found


def _column(
    cls: type[Any], plan: Plan, at: int, tensors: Sequence[Any], specs: Sequence[RowSpec | None]
) -> list[Any]:
    """Pieces of one list of tensors, the argument at position `at`."""
    # One element each. _fused_adagrad_ declares that it writes to them, and does not.
    is_steps = plan.func._schema.arguments[at].name == "state_steps"
    if is_steps and cls not in set(map(type, tensors)):
        return list(tensors)
    pieces = []
    for tensor, spec in zip(tensors, specs, strict=False):
        if spec is None:
            pieces.append(tensor)
        elif type(tensor) is cls and spec.local_numel:
            pieces.append(tensor._local_tensor)
        else:
            if at in plan.writes:
                _check_written(cls, plan, [tensor])
            pieces.append(_piece(cls, plan, tensor, spec))
    return pieces


def _one_element(cls: type[Any], plan: Plan, value: Any) -> Any:
    """An argument that holds for all positions: no row-sharded tensor can."""
    if type(value) is cls:
        refuse(cls, plan, (), {}, " that stand for a scalar")
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value


def _draw(cls: type[Any], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Draw what one process would draw for the whole tensor: same values, same generator state."""
    target = args[0]
    if len(_tensors(cls, args, kwargs)) > 1 or type(target) is not cls:
        refuse(cls, plan, args, kwargs, " as its parameters")
    spec, local = target.row_spec, target._local_tensor
    full = torch.empty(spec.shape, dtype=local.dtype, device=local.device)
    full = plan.func(full, *args[1:], **kwargs)
    if not plan.writes:
        return cls._wrap(spec.own_rows(full).clone(), spec)
    local.copy_(spec.own_rows(full))
    increment_version([local])
    return target


def _new(cls: type[Any], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`new_*` of the global shape: a tensor of the same layout."""
    spec = args[0].row_spec
    if torch.Size(args[1]) != spec.shape:
        refuse(cls, plan, args, kwargs, " for another shape than the tensor's own")
    return cls._wrap(plan.func(args[0]._local_tensor, spec.local_shape, *args[2:], **kwargs), spec)


def _same(cls: type[Any], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return cls._wrap(args[0]._local_tensor, args[0].row_spec)


def _itself(cls: type[Any], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _on_local(cls: type[Any], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return plan.func(args[0]._local_tensor, *args[1:], **kwargs)


_HANDLERS: dict[str, Handler] = {
    "detach": _same,
    "alias": _same,
    "detach_": _itself,
    "is_pinned": _on_local,
    **REDUCTIONS,
}
