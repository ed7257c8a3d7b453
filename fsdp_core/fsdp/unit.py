"""A unit around forward: gather, compute, release; what it does in backward is in `backward`.

forward pre    unshard (or wait for the prefetch), gather the next unit ahead, cast inputs
forward post   reshard; mark inputs and outputs for the backward pass; cast outputs
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from fsdp_core.fsdp.backward import Call, Forward, UnitBackward
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.precision import MixedPrecisionPolicy, cast_floats
from fsdp_core.fsdp.schedule import Schedule, in_backward, profiled

_NOT_COMPILED = "FSDP gathers or releases here: compile the modules of units, or without fullgraph"
"""What the compiler says where it meets the hooks on its way into a unit."""


def _gather(module: Any) -> None:
    module.unshard()


def _release(module: Any) -> None:
    module.reshard()


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
        self._open: list[Forward] = []  # forwards that have begun and not ended
        self._modules_to_run: set[int] = set()
        for module in modules:
            module.register_forward_pre_hook(self._on_pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._on_post_forward, with_kwargs=True)
        for module in dict.fromkeys(m for g in groups for o in g.owned for m, _ in o.places):
            module.register_state_dict_pre_hook(self._on_state_dict)
            module.register_load_state_dict_pre_hook(self._on_state_dict)
            module.register_load_state_dict_post_hook(self._on_loaded)
        self.backward = UnitBackward(self)

    # ---- hooks

    @torch.compiler.disable
    def _on_state_dict(self, *_: Any) -> None:
        """A state is of the parameters at rest, also where a unit stays gathered."""
        if not self._open and not self.backward.is_open:
            self.reshard()

    @torch.compiler.disable
    @torch.no_grad()
    def _on_loaded(self, *_: Any) -> None:
        """Loading may have put others in the place of parameters."""
        for group in self.groups:
            group.readopt()

    @torch.compiler.disable(reason=_NOT_COMPILED)
    def _on_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The unit's forward begins with the first of its modules."""
        del module
        if self._modules_to_run:
            return self._cast_inputs(args, kwargs)
        if len(self.modules) > 1:
            self._modules_to_run = {id(m) for m in self.modules}
        return self.pre_forward(args, kwargs)

    @torch.compiler.disable(reason=_NOT_COMPILED)
    def _on_post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The unit's forward ends with the last of its modules."""
        del args, kwargs
        if len(self.modules) > 1:
            self._modules_to_run.discard(id(module))
            if self._modules_to_run:
                self._hook_output(output, self.forward_under_way or Forward())
                return cast_floats(output, self.policy.output_dtype)
        return self.post_forward(output)

    # What must happen around captures of a module that this one is inside of, where hooks are off.
    _on_pre_forward._cuda_graph_handler = _gather
    _on_post_forward._cuda_graph_handler = _release
    _on_post_forward._cuda_graph_backward_pre_handler = _gather
    _on_post_forward._cuda_graph_backward_handler = _release

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

    @property
    def is_idle(self) -> bool:
        """Whether nothing needs the gathered parameters before they are gathered again."""
        in_use = self._open or self.backward.is_open
        return not in_use and (self.is_prefetched or not self.keeps_gathered)

    @property
    def forward_under_way(self) -> Forward | None:
        """The forward that began last and has not ended."""
        return self._open[-1] if self._open else None

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
                if not group.can_unshard():
                    schedule.make_way()
                group.unshard(stream)
            self.gathered_event = stream.record_event()

    def wait_unshard(self) -> None:
        """Make the current stream wait for the gather, and the modules hold what it gathered."""
        self._wait_gather()
        for group in self.groups:
            group.register_unsharded()

    def _wait_gather(self) -> None:
        if self.gathered_event is not None:
            self.schedule.device.current_stream().wait_event(self.gathered_event)
            self.gathered_event = None

    def reshard(self) -> None:
        """Release the gathered parameters."""
        self.is_prefetched = False
        if not any(group.is_unsharded for group in self.groups):
            return
        with profiled("reshard", self.name):
            self._wait_gather()  # if nobody has, it is still writing
            for group in self.groups:
                group.reshard(self.schedule.device.current_stream())

    def prefetch(self, chosen: "list[Unit] | None", recorded: "list[Unit]") -> None:
        """Gather ahead what the user chose, else what the record says, where buffers are free."""
        if self.schedule.overlap.streams == 0:
            return
        for unit in recorded if chosen is None else chosen:
            waiting = [group for group in unit.groups if not group.is_unsharded]
            if waiting and all(group.can_unshard() for group in waiting):
                unit.unshard()
                unit.is_prefetched = True

    # ---- forward

    def pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before the forward: gathers, and the inputs in the compute dtype."""
        if in_backward():
            # Recomputation: its backward follows at once, so gather, and nothing else. The one
            # before may have stopped before its end: nothing must pile up.
            self._open.clear()
        else:
            self.schedule.enter(self)
            if any(group.is_unsharded and not group.is_current for group in self.groups):
                self.reshard()
        self._open.append(Forward())
        self.is_prefetched = False
        self.unshard()
        self.wait_unshard()
        if not in_backward():
            self.prefetch(self.forward_prefetch, self.schedule.following(self))
        args, kwargs = self._cast_inputs(args, kwargs)
        self._open[-1].inputs = self._hook_inputs((args, kwargs))
        return args, kwargs

    def _hook_inputs(self, inputs: Any) -> list[GradientEdge]:
        """Mark where the backward pass leaves the unit.

        Before the forward, which may write into its inputs.
        """
        if not torch.is_grad_enabled() or not self.groups or len(self.modules) > 1:
            return []
        tensors = _tracked(inputs)
        if len(tensors) == 1:
            tensors[0].register_hook(self.backward.on_boundary)
        elif tensors:
            register_multi_grad_hook(tensors, self.backward.on_boundary, mode="all")
        return [get_gradient_edge(t) for t in tensors]

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        cast = functools.partial(cast_floats, dtype=self.policy.input_dtype)
        return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}

    def post_forward(self, output: Any) -> Any:
        """After the forward: releases, marks the outputs and casts them."""
        is_marked = self._hook_output(output, self._open.pop() if self._open else Forward())
        if not in_backward():
            is_last = self.schedule.leave(self)
            # If nothing tells when backward needs the parameters, they stay until it is over.
            if not self.keeps_gathered and not is_last and is_marked:
                self.reshard()
        return cast_floats(output, self.policy.output_dtype)

    def _hook_output(self, output: Any, forward: Forward) -> bool:
        """Mark where the backward pass enters a forward of the unit.

        By hooks of the nodes, which run after those of their tensors: if the tensor is another
        unit's input, that unit closes before this one opens. False if gradients may come for this
        unit and there is no output to mark.
        """
        if not torch.is_grad_enabled() or not self.groups:
            return True
        call, tensors = Call(self.backward, forward), _tracked(output)
        for tensor in tensors:
            if tensor.grad_fn is None:
                tensor.register_hook(call)
            else:
                tensor.grad_fn.register_prehook(call)
        self.schedule.calls.add(call)
        return bool(tensors) or not any(p.requires_grad for g in self.groups for p in g.unsharded)

    def recover_forward(self) -> None:
        """Forget a forward that raised; nothing after one that ended."""
        if self._open or self.is_prefetched:
            self.forget_forwards()
            self.reshard()

    def forget_forwards(self) -> None:
        """No forward is under way: what has begun raised, or recomputed and had what it wanted."""
        self._open.clear()
        self._modules_to_run.clear()


def _tracked(tree: Any) -> list[torch.Tensor]:
    """The tensors in `tree` that autograd follows."""
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.requires_grad]
