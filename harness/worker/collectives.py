"""Notes of each collective that a rank enters, on the CPU, where the memory counter sees them all.

    counter of live storage -> Notes.entering / waiting / left -> `engine.evidence.PlaceFile`

A replayed graph calls no code of the model, so whose a collective is can be asked only in eager
steps. The order of the last step before graphs are captured is learned; in a replay a collective
has the label of that place in the step, as long as the operators up to there are the same.
Messages between two ranks are noted and not counted. Captures call collectives of their own, which
are no part of that order. In the step that captures, the module that is running is noted, too, on a
GPU as well: a rank that is killed there leaves no other word.

In runs that tap, what the rank gives to each collective is digested on the host: a gradient's
digest is that of the sum, so that a wrong sum is led back to its giver by what it gave alone.
"""

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp_core import fsdp
from fsdp_core.device import Device
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.unit import Unit
from fsdp_core.train.graphs import Graphs
from harness.engine.evidence import IN_CAPTURE, Place, PlaceFile, group_key
from harness.records import GIVEN, EventRecord, GivenCall

_SHARDING = str(Path(fsdp.__file__).parent)
_WAIT = "_c10d_functional::wait_tensor"
_CAPTURES = (Graphs.capture_parts.__code__, Graphs.capture_iteration.__code__)
_POINT_TO_POINT = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")
_INPUTS = frozenset({"input", "inputs", "input_tensor", "input_tensors", "tensors"})
"""What operators call the tensors that a rank brings along."""


@contextlib.contextmanager
def noted(
    device: Device, path: Path, step: Callable[[], int], eager_steps: int, *, gives: bool = False
) -> Iterator["Notes"]:
    """Inside, collectives are noted in the file at `path`, which is left behind by failures only.

    Where the device counts no memory, as on CUDA, none is noted. `step` gives the number of the
    step, `eager_steps` how many come before graphs are captured; `gives`: whether to note inputs.
    """
    file = PlaceFile(path)
    notes, counter = Notes(file, step, eager_steps), device.counter
    if counter is None or dist.get_world_size() == 1:
        yield notes
    else:
        counter.collectives = notes
        notes.given = [] if gives else None
        yield notes
        counter.collectives = None
    file.remove()


class Notes:
    """Keeps one rank's place; arguments as of `noted`.

    Attributes:
        given: what the rank gave in this step; None if nobody wants to know.
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
        self.given: list[GivenCall] | None = None

    def entering(self, func: Any, args: tuple[Any, ...]) -> None:
        operator: str = func._schema.name
        if operator != _WAIT:
            group = self._group(args)
            if counts := operator not in _POINT_TO_POINT:
                key = group_key(group)
                self._entered[key] = self._entered.get(key, 0) + 1
            self._last = (operator, self._label(operator), group)
            if self.given is not None and counts:
                self.given.append(_given(func, args, self._last[1], group))
        self._write(is_inside=True)

    def left(self) -> None:
        self._write(is_inside=False)

    def given_event(self, rank: int, step: int) -> EventRecord:
        detail = {"calls": [call.to_json() for call in self.given or ()]}
        return EventRecord(name=GIVEN, rank=rank, step=step, detail=detail)

    def begin(self) -> None:
        """A step begins: what the rank gave before is no part of it."""
        if self.given is not None:
            self.given = []

    @contextlib.contextmanager
    def modules(self, stages: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, whichever module runs is noted, too; for the step that captures graphs."""
        named = [(name, each) for stage in stages for name, each in stage.named_modules() if name]
        before = [vars(each).get("_call_impl") for _, each in named]
        for name, each in named:
            # The instance's own, which `Module.__call__` finds first.
            each._call_impl = self._noting(name, each._call_impl)
        try:
            yield
        finally:
            for (_, each), own in zip(named, before, strict=True):
                del each._call_impl
                if own is not None:
                    each._call_impl = own

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            around, self._module = self._module, name
            self._write(is_inside=False)
            result = original(*args, **kwargs)
            self._module = around
            self._write(is_inside=False)
            return result

        return call

    def _write(self, *, is_inside: bool) -> None:
        operator, label, group = self._last
        self._file.write(
            Place(
                step=self._step(), operator=operator, label=label, group=group,
                is_inside=is_inside and operator not in _POINT_TO_POINT,
                entered=dict(self._entered), module=self._module,
            )
        )  # fmt: skip

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
            if (group := _as_group(value)) is not None:
                name = group.group_name
                if name not in self._groups:
                    self._groups[name] = tuple(dist.get_process_group_ranks(group))
                return self._groups[name]
        return ()


def _as_group(value: Any) -> dist.ProcessGroup | None:
    try:
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str):
            return dist.distributed_c10d._resolve_process_group(cast("Any", value))
    except (LookupError, ValueError, RuntimeError):
        pass  # another class, how to reduce, or another string, the operation
    return None


def _given(func: Any, args: tuple[Any, ...], label: str, group: tuple[int, ...]) -> GivenCall:
    """What a rank brings to a collective that it enters, for the unit of that name."""
    digest = hashlib.blake2b(digest_size=8)
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in _INPUTS:
            for tensor in tree_leaves(value):  # a scatter's are lists of lists
                # A copy: storage that numpy has seen can be resized no more, as pools do.
                own = tensor.detach().clone(memory_format=torch.contiguous_format)
                digest.update(own.reshape(-1).view(torch.uint8).numpy().tobytes())
    operator = func._schema.name.rpartition("::")[2].strip("_")
    return GivenCall(operator=operator, label=label, group=group, digest=digest.hexdigest())


def _unit_at_work() -> tuple[str, bool]:
    """The FSDP unit or group whose code called this, "" if none did; whether in a capture."""
    label, in_capture = "", False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not label and _SHARDING in frame.f_code.co_filename:
            owners = (frame.f_locals.get(name) for name in ("self", "unit", "group"))
            found = (each for each in owners if isinstance(each, Unit | ParamGroup))
            label = next((each.name or "the root" for each in found), "")
        in_capture |= frame.f_code in _CAPTURES
        frame = frame.f_back
    return label, in_capture
