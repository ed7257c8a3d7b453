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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fsdp_core.fsdp.param_group import ParamGroup

if TYPE_CHECKING:
    from fsdp_core.fsdp.unit import Unit

Place = tuple[int, int]
"""A parameter of a unit: number of its group, number in the group."""

_COPY_FRACTION = 4
"""Gradients are copied when a quarter of a group waits: few kernels, and little held twice."""


class Call:
    """One forward call of a unit; called when a backward pass reaches one of its outputs.

    Only the first output of a pass counts: an input that is passed through as an output is reached
    when the unit is long done.

    Attributes:
        is_waiting: no backward pass has come through yet.
    """

    def __init__(self, backward: "UnitBackward", inputs: list[GradientEdge]) -> None:
        self._backward, self._inputs, self._task = backward, inputs, -1
        self.is_waiting = True

    @torch.compiler.disable
    def __call__(self, grads: Any) -> None:
        del grads
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self.is_waiting = task, False
            self._backward.open(self._inputs, task)


class UnitBackward:
    """State of a unit in the backward pass under way; at rest between passes."""

    def __init__(self, unit: "Unit") -> None:
        self._unit = unit
        self.is_open = False
        self._awaited: set[Place] = set()
        self._awaits_all = True
        self._task = -1
        self._seen: set[Place] = set()
        self._boundary_ahead = False
        self._uses: dict[Place, int] = {}
        for number, group in enumerate(unit.groups):
            for index, parameter in enumerate(group.unsharded):
                self._hook((number, index), parameter)

    def _hook(self, place: Place, parameter: nn.Parameter) -> None:
        trainable = parameter.requires_grad
        # A frozen parameter may be thawed later; a hook needs requires_grad.
        parameter.requires_grad_(True)
        parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, place))
        parameter.requires_grad_(trainable)
        for module, _ in self._unit.groups[place[0]].owned[place[1]].places:
            if getattr(module, "fuse_wgrad_accumulation", False):
                module.register_forward_hook(lambda *_: self._count_use(place))

    @torch.compiler.disable
    def _count_use(self, place: Place) -> None:
        """For parameters whose backward kernels write into `main_grad` themselves."""
        if torch.is_grad_enabled():
            self._uses[place] = self._uses.get(place, 0) + 1

    # ---- a pass

    def open(self, inputs: list[GradientEdge], task: int) -> None:
        """The backward pass `task` enters a forward call of the unit, to leave at `inputs`."""
        unit, schedule = self._unit, self._unit.schedule
        schedule.begin_backward()
        if task != self._task:
            self._task, self._seen = task, set()
        if not self.is_open:
            self.is_open = True
            planned = {place for place, p in self._trainable() if _will_run(p)}
            self._awaited = planned - self._seen
            self._awaits_all = len(planned) == sum(len(g.unsharded) for g in unit.groups)
        self._boundary_ahead |= any(torch._C._will_engine_execute_node(e.node) for e in inputs)
        unit.is_prefetched = False
        if unit.unshard_in_backward:
            unit.unshard()
            unit.wait_unshard()
        self._expose_main_grads()
        if unit.backward_prefetch is not None:
            unit.prefetch(unit.backward_prefetch)
        elif (preceding := schedule.preceding(unit)) is not None and not preceding.backward.is_open:
            unit.prefetch([preceding])

    def _trainable(self) -> Iterator[tuple[Place, nn.Parameter]]:
        for number, group in enumerate(self._unit.groups):
            for index, parameter in enumerate(group.unsharded):
                if parameter.requires_grad:
                    yield (number, index), parameter

    def _expose_main_grads(self) -> None:
        for number, group in enumerate(self._unit.groups):
            uses = {
                index: used
                for (owner, index), used in self._uses.items()
                if owner == number and used and group.unsharded[index].requires_grad
            }
            if uses:
                schedule = self._unit.schedule
                if not group.gradients.is_pending:
                    schedule.make_room(group.gradients)
                group.gradients.expose(uses, self._pool(group), schedule.device.current_stream())

    @torch.compiler.disable
    def _on_gradient(self, place: Place, parameter: torch.Tensor) -> None:
        del parameter
        group = self._unit.groups[place[0]]
        if not self.is_open:
            self._open_late(group, place)
        self._uses.pop(place, None)
        self._awaited.discard(place)
        self._seen.add(place)
        gradients = group.gradients
        gradients.arrived(place[1])
        if gradients.waiting_numel * _COPY_FRACTION >= group.layout.total_numel and self._awaited:
            self._copy_in(group)
        if not self._awaited and not self._boundary_ahead and self._awaits_all:
            self._close()

    def _open_late(self, group: ParamGroup, place: Place) -> None:
        """A gradient came though no output of the unit was reached, such as of a tensor kept aside.

        Raises:
            RuntimeError: the unit was not gathered, so its parameters were read where they are not.
        """
        unit = self._unit
        if not group.is_unsharded or unit.gathered_event is not None:
            raise RuntimeError(
                f"Expected backward to enter unit {unit.name!r} through its outputs, but a "
                f"gradient of {group.names[place[1]]!r} came before: its forward must return its "
                "tensors in tuples, lists, dicts or registered pytree nodes."
            )
        unit.schedule.begin_backward()
        self.is_open, self._awaited, self._awaits_all = True, set(), False

    @torch.compiler.disable
    def on_boundary(self, grads: Any) -> None:
        """The gradients of the unit's inputs are there."""
        del grads
        self._boundary_ahead = False
        if self.is_open and not self._awaited:
            self._close()

    def _close(self) -> None:
        self.is_open = False
        for group in self._unit.groups:
            self._copy_in(group)
            if group.gradients.is_pending and self._reduces(group):
                self._unit.start_reduce(group, final=self._is_final(group))
        if self._unit.reshard_after_backward:
            # Last, so that the next gather finds this memory whole.
            self._unit.reshard()

    def _copy_in(self, group: ParamGroup) -> None:
        schedule = self._unit.schedule
        if not group.gradients.is_pending:
            schedule.make_room(group.gradients)
        with torch.no_grad():
            group.gradients.copy_in(self._pool(group), schedule.device.current_stream())

    # ---- how far gradients go

    def _is_final(self, group: ParamGroup) -> bool:
        """Whether this pass brings the gradients all the way into `grad`."""
        unit, nest = self._unit, group.nest
        whole = nest.grad_level == nest.main_level and not nest.replica_groups
        return whole or (unit.requires_all_reduce and unit.schedule.is_last_backward)

    def _reduces(self, group: ParamGroup) -> bool:
        """Whether this pass communicates gradients at all."""
        goes_on = self._is_final(group) or group.nest.grad_level > 0
        return self._unit.requires_gradient_sync and goes_on

    def _pool(self, group: ParamGroup) -> Any:
        """Where a full gradient comes from; None if it outlives the pass."""
        return self._unit.schedule.pool if self._reduces(group) else None

    # ---- the end

    def close_late(self) -> None:
        """Close, if no boundary did and nothing is missing."""
        if self.is_open and not self._awaited:
            self._close()

    @property
    def missing(self) -> list[str]:
        """Names of parameters whose gradient was to come in this pass and did not."""
        groups = self._unit.groups
        return [groups[number].names[index] for number, index in sorted(self._awaited)]

    def end(self) -> None:
        """The pass is over."""
        if self._awaited:
            self._forget_gradients()
        self.is_open, self._boundary_ahead, self._awaited = False, False, set()

    def abandon(self) -> None:
        """The pass raised: drop gradients that it has not brought into `grad`."""
        self.end()
        self._uses.clear()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for group in self._unit.groups:
            group.gradients.forget(self._unit.schedule.device.current_stream())


def _will_run(parameter: nn.Parameter) -> bool:
    """Whether the backward pass under way will accumulate a gradient of `parameter`."""
    node = get_gradient_edge(parameter).node
    return bool(torch._C._will_engine_execute_node(node))
