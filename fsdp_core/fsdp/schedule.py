"""What the units of one root share: streams, pool, the order of passes, reductions under way.

    current   ....forward 0........forward 1.........   ..backward 1......backward 0...
    gather    [gather 0][gather 1]     [gather 2]          [gather 0]
    reduce                                                       [reduce 1]   [reduce 0]

A forward pass is recorded as it runs, and the next one of its kind (with or without gradients)
gathers ahead by that record. A pass that runs otherwise, because a module was skipped, only loses
the overlap: what was gathered in vain is given back at its end.

The end of a backward pass waits and validates. The one piece of work it does is to reduce what no
unit's own end has: gradients out of nested backward passes (reentrant checkpoints inside a unit),
of which only then is it known that no more will come, and sums of earlier passes in units that this
one did not enter.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fsdp_core.device import Device
from fsdp_core.fsdp.collectives import all_reduce
from fsdp_core.fsdp.gradients import Gradients
from fsdp_core.fsdp.pool import Pool

if TYPE_CHECKING:
    from fsdp_core.fsdp.backward import Call
    from fsdp_core.fsdp.unit import Unit


@dataclass(frozen=True)
class Overlap:
    """How communication runs beside compute.

    Attributes:
        streams: 2: gathers and reductions on a side stream each; 1: on one side stream, with one
            gradient buffer in place of two; 0: on the current stream, nothing gathered ahead.
    """

    streams: int = 2

    def __post_init__(self) -> None:
        if self.streams not in (0, 1, 2):
            raise ValueError(f"Expected 0, 1 or 2 communication streams, got {self.streams!r}.")


def in_backward() -> bool:
    """Whether autograd is running now: a forward then is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def profiled(phase: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """A profiler range `fsdp <phase> <name>`; nothing where no profiler runs."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return torch.profiler.record_function(f"fsdp {phase} {name}")


@dataclass
class _Reduction:
    """A reduction under way; `held` is memory that it uses. Without an event it is over."""

    gradients: Gradients
    event: Any
    held: list[torch.Tensor]


class Schedule:
    """Streams, pool, order and pending reductions of units, the first of which is the root."""

    def __init__(self, units: "list[Unit]", device: Device, pool: Pool, overlap: Overlap) -> None:
        self.units, self.root = units, units[0]
        self.device, self.pool, self.overlap = device, pool, overlap
        for unit in units:
            unit.schedule = self
            for group in unit.groups:
                group.pool = pool
        self.is_last_backward = True
        # Forward calls whose graphs live, by weak reference: a backward pass may still come.
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._reductions: list[_Reduction] = []
        # The forward pass under way, or the last: units as they began, and as they ended.
        self._in_pass, self._trains = False, True
        self._begun: list[Unit] = []
        self._ended: list[Unit] = []
        # How the last passes with and without gradients began their units.
        self._plans: dict[bool, list[Unit]] = {True: [], False: []}
        self._preceding: dict[Unit, Unit] = {}
        self._final: weakref.ref[Callable[[], None]] | None = None

    # ---- streams

    @functools.cached_property
    def _side_streams(self) -> tuple[Any, Any]:
        gather = self.device.new_stream("gather")
        both = self.overlap.streams == 2
        return gather, self.device.new_stream("reduce") if both else gather

    @property
    def gather_stream(self) -> Any:
        """Stream of the gathers."""
        return self._side_streams[0] if self.overlap.streams else self.device.current_stream()

    @property
    def reduce_stream(self) -> Any:
        """Stream of the reductions."""
        return self._side_streams[1] if self.overlap.streams else self.device.current_stream()

    def quiesce(self) -> None:
        """Finish all work and forget its events, so that a capture may begin or has ended.

        An event recorded outside a capture must not be waited for inside it, nor the reverse, also
        if the capture failed. Nor may what is known to be up to date outside be left out inside: a
        replay starts elsewhere.
        """
        self.device.synchronize()
        for reduction in self._reductions:
            reduction.event = None
        self.drain(keep=0)
        self.device.synchronize()
        self.pool.forget_events()
        for unit in self.units:
            unit.gathered_event = None
            for group in unit.groups:
                group.forget_freshness()

    # ---- forward

    def enter(self, unit: "Unit") -> None:
        """A forward begins; not called when it is a recomputation."""
        if unit is self.root:
            self.recover()
            self._begun, self._ended, self._in_pass = [], [], True
            # The root's word: a reentrant checkpoint turns gradients off for the units inside.
            self._trains = torch.is_grad_enabled()
        if self._in_pass:
            self._begun.append(unit)

    def following(self, unit: "Unit") -> "list[Unit]":
        """The unit that entered next in the last pass of this kind, if that pass is being kept."""
        plan, place = self._plans[self._trains], len(self._begun)
        is_kept = self._in_pass and plan[place - 1 : place] == [unit]
        return plan[place : place + 1] if is_kept else []

    def leave(self, unit: "Unit") -> bool:
        """A forward has ended; whether backward begins with this unit, which so stays gathered."""
        if not self._in_pass:
            return False
        self._ended.append(unit)
        if unit is self.root:
            self._end_forward_pass()
            return False
        plan = self._plans[True]
        return self._trains and len(self._begun) == len(plan) and plan[-1] is unit

    def _end_forward_pass(self) -> None:
        self._in_pass = False
        self._plans[self._trains] = self._begun
        for unit in self.units:
            # Gathered for nothing; or nothing may stay, since a replayed graph may change weights
            # unseen before the next pass.
            if unit.is_prefetched or not self._trains:
                unit.reshard()
        if self._trains:
            self._preceding = dict(pairwise(dict.fromkeys(reversed(self._ended))))
        else:
            self.end_of_pass()

    def recover(self) -> None:
        """Put right what a pass that raised has left behind; nothing after one that ended."""
        for unit in self.units:
            unit.recover_forward()
        if self._final is not None and self._final() is None:
            self.abandon_backward()

    def make_way(self) -> None:
        """Give back buffers of units that are gathered and not in use: ahead, or kept in vain."""
        for unit in self.units:
            if unit.is_idle:
                unit.reshard()

    # ---- backward

    def begin_backward(self) -> None:
        """Queue the end of this backward pass, once."""
        if self._final is not None:
            if self._final() is not None:
                return
            self.abandon_backward()
        # The reduce stream joins the current one before its first work, so that a capture in
        # progress covers it.
        self.reduce_stream.wait_stream(self.device.current_stream())
        callback = functools.partial(finish, self)
        # Weak: a pass that raises drops its callback unrun, and the next pass must see that.
        self._final = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def preceding(self, unit: "Unit") -> "list[Unit]":
        """The unit whose backward comes after that of `unit`, by the order of the last forward."""
        before = self._preceding.get(unit)
        return [] if before is None or before.backward.is_open else [before]

    def start_reduce(self, gradients: Gradients, *, final: bool) -> None:
        """Reduce a full gradient buffer on the reduce stream."""
        stream = self.reduce_stream
        stream.wait_stream(self.device.current_stream())
        held = gradients.reduce(stream, final=final)
        self._reductions.append(_Reduction(gradients, stream.record_event(), held))

    @property
    def has_reductions(self) -> bool:
        """Whether reductions are under way."""
        return bool(self._reductions)

    def make_room(self, gradients: Gradients) -> None:
        """Before a gradient buffer is taken: one other may be live, and none with one stream.

        The buffer itself may be live, from the backward pass before. Nothing if it has been taken.
        """
        if gradients.is_pending:
            return
        newest = self._reductions[-1].gradients if self._reductions else None
        self.drain(keep=1 if self.overlap.streams == 2 and newest is not gradients else 0)

    def drain(self, keep: int) -> None:
        """Release gradient buffers whose reduction is queued, all but the newest `keep`."""
        current = self.device.current_stream()
        while len(self._reductions) > keep:
            reduction = self._reductions.pop(0)
            if reduction.event is not None:
                current.wait_event(reduction.event)
            reduction.gradients.release_full(current)

    def abandon_backward(self) -> None:
        """Drop what a backward pass that raised has not reduced; `grad` keeps what it has."""
        self._final = None
        self.drain(keep=0)
        self.device.current_stream().wait_stream(self.reduce_stream)
        for unit in self.units:
            unit.backward.end(raised=True)
        self.end_of_pass()

    def end_backward(self) -> None:
        """Join the side streams and give everything back."""
        self._final = None
        current = self.device.current_stream()
        for unit in self.units:
            unit.backward.close()
        for unit in self.units:
            if not unit.backward.is_open:  # this pass need not have entered it
                unit.backward.reduce()
        if self.is_last_backward:
            self.drain(keep=0)
            current.wait_stream(self.reduce_stream)
        current.wait_stream(self.gather_stream)
        for unit in self.units:
            unit.backward.end(raised=False)
        self.end_of_pass()

    def end_of_pass(self) -> None:
        """Tell the pool that everything is given back and nothing saved, if it is so."""
        busy = bool(self._reductions) or any(unit.holds_buffers for unit in self.units)
        if not busy and not any(call.task is None for call in self.calls):
            self.pool.end_of_pass()


@torch.compiler.disable
def finish(schedule: Schedule) -> None:
    """End of a backward pass.

    Raises:
        RuntimeError: a unit went into backward and some of its gradients never came, or its policy
            asks for finite gradients and some are not; names unit and parameter.
    """
    missing = [(unit, name) for unit in schedule.units for name in unit.backward.missing]
    schedule.end_backward()
    if missing:
        unit, name = missing[0]
        raise RuntimeError(
            f"Expected gradients of every parameter of unit {unit.name!r} that the loss depends "
            f"on, {len(missing)} never came, such as {name!r}; the unit was not reduced."
        )
    if any(unit.check_finite_grads for unit in schedule.units):
        _check_finite(schedule)


def _check_finite(schedule: Schedule) -> None:
    """Every rank raises if any has a gradient that is not finite: none is left waiting."""
    checked = [g for unit in schedule.units if unit.check_finite_grads for g in unit.groups]
    names = [name for group in checked for name in group.gradients.nonfinite(group.names)]
    found = torch.tensor(float(len(names)), device=schedule.device.torch_device)
    mesh = next(group.nest.mesh for unit in schedule.units for group in unit.groups)
    for axis in range(mesh.ndim):
        all_reduce(found, mesh.get_group(axis))
    if not found.item():
        return
    for axis in range(mesh.ndim):
        parts: list[list[str]] = [[] for _ in range(mesh.size(axis))]
        dist.all_gather_object(parts, names, group=mesh.get_group(axis))
        names = list(dict.fromkeys(name for part in parts for name in part))
    raise RuntimeError(f"Expected finite gradients, got NaN or infinity in {', '.join(names)}.")
