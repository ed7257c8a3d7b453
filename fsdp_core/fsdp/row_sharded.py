"""A parameter, gradient or optimizer state at rest: this rank's whole rows of a global tensor.

To a user it is a tensor of the global shape on a mesh, as DTensor is:

    .full_tensor()                    all rows, on every rank (a collective)
    .to_local()                       this rank's rows, a view of the flat buffer: writes go through
    optimizers, nn.init, norms, `==`  work, see the table of operators
    checkpoints                       hold pieces at their true row offsets
    reductions, products, cat, ...    gather whole tensors; views, and writes through them, raise

Every operator has one of these kinds, or raises:

    elementwise   tagged pointwise by torch, `_ELEMENTWISE`   runs on the pieces
    lists         `_foreach_*` of those, fused optimizers     runs on lists of pieces
    draw          normal_, rand_like, ...                     draws the whole tensor, keeps its rows
    norm          vector_norm, _foreach_norm                  a `PendingNorm` of this rank's part
    total         sum, any, all                               a scalar DTensor, reduced at once
    same          detach, alias                               another object over the same piece
    whole         all others that write nothing, give no      with whole tensors on every rank: a
                  view and draw nothing                       collective; a replicated DTensor

Tensors in one call share one layout. Beside them may stand tensors of one element, tensors of the
global shape, of which each rank takes its rows, and DTensors that broadcast to it. Nothing else:
shapes that fit only because of how many rows a rank happens to hold must not pass. In-place
operators also raise the version counter of the flat buffer, as they would on the piece itself.

Around an optimizer's step, whichever it is, by hooks that every `torch.optim.Optimizer` runs:

    before  an optimizer that would not train what the modules hold at rest is refused; one whose
            kernels take addresses is given this rank's rows, if it cannot find them itself
    after   copies of the main weights follow, once a group, inside a graph capture as well

Version counters would not do for the copies: an optimizer may write by a kernel of its own
(TransformerEngine's FusedAdam does).
"""

import copy
import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as _optim_foreach_types
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._foreach_utils import _foreach_supported_types as _clip_foreach_types
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_core.dispatch import IS_2_13
from fsdp_core.fsdp.layout import Inner, RowShard, RowSpec, gather_rows
from fsdp_core.fsdp.norms import PendingNorm, over_ranks, replicated

_Base: Any = DTensor if IS_2_13 else torch.Tensor


class RowSharded(_Base):
    """A tensor of global shape of which this rank holds the rows that `row_spec` says. Build it
    with `make`. Where torch allows it, this is a DTensor to `isinstance`.
    """

    __slots__ = ("_local_tensor", "row_spec", "tie")
    _local_tensor: torch.Tensor
    row_spec: RowSpec
    tie: Any  # to the group that must know when it is trained, see `watch`

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, *_args: Any, **_kwargs: Any) -> "RowSharded":
        raise TypeError("RowSharded is built with RowSharded.make(local, spec).")

    @staticmethod
    def make(local: torch.Tensor, spec: RowSpec) -> "RowSharded":
        """A tensor of `spec.shape` over `local`, this rank's rows [spec.local_shape]; no copy."""
        assert local.shape == spec.local_shape, (local.shape, spec)
        self = torch.Tensor._make_wrapper_subclass(
            RowSharded, spec.shape, strides=spec.stride, dtype=local.dtype, device=local.device
        )
        # A kernel that takes addresses must not take this object's: it has no memory.
        torch._C._set_throw_on_mutable_data_ptr(self)
        self._local_tensor, self.row_spec, self.tie = local, spec, None
        return self

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _rules.get(func) or _rules.setdefault(func, _rule_of(func))
        return rule.run(rule, args, kwargs or {})

    def data_ptr(self) -> int:
        """0, by which torch's Python tells a tensor that wraps another; in C++ it raises."""
        return 0

    @torch.compiler.disable
    def to_local(self) -> torch.Tensor:
        """This rank's rows: the very memory. Differentiable, as DTensor's."""
        if self.requires_grad and torch.is_grad_enabled():
            return _Rows.apply(self, False)
        return self._local_tensor

    @torch.compiler.disable
    def full_tensor(self) -> torch.Tensor:
        """All rows, in memory of their own: a collective over the mesh. Differentiable as
        DTensor's: every rank computes the same from it, so the gradient of this rank's rows is no
        sum over ranks.
        """
        if self.requires_grad and torch.is_grad_enabled():
            return _Rows.apply(self, True)
        return gather_rows(self._local_tensor, self.row_spec)

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> DTensor:
        """A standard DTensor on the same mesh, for Replicate on every axis: a collective."""
        mesh, asked = self.device_mesh, (device_mesh or self.device_mesh, list(placements or ()))
        if asked != (mesh, [Replicate()] * mesh.ndim) or any(options.values()):
            raise NotImplementedError(
                f"Expected Replicate on every axis of {mesh}, got {asked} and {options}: use "
                ".full_tensor()."
            )
        return replicated(self.full_tensor(), mesh)

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.row_spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.row_spec.placements

    @property
    def data(self) -> torch.Tensor:
        """A detached tensor over the same rows; setting it copies rows into the flat buffer. If
        device or dtype differ, as in Module.to, it is rebound.
        """
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, RowSharded) or value.row_spec != self.row_spec:
            raise NotImplementedError(
                f"Expected a RowSharded tensor of layout {self.row_spec}, got {value!r}: use "
                ".copy_(x) under torch.no_grad(), x being of the global shape."
            )
        if (value.dtype, value.device) != (self.dtype, self.device):
            self.rebind(value)
        elif value._local_tensor is not self._local_tensor:
            with torch.no_grad():
                self.copy_(value)

    def rebind(self, value: "RowSharded") -> None:
        """Stand for the memory of `value`, whatever its dtype and device."""
        if (value.dtype, value.device) != (self.dtype, self.device):
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._local_tensor = value._local_tensor

    @property
    def __tensor_flatten__(self) -> NoReturn:
        # Hidden from hasattr: torch would take it apart and put a DTensor together from it.
        raise AttributeError("RowSharded tensors cannot be flattened for tracing.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        spec, rows = self.row_spec, f"[{self.row_spec.row_start}, {self.row_spec.row_stop})"
        return f"RowSharded(rows {rows} of {tuple(spec.shape)}, {self._local_tensor}, {spec})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "RowSharded":
        if not self.is_leaf:
            raise RuntimeError("Expected a leaf of autograd to copy, got the result of operators.")
        _, (local, spec, attributes) = self.__reduce_ex__(None)
        twin = _rebuild(local, spec, copy.deepcopy(attributes, memo))
        twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copy of the rows: the view's storage is the unit's whole buffer, all other parameters'.
        local = self._local_tensor.detach().clone()
        # What was set on the object, nn.Parameter's mark included.
        attributes = self.__dict__ | {"requires_grad": self.requires_grad}
        return _rebuild, (local, self.row_spec, attributes)

    # What torch.distributed.checkpoint asks of a tensor that it does not know.

    def __create_chunk_list__(self) -> list[metadata.ChunkStorageMetadata]:
        """Where this rank's rows lie, if it has any. Shard 0 has those without elements."""
        spec = self.row_spec
        if not spec.local_numel and (self.numel() or spec.shard_index):
            return []
        offsets = list(spec.part_offsets)
        if offsets:
            offsets[spec.dim] += spec.row_start
        return [metadata.ChunkStorageMetadata(torch.Size(offsets), spec.local_shape)]

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        return write_items(fqn, self, self._local_tensor)

    def __get_tensor_shard__(self, index: metadata.MetadataIndex) -> torch.Tensor:
        return self._local_tensor


def write_items(fqn: str, tensor: Any, local: torch.Tensor) -> list[WriteItem]:
    """What checkpoints write of a tensor that knows its chunks, in this rank's memory `local`."""
    about = metadata.TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=metadata.MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, about, tensor.size()),
        )
        for chunk in tensor.__create_chunk_list__()
    ]


class _Rows(torch.autograd.Function):
    """This rank's rows, or with `gather` all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: RowSharded, gather: bool) -> torch.Tensor:  # noqa: FBT001
        ctx.row_spec, ctx.gather, local = tensor.row_spec, gather, tensor._local_tensor
        return gather_rows(local, tensor.row_spec) if gather else local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[RowSharded, None]:
        rows = ctx.row_spec.own_rows(grad) if ctx.gather else grad
        rows = rows.clone(memory_format=torch.contiguous_format) if ctx.gather else rows
        return RowSharded.make(rows, ctx.row_spec), None


def _rebuild(local: torch.Tensor, spec: RowSpec, attributes: dict[str, Any]) -> RowSharded:
    tensor = RowSharded.make(local, spec)
    tensor.requires_grad_(attributes.pop("requires_grad"))
    tensor.__dict__.update(attributes)
    return tensor


# What torch.load with weights_only may call, and the types for which torch's optimizers and
# clipping choose foreach on their own: DTensor enters itself into the same lists.
torch.serialization.add_safe_globals([_rebuild, RowSpec, RowShard, Inner])
for _types in (_optim_foreach_types, _clip_foreach_types):
    if RowSharded not in _types:
        _types.append(RowSharded)  # type: ignore[arg-type]


class _OursToo(type(DTensor)):  # type: ignore[misc]
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, (DTensor, RowSharded))


if not IS_2_13:  # torch's full state dicts gather what is one to `isinstance`
    _state_dict_utils.DTensor = _OursToo("DTensor", (DTensor,), {})  # type: ignore[misc]


# ---- operators


class _Rule(NamedTuple):
    """How one operator runs; `writes`: positions, or names of keywords, that it writes to."""

    func: Any
    run: "_Handler"
    writes: tuple[int | str, ...]

    def refuse(self, why: str = "") -> NoReturn:
        raise NotImplementedError(
            f"{self.func} does not work on RowSharded tensors{why}: use .full_tensor() of it, or "
            ".to_local() for this rank's rows."
        )


_Handler = Callable[[_Rule, Sequence[Any], dict[str, Any]], Any]
_rules: dict[Any, _Rule] = {}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = _words(
    "clone copy_ _to_copy zero_ fill fill_ zeros_like ones_like full_like empty_like lerp lerp_ "
    "masked_fill_ isfinite isinf isnan isposinf isneginf _pin_memory "
    "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"
)
_FOREACH = _words(
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf "
    "erfc exp expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow "
    "reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero"
)
_DRAWS = _words(
    "normal_ uniform_ bernoulli_ exponential_ log_normal_ random_ cauchy_ geometric_ "
    "rand_like randn_like randint_like"
)


def _rule_of(func: Any) -> _Rule:
    writes = tuple(
        argument.name if argument.kwarg_only else index
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        # _fused_adagrad_ declares that it writes to them, and does not.
        and argument.name != "state_steps"
    )
    name = func._schema.name.removeprefix("aten::")
    if name in _HANDLERS:
        return _Rule(func, _HANDLERS[name], writes)
    foreach = name.removeprefix("_foreach_").removesuffix("_")
    is_foreach = name.startswith("_foreach_") and bool(writes) == name.endswith("_")
    draws = torch.Tag.nondeterministic_seeded in func.tags
    tensors_only = all(str(value.type) == "Tensor" for value in func._schema.returns)
    pointwise = torch.Tag.pointwise in func.tags and tensors_only and not draws
    is_known = pointwise or name in _ELEMENTWISE or (is_foreach and foreach in _FOREACH)
    return _Rule(func, _on_pieces if is_known else _on_whole, writes)


def _on_pieces(rule: _Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run on this rank's rows: of tensors, or of those at each position of lists."""
    is_listed = _is_tensors(args[0])
    tensors = [[v] for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    specs = _specs(rule, [v for v in args if _is_tensors(v)] if is_listed else tensors)

    def pieces(key: int | str, value: Any) -> Any:
        if is_listed and _is_tensors(value):
            return [
                t._local_tensor
                if type(t) is RowSharded and spec.local_numel
                else _piece(rule, key, t, spec)
                for t, spec in zip(value, specs, strict=False)
            ]
        spec = None if is_listed else specs[0]
        return _piece(rule, key, value, spec) if isinstance(value, torch.Tensor) else value

    local = [pieces(*item) for item in enumerate(args)]
    named = {key: pieces(key, value) for key, value in kwargs.items()}
    if rule.func._schema.name.startswith("aten::_fused"):
        # No fused kernel ever sees a piece without elements.
        here = [spec is None or bool(spec.local_numel) for spec in specs]
        local = [list(itertools.compress(v, here)) if isinstance(v, list) else v for v in local]
    out = rule.func(*local, **named) if not is_listed or local[0] else []
    if written := [args[at] if isinstance(at, int) else kwargs[at] for at in rule.writes]:
        changed = itertools.chain(*written) if is_listed else written
        increment_version([t._local_tensor for t in changed if type(t) is RowSharded])
        return None if is_listed else written[0] if len(written) == 1 else tuple(written)
    if is_listed:
        return [_wrap(rule, *pair) for pair in zip(out, specs, strict=True)]
    if isinstance(out, torch.Tensor):
        return _wrap(rule, out, specs[0])
    return tuple(_wrap(rule, value, specs[0]) for value in out)


def _is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def _specs(rule: _Rule, lists: Iterable[Sequence[Any]]) -> list[Any]:
    """Layout at each position of the lists; None where all tensors are plain."""
    found: list[RowSpec | None] = []
    for tensors in itertools.zip_longest(*lists):
        specs = [tensor.row_spec for tensor in tensors if type(tensor) is RowSharded]
        for spec in specs[1:]:
            if spec is not specs[0] and spec != specs[0]:
                raise ValueError(
                    f"Expected RowSharded tensors of one layout in {rule.func}, got {spec} and "
                    f"{specs[0]}."
                )
        found.append(specs[0] if specs else None)
    return found


def _piece(rule: _Rule, key: int | str, value: Any, spec: RowSpec | None) -> torch.Tensor:
    """This rank's part of argument `key`, or of its tensor at a position; None: all are plain."""
    if type(value) is RowSharded:
        if spec is None:
            rule.refuse(" that stand for a scalar")
        local = value._local_tensor
        # A scalar that is elsewhere: an element to compute with, so that types promote as there.
        return local.new_zeros(()) if spec.is_absent_scalar else local
    if spec is not None and key in rule.writes:
        raise ValueError(
            f"Expected {rule.func} to write to a RowSharded tensor, got one of "
            f"{type(value).__name__}: take .full_tensor() of the other arguments."
        )
    if isinstance(value, DTensor):  # unlike a plain one it says that its shape is global
        value, shape = value.full_tensor(), spec.shape if spec else value.shape
        if value.numel() > 1 and torch.broadcast_shapes(value.shape, shape) == shape:
            value = value.expand(shape)
    if spec is None or (value.numel() == 1 and value.ndim <= len(spec.shape)):
        return cast("torch.Tensor", value)
    if value.shape == spec.shape:
        return spec.own_rows(value)
    raise ValueError(
        f"Expected a tensor of one element or of the global shape {tuple(spec.shape)} beside a "
        f"RowSharded tensor in {rule.func}, got {tuple(value.shape)}."
    )


def _wrap(rule: _Rule, out: torch.Tensor, spec: RowSpec | None) -> Any:
    if spec is None:
        return out
    if spec.is_absent_scalar and not out.ndim:
        out = out.new_empty(0)
    if not (out.movedim(spec.dim, 0) if spec.dim else out).is_contiguous():
        rule.refuse(" in another memory format")
    return RowSharded.make(out, spec)


def _draw(rule: _Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Draw what one process would draw for the whole tensor: same values, same generator state."""
    if [type(value) is RowSharded for value in args] != [True] + [False] * (len(args) - 1):
        rule.refuse(" as its parameters, or a plain one as its target")
    full = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
    full = rule.func(full, *args[1:], **kwargs)
    target = args[0] if rule.writes else torch.empty_like(args[0], dtype=full.dtype)
    return target.copy_(full)


def _on_whole(rule: _Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute with the whole tensors on every rank: a collective, and a replicated result. A view
    would be one of a copy, and what is drawn differs by rank.
    """
    schema = rule.func._schema
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if any(value.alias_info is not None for value in (*schema.arguments, *schema.returns)):
        rule.refuse(" that it would view or write to")
    if torch.Tag.nondeterministic_seeded in rule.func.tags:
        rule.refuse()
    specs = [t.row_spec for t in tensors if type(t) is RowSharded]
    plain = [t for t in tensors if t.numel() != 1 and not hasattr(t, "full_tensor")]
    if any(t.shape != specs[0].shape for t in plain):
        rule.refuse(" beside plain ones of another shape")
    mesh = specs[0].mesh
    args, kwargs = tree_map_only((RowSharded, DTensor), lambda t: t.full_tensor(), (args, kwargs))
    return tree_map_only(torch.Tensor, lambda t: replicated(t, mesh), rule.func(*args, **kwargs))


def _same(rule: _Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return RowSharded.make(args[0]._local_tensor, args[0].row_spec)


def _new_empty(rule: _Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of the global shape, as staging of checkpoints asks: a tensor of the same layout."""
    spec: RowSpec = args[0].row_spec
    if torch.Size(args[1]) != spec.shape:
        rule.refuse(" for another shape than the tensor's own")
    return RowSharded.make(rule.func(args[0]._local_tensor, spec.local_shape, **kwargs), spec)


def _fill_where(rule: _Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`tensor[mask] = number`: rows need no other ranks' rows for it."""
    target, indices, value, *_ = args
    masks = [i for i in indices if type(i) is RowSharded and i.dtype == torch.bool]
    if kwargs or len(args) > 3 or len(masks) != len(indices) or value.numel() != 1:
        rule.refuse(" but for setting what a mask of their layout marks to a number")
    return target.masked_fill_(masks[0], value.to(target.dtype).reshape(()))


# ---- reductions to a scalar


def _norm(rule: _Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Norms of tensors of a list, or of one tensor over all of it."""
    is_list = rule.func._schema.name == "aten::_foreach_norm"
    names = ("self", "ord", "dtype") if is_list else ("self", "ord", "dim", "keepdim")
    given = dict(zip(names, args, strict=False)) | kwargs
    order, tensors = float(given.get("ord", 2)), given["self"] if is_list else [given["self"]]
    dims, ndim = given.get("dim"), tensors[0].ndim
    whole = set(range(max(ndim, 1)))
    over = {dim % len(whole) for dim in dims} if dims else whole
    if order < 0 or over != whole or given.get("keepdim") or "out" in given:
        return _on_whole(rule, args, kwargs)
    pieces = [t._local_tensor if type(t) is RowSharded else t for t in tensors]
    # Where there are no elements torch's inf norm would raise.
    some = [piece if piece.numel() else piece.new_zeros(1) for piece in pieces]
    norms: list[Any] = list(torch._foreach_norm(some, order, dtype=given.get("dtype")))
    for at, tensor in enumerate(tensors):
        if type(tensor) is RowSharded:
            spec = tensor.row_spec
            norms[at] = PendingNorm.make({spec.cut_axes: [norms[at]]}, (order, spec.mesh))
    return norms if is_list else norms[0]


def _unscale(rule: _Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """What a GradScaler does; any rank's number that is not finite counts for all: a collective."""
    _on_pieces(rule._replace(writes=(0,)), args, kwargs)
    specs = (grad.row_spec for grad in args[0] if type(grad) is RowSharded)
    for mesh, axes in dict.fromkeys((spec.mesh, spec.cut_axes) for spec in specs):
        args[1].copy_(over_ranks(args[1].reshape(()), mesh, axes, torch.amax))


def _total(rule: _Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Sum, any or all of a whole tensor."""
    tensor = args[0]
    if len(args) > 1 or kwargs or type(tensor) is not RowSharded:
        return _on_whole(rule, args, kwargs)
    combine = getattr(torch, rule.func._schema.name.removeprefix("aten::"))
    spec, part = tensor.row_spec, combine(tensor._local_tensor)
    return replicated(over_ranks(part, spec.mesh, spec.cut_axes, combine), spec.mesh)


_HANDLERS: dict[str, _Handler] = {
    "detach": _same,
    "alias": _same,
    "detach_": lambda rule, args, kwargs: args[0],
    "new_empty": _new_empty,
    "is_pinned": lambda rule, args, kwargs: args[0]._local_tensor.is_pinned(),
    "index_put_": _fill_where,
    "_foreach_norm": _norm,
    "linalg_vector_norm": _norm,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    **dict.fromkeys(("sum", "any", "all"), _total),
    **dict.fromkeys(_DRAWS, _draw),
}


# ---- around an optimizer's step

_SOURCE = "the ones from before fully_shard"
_WHOLE = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)


class Tie(NamedTuple):
    """Parameter `number` of a group, or a stand-in of it; what it is when modules hold another."""

    group: "weakref.ref[Any]"
    number: int
    otherwise: str


_STAND_INS: Any = WeakIdKeyDictionary()
"""Ties of parameters that modules hold, or held, in place of those at rest."""

_STEPPED: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()
"""Optimizers that have been here: an SGD never has any state to tell by."""


def watch(group: Any, sources: Sequence[nn.Parameter] = ()) -> None:
    """Tell `group`, which is not kept alive, of every step of an optimizer of its parameters.
    Optimizers of others are refused: gathered ones, `sources`, replaced ones when called again.
    """
    _register_hooks()
    ref = weakref.ref(group)
    for number, sharded in enumerate(group.sharded):
        sharded.tie = Tie(ref, number, "the ones from before to_empty() or to()")
    for otherwise, stand_ins in ((_SOURCE, sources), ("gathered ones", group.unsharded)):
        for number, parameter in enumerate(stand_ins):
            _STAND_INS[parameter] = Tie(ref, number, otherwise)


@functools.cache
def _register_hooks() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


@torch.compiler.disable
def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Refuse what would not train rightly; give rows to kernels that take addresses."""
    _check_at_rest(optimizer)
    sharded = [p for p in _parameters(optimizer) if type(p) is RowSharded]
    if sharded and isinstance(optimizer, _WHOLE):
        raise NotImplementedError(
            "Expected an optimizer that treats each element alone, as AdamW does, got "
            f"{type(optimizer).__name__}, which needs whole tensors: ranks have rows of them."
        )
    if sharded and optimizer not in _STEPPED:
        _STEPPED.add(optimizer)
        optimizer.register_load_state_dict_post_hook(_adopt_states)
        # The states made in this step live for ever: in memory of their own, not in holes that
        # activations have left and will want again, whole.
        if sharded[0].is_cuda and not torch.cuda.is_current_stream_capturing():
            torch.cuda.empty_cache()
    # TransformerEngine's kernels take addresses, and would look for those of a DTensor.
    kinds = [kind.__module__ for kind in type(optimizer).__mro__]
    if not sharded or not any(kind.startswith("transformer_engine.") for kind in kinds):
        return None
    if any(option is not None for option in (*args[1:], *kwargs.values())):
        # Gradients of a closure would come too late, and a GradScaler would see this rank's only.
        raise NotImplementedError(
            f"Expected step() of {type(optimizer).__name__} over sharded parameters to have no "
            "closure and no grad_scaler."
        )
    return (_on_rows(optimizer, sharded),), {}


def _adopt_states(optimizer: torch.optim.Optimizer) -> None:
    """Cut anew what `torch.distributed` has cut evenly, from whole states: a collective."""
    for parameter in (p for p in _parameters(optimizer) if type(p) is RowSharded):
        spec, states = parameter.row_spec, optimizer.state.get(parameter, {})
        for key, value in states.items():
            if isinstance(value, DTensor) and type(value) is not RowSharded:
                cuts = [Shard(p.dim) if isinstance(p, RowShard) else p for p in value.placements]
                even = DTensor.from_local(
                    value.to_local(),
                    value.device_mesh,
                    cuts,
                    run_check=False,
                    shape=value.shape,
                    stride=value.stride(),
                )
                states[key] = RowSharded.make(spec.own_rows(even.full_tensor()).clone(), spec)


def _check_at_rest(optimizer: torch.optim.Optimizer) -> None:
    wrong: dict[str, list[str]] = {}
    for parameter in _parameters(optimizer):
        is_sharded = type(parameter) is RowSharded
        tie: Tie | None = parameter.tie if is_sharded else _STAND_INS.get(parameter)
        group = tie.group() if tie is not None else None
        if tie is None or group is None or group.sharded[tie.number] is parameter:
            continue
        if tie.otherwise != _SOURCE or parameter.grad is None:  # else a copy, trained as one
            wrong.setdefault(tie.otherwise, []).append(group.names[tie.number])
    if wrong:
        got = "; ".join(
            f"{kind} of {', '.join(names[:4])}{' ...' if names[4:] else ''}"
            for kind, names in wrong.items()
        )
        raise RuntimeError(
            f"Expected an optimizer of the parameters at rest, got {got}: build the optimizer "
            "after fully_shard and to_empty(), and before a forward, or call reshard() first."
        )


@torch.compiler.disable
def _after_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    del kwargs
    if args[0] is not optimizer:
        _off_rows(optimizer, args[0])
    ties = (p.tie for p in _parameters(optimizer) if type(p) is RowSharded)
    # A dict, not a set: every rank must go through the groups in the same order.
    groups = dict.fromkeys(tie.group() for tie in ties if tie is not None)
    with torch.no_grad():
        for group in groups:
            if group is not None:
                group.main_weight_changed()


def _on_rows(optimizer: torch.optim.Optimizer, sharded: list[Any]) -> torch.optim.Optimizer:
    """For one step, the same optimizer over this rank's rows, in the memory of `sharded`."""
    dtypes = getattr(optimizer, "name_to_dtype_map", {})
    if any(dtype != torch.float32 for dtype in dtypes.values()):
        raise NotImplementedError(
            f"Expected states of sharded parameters in float32, got {dtypes}."
        )
    rows = {parameter: parameter._local_tensor for parameter in sharded}
    groups = [
        group | {"params": [rows.get(parameter, parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state: Any = defaultdict(dict)
    state.update({p: optimizer.state[p] for p in _parameters(optimizer) if p not in rows})
    for parameter, local in rows.items():
        states = optimizer.state[parameter].items()
        state[local] = {key: getattr(value, "_local_tensor", value) for key, value in states}
        # TransformerEngine's kernels up to 2.17 go wrong over tensors without elements.
        has = parameter.grad is not None and local.numel()
        local.grad = parameter.grad._local_tensor if has else None
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__ | {"param_groups": groups, "state": state})
    return twin


def _off_rows(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer) -> None:
    """Give the optimizer what a step of its twin over rows has changed."""
    for group, changed in zip(optimizer.param_groups, twin.param_groups, strict=True):
        group.update(changed | {"params": group["params"]})
    for parameter, local in zip(_parameters(optimizer), _parameters(twin), strict=True):
        if parameter is local:
            optimizer.state[parameter] = twin.state[parameter]
            continue
        states, local.grad = optimizer.state[parameter], None
        for key, value in twin.state[local].items():
            if getattr(states.get(key), "_local_tensor", None) is not value:
                states[key] = RowSharded.make(value, parameter.row_spec)
