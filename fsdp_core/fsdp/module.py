"""Life cycle of a unit around forward and backward: gather, compute, release, reduce.

    forward pre    unshard (or wait for the prefetch), prefetch the next unit
    forward post   reshard; hook the outputs for the backward pass
    backward pre   unshard, prefetch the unit before
    grad ready     copy each gradient into the full buffer; with the last one: reshard, reduce
    final          join the streams, release the last buffers, check that nothing was skipped

Two side streams, `gather` and `reduce`, are shared by all units of a root (`Schedule`).
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp_core.device import Device
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.pool import Pool


def _no_callback() -> None:
    """Stands for the callback of a backward pass while there is none."""


class Schedule:
    """What the units of one root share: streams, pool, recorded order, buffers to drain."""

    def __init__(self, device: Device, pool: Pool) -> None:
        self.device, self.pool = device, pool
        self.units: list[Unit] = []
        self.order: list[Unit] = []
        self.reducing: list[tuple[ParamGroup, Any]] = []
        self.final_callback: Callable[[], Any] = _no_callback

    @functools.cached_property
    def gather_stream(self) -> Any:
        """Side stream of the all-gathers, made on first use."""
        return self.device.new_stream()

    @functools.cached_property
    def reduce_stream(self) -> Any:
        """Side stream of the reductions, made on first use."""
        return self.device.new_stream()

    def adopt(self, unit: "Unit") -> None:
        """Take over a unit that was made under a schedule of its own."""
        unit.schedule, unit.group.pool = self, self.pool
        self.units.append(unit)

    def neighbour(self, unit: "Unit", offset: int) -> "Unit | None":
        """The unit `offset` places after `unit` in the recorded forward order."""
        if unit not in self.order:
            return None
        index = self.order.index(unit) + offset
        return self.order[index] if 0 <= index < len(self.order) else None

    def drain(self, keep: int) -> None:
        """Release gradient buffers whose reduction is queued, all but the newest `keep`."""
        current = self.device.current_stream()
        while len(self.reducing) > keep:
            group, event = self.reducing.pop(0)
            current.wait_event(event)
            group.release_grad(current)

    def begin_backward(self) -> None:
        """Queue the end of this backward pass, once; drop what a pass that raised left behind."""
        if self.final_callback() is not None:
            return
        self.drain(keep=0)
        for unit in self.units:
            unit.forget_backward()
        # The reduce stream joins the current one before its first allocation, so that a capture in
        # progress covers it.
        self.reduce_stream.wait_stream(self.device.current_stream())
        callback = functools.partial(finish, self)
        # Weak: a pass that raises drops its callback unrun, and the next pass must see that.
        self.final_callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def quiesce(self) -> None:
        """Finish all work and forget its events, so that a capture may begin or has ended.

        An event recorded outside a capture must not be waited for inside it, nor the reverse.
        """
        self.device.synchronize()
        self.pool.forget_events()
        for unit in self.units:
            unit.gathered_event = None


class Unit:
    """A module whose direct parameters are gathered and reduced together."""

    def __init__(
        self,
        module: nn.Module,
        group: ParamGroup,
        schedule: Schedule,
        *,
        reshard_after_forward: bool,
    ) -> None:
        self.name = ""
        self.module, self.group, self.schedule = module, group, schedule
        self.reshard_after_forward = reshard_after_forward
        self.gathered_event: Any = None
        self._awaited: set[int] = set()
        schedule.adopt(self)
        module.register_forward_pre_hook(self._pre_forward, prepend=True)
        module.register_forward_hook(self._post_forward)
        for index, parameter in enumerate(group.unsharded):
            parameter.register_post_accumulate_grad_hook(self._grad_hook(index))

    def unshard(self) -> None:
        """Issue the gather on the gather stream, unless it is done or under way."""
        if self.group.is_unsharded:
            return
        schedule = self.schedule
        # The shard was last written on the current stream (optimizer, cast, checkpoint load).
        schedule.gather_stream.wait_stream(schedule.device.current_stream())
        self.group.unshard(schedule.gather_stream)
        self.gathered_event = schedule.gather_stream.record_event()

    def wait_unshard(self) -> None:
        """Make the current stream wait for the gather."""
        if self.gathered_event is not None:
            self.schedule.device.current_stream().wait_event(self.gathered_event)
            self.gathered_event = None

    def reshard(self) -> None:
        """Release the gathered parameters."""
        self.group.reshard(self.schedule.device.current_stream())

    def _pre_forward(self, module: nn.Module, args: Any) -> None:
        del module, args
        if self not in self.schedule.order:
            self.schedule.order.append(self)
        self.unshard()
        self.wait_unshard()
        following = self.schedule.neighbour(self, 1)
        if following is not None:
            following.unshard()

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        if self.reshard_after_forward:
            self.reshard()
        tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        watched = [t for t in tensors if t.requires_grad]
        if watched and torch.is_grad_enabled():
            torch.autograd.graph.register_multi_grad_hook(watched, self._pre_backward, mode="any")
        return output

    def _pre_backward(self, grad: torch.Tensor) -> None:
        del grad
        schedule = self.schedule
        schedule.begin_backward()
        self._awaited = set(range(len(self.group.owned)))
        self.unshard()
        self.wait_unshard()
        # The root comes first in forward and its backward starts first: the last unit is next.
        is_first = bool(schedule.order) and schedule.order[0] is self
        previous = schedule.order[-1] if is_first else schedule.neighbour(self, -1)
        if previous is not None and previous.reshard_after_forward:
            previous.unshard()

    def _grad_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            del parameter
            self.group.take_grad(index, self.schedule.device.current_stream())
            self._awaited.discard(index)
            if not self._awaited:
                self._post_backward()

        return take

    def _post_backward(self) -> None:
        schedule = self.schedule
        self.reshard()
        schedule.reduce_stream.wait_stream(schedule.device.current_stream())
        self.group.reduce(schedule.reduce_stream)
        schedule.reducing.append((self.group, schedule.reduce_stream.record_event()))
        schedule.drain(keep=1)

    def forget_backward(self) -> None:
        """Drop gradients that an unfinished backward pass left; nothing after a finished one."""
        self._awaited = set()
        if self.group.has_grads:
            self.group.release_grad(self.schedule.device.current_stream())

    @property
    def missing_grads(self) -> list[str]:
        """Names of parameters whose gradient has not arrived in this backward pass."""
        return [self.group.names[index] for index in sorted(self._awaited)]


def finish(schedule: Schedule) -> None:
    """End of a backward pass: join the reduce stream and validate; does nobody's work.

    Raises:
        RuntimeError: a unit went into backward and some of its gradients never came.
    """
    schedule.final_callback = _no_callback
    schedule.drain(keep=0)
    schedule.device.current_stream().wait_stream(schedule.reduce_stream)
    schedule.device.current_stream().wait_stream(schedule.gather_stream)
    for unit in schedule.units:
        unit.reshard()
    for unit in schedule.units:
        if missing := unit.missing_grads:
            raise RuntimeError(
                f"Expected gradients of every parameter of unit {unit.name!r}, "
                f"{len(missing)} never came, such as {missing[0]!r}; the unit was not reduced."
            )
