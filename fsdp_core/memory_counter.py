"""Counts live CPU memory as storages that operators make; resident size also counts what the
allocator keeps.

gloo's threads answer first and drop their references then, so tensors of a collective that is over
live on for as long as the thread waits for a processor, and two counts differ. So `Lending` gives
collectives aliases, tensors over the same memory that do not own it:

    argument    alias --> gloo; the tensor itself is held here while the work runs
    result      alias --> program; gloo's own tensor is held here until the alias dies

torch knows functional collectives by their result's storage, so `wait_tensor` of an alias is passed
on to what it stands for. Nothing is waited for that the program does not wait for.
"""

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter, tree_leaves, tree_map_only

from fsdp_core.dispatch import ObservingMode, is_fake, opens_itself

_OF_NO_THREAD = frozenset(("barrier", "monitored_barrier_", "send", "recv_", "recv_any_source_"))
"""Operators of c10d without tensors, or whose tensors only their `Work` holds."""
_NOBODY = "fake"
"""torch's backend that does nothing."""
_WAIT = "_c10d_functional::wait_tensor"
_WRAP = "_c10d_functional::_wrap_tensor_autograd"
"""No collective: since torch 2.13 it makes the result of one the tensor that waits for itself."""
_RESIZING = ("aten::resize_", "aten::resize_as_", "aten::set_")

Lent = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Alias and original, by the alias's identity."""


def is_collective(func: Any) -> bool:
    """Whether `func` is one of c10d's operators, functional or not, that threads work on."""
    name: str = func._schema.name
    return name.startswith(("c10d::", "_c10d_functional::")) and name != _WRAP


@dataclass
class _Result:
    """What a functional collective gave: `own` is gloo's, which an alias in the program shows."""

    alias: weakref.ref[Any]
    own: torch.Tensor
    lent: list[torch.Tensor]


class Lending:
    """Runs collectives of CPU tensors on aliases, for a dispatch mode."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, list[torch.Tensor]]] = []
        self._results: dict[int, _Result] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, one that `is_collective`; its result is what the program is to get."""
        schema: str = func._schema.name
        namespace, _, name = schema.partition("::")
        if schema == _WAIT:
            return self._wait(func, args[0])
        if name in _OF_NO_THREAD:
            return func(*args, **kwargs)
        lent: Lent = {}

        def lend(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu":
                return tensor
            alias = _alias(tensor)
            lent[id(alias)] = alias, tensor
            return alias

        def show(own: torch.Tensor) -> torch.Tensor:
            if namespace == "c10d" and id(own) in lent:
                return lent[id(own)][1]
            return self._show(own, lent)

        args, kwargs = tree_map_only(torch.Tensor, lend, (args, kwargs))
        out = func(*args, **kwargs)
        if namespace == "c10d":
            self._hold(out, lent, is_waited=_argument(func, args, kwargs, "async_op") is False)
        return tree_map_only(torch.Tensor, show, out)

    def let_go(self) -> None:
        if self._held:
            self._held = [each for each in self._held if not each[0].is_completed()]

    def _hold(self, out: Any, lent: Lent, *, is_waited: bool) -> None:
        for leaf in tree_leaves(out):
            if not isinstance(leaf, torch.ScriptObject):
                continue
            work = dist.Work.unbox(leaf)
            if is_waited or dist.get_backend() == _NOBODY:
                # The caller does so next; until then it has the tensors itself. Work of a rank
                # that is alone in its world is never said to be over, and nothing is sent.
                work.wait()
            else:
                self._held.append((work, [tensor for _, tensor in lent.values()]))

    def _show(self, own: torch.Tensor, lent: Lent) -> torch.Tensor:
        """What stands for a functional collective's result; a tensor in place stands for itself."""
        shown = lent[id(own)][1] if id(own) in lent else _alias(own)
        storage = shown.untyped_storage()
        key = storage._cdata
        gone = weakref.ref(storage, lambda reference: self._forget(key, reference))
        self._results[key] = _Result(gone, own, [tensor for _, tensor in lent.values()])
        return shown

    def _forget(self, key: int, reference: Any) -> None:
        found = self._results.get(key)
        if found is not None and found.alias is reference:
            del self._results[key]

    def _wait(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        found = self._results.get(tensor.untyped_storage()._cdata)
        if found is None:
            waited: torch.Tensor = func(tensor)
            return waited
        func(found.own)
        found.lent = []
        return tensor


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> object:
    """An operator's argument; None if it has none of that name."""
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    given = dict(zip(defaults, args, strict=False)) | kwargs
    return given.get(name, defaults.get(name))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory, which does not keep it alive."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    over = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), storage.device, storage.nbytes()
    )
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(over, tensor.storage_offset(), tensor.size(), tensor.stride())


class _StorageRef(weakref.ref[Any]):
    __slots__ = ("key",)
    key: int


class _Kind(NamedTuple):
    makes: bool
    resizes: bool
    lends: bool


def _kind_of(func: Any) -> _Kind:
    schema = func._schema
    # c10d's schemas do not say so: what they return is what they were given to fill.
    passes_on = schema.name.startswith("c10d::") or any(
        each.alias_info is not None for each in schema.returns
    )
    resizes = schema.name in _RESIZING or any(a.name == "out" for a in schema.arguments)
    return _Kind(not passes_on, resizes, is_collective(func))


class StorageCounter(ObservingMode):
    """Counts bytes of live CPU tensor storage, and their peak, while it is active.

    A storage is counted when an operator makes it and uncounted when it dies. One that an operator
    only passes on is not: a library's own buffer (gloo has some) lives as long as its threads
    please. `resized` must be told of `UntypedStorage.resize_`, which is no operator.

    collectives: None, or whose `entering(func, args)` and `left()` are called around each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.collectives: Any = None
        self._known: dict[int, tuple[_StorageRef, int]] = {}
        self._kinds: dict[Any, _Kind] = {}
        self._lending = Lending()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(opens_itself, types)):
            if is_fake(types):
                return func(*args, **(kwargs or {}))
            return NotImplemented  # the wrapper opens itself up first; what it holds is counted
        # This runs for every operator of every rank, so it looks at as little as it can.
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        makes, resizes, lends = kind
        self._lending.let_go()
        if lends:
            if self.collectives is not None:
                self.collectives.entering(func, args)
            out = self._lending.call(func, args, kwargs or {})
            if self.collectives is not None:
                self.collectives.left()
        else:
            out = func(*args, **(kwargs or {}))
        if not (makes or resizes):
            return out
        if type(out) is torch.Tensor:
            self._see(out, makes=makes)
            return out
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor) and not opens_itself(type(value)):
                self._see(value, makes=makes)
        return out

    def _see(self, tensor: torch.Tensor, *, makes: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is not None and known[0]() is not None:
            if known[1] != storage.nbytes():
                self.resized(storage)
        elif makes:
            nbytes = storage.nbytes()
            reference = _StorageRef(storage, self._forget)
            reference.key = key
            self._known[key] = (reference, nbytes)
            self._change(key, nbytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        known = self._known.get(storage._cdata)
        if known is not None:
            self._known[storage._cdata] = (known[0], storage.nbytes())
            self._change(storage._cdata, storage.nbytes() - known[1])

    def _forget(self, reference: _StorageRef) -> None:
        known = self._known.pop(reference.key, None)
        if known is not None:
            self._change(reference.key, -known[1])

    def _change(self, key: int, delta: int) -> None:
        del key  # who follows single storages is told which it is
        self.live_bytes += delta
        # A death on another thread, between two looks at the peak, must not take back a higher one.
        if delta > 0:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def settle(self) -> None:
        self._lending.let_go()
