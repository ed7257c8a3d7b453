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

import itertools
from collections.abc import Sequence
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
        plan = _plans[func] = _plan(cls, func)
    return plan.handler(plan, args, kwargs)


def _plan(cls: type[Any], func: Any) -> Plan:
    writes: list[int | str] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else index)
    return Plan(cls, func, _handler(func, bool(writes)), tuple(writes))


def _handler(func: Any, writes: bool) -> Handler:  # noqa: FBT001  (private, one caller)
    name = func._schema.name.removeprefix("aten::")
    draws = torch.Tag.nondeterministic_seeded in func.tags
    if name in _HANDLERS:
        return _HANDLERS[name]
    foreach = name.removeprefix("_foreach_").removesuffix("_")
    is_foreach = name.startswith("_foreach_") and foreach in _FOREACH
    if name in _FUSED or (is_foreach and writes == name.endswith("_")):
        return _lists
    if name in _DRAW:
        return _draw
    tensors_only = all(str(value.type) == "Tensor" for value in func._schema.returns)
    pointwise = torch.Tag.pointwise in func.tags and tensors_only and not draws
    return _elementwise if name in _ELEMENTWISE or pointwise else Plan.refused


def _piece(plan: Plan, value: Any, spec: RowSpec) -> torch.Tensor:
    """This rank's part of any tensor that stands in a call beside others of layout `spec`."""
    if type(value) is plan.cls:
        _check_layout(plan, value.row_spec, spec)
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
        f"{plan.cls.__name__} tensor in {plan.func}, got {tuple(value.shape)}."
    )


def _check_layout(plan: Plan, spec: RowSpec, other: RowSpec) -> None:
    if spec is not other and spec != other:
        raise ValueError(
            f"Expected {plan.cls.__name__} tensors of one layout in {plan.func}, "
            f"got {spec} and {other}."
        )


def _check_written(plan: Plan, written: Sequence[Any]) -> None:
    for value in written:
        if type(value) is not plan.cls:
            raise ValueError(
                f"Expected {plan.func} to write to a {plan.cls.__name__} tensor, got one of "
                f"{type(value).__name__}: take .full_tensor() of the other arguments."
            )


def _elementwise(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    values = (*args, *kwargs.values())
    spec: RowSpec = next(value.row_spec for value in values if type(value) is plan.cls)
    if kwargs and kwargs.get("memory_format") in _CHANNELS_LAST:
        plan.refuse(" with memory_format channels_last")
    written = [args[at] if isinstance(at, int) else kwargs[at] for at in plan.writes]
    _check_written(plan, written)

    def piece(value: Any) -> Any:
        return _piece(plan, value, spec) if isinstance(value, torch.Tensor) else value

    out = plan.func(*map(piece, args), **{key: piece(value) for key, value in kwargs.items()})
    if written:
        increment_version([value._local_tensor for value in written])
        return written[0] if len(written) == 1 else tuple(written)
    if isinstance(out, torch.Tensor):
        return _wrap(plan, out, spec)
    return tuple(_wrap(plan, value, spec) for value in out)


def _wrap(plan: Plan, out: torch.Tensor, spec: RowSpec) -> Any:
    if spec.is_absent_scalar and not out.ndim:
        out = out.new_empty(0)
    assert out.shape == spec.local_shape, f"{plan.func} made {out.shape} of {spec.local_shape}"
    return plan.cls._wrap(out, spec)


def _lists(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    specs = _specs(plan, [value for value in args if _is_tensors(value)])
    pieces = [
        _column(plan, at, value, specs) if _is_tensors(value) else _one_element(plan, value)
        for at, value in enumerate(args)
    ]
    named = {key: _one_element(plan, value) for key, value in kwargs.items()}
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
                value if spec is None else _wrap(plan, value, spec)
                for value, spec in zip(out, specs, strict=True)
            ]
    for at in plan.writes:
        increment_version([t._local_tensor for t in args[int(at)] if type(t) is plan.cls])
    return None


def _is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def _specs(plan: Plan, lists: Sequence[Sequence[Any]]) -> list[RowSpec | None]:
    """Layout at each position of the lists; None where all tensors are plain."""
    found: list[RowSpec | None] = []
    for tensors in itertools.zip_longest(*lists):
        specs = [tensor.row_spec for tensor in tensors if type(tensor) is plan.cls]
        for spec in specs[1:]:
            _check_layout(plan, spec, specs[0])
        found.append(specs[0] if specs else None)
    return found


def _column(
    plan: Plan, at: int, tensors: Sequence[Any], specs: Sequence[RowSpec | None]
) -> list[Any]:
    """Pieces of one list of tensors, the argument at position `at`."""
    # One element each. _fused_adagrad_ declares that it writes to them, and does not.
    is_steps = plan.func._schema.arguments[at].name == "state_steps"
    if is_steps and plan.cls not in set(map(type, tensors)):
        return list(tensors)
    pieces = []
    for tensor, spec in zip(tensors, specs, strict=False):
        if spec is None:
            pieces.append(tensor)
        elif type(tensor) is plan.cls and spec.local_numel:
            pieces.append(tensor._local_tensor)
        else:
            if at in plan.writes:
                _check_written(plan, [tensor])
            pieces.append(_piece(plan, tensor, spec))
    return pieces


def _one_element(plan: Plan, value: Any) -> Any:
    """An argument that holds for all positions: no row-sharded tensor can."""
    if type(value) is plan.cls:
        plan.refuse(" that stand for a scalar")
    return value.full_tensor() if isinstance(value, DTensor) else value


def _draw(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Draw what one process would draw for the whole tensor: same values, same generator state."""
    target = args[0]
    if [value for value in (*args[1:], *kwargs.values()) if type(value) is plan.cls]:
        plan.refuse(" as its parameters")
    _check_written(plan, [target])
    full = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    return target.copy_(plan.func(full, *args[1:], **kwargs))


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


def _on_local(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return plan.func(args[0]._local_tensor, *args[1:], **kwargs)


_HANDLERS: dict[str, Handler] = {
    "detach": _same,
    "alias": _same,
    "detach_": lambda plan, args, kwargs: args[0],
    "new_empty": _new_empty,
    "is_pinned": _on_local,
    "index_put_": _fill_where,
    **REDUCTIONS,
}
