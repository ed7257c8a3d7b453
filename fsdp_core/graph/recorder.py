"""Watches operators while a graph is captured: what they touch, and what cannot be captured.

The same dispatch mode serves both makers. For CUDA graphs it only lists the external storages that
captured kernels read or write, which the driver does not tell. For the host graph it also keeps
each operator with its arguments described by storage, so that it can be run again.

A storage is *internal* if an operator inside the capture made it, else *external*. Tensors are kept
as descriptions (storage number, offset, size, stride), never as tensors, so that an internal
storage dies during the capture exactly when the program lets it die.

Which part of a program an operator runs for, as a name for memory that nobody else names.

A library keeps workspaces, tables and counters of its own. They are in no list of parameters or
buffers, so what names them is who used them first: the module whose forward runs, else the autograd
node, else the line of the program. Looked up on the stack, so it costs nothing where nobody asks.
"""

import sys
import weakref
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from fsdp_core.dispatch import opens_itself

_ALLOCATIONS = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided",
                          "aten::new_empty", "aten::new_empty_strided"})  # fmt: skip
_BAKES_A_VALUE = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift"})
_CHANGES_STORAGE = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})
_READS_ON_HOST = ("tolist", "numpy", "__array__", "__dlpack__")


class CaptureRefused(RuntimeError):
    """An operation that no graph can hold. The message names it, the place and the reason."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor as (storage number, dtype, offset in elements, size, stride, lazy views).

    `conjugate` and `negative`: what is in the storage is yet to be conjugated, or negated.
    """

    storage: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool
    negative: bool


@dataclass
class StorageEntry:
    """One storage that the capture touched.

    Attributes:
        nbytes: size when first seen.
        address: address when first seen.
        internal: made inside the capture.
        reference: weak reference to the storage.
        first, last: numbers of the first and last operator that touch it.
        written: an operator of the capture writes it.
        released: its memory was given back inside the capture by resizing the storage to nothing.
        made_by: operator that made it, or first touched it.
        place: of an external storage, which part of the program first touched it: see `places`.
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


def calling_place() -> str:
    """`file:line` of the innermost frame outside torch and this package."""
    return calling_line(sys._getframe(1)) or "an unknown place"


class HostReadGuard(TorchFunctionMode):
    """Refuses reads of tensor data by Python that no operator shows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` unless it copies tensor data to Python."""
        name = getattr(func, "__name__", "")
        if name in _READS_ON_HOST:
            raise CaptureRefused(
                f"cannot capture Tensor.{name}() at {calling_place()}: it reads tensor data in "
                "Python, and a replay runs no Python"
            )
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Dispatch mode that fills a `Recording`.

    Args:
        keep_operations: keep operators for a host graph, with its refusals; False lists storages.
        before_write: called with a tensor of each external storage before it is first written.
    """

    def __init__(self, *, keep_operations: bool, before_write: Any = None) -> None:
        super().__init__()
        self.recording = Recording()
        self._keep = keep_operations
        self._before_write = before_write
        self._numbers: dict[int, int] = {}
        self._places = Places()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operator around its execution."""
        if any(map(opens_itself, types)):
            return NotImplemented  # the wrapper (a pending collective's, say) opens itself up first
        kwargs = kwargs or {}
        if self._keep:
            refuse_uncapturable(func, args, kwargs)
        number = len(self.recording.operations)
        name = str(func)
        written = {id(t) for t in written_tensors(func, args, kwargs)}

        def refer(tensor: torch.Tensor) -> TensorRef:
            return self._refer(tensor, number, name, writes=id(tensor) in written, made=False)

        arg_refs, kwarg_refs = tree_map_only(torch.Tensor, refer, (args, kwargs))
        out = func(*args, **kwargs)
        if self._keep and func.namespace == "c10d":
            out = finish_collective(out)
        if self._keep and (reason := _unreplayable(out)):
            raise CaptureRefused(f"cannot capture {func} at {calling_place()}: {reason}")
        fresh = self._fresh_outputs(out, number, name)
        if self._keep and (fresh or written) and func._schema.name not in _ALLOCATIONS:
            self.recording.operations.append(Operation(func, arg_refs, kwarg_refs, fresh))
        elif not self._keep:
            self.recording.operations.append(Operation(func, None, None, ()))
        return out

    # ---- what is not seen as operators

    @property
    def keeps_operations(self) -> bool:
        """Whether it records for a host graph."""
        return self._keep

    def uses(self, tensors: Iterable[torch.Tensor]) -> None:
        """Enter what kernels that are no operators read."""
        for tensor in tensors:
            if not opens_itself(type(tensor)):
                self._refer(tensor, len(self.recording.operations), "a compiled function",
                            writes=False, made=False)  # fmt: skip

    def record_call(self, function: Any, args: tuple[Any, ...], writes: Container[int]) -> Any:
        """Run a function of tensors and record it as one operation; its outputs are tensors.

        Args:
            function: does the same work again at each replay; `function.__self__.namespace` says
                whose it is.
            writes: numbers of arguments that it changes.
        """
        number, name = len(self.recording.operations), f"{function.__self__.namespace} kernels"

        def refer(index: int, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return self._refer(value, number, name, writes=index in writes, made=False)

        arg_refs = tuple(refer(index, value) for index, value in enumerate(args))
        out = function(*args)
        fresh = self._fresh_outputs(out, number, name)
        self.recording.operations.append(Operation(_Call(function), arg_refs, {}, fresh))
        return out

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was resized in place: what it held is gone, what it holds now is internal."""
        number = self._number_of(storage)
        if number is not None:
            self.recording.storages[number].released = True
        self._numbers.pop(storage._cdata, None)
        if storage.nbytes():
            operation = len(self.recording.operations)
            self._enter(storage, operation, "the pool", internal=True)

    def _enter(
        self, storage: torch.UntypedStorage, operation: int, name: str, *, internal: bool
    ) -> int:
        number = len(self.recording.storages)
        self._numbers[storage._cdata] = number
        self.recording.storages.append(
            StorageEntry(
                nbytes=storage.nbytes(),
                address=storage.data_ptr(),
                internal=internal,
                reference=weakref.ref(storage),
                first=operation,
                last=operation,
                written=False,
                made_by=name,
                place="" if internal else self._places.now(),
            )
        )
        return number

    def _fresh_outputs(self, out: Any, number: int, name: str) -> tuple[tuple[int, TensorRef], ...]:
        fresh = []
        for index, value in enumerate(flat_outputs(out)):
            if not isinstance(value, torch.Tensor) or opens_itself(type(value)):
                continue
            known = self._number_of(value.untyped_storage())
            if known is None:
                ref = self._refer(value, number, name, writes=True, made=True)
                fresh.append((index, ref))
        return tuple(fresh)

    def _number_of(self, storage: torch.UntypedStorage) -> int | None:
        number = self._numbers.get(storage._cdata)
        if number is None or self.recording.storages[number].reference() is None:
            return None
        return number

    def _refer(
        self, tensor: torch.Tensor, operation: int, name: str, *, writes: bool, made: bool
    ) -> TensorRef:
        storage = tensor.untyped_storage()
        number = self._number_of(storage)
        if number is None:
            number = self._enter(storage, operation, name, internal=made)
        entry = self.recording.storages[number]
        if writes and not entry.written:
            if not entry.internal and self._before_write is not None:
                self._before_write(number, tensor)
            entry.written = True
        entry.last = operation
        return TensorRef(
            number,
            tensor.dtype,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )


class OverCompiled(Recorder):
    """Lets compiled code run compiled; without it the compiler steps aside under a recorder."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile as if nobody looked on, and look on while it runs."""
        return True


class _Call:
    """A function in the place of an operator."""

    def __init__(self, function: Any) -> None:
        self._function, self.namespace = function, function.__self__.namespace

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def finish_collective(out: Any) -> Any:
    """Wait for a collective here, and hand on a handle that is finished already.

    When gloo's reduce-scatter is waited for, it copies its result out of a buffer of its own, by
    operators. In the program's wait the recorder would see them, and a replay would copy what that
    buffer held at capture over its own result; here they run unseen.
    """

    def finished(value: Any) -> Any:
        if not isinstance(value, torch.ScriptObject):
            return value
        cast("Any", value).wait()  # torchbind methods are not in the stubs
        return FakeWork().boxed()

    return tree_map(finished, out)


def flat_outputs(out: Any) -> list[Any]:
    """Outputs of an operator as a flat list, lists of tensors opened up."""
    if isinstance(out, torch.Tensor) or not isinstance(out, list | tuple):
        return [out]
    return [leaf for item in out for leaf in flat_outputs(item)]


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Arguments that the operator's schema says it writes, lists opened up."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        info = argument.alias_info
        if info is None or not info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            nested = item if isinstance(item, list | tuple) else [item]
            found.extend(t for t in nested if isinstance(t, torch.Tensor))
    if func.namespace == "c10d":
        found.extend(_collective_outputs(func, args))
    return found


def _collective_outputs(func: Any, args: Any) -> list[torch.Tensor]:
    """c10d schemas do not mark every output they write; their first argument holds them."""
    first = args[0] if args else None
    if isinstance(first, torch.Tensor):
        return [first]
    return [t for t in flat_outputs(first) if isinstance(t, torch.Tensor)]


def refuse_uncapturable(func: Any, args: Any, kwargs: Any) -> None:
    """Raise for operators whose result a replay cannot reproduce.

    Raises:
        CaptureRefused: the operator reads data on the host, has a data-dependent shape, bakes in a
            Python value, or changes a storage.
    """
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
        raise CaptureRefused(f"cannot capture {func} at {calling_place()}: {reason}")


def _unreplayable(values: Any) -> str:
    """Why a graph cannot hold one of `values`; empty if it can hold them all."""
    for value in tree_iter(values):
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            return f"tensors of layout {value.layout} cannot be replayed, only strided ones"
        if isinstance(value, torch.Generator) and _identity(value) != _identity(
            torch.default_generator
        ):
            return "it draws from a generator of its own, whose state the graph does not know"
    return ""


def _identity(generator: torch.Generator) -> int:
    """The same for every Python object that torch wraps around one generator."""
    return generator._cdata  # type: ignore[attr-defined]


def _shape_depends_on_data(name: str, args: Any) -> bool:
    if name not in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return True
    masks = (torch.bool, torch.uint8)
    return any(isinstance(i, torch.Tensor) and i.dtype in masks for i in args[1])


_TORCH_FOLDER = str(Path(torch.__file__).parent)
# What calls compiled code is no place either, where it is not in this folder.
_OWN = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "train" / "compiled.py"))
_OF_MODES = ("__torch_dispatch__", "__torch_function__")


class Places:
    """Names places; remembers the names of modules that it has met."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[nn.Module, dict[int, str]]] = {}

    def now(self) -> str:
        """Where the program is: `in layers.3.attn`, `of MmBackward0`, `at loss.py:12`, or ''."""
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            return f"of {node.name()}"
        modules = list(_modules(sys._getframe(1)))
        if modules:
            return f"in {self._path(modules[0], modules[-1])}"
        line = calling_line(sys._getframe(1))
        return f"at {line}" if line else ""

    def _path(self, inner: nn.Module, outer: nn.Module) -> str:
        """The name of `inner` under `outer`, or of its class."""
        # The module is kept beside its names, so that its id stays its own.
        known = self._names.get(id(outer))
        if known is None:
            names = {id(module): name for name, module in outer.named_modules()}
            known = self._names[id(outer)] = (outer, names)
        return known[1].get(id(inner), "") or type(inner).__name__


def calling_line(frame: FrameType | None) -> str:
    """`file:line` of the innermost frame outside torch, modes and this package, or ''."""
    while frame is not None:
        name, is_mode = frame.f_code.co_filename, frame.f_code.co_name in _OF_MODES
        if not (is_mode or name.startswith((_TORCH_FOLDER, *_OWN, "<frozen"))):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _modules(frame: FrameType | None) -> Iterator[nn.Module]:
    """Modules whose methods are on the stack, innermost first."""
    while frame is not None:
        code = frame.f_code
        # `f_locals` copies every variable: only where the first argument may be a module.
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                yield owner
        frame = frame.f_back
