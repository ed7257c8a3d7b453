"""Which part of a program an operator runs for, as a name for memory that nobody else names.

A library keeps workspaces, tables and counters of its own. They are in no list of parameters or
buffers, so what names them is who used them first: the module whose forward runs, else the autograd
node, else the line of the program. Looked up on the stack, so it costs nothing where nobody asks.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

_TORCH_FOLDER = str(Path(torch.__file__).parent)
_OWN_FOLDER = str(Path(__file__).parent)
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
        if not (is_mode or name.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<frozen"))):
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
