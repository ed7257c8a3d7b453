"""One unit's part in backward passes: when it opens, which gradients come, when it is done.

    open       a backward pass reaches an output of the unit: gather, and ask autograd's engine
               which gradients it is going to accumulate
    gradient   into the unit's full gradient, a quarter of it or more at a time
    boundary   the gradients of the unit's inputs are there, so nothing needs its parameters any
               more: reshard, start the reduction
    late       without a boundary: with the last gradient, if all of the unit's parameters have one,
               else with the pass

What the engine plans to execute is what comes, so parameters that the loss does not depend on,
modules run twice and recomputed modules need no special care. A parameter that has its gradient is
needed no more, since its gradient comes after all that read it; a frozen one has none, so where
there is one, or where a nested backward pass may bring more, only the boundary or the end will do.
"""

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fsdp_core.errors import TensorError
from fsdp_core.fsdp.gradients import Use
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.pool import Pool
from fsdp_core.fsdp.schedule import profiled

if TYPE_CHECKING:
    from fsdp_core.fsdp.unit import Unit

Place = tuple[ParamGroup, int]
"""A parameter of a unit: its group, number in the group."""

_COPY_FRACTION = 4
"""Gradients are copied when a quarter of a group waits: few kernels, and little held twice."""


@dataclass(eq=False)
class Forward:
    """One forward of a unit.

    Attributes:
        inputs: where the backward pass leaves it.
        uses: parameters of modules that add to `main_grad` themselves.
        task: number of the last backward pass that gave them a `main_grad`.
    """

    inputs: list[GradientEdge] = field(default_factory=list)
    uses: dict[Place, Use] = field(default_factory=dict)
    task: int | None = None


class Call:
    """One forward call of a unit; called when a backward pass reaches one of its outputs.

    Only the first output of a pass counts: an input that is passed through as an output is reached
    when the unit is long done.

    Attributes:
        task: number of the last backward pass that came through; None before the first.
    """

    def __init__(self, backward: "UnitBackward", forward: Forward) -> None:
        self._backward, self._forward = backward, forward
        self.task: int | None = None

    @torch.compiler.disable
    def __call__(self, grads: Any) -> None:
        del grads
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.task = task
            self._backward.open(self._forward, task)


@torch.compiler.disable
def _on_gradient_of(
    backward: "weakref.ref[UnitBackward]", number: int, index: int, parameter: torch.Tensor
) -> None:
    """Hook of a parameter; holds nothing that holds the parameter.

    Python's collector does not see what hooks of this kind hold (torch 2.11 and 2.13): a cycle
    through one would keep the whole model in memory for ever.
    """
    del parameter
    mine = backward()
    if mine is not None:
        mine.on_gradient(mine.unit.groups[number], index)


class UnitBackward:
    """State of a unit in the backward pass under way; at rest between passes."""

    def __init__(self, unit: "Unit") -> None:
        self.unit = unit
        self.is_open = False
        self._awaited: set[Place] = set()
        self._awaits_all = True
        # By number of the backward pass: others may run inside of it, and bring gradients too.
        self._seen: dict[int, set[Place]] = {}
        self._boundary_ahead = False
        self._parameters: dict[Place, nn.Parameter] = {
            (group, index): parameter
            for group in unit.groups
            for index, parameter in enumerate(group.unsharded)
        }
        for place, parameter in self._parameters.items():
            self._hook(place, parameter)

    def _hook(self, place: Place, parameter: nn.Parameter) -> None:
        trainable = parameter.requires_grad
        # A frozen parameter may be thawed later; a hook needs requires_grad.
        parameter.requires_grad_(True)
        group, index = place
        number = self.unit.groups.index(group)
        hook = functools.partial(_on_gradient_of, weakref.ref(self), number, index)
        parameter.register_post_accumulate_grad_hook(hook)
        parameter.requires_grad_(trainable)
        for module, _ in group.owned[index].places:
            if getattr(module, "fuse_wgrad_accumulation", False):
                module.register_forward_pre_hook(lambda *_: self._count_use(place))

    @torch.compiler.disable
    def _count_use(self, place: Place) -> None:
        """For parameters whose backward kernels write into `main_grad` themselves."""
        forward = self.unit.forward_under_way
        if not torch.is_grad_enabled() or not (forward or self.is_open):
            return
        uses = {} if forward is None else forward.uses
        before, parameter = uses.get(place, Use(0, overwrites=False)), self._parameters[place]
        overwrites = before.overwrites or getattr(parameter, "overwrite_main_grad", False)
        uses[place] = Use(before.times + 1, overwrites=overwrites)
        if forward is None:  # a recomputation inside of the unit, whose backward is next
            self._expose_main_grads(uses)

    # ---- a pass

    def open(self, forward: Forward, task: int) -> None:
        """The backward pass `task` enters a forward of the unit."""
        unit, schedule = self.unit, self.unit.schedule
        schedule.begin_backward()
        if not self.is_open:
            self.is_open = True
            trained = ((place, p) for place, p in self._parameters.items() if p.requires_grad)
            planned = {place for place, p in trained if _will_run(get_gradient_edge(p))}
            self._awaited = planned - self._seen.get(task, set())
            self._awaits_all = len(planned) == len(self._parameters)
        self._boundary_ahead |= any(map(_will_run, forward.inputs))
        unit.is_prefetched = False
        if unit.unshard_in_backward:
            unit.unshard()
            unit.wait_unshard()
        if forward.task != task:
            forward.task = task
            self._expose_main_grads(forward.uses)
        unit.prefetch(unit.backward_prefetch, schedule.preceding(unit))

    def _expose_main_grads(self, uses: Mapping[Place, Use]) -> None:
        by_group: dict[ParamGroup, dict[int, Use]] = {}
        for (group, index), use in uses.items():
            if group.unsharded[index].requires_grad:
                by_group.setdefault(group, {})[index] = use
        for group, trained in by_group.items():
            group.gradients.expose(trained, *self._make_room(group))

    def on_gradient(self, group: ParamGroup, index: int) -> None:
        """The gradient of parameter `index` of `group` has come."""
        place = (group, index)
        if not self.is_open:
            self._open_late(group, index)
        self._awaited.discard(place)
        self._seen.setdefault(torch._C._current_graph_task_id(), set()).add(place)
        group.gradients.arrived(index)
        waiting = group.gradients.waiting_numel
        if waiting * _COPY_FRACTION >= group.layout.total_numel and self._awaited:
            self._copy_in(group)
        if self._awaits_all and not self._boundary_ahead:
            self.close()

    def _open_late(self, group: ParamGroup, index: int) -> None:
        """A gradient came though no output of the unit was reached, such as of a tensor kept aside.

        Raises:
            RuntimeError: the unit was not gathered, so its parameters were read where they are not.
        """
        unit = self.unit
        if not group.is_unsharded or unit.gathered_event is not None:
            raise TensorError(
                f"Expected backward to enter unit {unit.name!r} through its outputs, but a "
                f"gradient of {group.names[index]!r} came before: its forward must return its "
                "tensors in tuples, lists, dicts or registered pytree nodes.",
                group.names[index],
            )
        unit.schedule.begin_backward()
        self.is_open, self._awaited, self._awaits_all = True, set(), False

    @torch.compiler.disable
    def on_boundary(self, grads: Any) -> None:
        """The gradients of the unit's inputs are there."""
        del grads
        self._boundary_ahead = False
        self.close()

    def close(self) -> None:
        """The unit is done with this pass, if it is open and nothing is missing."""
        if self.is_open and not self._awaited:
            self.is_open = False
            self.reduce()
            if self.unit.reshard_after_backward:
                # Last, so that the next gather finds this memory whole.
                self.unit.reshard()

    def reduce(self) -> None:
        """Start to reduce what has come, in this pass or before it, as far as this pass does."""
        for group in self.unit.groups:
            self._copy_in(group)
            final = self._is_final(group)
            if self._reduces(group) and group.gradients.is_due(final=final):
                with profiled("reduce", self.unit.name):
                    self.unit.schedule.start_reduce(group.gradients, final=final)

    def _copy_in(self, group: ParamGroup) -> None:
        if group.gradients.waiting_numel == 0:
            return
        with torch.no_grad():
            group.gradients.copy_in(*self._make_room(group))

    def _make_room(self, group: ParamGroup) -> tuple[Pool | None, Any]:
        """Where a full gradient comes from, None if it outlives the pass; the current stream."""
        schedule = self.unit.schedule
        schedule.make_room(group.gradients)
        return schedule.pool if self._reduces(group) else None, schedule.device.current_stream()

    # ---- how far gradients go

    def _is_final(self, group: ParamGroup) -> bool:
        """Whether this pass brings the gradients all the way into `grad`."""
        unit, nest = self.unit, group.nest
        whole = nest.grad_level == nest.main_level and not nest.replica_groups
        return whole or (unit.requires_all_reduce and unit.schedule.is_last_backward)

    def _reduces(self, group: ParamGroup) -> bool:
        """Whether this pass communicates gradients at all."""
        goes_on = self._is_final(group) or group.nest.grad_level > 0
        return self.unit.requires_gradient_sync and goes_on

    # ---- the end

    @property
    def missing(self) -> list[str]:
        """Names of parameters whose gradient was to come in this pass and did not."""
        return [group.names[i] for group, i in self._parameters if (group, i) in self._awaited]

    def end(self, *, raised: bool) -> None:
        """The pass is over, or has raised: gradients not in `grad` yet then do not count."""
        unit = self.unit
        if raised or self._awaited:
            for group in unit.groups:
                group.gradients.forget(unit.schedule.device.current_stream())
        self.is_open, self._boundary_ahead, self._awaited, self._seen = False, False, set(), {}
        unit.forget_forwards()
        if raised or unit.reshard_after_backward:
            unit.reshard()


def _will_run(edge: GradientEdge) -> bool:
    """Whether the backward pass under way comes to `edge`."""
    return bool(torch._C._will_engine_execute_node(edge.node))
