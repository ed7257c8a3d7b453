"""The life of a unit: gather, compute, release, reduce; and what the units of one root share.

    forward pre    unshard (or wait for the prefetch), gather the next unit ahead, cast inputs
    forward post   reshard; mark inputs and outputs for the backward pass; cast outputs
    open           a backward pass reaches an output of the unit: gather, and ask autograd's engine
                   which gradients it is going to accumulate
    gradient       into the unit's full gradient, a quarter of it or more at a time
    boundary       the gradients of the unit's inputs are there, so nothing needs its parameters any
                   more: reshard, start the reduction
    late           without a boundary: with the last gradient, if all of the unit's parameters have
                   one, else with the pass

What the engine plans to execute is what comes, so parameters that the loss does not depend on,
modules run twice and recomputed modules need no special care.

A forward pass is recorded as it runs, and the next one of its kind (with or without gradients)
gathers ahead by that record. A pass that runs otherwise only loses the overlap.
"""

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, register_multi_grad_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_leaves

from fsdp_core.device import Device
from fsdp_core.dispatch import TensorError
from fsdp_core.fsdp.dtypes import cast_floats
from fsdp_core.fsdp.param_group import Gradients, ParamGroup
from fsdp_core.fsdp.pool import Pool

_NOT_COMPILED = "FSDP gathers or releases here: compile the modules of units, or without fullgraph"
"""What the compiler says where it meets the hooks on its way into a unit."""

_COPY_FRACTION = 4  # copy when a quarter of a group waits: few kernels, and little held twice

Place = tuple[ParamGroup, int]  # a parameter of a unit: its group, number in the group


def in_backward() -> bool:
    """Whether autograd is running now: a forward then is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def _profiled(phase: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """A profiler range `fsdp <phase> <name>`; nothing where no profiler runs."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return torch.profiler.record_function(f"fsdp {phase} {name}")


def _will_run(edge: GradientEdge, *, captured: bool = False) -> bool:
    """Whether this pass comes to `edge`; `captured`: of a leaf that autograd.grad is asked for."""
    try:
        return bool(torch._C._will_engine_execute_node(edge.node))
    except RuntimeError:
        return captured


def _tracked(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.requires_grad]


_gather, _release = operator.methodcaller("unshard"), operator.methodcaller("reshard")


class _Call:
    """One forward call of a unit; called when a backward pass reaches one of its outputs. Only the
    first output of a pass counts: an input that is passed through as an output is reached when the
    unit is long done. `task` is the number of the last backward pass that came through.
    """

    def __init__(self, unit: "Unit", inputs: list[GradientEdge]) -> None:
        self._unit, self._inputs = unit, inputs
        self.task: int | None = None

    @torch.compiler.disable
    def __call__(self, grads: Any) -> None:
        del grads
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.task = task
            self._unit.open(self._inputs, task)


@torch.compiler.disable
def _on_gradient_of(
    unit: "weakref.ref[Unit]", number: int, index: int, parameter: torch.Tensor
) -> None:
    """Hook of a parameter; its unit by weak reference: Python's collector sees no such hooks."""
    del parameter
    mine = unit()
    if mine is not None:
        mine.on_gradient(mine.groups[number], index)


class Unit:
    """A module, or several, whose own parameters are gathered and reduced together.

    is_open: a backward pass has entered the unit and not left it.
    is_prefetched: gathered ahead, and nobody has come for it yet.
    gathered_event: of a gather that nobody has waited for.
    """

    schedule: "Schedule"

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
        self.reshard_after_backward = self.unshard_in_backward = True
        self.requires_gradient_sync = self.requires_all_reduce = True
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.gathered_event: Any = None
        self.is_prefetched = self.is_open = self._boundary_ahead = self._awaits_all = False
        self._stream: Any = None  # that of the backward pass, while it is open
        # Forwards that have begun and not ended: where the backward pass leaves each.
        self._forwards: list[list[GradientEdge]] = []
        self._is_recomputed = False  # the last one that began
        self._modules_to_run: set[int] = set()
        self._awaited: set[Place] = set()
        self._parameters: dict[Place, nn.Parameter] = {}
        # By number of the backward pass: others may run inside of it, and bring gradients too.
        self._seen: dict[int, set[Place]] = {}
        self._planned: int | None = None  # the last pass that was asked for its gradients
        for module in modules:
            module.register_forward_pre_hook(self._on_pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._on_post_forward, with_kwargs=True)
        for module in dict.fromkeys(m for g in groups for o in g.owned for m, _ in o.places):
            module.register_state_dict_pre_hook(self._on_state_dict)
            module.register_load_state_dict_pre_hook(self._on_state_dict)
            module.register_load_state_dict_post_hook(self._on_loaded)
        self._watch_gradients()

    def _watch_gradients(self) -> None:
        """Have a hook on each parameter that is gathered, whoever made it."""
        for number, group in enumerate(self.groups):
            if group.is_watched:
                continue
            group.is_watched = True
            for index, parameter in enumerate(group.unsharded):
                self._parameters[group, index] = parameter
                hook = functools.partial(_on_gradient_of, weakref.ref(self), number, index)
                if not (parameter.is_floating_point() or parameter.is_complex()):
                    continue
                # A frozen parameter may be thawed later; a hook needs requires_grad.
                trainable = parameter.requires_grad
                parameter.requires_grad_(True)
                parameter.register_post_accumulate_grad_hook(hook)
                parameter.requires_grad_(trainable)

    # ---- hooks

    @torch.compiler.disable
    def _on_state_dict(self, *_: Any) -> None:
        # A state is of the parameters at rest, also where a unit stays gathered.
        if not self._forwards and not self.is_open:
            self.reshard()

    @torch.compiler.disable
    @torch.no_grad()
    def _on_loaded(self, *_: Any) -> None:
        for group in self.groups:
            group.readopt()

    @torch.compiler.disable(reason=_NOT_COMPILED)
    def _on_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        del module
        if self._modules_to_run:
            return self._cast_inputs(args, kwargs)
        if len(self.modules) > 1:
            self._modules_to_run = {id(m) for m in self.modules}
        return self.pre_forward(args, kwargs)

    @torch.compiler.disable(reason=_NOT_COMPILED)
    def _on_post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        del args, kwargs
        if len(self.modules) > 1:
            self._modules_to_run.discard(id(module))
            if self._modules_to_run:
                self._hook_output(output, self._forwards[-1] if self._forwards else [])
                return cast_floats(output, self.policy.output_dtype)
        return self.post_forward(output)

    # What must happen around captures of a module that this one is inside of, where hooks are off.
    _on_pre_forward._cuda_graph_handler = _gather
    _on_post_forward._cuda_graph_backward_pre_handler = _gather
    _on_post_forward._cuda_graph_handler = _on_post_forward._cuda_graph_backward_handler = _release

    # ---- weights

    @property
    def keeps_gathered(self) -> bool:
        """Whether parameters stay gathered between forward and backward."""
        if self.reshard_after_forward is None:
            return self is self.schedule.root
        return not self.reshard_after_forward

    @property
    def holds_buffers(self) -> bool:
        return any(g.is_unsharded or g.gradients.is_pending for g in self.groups)

    @property
    def is_idle(self) -> bool:
        """Whether nothing needs the gathered parameters before they are gathered again."""
        in_use = self._forwards or self.is_open
        return not in_use and (self.is_prefetched or not self.keeps_gathered)

    def unshard(self) -> None:
        """Issue the gather on the gather stream, unless it is done or under way."""
        waiting = [group for group in self.groups if not group.is_unsharded]
        if not waiting:
            return
        schedule = self.schedule
        with _profiled("unshard", self.name):
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
        self._watch_gradients()

    def _wait_gather(self) -> None:
        if self.gathered_event is not None:
            self.schedule.device.current_stream().wait_event(self.gathered_event)
            self.gathered_event = None

    def reshard(self) -> None:
        self.is_prefetched = False
        if not any(group.is_unsharded for group in self.groups):
            return
        with _profiled("reshard", self.name):
            self._wait_gather()  # if nobody has, it is still writing
            for group in self.groups:
                group.reshard(self.schedule.device.current_stream())

    def _prefetch(self, chosen: "list[Unit] | None", recorded: "list[Unit]") -> None:
        """Gather ahead what the user chose, else what the record says, where buffers are free."""
        if self.schedule.overlap == 0:
            return
        for unit in recorded if chosen is None else chosen:
            waiting = [group for group in unit.groups if not group.is_unsharded]
            if waiting and all(group.can_unshard() for group in waiting):
                unit.unshard()
                unit.is_prefetched = True

    # ---- forward

    def pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before the forward: gathers, and the inputs in the compute dtype."""
        self._is_recomputed = in_backward()
        if self._is_recomputed:
            # Recomputation: its backward follows at once, so gather, and nothing else. The one
            # before may have stopped before its end: nothing must pile up.
            self._forwards.clear()
        else:
            self.schedule.enter(self)
            if any(group.is_unsharded and not group.is_current for group in self.groups):
                self.reshard()
        self._forwards.append([])
        self.is_prefetched = False
        self.unshard()
        self.wait_unshard()
        if not in_backward():
            self._prefetch(self.forward_prefetch, self.schedule.following(self))
        args, kwargs = self._cast_inputs(args, kwargs)
        self._forwards[-1] = self._hook_inputs((args, kwargs))
        return args, kwargs

    def _hook_inputs(self, inputs: Any) -> list[GradientEdge]:
        """Mark where backward leaves the unit; before the forward, which may write into inputs."""
        if not torch.is_grad_enabled() or not self.groups or len(self.modules) > 1:
            return []
        tensors = _tracked(inputs)
        if len(tensors) == 1:
            tensors[0].register_hook(self._on_boundary)
        elif tensors:
            register_multi_grad_hook(tensors, self._on_boundary, mode="all")
        return [get_gradient_edge(t) for t in tensors]

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.policy.param_dtype if self.policy.cast_forward_inputs else None
        cast = functools.partial(cast_floats, dtype=dtype)
        return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}

    def post_forward(self, output: Any) -> Any:
        """After the forward: releases, marks the outputs and casts them."""
        is_marked = self._hook_output(output, self._forwards.pop() if self._forwards else [])
        if not in_backward():
            is_last = self.schedule.leave(self)
            # If nothing tells when backward needs the parameters, they stay until it is over.
            if not self.keeps_gathered and is_marked:
                if is_last:  # whoever looks in between sees it at rest, as the others
                    for group in self.groups:
                        group.register_sharded()
                else:
                    self.reshard()
        return cast_floats(output, self.policy.output_dtype)

    def _hook_output(self, output: Any, inputs: list[GradientEdge]) -> bool:
        """Mark where backward enters the unit; False if it will, and there is no output to mark. By
        hooks of the nodes, which run after those of their tensors: if the tensor is another unit's
        input, that unit closes before this one opens.
        """
        if not torch.is_grad_enabled() or not self.groups:
            return True
        call, tensors = _Call(self, inputs), _tracked(output)
        for tensor in tensors:
            if tensor.grad_fn is None:
                tensor.register_hook(call)
            else:
                tensor.grad_fn.register_prehook(call)
        self.schedule.calls.add(call)
        return bool(tensors) or not any(p.requires_grad for g in self.groups for p in g.unsharded)

    def recover_forward(self) -> None:
        """Forget a forward that raised; nothing after one that ended."""
        if self._forwards or self.is_prefetched:
            self._forget_forwards()
            self.reshard()

    def _forget_forwards(self) -> None:
        self._forwards.clear()
        self._modules_to_run.clear()

    # ---- backward

    def open(self, inputs: list[GradientEdge], task: int) -> None:
        """The backward pass `task` enters a forward of the unit, which it leaves at `inputs`."""
        schedule = self.schedule
        if torch.is_grad_enabled():
            raise NotImplementedError(f"Expected create_graph=False at FSDP unit {self.name!r}.")
        schedule.begin_backward()
        if not self.is_open:
            self.is_open, self._stream = True, schedule.device.current_stream()
        if self._planned != task:
            trained = ((place, p) for place, p in self._parameters.items() if p.requires_grad)
            planned = {place for place, p in trained if _will_run(get_gradient_edge(p))}
            self._awaited |= planned - self._seen.get(task, set())
            if self._planned is None:
                self._awaits_all = len(planned) == len(self._parameters)
            self._planned = task
        self._boundary_ahead |= any(_will_run(edge, captured=True) for edge in inputs)
        self.is_prefetched = False
        if self.unshard_in_backward:
            self.unshard()
            self.wait_unshard()
        for group in self.groups:
            if group.gradients.fused:
                with torch.no_grad():
                    group.gradients.expose(*self._make_room(group))
        self._prefetch(self.backward_prefetch, schedule.preceding(self))

    def on_gradient(self, group: ParamGroup, index: int) -> None:
        """The gradient of parameter `index` of `group` has come. Autograd accumulates on the stream
        where its node for the parameter was made. Torch's and TransformerEngine's
        `make_graphed_callables` keep that of their capture, on its stream.
        """
        if not self.is_open:
            self._open_late(group, index)
        device = self.schedule.device
        accumulated, mine = device.current_stream(), self._stream
        if accumulated == mine:
            return self._take_gradient(group, index)
        mine.wait_stream(accumulated)
        with device.on(mine):
            self._take_gradient(group, index)
        accumulated.wait_stream(mine)  # before it uses the gradient's memory again
        return None

    def _take_gradient(self, group: ParamGroup, index: int) -> None:
        place = (group, index)
        self._awaited.discard(place)
        self._seen.setdefault(torch._C._current_graph_task_id(), set()).add(place)
        group.gradients.arrived(index)
        waiting = group.gradients.waiting_numel
        if waiting * _COPY_FRACTION >= group.layout.total_numel and self._awaited:
            self._copy_in(group)
        if self._awaits_all and not self._boundary_ahead:
            self.close()

    def _open_late(self, group: ParamGroup, index: int) -> None:
        """A gradient came though no output of the unit was reached, such as of a hidden tensor."""
        if self._forwards and len(self.modules) == 1 and not self._is_recomputed:
            raise TensorError(
                f"Expected the forward hooks of unit {self.name!r} to run, as its pre-hooks did, "
                f"but a gradient of {group.names[index]!r} came first: whoever computes with its "
                "weights in place of its forward, such as a fused kernel, must run both.",
                group.names[index],
            )
        if not group.is_unsharded or self.gathered_event is not None:
            raise TensorError(
                f"Expected backward to enter unit {self.name!r} through its outputs, but a "
                f"gradient of {group.names[index]!r} came before: its forward must return its "
                "tensors in tuples, lists, dicts or registered pytree nodes.",
                group.names[index],
            )
        self.schedule.begin_backward()
        self.is_open, self._stream = True, self.schedule.device.current_stream()
        self._awaited, self._awaits_all = set(), False

    @torch.compiler.disable
    def _on_boundary(self, grads: Any) -> None:
        del grads
        self._boundary_ahead = False
        self.close()

    def close(self) -> None:
        if self.is_open and not self._awaited:
            self.is_open, self._planned = False, None
            self.reduce()
            if self.reshard_after_backward:
                self.reshard()  # last, so that the next gather finds this memory whole

    def reduce(self) -> None:
        """Start to reduce what has come, in this pass or before it, as far as this pass does."""
        for group in self.groups:
            self._copy_in(group)
            final = self._is_final(group)
            if self._reduces(group) and group.gradients.is_due(final=final):
                with _profiled("reduce", self.name):
                    self.schedule.start_reduce(group.gradients, final=final)

    def _copy_in(self, group: ParamGroup) -> None:
        if group.gradients.waiting_numel:
            with torch.no_grad():
                group.gradients.copy_in(*self._make_room(group))

    def _make_room(self, group: ParamGroup) -> tuple[Pool | None, Any]:
        """Where a full gradient comes from, None if it outlives the pass; the current stream."""
        schedule = self.schedule
        schedule.make_room(group.gradients)
        return schedule.pool if self._reduces(group) else None, schedule.device.current_stream()

    def _is_final(self, group: ParamGroup) -> bool:
        """Whether this pass brings the gradients all the way into `grad`."""
        nest = group.nest
        whole = nest.grad_level == nest.main_level and not nest.replica_groups
        return whole or (self.requires_all_reduce and self.schedule.is_last_backward)

    def _reduces(self, group: ParamGroup) -> bool:
        """Whether this pass communicates gradients at all."""
        goes_on = self._is_final(group) or group.nest.grad_level > 0
        return self.requires_gradient_sync and goes_on

    @property
    def missing(self) -> list[str]:
        """Names of parameters whose gradient was to come in this pass and did not."""
        return sorted(group.names[index] for group, index in self._awaited)

    def end(self, *, raised: bool) -> None:
        """The pass is over, or has raised: gradients not in `grad` yet then do not count."""
        if raised or self._awaited:
            for group in self.groups:
                group.gradients.forget(self.schedule.device.current_stream())
        self.is_open, self._boundary_ahead, self._planned = False, False, None
        self._awaited, self._seen = set(), {}
        self._forget_forwards()
        if raised or self.reshard_after_backward:
            self.reshard()


@dataclass
class _Reduction:
    """A reduction under way, and memory that it uses. Without an event it is over."""

    gradients: Gradients
    event: Any
    held: list[torch.Tensor]


class Schedule:
    """Streams, pool, order and pending reductions of units, the first of which is the root. The end
    of a backward pass also reduces what no unit's own end has: gradients out of nested backward
    passes (reentrant checkpoints inside a unit), and sums of earlier passes in units that this one
    did not enter.
    """

    def __init__(self, units: list[Unit], device: Device, pool: Pool, overlap: int) -> None:
        self.units, self.root = units, units[0]
        self.device, self.pool, self.overlap = device, pool, overlap
        for unit in units:
            unit.schedule = self
            for group in unit.groups:
                group.pool = pool
        self.is_last_backward = True
        self.most_reductions = 2 if overlap == 2 else 1  # full gradient buffers at a time
        # Forward calls whose graphs live, by weak reference: a backward pass may still come.
        self.calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self.reductions: list[_Reduction] = []
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
    def side_streams(self) -> tuple[Any, Any]:
        """Of gathers and of reductions."""
        gather = self.device.new_stream("gather")
        both = self.overlap == 2
        return gather, self.device.new_stream("reduce") if both else gather

    @property
    def gather_stream(self) -> Any:
        return self.side_streams[0] if self.overlap else self.device.current_stream()

    @property
    def reduce_stream(self) -> Any:
        return self.side_streams[1] if self.overlap else self.device.current_stream()

    def quiesce(self) -> None:
        """Finish all work, and forget its events and what is up to date: around captures."""
        self.device.synchronize()
        for reduction in self.reductions:
            reduction.event = None
        self.drain(keep=0)
        self.device.synchronize()
        self.pool.forget_events()
        for unit in self.units:
            unit.gathered_event = None
            for group in unit.groups:
                group.forget_freshness()

    # ---- forward

    def enter(self, unit: Unit) -> None:
        """A forward begins; not called when it is a recomputation."""
        if unit is self.root:
            self.recover()
            self._begun, self._ended, self._in_pass = [], [], True
            # The root's word: a reentrant checkpoint turns gradients off for the units inside.
            self._trains = torch.is_grad_enabled()
        if self._in_pass:
            self._begun.append(unit)

    def following(self, unit: Unit) -> list[Unit]:
        """The unit that entered next in the last pass of this kind, if that pass is being kept."""
        plan, place = self._plans[self._trains], len(self._begun)
        is_kept = self._in_pass and plan[place - 1 : place] == [unit]
        return plan[place : place + 1] if is_kept else []

    def leave(self, unit: Unit) -> bool:
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
        callback = functools.partial(_finish, self)
        # Weak: a pass that raises drops its callback unrun, and the next pass must see that.
        self._final = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def preceding(self, unit: Unit) -> list[Unit]:
        """The unit whose backward comes after that of `unit`, by the order of the last forward."""
        before = self._preceding.get(unit)
        return [] if before is None or before.is_open else [before]

    def start_reduce(self, gradients: Gradients, *, final: bool) -> None:
        """Reduce a full gradient buffer on the reduce stream."""
        stream = self.reduce_stream
        stream.wait_stream(self.device.current_stream())
        held = gradients.reduce(stream, final=final)
        self.reductions.append(_Reduction(gradients, stream.record_event(), held))

    def make_room(self, gradients: Gradients) -> None:
        """Before a gradient buffer is taken: one other may be live, and none with one stream."""
        if gradients.is_pending:
            return
        newest = self.reductions[-1].gradients if self.reductions else None
        self.drain(keep=self.most_reductions - 1 if newest is not gradients else 0)

    def drain(self, keep: int) -> None:
        """Release gradient buffers whose reduction is queued, all but the newest `keep`."""
        current = self.device.current_stream()
        while len(self.reductions) > keep:
            reduction = self.reductions.pop(0)
            if reduction.event is not None:
                current.wait_event(reduction.event)
            reduction.gradients.release_full(current)

    def abandon_backward(self) -> None:
        """Drop what a backward pass that raised has not reduced; `grad` keeps what it has."""
        self._final = None
        self.drain(keep=0)
        self.device.current_stream().wait_stream(self.reduce_stream)
        for unit in self.units:
            unit.end(raised=True)
        self.end_of_pass()

    def end_backward(self) -> None:
        """Join the side streams and give everything back."""
        self._final = None
        current = self.device.current_stream()
        for unit in self.units:
            unit.close()
        for unit in self.units:
            if not unit.is_open:  # this pass need not have entered it
                unit.reduce()
        if self.is_last_backward:
            self.drain(keep=0)
            current.wait_stream(self.reduce_stream)
        current.wait_stream(self.gather_stream)
        for unit in self.units:
            unit.end(raised=False)
        self.end_of_pass()

    def end_of_pass(self) -> None:
        """Tell the pool that everything is given back and nothing saved, if it is so."""
        busy = bool(self.reductions) or any(unit.holds_buffers for unit in self.units)
        if not busy and not any(call.task is None for call in self.calls):
            self.pool.end_of_pass()


@torch.compiler.disable
def _finish(schedule: Schedule) -> None:
    """End of a backward pass; raises if gradients of a unit that it entered never came."""
    missing = [(unit, name) for unit in schedule.units for name in unit.missing]
    schedule.end_backward()
    if missing:
        unit, name = missing[0]
        raise RuntimeError(
            f"Expected gradients of every parameter of unit {unit.name!r} that the loss depends "
            f"on, {len(missing)} never came, such as {name!r}; the unit was not reduced."
        )
