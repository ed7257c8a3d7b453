"""What dispatch modes have in common: tensors that they see, places they name, and a compiler."""

import functools
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


def opens_itself(kind: type) -> bool:
    """Whether operators on a tensor class become operators on the tensors that it holds."""
    dispatch: object = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not torch._C._disabled_torch_dispatch_impl


def is_fake(kinds: Iterable[type]) -> bool:
    """Whether an operator's tensors are to know shapes alone, as where DTensor plans its own.

    Modes must hand these on: no other mode is asked once one does not implement them.
    """
    return any(issubclass(kind, FakeTensor) for kind in kinds)


_HERE = Path(__file__).parent
_OF_NO_PROGRAM = (
    str(Path(torch.__file__).parent), str(_HERE / "graph"), str(_HERE / "stress"),
    str(_HERE / "train" / "compiled.py"), "<frozen", "<eval_with_key",
)  # fmt: skip
"""Whose frames are no place in a program: torch's, and of those who capture, replay or look on."""
_OF_MODES = ("__torch_dispatch__", "__torch_function__")


def calling_line(frame: FrameType | None) -> str:
    """`file:line` of the innermost frame of the program from `frame` outwards, or ''."""
    while frame is not None:
        name = _program_file(frame.f_code.co_filename)
        if name and frame.f_code.co_name not in _OF_MODES:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.cache
def _program_file(path: str) -> str:
    return "" if path.startswith(_OF_NO_PROGRAM) else Path(path).name


class ObservingMode(TorchDispatchMode):
    """A mode that looks on while operators run: it compiles nothing and keeps no compiler out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The compiler works as if nobody looked on; without this it gives up."""
        return True
