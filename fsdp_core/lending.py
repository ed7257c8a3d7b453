"""What threads of gloo hold on to is lent, so that only the program decides when its memory dies.

gloo runs collectives on threads of its own. A thread answers first and drops its references then,
so tensors of a collective that is over may live on for as long as the thread waits for a processor:
milliseconds on a busy machine. Who counts live memory, or watches it die, would see another number
each time. So a collective gets aliases, tensors over the same memory that do not own it:

    argument    alias --> gloo; the tensor itself is held here while the work runs
    result      alias --> program; gloo's own tensor is held here until the alias dies

Functional collectives are known to torch by their result's storage, so `wait_tensor` of an alias is
passed on to what it stands for. Nothing is waited for that the program does not wait for: without
`async_op`, that is at once.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

_OF_NO_THREAD = frozenset(("barrier", "monitored_barrier_", "send", "recv_", "recv_any_source_"))
"""Operators of c10d without tensors, or whose tensors only their `Work` holds."""
_NOBODY = "fake"
"""torch's backend that does nothing."""
_WAIT = "_c10d_functional::wait_tensor"
_WRAP = "_c10d_functional::_wrap_tensor_autograd"
"""No collective: since torch 2.13 it makes the result of one the tensor that waits for itself."""


def is_collective(func: Any) -> bool:
    """Whether `func` is one of c10d's operators, functional or not, that threads work on."""
    name: str = func._schema.name
    return name.startswith(("c10d::", "_c10d_functional::")) and name != _WRAP


@dataclass
class _Result:
    """What a functional collective gave: `own` is gloo's, which an alias in the program shows."""

    alias: weakref.ref[Any]
    own: torch.Tensor
    lent: list[torch.Tensor] = field(default_factory=list)


class Lending:
    """Runs collectives of CPU tensors on aliases, for a dispatch mode."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, list[torch.Tensor]]] = []
        self._results: dict[int, _Result] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator; its result is what the program is to get.

        Args:
            func: one for which `is_collective` is true.
        """
        schema: str = func._schema.name
        namespace, _, name = schema.partition("::")
        if schema == _WAIT:
            return self._wait(func, args[0])
        if name in _OF_NO_THREAD:
            return func(*args, **kwargs)
        lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def lend(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu":
                return tensor
            alias = _alias(tensor)
            lent[id(alias)] = alias, tensor
            return alias

        args, kwargs = tree_map_only(torch.Tensor, lend, (args, kwargs))
        out = func(*args, **kwargs)
        originals = [tensor for _, tensor in lent.values()]
        if namespace == "c10d":
            self._hold(out, originals, is_waited=_argument(func, args, kwargs, "async_op") is False)
        return tree_map_only(
            torch.Tensor,
            lambda own: (
                lent[id(own)][1]
                if namespace == "c10d" and id(own) in lent
                else self._show(own, lent, originals)
            ),
            out,
        )

    def let_go(self) -> None:
        """Drop what was lent to work that is complete."""
        if self._held:
            self._held = [each for each in self._held if not each[0].is_completed()]

    def _hold(self, out: Any, originals: list[torch.Tensor], *, is_waited: bool) -> None:
        for leaf in tree_leaves(out):
            if not isinstance(leaf, torch.ScriptObject):
                continue
            work = dist.Work.unbox(leaf)
            if is_waited or dist.get_backend() == _NOBODY:
                # The caller does so next; until then it has the tensors itself. Work of a rank
                # that is alone in its world is never said to be over, and nothing is sent.
                work.wait()
            else:
                self._held.append((work, originals))

    def _show(
        self,
        own: torch.Tensor,
        lent: dict[int, tuple[torch.Tensor, torch.Tensor]],
        originals: list[torch.Tensor],
    ) -> torch.Tensor:
        """What stands for a functional collective's result; a tensor in place stands for itself."""
        shown = lent[id(own)][1] if id(own) in lent else _alias(own)
        storage = shown.untyped_storage()
        key = storage._cdata
        gone = weakref.ref(storage, lambda reference: self._forget(key, reference))
        self._results[key] = _Result(gone, own, originals)
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
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == name:
            return value
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    return kwargs.get(name, defaults.get(name))


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
