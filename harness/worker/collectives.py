"""Notes of each collective that a rank enters, on the CPU, where the memory counter sees them all.

    counter of live storage -> Notes.entering / waiting / left -> `engine.collective_log.PlaceFile`

A replayed graph calls no code of the model, so whose a collective is can be asked only in eager
steps. The order of the last step before graphs are captured is learned; in a replay a collective
has the label of that place in the step, as long as the operators up to there are the same.
Messages between two ranks are noted and not counted. Captures call collectives of their own, which
are no part of that order.

In the step that captures, the module that is running is noted, too, on a GPU as well: a rank that
is killed there leaves no other word.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core import fsdp
from fsdp_core.device import Device
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.unit import Unit
from fsdp_core.train.captures import Captures
from harness.engine.collective_log import IN_CAPTURE, Place, PlaceFile, group_key
from harness.worker.given import Given

_SHARDING = str(Path(fsdp.__file__).parent)
_WAIT = "_c10d_functional::wait_tensor"
_CAPTURES = (Captures.capture_parts.__code__, Captures.capture_iteration.__code__)
_POINT_TO_POINT = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")


@contextlib.contextmanager
def noted(
    device: Device,
    path: Path,
    step: Callable[[], int],
    eager_steps: int,
    *,
    gives: bool = False,
) -> Iterator["Notes"]:
    """Inside, collectives are noted in the file at `path`, which is left behind by failures only.

    Args:
        device: whose memory is being counted; where it is not, as on CUDA, no collective is noted.
        step: gives the number of the step.
        eager_steps: how many of them come before graphs are captured.
        gives: whether to note what the rank gives to each of them.
    """
    file = PlaceFile(path)
    notes, counter = Notes(file, step, eager_steps), device.counter
    if counter is None or dist.get_world_size() == 1:
        yield notes
    else:
        counter.collectives = notes
        notes.given = Given() if gives else None
        yield notes
        counter.collectives = None
    file.remove()


class Notes:
    """Keeps one rank's place; arguments as of `noted`.

    Attributes:
        given: told of what the rank brings along, if anybody wants to know.
    """

    def __init__(self, file: PlaceFile, step: Callable[[], int], eager_steps: int) -> None:
        self._file, self._step, self._eager_steps = file, step, eager_steps
        self._entered: dict[str, int] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        self._labels: list[tuple[str, str]] = []
        self._is_known = True
        self._at = (-1, 0)
        self._last: tuple[str, str, tuple[int, ...]] = ("", "", ())
        self._module = ""
        self.given: Given | None = None

    def entering(self, func: Any, args: tuple[Any, ...]) -> None:
        """A collective is called."""
        operator: str = func._schema.name
        if operator != _WAIT:
            group = self._group(args)
            if operator not in _POINT_TO_POINT:
                key = group_key(group)
                self._entered[key] = self._entered.get(key, 0) + 1
            self._last = (operator, self._label(operator), group)
            if self.given is not None and operator not in _POINT_TO_POINT:
                self.given.take(func, args, self._last[1], group)
        self._write(is_inside=True)

    def left(self) -> None:
        """It came back."""
        self._write(is_inside=False)

    @contextlib.contextmanager
    def modules(self, stages: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, whichever module runs is noted, too; for the step that captures graphs."""
        named = [(name, each) for stage in stages for name, each in stage.named_modules() if name]
        before = [vars(each).get("_call_impl") for _, each in named]
        for name, each in named:
            # The instance's own, which `Module.__call__` finds first.
            each._call_impl = self._noting(name, each._call_impl)
        yield
        for (_, each), own in zip(named, before, strict=True):
            del each._call_impl
            if own is not None:
                each._call_impl = own

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            around = self._module
            self._enter_module(name)
            result = original(*args, **kwargs)
            self._enter_module(around)
            return result

        return call

    def _enter_module(self, name: str) -> None:
        self._module = name
        self._write(is_inside=False)

    def _write(self, *, is_inside: bool) -> None:
        operator, label, group = self._last
        self._file.write(
            Place(
                step=self._step(),
                operator=operator,
                label=label,
                group=group,
                is_inside=is_inside and operator not in _POINT_TO_POINT,
                entered=dict(self._entered),
                module=self._module,
            )
        )

    def _label(self, operator: str) -> str:
        label, in_capture = _unit_at_work()
        if in_capture:
            return label or IN_CAPTURE
        (before, number), step = self._at, self._step()
        number = number + 1 if step == before else 0
        self._at = (step, number)
        if step < self._eager_steps:
            self._labels = [*(self._labels if number else ()), (operator, label)]
            return label
        known, learned = self._labels[number] if number < len(self._labels) else ("", "")
        self._is_known = known == operator and (self._is_known or not number)
        return label or (learned if self._is_known else "")

    def _group(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Global ranks of the collective with these arguments."""
        for value in args[::-1]:
            if isinstance(value, str) and value in self._groups:
                return self._groups[value]
            group = _as_group(value)
            if group is not None:
                name = group.group_name
                if name not in self._groups:
                    self._groups[name] = tuple(dist.get_process_group_ranks(group))
                return self._groups[name]
        return ()


def _as_group(value: Any) -> dist.ProcessGroup | None:
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except RuntimeError:
            return None  # another class: how to reduce
    if isinstance(value, str):
        try:
            return dist.distributed_c10d._resolve_process_group(cast("Any", value))
        except (LookupError, ValueError, RuntimeError):
            return None  # another string: the operation
    return None


def _unit_at_work() -> tuple[str, bool]:
    """The FSDP unit or group whose code called this, "" if none did; whether in a capture."""
    label, in_capture = "", False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not label and _SHARDING in frame.f_code.co_filename:
            label = _unit_in(frame)
        in_capture |= frame.f_code in _CAPTURES
        frame = frame.f_back
    return label, in_capture


def _unit_in(frame: FrameType) -> str:
    for name in ("self", "unit", "group"):
        owner = frame.f_locals.get(name)
        if isinstance(owner, Unit | ParamGroup):
            return owner.name or "the root"
    return ""
