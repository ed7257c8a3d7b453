"""Watches operators while a graph is captured: what they touch, and what cannot be captured.

A storage is *internal* if an operator inside the capture made it, else *external*. Tensors are kept
as descriptions, never as tensors, so that an internal storage dies during the capture exactly when
the program lets it die. Memory of libraries, which no list names, is named by who used it first:
the module whose forward runs, else the autograd node, else the line of the program.

The address ledger: a graph may only be replayed while everything it reads is where it was. A GPU
that replays over a freed parameter does not fault, it reads what the allocator put there. So each
external storage is entered at capture with its address, size and name: a name of its owner, which
is looked up anew before each replay, or the operator and module that used it first, whose storage
is watched itself. What is neither is counted as unnamed.
"""

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves, tree_map, tree_map_only

from fsdp_core.dispatch import ALLOCATIONS, TensorError, calling_line, opens_itself

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
        elif (fresh or written) and func._schema.name not in ALLOCATIONS:
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


# ---- addresses, and whether they still hold

Resolver = Callable[[], Mapping[str, torch.Tensor]]
"""Returns every named tensor that a graph may use, as the program would find it now."""

Getter = Callable[[], torch.Tensor | None]
"""Looks one tensor up where the program keeps it; None if there is none now."""


class StaleAddress(TensorError):
    """A graph was about to be replayed over memory that is no longer what it captured; `names` are
    in the order in which the graph's owner names them.
    """

    def __init__(self, names: list[str], detail: str) -> None:
        others = f" (and {', '.join(names[1:])})" if len(names) > 1 else ""
        super().__init__(f"{names[0]}: {detail}{others}", *names)


class AddressBook(Mapping[str, torch.Tensor]):
    """Tensors by name, each looked up when it is asked for; `now` is a `Resolver`."""

    def __init__(self) -> None:
        self._getters: dict[str, Getter] = {}
        self._holders: dict[str, Callable[[], bool]] = {}

    def enter(self, name: str, getter: Getter, is_held: Callable[[], bool] | None = None) -> None:
        """Add a name that is not taken. `is_held` says whether the owner holds the tensor's memory
        now, if others use it in turn.
        """
        if name in self._getters:
            raise ValueError(f"Expected a name of one tensor, got {name} again.")
        self._getters[name] = getter
        if is_held is not None:
            self._holders[name] = is_held

    def hold(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that the program never replaces."""
        self.enter(name, lambda: tensor)

    def is_held(self, name: str) -> bool:
        """Whether what lies at the tensor's address now is the tensor's."""
        holder = self._holders.get(name)
        return holder is None or holder()

    def now(self) -> "AddressBook":
        return self

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of that name as it is now; `KeyError` if there is none."""
        tensor = self.get(name)
        if tensor is None:
            raise KeyError(name)
        return tensor

    def get(self, name: str, default: object = None) -> torch.Tensor | None:  # type: ignore[override]
        """The tensor of that name as it is now, or None."""
        getter = self._getters.get(name)
        return None if getter is None else getter()

    def __iter__(self) -> Iterator[str]:
        return (name for name, getter in self._getters.items() if getter() is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    address: int
    numel: int
    dtype: torch.dtype
    storage_address: int
    storage_bytes: int
    is_held: bool


class Ledger:
    """Addresses that one graph relies on.

    resolve: looks names up again; called now and before every replay.
    partner: recording of a graph that owns memory this one uses (forward, for a backward).
    own: names of what the graph's owner made for it alone, such as static inputs.
    relied: tensors that the graph reads whether or not an operator showed it.
    within: name of what was captured, for places inside of it.
    """

    def __init__(
        self,
        recording: Recording,
        resolve: Resolver,
        partner: Recording | None = None,
        *,
        own: Resolver | None = None,
        relied: Iterable[torch.Tensor] = (),
        within: str = "",
    ) -> None:
        entries = _external(recording, partner)
        addresses = set(entries) | {t.untyped_storage().data_ptr() for t in relied}
        addresses.discard(0)
        self._sources = [(each, _named(each(), addresses)) for each in (resolve, own) if each]
        found = {each.storage_address for _, named in self._sources for each in named}
        self._watched = [
            (_described(entry, within), entry) for at, entry in entries.items() if at not in found
        ]

    @property
    def names(self) -> list[str]:
        return [each.name for _, named in self._sources for each in named]

    @property
    def places(self) -> list[str]:
        return [name for name, entry in self._watched if entry.place]

    @property
    def num_unnamed(self) -> int:
        return sum(not entry.place for _, entry in self._watched)

    def check(self) -> None:
        """Compare every address with what it was at capture; no device work. `StaleAddress` names
        every tensor that moved, shrank, vanished, was freed, or whose memory its owner does not
        hold.
        """
        stale: list[tuple[str, str]] = []
        for resolve, named in self._sources:
            if named:
                now = resolve()
                stale += [(each.name, why) for each in named if (why := _change(each, now))]
        for name, entry in self._watched:
            storage = entry.reference()
            if storage is None:
                stale.append((name, "freed since the capture"))
            elif storage.data_ptr() != entry.address or storage.nbytes() < entry.nbytes:
                moved = f"captured at {entry.address:#x}, now at {storage.data_ptr():#x}"
                stale.append((name, moved))
        if stale:
            raise StaleAddress([name for name, _ in stale], stale[0][1])


def _external(recording: Recording, partner: Recording | None) -> dict[int, StorageEntry]:
    """Storages that the graph uses and neither it nor its partner owns, by address."""
    partners = partner.storages if partner else ()
    # By identity: memory of what died in the partner may be an external tensor's by now.
    owned = {s._cdata for e in partners if e.internal and (s := e.reference()) is not None}
    entries: dict[int, StorageEntry] = {}
    for entry in recording.external():
        storage = entry.reference()
        # What died during the capture was a library's own buffer, in the graph's memory pool.
        if storage is not None and entry.address and storage._cdata not in owned:
            entries[entry.address] = entry
    return entries


def _named(now: Mapping[str, torch.Tensor], addresses: set[int]) -> list[_Named]:
    """Tensors whose storages lie at the addresses; of those that use one in turn, who holds it."""
    entered = []
    for name, tensor in now.items():
        storage = tensor.untyped_storage()
        if tensor.numel() and storage.data_ptr() in addresses:
            seen = (tensor.data_ptr(), tensor.numel(), tensor.dtype)
            entered.append(
                _Named(name, *seen, storage.data_ptr(), storage.nbytes(), _is_held(now, name))
            )
    return entered


def _is_held(now: Mapping[str, torch.Tensor], name: str) -> bool:
    return not isinstance(now, AddressBook) or now.is_held(name)


def _change(named: _Named, now: Mapping[str, torch.Tensor]) -> str:
    """Why a tensor is no longer what was captured; empty if it is."""
    tensor = now.get(named.name)
    if named.is_held and not _is_held(now, named.name):
        return "captured while its owner held its memory, which others may use now"
    if tensor is None:
        return "captured, but the program no longer has it"
    address = tensor.data_ptr()
    if address != named.address:
        freed = "" if address else " (its storage was freed)"
        return f"captured at {named.address:#x}, now at {address:#x}{freed}"
    if tensor.numel() != named.numel or tensor.dtype != named.dtype:
        return f"captured as {named.numel} x {named.dtype}, now {tensor.numel()} x {tensor.dtype}"
    if tensor.untyped_storage().nbytes() < named.storage_bytes:
        return "its storage has shrunk since the capture"
    return ""


def _described(entry: StorageEntry, within: str) -> str:
    """`storage of 400 bytes that aten.sum.default uses in layers.3.attn.norm`."""
    place = entry.place
    if within and place.startswith("in "):
        place = f"in {within}.{place[3:]}"
    elif within and place:
        place = f"{place} in {within}"
    return f"storage of {entry.nbytes} bytes that {entry.made_by} uses {place}".rstrip()
