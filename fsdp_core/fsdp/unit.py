"""Life cycle of a unit around forward and backward: gather, compute, release, reduce.

    forward pre    unshard (or wait for the prefetch), gather the next unit ahead, cast inputs
    forward post   reshard; hook the outputs for the backward pass; cast outputs
    backward pre   unshard, gather the unit before ahead; see which gradients will come
    grad arrived   into the unit's full gradient, a quarter of it or more at a time
    boundary       the gradients of the unit's inputs are there, so nothing needs its parameters any
                   more: reshard, start the reduction
    end            see `schedule`

Which gradients will come is what the autograd engine itself plans to execute, so parameters that
the loss does not depend on, modules run twice and recomputed modules need no special care. A unit
without an input that requires gradients has no boundary: its last gradient is its end.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.precision import MixedPrecisionPolicy, cast_floats
from fsdp_core.fsdp.schedule import Schedule, in_backward, profiled

Place = tuple[int, int]
"""A parameter of a unit: number of its group, number in the group."""

_COPY_FRACTION = 4
"""Gradients are copied when a quarter of a group waits: few kernels, and little held twice."""


class Call:
    """One forward call of a unit; called when a backward pass reaches one of its outputs.

    Only the first output of a pass counts: an input that is passed through as an output is reached
    when the unit is long done.
    """

    def __init__(self, unit: "Unit", inputs: list[GradientEdge]) -> None:
        self._unit, self._inputs, self._task = unit, inputs, -1
        self.is_waiting = True

    @torch.compiler.disable
    def __call__(self, grads: Any) -> None:
        del grads
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self.is_waiting = task, False
            self._unit.open_backward(self._inputs, task)


class Unit:
    """A module, or several, whose own parameters are gathered and reduced together."""

    schedule: Schedule

    def __init__(
        self,
        modules: list[nn.Module],
        groups: list[ParamGroup],
        *,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.name = ""
        self.modules, self.groups, self.policy = modules, groups, policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.check_finite_grads = False
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.gathered_event: Any = None
        self.is_prefetched = False
        self.forwards_open = 0
        self._is_backward = False
        self._awaited: set[Place] = set()
        self._awaits_all = True
        self._task = -1
        self._seen: set[Place] = set()
        self._boundary_ahead = False
        self._open_inputs: list[list[GradientEdge]] = []
        self._modules_to_run: set[int] = set()
        self._hook_modules()
        self._hook_gradients()

    # ---- hooks

    def _hook_modules(self) -> None:
        for module in self.modules:
            module.register_forward_pre_hook(self._on_pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._on_post_forward, with_kwargs=True)

    def _hook_gradients(self) -> None:
        for number, group in enumerate(self.groups):
            for index, parameter in enumerate(group.unsharded):
                if parameter.requires_grad:
                    self._hook_gradient((number, index), parameter)
                else:
                    # A frozen parameter may be thawed; a hook needs requires_grad.
                    parameter.requires_grad_(True)
                    self._hook_gradient((number, index), parameter)
                    parameter.requires_grad_(False)

    def _hook_gradient(self, place: Place, parameter: nn.Parameter) -> None:
        parameter.register_post_accumulate_grad_hook(lambda _: self._on_gradient(place))

    @torch.compiler.disable
    def _on_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The unit's forward begins with the first of its modules."""
        del module
        if self._modules_to_run:
            return self._cast_inputs(args, kwargs)
        if len(self.modules) > 1:
            self._modules_to_run = {id(m) for m in self.modules}
        return self.pre_forward(args, kwargs)

    @torch.compiler.disable
    def _on_post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The unit's forward ends with the last of its modules."""
        del args, kwargs
        if len(self.modules) > 1:
            self._modules_to_run.discard(id(module))
            if self._modules_to_run:
                return self._hook_output(output, [])
        return self.post_forward(output)

    # ---- weights

    @property
    def keeps_gathered(self) -> bool:
        """Whether parameters stay gathered between forward and backward."""
        if self.reshard_after_forward is None:
            return self is self.schedule.root
        return not self.reshard_after_forward

    @property
    def holds_buffers(self) -> bool:
        """Whether any pooled buffer is held."""
        return any(g.is_unsharded or g.gradients.is_pending for g in self.groups)

    def unshard(self) -> None:
        """Issue the gather on the gather stream, unless it is done or under way."""
        waiting = [group for group in self.groups if not group.is_unsharded]
        if not waiting:
            return
        schedule = self.schedule
        with profiled("unshard", self.name):
            stream = schedule.gather_stream
            # The shard was last written on the current stream (optimizer, checkpoint load).
            stream.wait_stream(schedule.device.current_stream())
            for group in waiting:
                group.unshard(stream)
            self.gathered_event = stream.record_event()

    def wait_unshard(self) -> None:
        """Make the current stream wait for the gather."""
        if self.gathered_event is not None:
            self.schedule.device.current_stream().wait_event(self.gathered_event)
            self.gathered_event = None

    def reshard(self) -> None:
        """Release the gathered parameters."""
        self.is_prefetched = False
        if not any(group.is_unsharded for group in self.groups):
            return
        with profiled("reshard", self.name):
            # A gather that nobody waited for is still writing.
            self.wait_unshard()
            current = self.schedule.device.current_stream()
            for group in self.groups:
                group.reshard(current)

    def _prefetch(self, units: "list[Unit]") -> None:
        if self.schedule.overlap.streams == 0:
            return
        for unit in units:
            if not all(group.is_unsharded or group.can_unshard() for group in unit.groups):
                continue  # its buffer will be free when it is needed, and is not yet
            if not all(group.is_unsharded for group in unit.groups):
                unit.unshard()
                unit.is_prefetched = True

    # ---- forward

    def pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before the forward: gathers, and the inputs in the compute dtype."""
        if in_backward():
            # Recomputation: its backward follows at once, so gather, and nothing else.
            self.unshard()
            self.wait_unshard()
        else:
            self.schedule.enter(self)
            if any(group.is_unsharded and not group.is_current for group in self.groups):
                self.reshard()
            self.unshard()
            self.wait_unshard()
            if self.forward_prefetch is not None:
                self._prefetch(self.forward_prefetch)
            elif (following := self.schedule.following(self)) is not None:
                self._prefetch([following])
        args, kwargs = self._cast_inputs(args, kwargs)
        self._open_inputs.append(self._hook_inputs((args, kwargs)))
        return args, kwargs

    def _hook_inputs(self, inputs: Any) -> list[GradientEdge]:
        """Mark where the backward pass leaves the unit.

        Before the forward, which may write into its inputs.
        """
        if not torch.is_grad_enabled() or not self.groups or len(self.modules) > 1:
            return []
        tensors = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
        tensors = [t for t in tensors if t.requires_grad]
        if len(tensors) == 1:
            tensors[0].register_hook(lambda _: self._on_boundary())
        elif tensors:
            register_multi_grad_hook(tensors, lambda _: self._on_boundary(), mode="all")
        return [get_gradient_edge(t) for t in tensors]

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.policy.input_dtype
        if dtype is None:
            return args, kwargs
        return (
            tuple(cast_floats(value, dtype) for value in args),
            {key: cast_floats(value, dtype) for key, value in kwargs.items()},
        )

    def post_forward(self, output: Any) -> Any:
        """After the forward: releases, hooks the outputs and casts them."""
        edges = self._open_inputs.pop() if self._open_inputs else []
        if not in_backward():
            is_last = self.schedule.leave(self)
            if not self.keeps_gathered and not is_last:
                self.reshard()
        return cast_floats(self._hook_output(output, edges), self.policy.output_dtype)

    def _hook_output(self, output: Any, edges: list[GradientEdge]) -> Any:
        """Mark where the backward pass enters the unit, which leaves it at `edges`.

        By hooks of the nodes, which run after those of their tensors: if the tensor is another
        unit's input, that unit closes before this one opens.
        """
        if not torch.is_grad_enabled() or not self.groups:
            return output
        call = Call(self, edges)
        self.schedule.calls.add(call)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                if tensor.grad_fn is None:
                    tensor.register_hook(call)
                else:
                    tensor.grad_fn.register_prehook(call)
        return output

    def recover_forward(self) -> None:
        """Forget a forward that raised; nothing after one that ended."""
        if self.forwards_open or self.is_prefetched:
            self.forwards_open = 0
            self._modules_to_run.clear()
            self._open_inputs.clear()
            self.reshard()

    # ---- backward

    def open_backward(self, inputs: list[GradientEdge], task: int) -> None:
        """The backward pass `task` enters a forward call of this unit, and leaves at `inputs`."""
        schedule = self.schedule
        schedule.begin_backward()
        if task != self._task:
            self._task, self._seen = task, set()
        if not self._is_backward:
            self._is_backward = True
            trainable = dict(self._trainable())
            self._awaited = {
                place for place, p in trainable.items() if place not in self._seen and _will_run(p)
            }
            self._awaits_all = len(self._awaited) == len(trainable)
        self._boundary_ahead |= any(torch._C._will_engine_execute_node(e.node) for e in inputs)
        self.is_prefetched = False
        if self.unshard_in_backward:
            self.unshard()
            self.wait_unshard()
        self._expose_main_grads()
        if self.backward_prefetch is not None:
            self._prefetch(self.backward_prefetch)
        elif (preceding := schedule.preceding(self)) is not None and not preceding._is_backward:
            self._prefetch([preceding])

    def _trainable(self) -> Iterator[tuple[Place, nn.Parameter]]:
        for number, group in enumerate(self.groups):
            for index, parameter in enumerate(group.unsharded):
                if parameter.requires_grad:
                    yield (number, index), parameter

    def _expose_main_grads(self) -> None:
        """For modules whose backward kernels add to `main_grad` themselves."""
        for group in self.groups:
            fused = [
                index
                for index, owned in enumerate(group.owned)
                if getattr(owned.places[0][0], "fuse_wgrad_accumulation", False)
                and group.unsharded[index].requires_grad
            ]
            if fused:
                self.schedule.make_room()
                current = self.schedule.device.current_stream()
                group.gradients.expose(fused, self._grad_pool(group), current)

    def _is_final(self, group: ParamGroup) -> bool:
        """Whether this backward pass brings the gradients all the way into `grad`."""
        nest = group.nest
        whole = nest.grad_level == nest.main_level and not nest.replica_groups
        return whole or (self.requires_all_reduce and self.schedule.is_last_backward)

    def _reduces(self, group: ParamGroup) -> bool:
        """Whether this backward pass communicates gradients at all."""
        return self.requires_gradient_sync and (self._is_final(group) or group.nest.grad_level > 0)

    def _grad_pool(self, group: ParamGroup) -> Any:
        return self.schedule.pool if self._reduces(group) else None

    @torch.compiler.disable
    def _on_gradient(self, place: Place) -> None:
        group = self.groups[place[0]]
        if not (self._is_backward or group.is_unsharded):
            raise RuntimeError(
                f"Expected backward to enter unit {self.name!r} through its outputs, but a "
                f"gradient of {group.names[place[1]]!r} came before: its forward must return its "
                "tensors in tuples, lists, dicts or registered pytree nodes."
            )
        gradients = group.gradients
        gradients.arrived(place[1])
        self._awaited.discard(place)
        self._seen.add(place)
        if gradients.waiting_numel * _COPY_FRACTION >= group.layout.total_numel and self._awaited:
            self._copy_in(group)
        # Fewer awaited than there are: a nested backward pass may bring the others later.
        if not self._awaited and not self._boundary_ahead and self._awaits_all:
            self._post_backward()

    def _copy_in(self, group: ParamGroup) -> None:
        schedule = self.schedule
        if not group.gradients.is_pending:
            schedule.make_room()
        with torch.no_grad():
            group.gradients.copy_in(self._grad_pool(group), schedule.device.current_stream())

    @torch.compiler.disable
    def _on_boundary(self) -> None:
        self._boundary_ahead = False
        if self._is_backward and not self._awaited:
            self._post_backward()

    def _post_backward(self) -> None:
        self._is_backward = False
        if self.reshard_after_backward:
            self.reshard()
        for group in self.groups:
            self._reduce(group)

    def _reduce(self, group: ParamGroup) -> None:
        self._copy_in(group)
        if group.gradients.is_pending and self._reduces(group):
            with profiled("reduce", self.name):
                self.schedule.start_reduce(group.gradients, final=self._is_final(group))

    def reduce_late(self) -> None:
        """Reduce gradients that came out of nested backward passes."""
        if self._is_backward and not self._awaited:
            self._post_backward()

    def end_backward(self) -> None:
        """Forget this backward pass and release the parameters."""
        if self._awaited:
            for group in self.groups:
                group.gradients.forget(self.schedule.device.current_stream())
        self._is_backward, self._boundary_ahead = False, False
        self._awaited = set()
        if self.reshard_after_backward:
            self.reshard()

    def abandon_backward(self) -> None:
        """Drop gradients that an unfinished backward pass left."""
        self.end_backward()
        self.reshard()
        for group in self.groups:
            group.gradients.forget(self.schedule.device.current_stream())

    @property
    def missing_grads(self) -> list[str]:
        """Names of parameters whose gradient was to come in this backward pass and did not."""
        return [self.groups[number].names[index] for number, index in sorted(self._awaited)]

    def check_finite(self) -> None:
        """See `schedule.finish`."""
        if not self.check_finite_grads:
            return
        for group in self.groups:
            if names := group.gradients.nonfinite(group.names):
                raise RuntimeError(
                    f"Expected finite gradients in unit {self.name!r}, got NaN or infinity in "
                    f"{', '.join(names)}."
                )


def _will_run(parameter: nn.Parameter) -> bool:
    """Whether the backward pass under way will accumulate a gradient of `parameter`."""
    node = get_gradient_edge(parameter).node
    return bool(torch._C._will_engine_execute_node(node))
