"""Errors that name tensors, walks over what holds them, what dispatch modes have in common, and
what differs between the versions of torch that are supported, 2.11 to 2.14.
"""

import functools
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

IS_2_13 = hasattr(dist, "all_gather_single")
"""From 2.13 on, a subclass of DTensor sees its operators: before, torch's C++ took them."""

# 2.13 renamed collectives: the old names warn there, the new ones are absent before.
ALL_GATHER = "all_gather_single" if IS_2_13 else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if IS_2_13 else "reduce_scatter_tensor"


class TensorError(RuntimeError):
    """Something is wrong with tensors that have names: `names`, the first to be told of first."""

    def __init__(self, message: str, *names: str) -> None:
        self.names = list(names)
        super().__init__(message)


def opens_itself(kind: type) -> bool:
    """Whether operators on a tensor class become operators on the tensors that it holds."""
    dispatch: object = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not torch._C._disabled_torch_dispatch_impl


def is_fake(kinds: Iterable[type]) -> bool:
    """Whether an operator's tensors are to know shapes alone, as where DTensor plans its own. Modes
    must hand these on: no other mode is asked once one does not implement them.
    """
    return any(issubclass(kind, FakeTensor) for kind in kinds)


ALLOCATIONS = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operators that run no kernel: memory without values."""

_HERE, _STDLIB = Path(__file__).parent, sysconfig.get_path("stdlib")
_OF_NO_PROGRAM = (
    str(Path(torch.__file__).parent), str(_HERE / "graph"), str(_HERE / "stress"),
    str(_HERE / "train" / "compiled.py"), "<frozen", "<eval_with_key",
)  # fmt: skip
"""Whose frames are no place in a program: torch's, and of those who capture, replay or look on."""
_OF_MODES = ("__torch_dispatch__", "__torch_function__")


def program_frames(frame: FrameType | None) -> Iterator[tuple[str, FrameType]]:
    """`file:line` of each frame of the program from `frame` outwards, and the frame."""
    while frame is not None:
        name = _program_file(frame.f_code.co_filename)
        if name and frame.f_code.co_name not in _OF_MODES:
            yield f"{name}:{frame.f_lineno}", frame
        frame = frame.f_back


def calling_line(frame: FrameType | None) -> str:
    """`file:line` of the innermost frame of the program from `frame` outwards, or ''."""
    return next((line for line, _ in program_frames(frame)), "")


@functools.cache
def _program_file(path: str) -> str:
    is_library = path.startswith(_STDLIB) and "-packages" not in path  # which may lie inside of it
    return "" if is_library or path.startswith(_OF_NO_PROGRAM) else Path(path).name


class ObservingMode(TorchDispatchMode):
    """A mode that looks on while operators run: it compiles nothing and keeps no compiler out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The compiler works as if nobody looked on; without this it gives up."""
        return True


def leaves(value: Any, name: str = "", *, open_records: bool = True) -> Iterator[tuple[str, Any]]:
    """What is nested in `value`, in order, each with its path behind `name`: `plan.spans[0]`.
    `open_records`: also in dataclasses.
    """
    items: Iterable[tuple[str, Any]]
    if isinstance(value, tuple | list):
        items = ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        items = ((f"[{key!r}]", item) for key, item in value.items())
    elif open_records and is_dataclass(value):
        items = ((f".{field.name}", getattr(value, field.name)) for field in fields(value))
    else:
        yield name, value
        return
    for step, item in items:
        yield from leaves(item, name + step, open_records=open_records)


def tensors_in(
    value: Any, name: str = "", *, open_records: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among `leaves`."""
    for path, leaf in leaves(value, name, open_records=open_records):
        if isinstance(leaf, torch.Tensor):
            yield path, leaf
