"""Watches operators while a graph is captured: what they touch, and what cannot be captured.

A storage is *internal* if an operator inside the capture made it, else *external*. Tensors are kept
as descriptions, never as tensors, so that an internal storage dies during the capture exactly when
the program lets it die. Memory of libraries, which no list names, is named by who used it first:
the module whose forward runs, else the autograd node, else the line of the program.
"""

import contextlib
import gc
import sys
import weakref
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves, tree_map, tree_map_only

from fsdp_core.dispatch import calling_line, opens_itself

_ALLOCATIONS = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided",
                          "aten::new_empty", "aten::new_empty_strided"})  # fmt: skip
_BAKES_A_VALUE = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift"})
_UPDATES_STATISTICS = frozenset(
    f"aten::{name}"
    for name in (
        "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats",
        "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts",
    )
)  # fmt: skip
"""Operators that write running statistics, which their schemas do not say."""
_CHANGES_STORAGE = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})
_READS_ON_HOST = ("tolist", "numpy", "__array__", "__dlpack__")


class CaptureRefused(RuntimeError):
    """An operation that no graph can hold. The message names it, the place and the reason."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor as a view of a numbered storage, yet to be conjugated or negated if it says so."""

    storage: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool
    negative: bool


@dataclass
class StorageEntry:
    """One storage that the capture touched, `nbytes` at `address` when first seen.

    internal: made inside the capture.
    first, last: numbers of the first and last operator that touch it.
    made_by: operator that made it, or first touched it.
    released: its memory was given back inside the capture by resizing the storage to nothing.
    place: of an external storage, which part of the program first touched it.
    """

    nbytes: int
    address: int
    internal: bool
    reference: "weakref.ref[torch.UntypedStorage]"
    first: int
    last: int
    written: bool
    made_by: str
    released: bool = False
    place: str = ""


@dataclass(frozen=True)
class Operation:
    """One recorded operator; tensors in `args` and `kwargs` are `TensorRef`s."""

    func: Any
    args: Any
    kwargs: Any
    fresh: tuple[tuple[int, TensorRef], ...]


@dataclass
class Recording:
    """What a capture saw."""

    storages: list[StorageEntry] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def external(self) -> list[StorageEntry]:
        """Storages that the graph uses and does not own."""
        return [entry for entry in self.storages if not entry.internal]


class HostReadGuard(TorchFunctionMode):
    """Refuses reads of tensor data by Python that no operator shows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` unless it copies tensor data to Python."""
        name = getattr(func, "__name__", "")
        if name in _READS_ON_HOST:
            reason = "it reads tensor data in Python, and a replay runs no Python"
            raise _refused(f"Tensor.{name}()", reason)
        return func(*args, **(kwargs or {}))


def _refused(what: Any, reason: str) -> CaptureRefused:
    place = calling_line(sys._getframe(1)) or "an unknown place"
    return CaptureRefused(f"cannot capture {what} at {place}: {reason}")


class Recorder(TorchDispatchMode):
    """Dispatch mode that fills a `Recording`.

    keep_operations: keep operators for a host graph, with its refusals; False lists storages.
    before_write: called with a tensor of each external storage before it is first written.
    on_host: what it watches runs on the CPU.
    """

    def __init__(
        self, *, keep_operations: bool, before_write: Any = None, on_host: bool = True
    ) -> None:
        super().__init__()
        self.recording, self.keeps_operations = Recording(), keep_operations
        self._on_host = on_host
        self._before_write = before_write
        self._numbers: dict[int, int] = {}
        self._num_operations = 0
        # By the outermost module's id: itself, so that the id stays its own, and names inside.
        self._names: dict[int, tuple[nn.Module, dict[int, str]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operator around its execution."""
        if any(map(opens_itself, types)):
            return NotImplemented  # the wrapper (a pending collective's, say) opens itself up first
        kwargs = kwargs or {}
        if self.keeps_operations:
            _refuse_uncapturable(func, args, kwargs)
        name = str(func)
        written = {id(t) for t in _written_tensors(func, args, kwargs)}

        def refer(tensor: torch.Tensor) -> TensorRef:
            return self._refer(tensor, name, writes=id(tensor) in written)

        arg_refs, kwarg_refs = tree_map_only(torch.Tensor, refer, (args, kwargs))
        out = func(*args, **kwargs)
        if self._on_host and func.namespace == "c10d":
            out = _finish_collective(out)
        if self.keeps_operations and (reason := _unreplayable(out)):
            raise _refused(func, reason)
        fresh = self._fresh_outputs(out, name)
        if not self.keeps_operations:
            self._num_operations += 1
        elif (fresh or written) and func._schema.name not in _ALLOCATIONS:
            self._keep(Operation(func, arg_refs, kwarg_refs, fresh))
        return out

    def _keep(self, operation: Operation) -> None:
        self.recording.operations.append(operation)
        self._num_operations += 1

    # ---- what is not seen as operators

    def uses(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if not opens_itself(type(tensor)):
                self._refer(tensor, "a compiled function", writes=False)

    def record_call(self, function: Any, args: tuple[Any, ...], writes: Container[int]) -> Any:
        """Run a function of tensors and record it as one operation; its outputs are tensors.
        `function` does the same work at each replay, its `namespace` says whose it is; `writes` are
        numbers of arguments that it changes.
        """
        name = f"{function.namespace} kernels"

        def refer(index: int, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return self._refer(value, name, writes=index in writes)

        arg_refs = tuple(refer(index, value) for index, value in enumerate(args))
        out = function(*args)
        self._keep(Operation(function, arg_refs, {}, self._fresh_outputs(out, name)))
        return out

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was resized in place: what it held is gone, what it holds now is internal."""
        number = self._number_of(storage)
        if number is not None:
            self.recording.storages[number].released = True
        self._numbers.pop(storage._cdata, None)
        if storage.nbytes():
            self._enter(storage, "the pool", internal=True)

    def _enter(self, storage: torch.UntypedStorage, name: str, *, internal: bool) -> int:
        number = self._numbers[storage._cdata] = len(self.recording.storages)
        now, place = self._num_operations, "" if internal else self._place()
        self.recording.storages.append(
            StorageEntry(
                nbytes=storage.nbytes(), address=storage.data_ptr(), internal=internal,
                reference=weakref.ref(storage), first=now, last=now, written=False, made_by=name,
                place=place,
            )
        )  # fmt: skip
        return number

    def _fresh_outputs(self, out: Any, name: str) -> tuple[tuple[int, TensorRef], ...]:
        return tuple(
            (index, self._refer(value, name, writes=True, made=True))
            for index, value in enumerate(tree_leaves(out))
            if isinstance(value, torch.Tensor)
            and not opens_itself(type(value))
            and self._number_of(value.untyped_storage()) is None
        )

    def _number_of(self, storage: torch.UntypedStorage) -> int | None:
        number = self._numbers.get(storage._cdata)
        if number is None or self.recording.storages[number].reference() is None:
            return None
        return number

    def _refer(
        self, tensor: torch.Tensor, name: str, *, writes: bool, made: bool = False
    ) -> TensorRef:
        storage = tensor.untyped_storage()
        number = self._number_of(storage)
        if number is None:
            number = self._enter(storage, name, internal=made)
        entry = self.recording.storages[number]
        if writes and not entry.written:
            if not entry.internal and self._before_write is not None:
                self._before_write(number, tensor)
            entry.written = True
        entry.last = self._num_operations
        offset, shape = int(tensor.storage_offset()), tuple(tensor.shape)
        return TensorRef(
            number, tensor.dtype, offset, shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
        )

    def _place(self) -> str:
        """Where the program is: `in layers.3.attn`, `of MmBackward0`, `at loss.py:12`, or ''."""
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            return f"of {node.name()}"
        modules = list(_modules(sys._getframe(1)))
        if not modules:
            line = calling_line(sys._getframe(1))
            return f"at {line}" if line else ""
        inner, outer = modules[0], modules[-1]
        if id(outer) not in self._names:
            names = {id(module): name for name, module in outer.named_modules()}
            self._names[id(outer)] = (outer, names)
        return f"in {self._names[id(outer)][1].get(id(inner), '') or type(inner).__name__}"


class OverCompiled(Recorder):
    """Lets compiled code run compiled; without it the compiler steps aside under a recorder."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection inside: what dies during a capture dies where the program lets it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _finish_collective(out: Any) -> Any:
    """Wait for a collective here, and hand on a handle that is finished already.

    When gloo's reduce-scatter is waited for, it copies its result out of a buffer of its own, by
    operators. Seen in the program's wait, a replay would copy what that buffer held at capture, and
    where collectives run on aliases (`Lending`) an undo would write to memory that the alias does
    not own.
    """

    def finished(value: Any) -> Any:
        if not isinstance(value, torch.ScriptObject):
            return value
        cast("Any", value).wait()  # torchbind methods are not in the stubs
        return FakeWork().boxed()

    return tree_map(finished, out)


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Arguments that the operator writes, as its schema says or does not say, lists opened up."""
    given = {
        argument.name: args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
    }
    values = [
        given[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if func._schema.name in _UPDATES_STATISTICS and given.get("training", True):
        values += [given["running_mean"], given["running_var"]]
    if func.namespace == "c10d":
        values += args[:1]  # schemas do not mark every output, which are all in here
    return [t for t in tree_iter(values) if isinstance(t, torch.Tensor)]


def _refuse_uncapturable(func: Any, args: Any, kwargs: Any) -> None:
    """Raise for operators whose result a replay cannot reproduce."""
    name, tags = func._schema.name, func.tags
    reason = ""
    if torch.Tag.data_dependent_output in tags:
        reason = "its result is a Python value that depends on tensor data (.item(), bool(), if)"
    elif torch.Tag.dynamic_output_shape in tags and _shape_depends_on_data(name, args):
        reason = "the shape of its result depends on tensor data"
    elif name in _BAKES_A_VALUE:
        reason = "it bakes a Python value into the graph; use torch.full or a static input"
    elif name in _CHANGES_STORAGE:
        reason = "it changes the storage of a tensor"
    else:
        reason = _unreplayable((args, kwargs))
    if reason:
        raise _refused(func, reason)


def _unreplayable(values: Any) -> str:
    """Why a graph cannot hold one of `values`; empty if it can hold them all."""
    for value in tree_iter(values):
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            return f"tensors of layout {value.layout} cannot be replayed, only strided ones"
        # One generator may be wrapped in several Python objects.
        default: Any = torch.default_generator
        if isinstance(value, torch.Generator) and value._cdata != default._cdata:  # type: ignore[attr-defined]
            return "it draws from a generator of its own, whose state the graph does not know"
    return ""


def _shape_depends_on_data(name: str, args: Any) -> bool:
    if name not in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return True
    masks = (torch.bool, torch.uint8)
    return any(isinstance(i, torch.Tensor) and i.dtype in masks for i in args[1])


def _modules(frame: FrameType | None) -> Iterator[nn.Module]:
    while frame is not None:
        code = frame.f_code
        # `f_locals` copies every variable: only where the first argument may be a module.
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                yield owner
        frame = frame.f_back
