"""Faults of the engine: hooks and flags, memory and addresses, the order of work, graphs.

On the CPU, and on a GPU that has nothing else to do, a plain run shows none of the faults of order
but the last. What makes graphs on a GPU and on the CPU is reached through the classes that both
have in common: `CapturedFunction`, `Slot`, `LayerGraphs` and `Undo`; and through both kinds of
graph.
"""

import copy
import itertools
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import fsdp_core.fsdp.gradients
import fsdp_core.train.trainer
from fsdp_core.config import TrainConfig
from fsdp_core.fsdp.dynamic_pool import DynamicPool
from fsdp_core.fsdp.fsdp_module import units_in
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.pool import SlotPool
from fsdp_core.fsdp.schedule import in_backward
from fsdp_core.fsdp.traced_pool import Key
from fsdp_core.fsdp.unit import Unit
from fsdp_core.graph import capture_session
from fsdp_core.graph.capture import CapturedFunction
from fsdp_core.graph.cuda import CudaGraph
from fsdp_core.graph.hooks import ExtractedHooks
from fsdp_core.graph.host import HostGraph
from fsdp_core.graph.slot import Pending, Slot
from fsdp_core.graph.undo import Undo
from fsdp_core.parallel import pipeline
from fsdp_core.stress.pools import WatchedPool
from fsdp_core.train import Trainer
from fsdp_core.train.build import roots
from fsdp_core.train.partial_graphs import PartialGraphs
from fsdp_core.train.stage_graphs import StageGraphs
from harness.worker.plants import processes
from harness.worker.plants.planting import (
    Act,
    Planting,
    Site,
    around,
    before_last_update,
    first_unit,
    instead,
    keep,
    layers,
    on_its_stream,
    on_stream,
    once,
    other_main_weight,
    schedules,
    surround,
    unit_named,
)


def _nothing(*args: Any) -> None:
    pass


def _groups(trainer: Trainer) -> list[ParamGroup]:
    """Of this rank's first layer."""
    return first_unit(trainer).groups


# ---- hooks and flags


def _cleared(*names: str) -> Planting:
    """Tables of hooks of the first layer's modules are empty."""
    return once(lambda trainer: [
        getattr(module, name).clear() for module in first_unit(trainer).modules for name in names
    ])  # fmt: skip


def _hooks_not_restored(site: Site, hooks: ExtractedHooks) -> None:
    for taken in hooks._taken:
        taken.original.clear()
    site.call(hooks)


class _Ramp:
    """A hook that scales a module's output by more each time; it says that graphs may hold it."""

    _cuda_graph_capturable = True
    num_calls = 0

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """The output, scaled by what Python has counted."""
        self.num_calls += 1
        return output * (1 + self.num_calls / 64)


def _every_other(site: Site, index: int) -> None:
    """As `arrived`, which of the first parameter hears only every other time."""
    site.kept = (site.kept or 0) + (index == 0)
    if index or site.kept % 2:
        site.call(index)


class _Kept(ParamGroup):
    """A group that holds what it has gathered for what there is; the buffer stays."""

    is_current = True

    def reshard(self, stream: Any) -> None:
        """Only registers what is sharded."""
        if self.is_registered:
            self._register(self.sharded)
            self.is_registered = False


_HOOKS: Mapping[str, Planting] = {
    "pre_hooks_lost": _cleared("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    "outputs_unmarked": instead(first_unit, "_hook_output", lambda hook: lambda *args: True),
    "hooks_not_restored": around(ExtractedHooks, "restore", _hooks_not_restored),
    "hook_arguments_lost": _cleared("_forward_pre_hooks_with_kwargs"),
    "root_bypassed": once(
        lambda trainer: setattr(trainer.stages[0], "_call_impl", trainer.stages[0].forward)
    ),
    "hook_counts_on_host": once(
        lambda trainer: layers(trainer)[0].attn.norm.register_forward_hook(_Ramp())
    ),
    "gradient_hook_late": around(lambda t: _groups(t)[0].gradients, "arrived", _every_other),
    "gradient_hook_doubled": once(
        lambda trainer: _groups(trainer)[0].unsharded[0].register_hook(lambda grad: grad * 2)
    ),
    # All that `begin_backward` does but to ask for a call of the end.
    "final_callback_lost": around(
        schedules, "begin_backward",
        lambda site: site.owner.reduce_stream.wait_stream(site.owner.device.current_stream()),
    ),
    "gather_skipped": instead(_groups, "_gather", lambda gather: _nothing),
    "gather_skipped_in_backward": around(
        first_unit, "unshard", lambda site: None if in_backward() else site.call()
    ),
    "kept_gathered": instead(_groups, "__class__", lambda group: _Kept),
    "zeroing_skipped": instead(
        lambda t: list(roots(t.stages)), "zero_main_grads", lambda zero: _nothing
    ),
    "last_flag_lost": around(
        pipeline, "announce_backward", lambda site, *a, is_last: site.call(*a, is_last=False)
    ),
    "last_flag_frozen": around(
        pipeline, "announce_backward", lambda site, *a, is_last: site.call(*a, is_last=True)
    ),
}  # fmt: skip


# ---- memory: tensors that others take the place of, that move, or have two owners


class _RestlessPool(DynamicPool):
    """A dynamic pool whose allocator gives no block twice.

    The allocator itself often would, to one key or another as luck has it; what is freed here is
    taken at once, and kept.
    """

    _taken: tuple[torch.Tensor, ...] = ()

    def release(self, key: Key, stream: Any) -> None:
        """See `DynamicPool`."""
        tensor = self._buffers[key].tensor
        numel, dtype = tensor.numel(), tensor.dtype
        super().release(key, stream)
        self._taken += (torch.empty(numel, dtype=dtype, device=tensor.device),)


def _unstable_buffers(trainer: Trainer) -> None:
    for schedule in schedules(trainer):
        unstable, pool = _RestlessPool(schedule.device), schedule.pool
        if isinstance(pool, WatchedPool):
            pool.inner = unstable
            continue
        schedule.pool = unstable
        for unit in schedule.units:
            for group in unit.groups:
                group.pool = unstable


def _weights_assigned(trainer: Trainer) -> None:
    """As a checkpoint that is loaded by assignment: the same values in other memory."""
    optimizer = trainer.optimizer
    for group in trainer.groups:
        group.main_weight = group.main_weight.clone()
        for index, name in enumerate(group.names):
            rows = group.local_rows(group.main_weight, index)
            if name in optimizer.names:
                optimizer.params[optimizer.names.index(name)] = rows


def _replaced(owner: Callable[[Trainer], Any], *names: str) -> Planting:
    """Attributes of an owner, tensors or lists of them, are others with the same values."""

    def act(trainer: Trainer) -> None:
        for name in names:
            held = getattr(owner(trainer), name)
            if isinstance(held, list):
                held[:] = [tensor.clone() for tensor in held]
            else:
                setattr(owner(trainer), name, held.clone())

    return on_stream(act)


def _move_parameter(trainer: Trainer, name: str) -> str:
    """Free the memory behind a parameter and let its storage live on somewhere else.

    Its contents come along, so a program that looks the parameter up finds it intact; only who
    remembers the old address is wrong. A tensor of NaN takes the old place.

    Raises:
        ValueError: no such parameter, or its storage has no memory between steps.
    """
    held = {
        name: parameter
        for group in trainer.groups
        for name, parameter in zip(group.names, group.unsharded, strict=True)
    }
    # The first that every graph scope reads: attention's, of this rank's first layer.
    name = name or next(name for name in held if ".attn.attention." in name)
    if name not in held:
        raise ValueError(
            f"plant.tensor: expected a parameter, got {name!r}; legal values: {', '.join(held)}"
        )
    device = trainer.device
    device.synchronize()
    storage = held[name].data.untyped_storage()
    nbytes, address = storage.nbytes(), storage.data_ptr()
    if not nbytes:
        raise ValueError(
            f"plant.fault: expected {name} to have memory between steps, which stale_parameter "
            "moves; with fsdp.pool dynamic it has none"
        )
    # Growing allocates the new block before it frees the old one, so the address must change.
    # Freed and allocated again at its old size, the storage could get its old place back.
    device.resize_storage(storage, 2 * nbytes)
    assert storage.data_ptr() != address
    keep(trainer, torch.full((nbytes // 4,), float("nan"), device=device.torch_device))
    device.synchronize()
    return name


def _gradient_buffer_moved(trainer: Trainer) -> None:
    """As `stale_parameter`, of the buffer that the first layer's gradients are reduced from."""
    for group in _groups(trainer):
        assert group.gradients.pooled is not None
        storage = group.gradients.pooled.untyped_storage()
        # Grown, it gets other memory before its own is free.
        trainer.device.resize_storage(storage, 2 * storage.nbytes())


def _buffer_given_twice(role: str) -> Planting:
    """Two layers get one buffer while both need it."""

    def act(trainer: Trainer) -> None:
        pool: Any = schedules(trainer)[0].pool
        pool = pool.inner if isinstance(pool, WatchedPool) else pool
        assert isinstance(pool, SlotPool)
        first, second = (
            next(
                home
                for key, home in pool._homes.items()
                if key.owner == units_in(layer)[0].groups[0].owner and key.role == role
            )
            for layer in layers(trainer)[:2]
        )
        # What the pool believes stays: two slots, and whoever asks for the second gets the first.
        second.tensor = first.tensor[: second.tensor.numel()]

    return on_stream(act)


_MEMORY: Mapping[str, Planting] = {
    "stale_parameter": Planting(before_step_on=_move_parameter),
    "unstable_buffers": once(_unstable_buffers),
    "weights_assigned": on_stream(_weights_assigned),
    "gradients_replaced": _replaced(lambda trainer: trainer.optimizer, "grads"),
    "moments_replaced": _replaced(lambda trainer: trainer.optimizer, "exp_avg", "exp_avg_sq"),
    "learning_rate_replaced": _replaced(lambda trainer: trainer.optimizer, "lr"),
    "rope_replaced": _replaced(lambda trainer: trainer.stages[0].rope, "cos", "sin"),
    "tokens_replaced": _replaced(lambda trainer: trainer._inputs, "tokens", "targets"),
    "random_state_replaced": instead(
        lambda t: [each for each in t.streams.streams if each.state is not None], "state",
        torch.clone,
    ),
    "gradient_buffer_moved": on_stream(_gradient_buffer_moved),
    "gather_buffer_given_twice": _buffer_given_twice("gather"),
    "gradient_buffer_given_twice": _buffer_given_twice("grad"),
    "microbatch_slot_frozen": instead(
        lambda t: list(t.stages), "on_microbatch", lambda on: lambda part, slot: on(part, 0)
    ),
}  # fmt: skip


# ---- the order of work: planted from a step on; but for the last they change no collective


def _drain_at_once(site: Site, keep: int) -> None:
    schedule = site.owner
    while len(schedule._reductions) > keep:
        gradients = schedule._reductions.pop(0).gradients
        gradients.release_full(schedule.device.current_stream())


def _reduce_and_drop(site: Site, stream: Any, *, final: bool) -> list[Any]:
    site.call(stream, final=final)
    return []


def _early_release(trainer: Trainer) -> None:
    for schedule in schedules(trainer):
        for group in schedule.root.groups:
            _give_back_twice(trainer, schedule.root, group)


def _give_back_twice(trainer: Trainer, unit: Unit, group: ParamGroup) -> None:
    """Release the group's buffer as soon as it is gathered; the real release does nothing."""
    is_out = False

    def wait_and_release(site: Site) -> None:
        nonlocal is_out
        site.call()
        if group.is_unsharded and group.nest.weight_level and not is_out:
            is_out = True
            group.pool.release(group._gather_key, trainer.device.current_stream())

    def take_again(site: Site, stream: Any) -> None:
        nonlocal is_out
        pool: Any = group.pool
        release = pool.release
        if is_out:
            pool.release = _nothing
        try:
            site.call(stream)
        finally:
            pool.release, is_out = release, False

    surround(trainer, unit, "wait_unshard", wait_and_release)
    surround(trainer, group, "reshard", take_again)


def _end_not_joining(site: Site) -> None:
    """The end of backward as if there were no stream of reductions."""
    schedule = site.owner
    streams = schedule._side_streams
    for reduction in schedule._reductions:
        reduction.event = None
    schedule.__dict__["_side_streams"] = (streams[0], streams[0])
    try:
        site.call()
    finally:
        schedule.__dict__["_side_streams"] = streams


def _unordered(site: Site, *args: Any) -> Any:
    """The same work on a stream of its own, which waits for none and for which none waits."""
    if site.kept is None:
        site.kept = site.trainer.device.new_stream("unordered")
    with site.trainer.device.on(site.kept):
        return site.call(*args)


def _gathered_ahead(trainer: Trainer) -> None:
    """The next step finds the layer gathered, from main weights before the last update."""
    unit = unit_named(trainer, "layers.1")
    group = unit.groups[0]
    old = before_last_update(trainer, group)
    with on_its_stream(trainer):
        with other_main_weight(group, old):
            unit.unshard()
        group.gathered_version = group.main_weight._version


_STREAMS: Mapping[str, Planting] = {
    "gather_ignores_writes": instead(
        lambda t: [s.gather_stream for s in schedules(t)], "wait_stream", lambda wait: _nothing
    ),
    "compute_ignores_gather": around(
        lambda t: [unit for schedule in schedules(t) for unit in schedule.units], "_wait_gather",
        lambda site: setattr(site.owner, "gathered_event", None),
    ),
    "buffer_ignores_reduction": around(schedules, "drain", _drain_at_once),
    "reduction_freed_early": around(
        lambda t: [group.gradients for group in t.groups], "reduce", _reduce_and_drop
    ),
    "early_release": once(_early_release),
    "reduction_ignores_gradients": instead(
        lambda t: [s.reduce_stream for s in schedules(t)], "wait_stream", lambda wait: _nothing
    ),
    "clip_ignores_reductions": around(schedules, "end_backward", _end_not_joining),
    "refilled_while_reduced": around(
        schedules, "make_room",
        lambda site, gradients: None if gradients.is_pending else site.owner.drain(keep=1),
    ),
    "replica_sum_unordered": around(fsdp_core.fsdp.gradients, "all_reduce", _unordered),
    "clip_unordered": around(fsdp_core.train.trainer, "clip_grads", _unordered),
    "gathered_ahead": once(_gathered_ahead),
}  # fmt: skip


# ---- graphs: ranks that do not capture alike

_GRAPHS = (HostGraph, CudaGraph)
_FIRST = "layers.0.attn"
WARM_UPS = 2
"""Calls of a partial scope's function before it is captured."""


def _configured(change: Callable[[TrainConfig], Mapping[str, Any]]) -> Planting:
    """The configuration with other values, whatever its rules say to them."""

    def make(config: TrainConfig) -> TrainConfig:
        changed = copy.copy(config)
        vars(changed).update(change(config))
        return changed

    return Planting(before_make=make)


def _eager(config: TrainConfig) -> TrainConfig:
    return replace(config, graph=())


def _most_microbatches_eager(config: TrainConfig) -> TrainConfig:
    """All but the first of each step."""
    begin, calls = StageGraphs._begin, itertools.count()

    def begun(graphs: StageGraphs, *args: Any) -> None:
        begin(graphs, *args)
        if next(calls) % config.microbatches:
            graphs._chosen = None

    StageGraphs._begin = begun  # type: ignore[method-assign, assignment]
    return config


def _attention(trainer: Trainer) -> Any:
    """Of this rank's first layer."""
    return layers(trainer)[0].attn.attention


def _before_attention(act: Callable[[torch.Tensor], Any]) -> Planting:
    """Something is done with what attention takes, wherever it runs."""

    def acting(site: Site, x: torch.Tensor, *args: Any, **how: Any) -> Any:
        act(x)
        return site.call(x, *args, **how)

    return around(_attention, "forward", acting)


def _at_call(number: int, act: Act) -> Planting:
    """Done once, before that call of attention; a scope that is not partial has no warm-up."""

    def acting(site: Site, *args: Any, **how: Any) -> Any:
        whole = site.trainer.config.graph == ("full_iteration",)
        if site.number - 1 == (0 if whole else number):
            act(site.trainer)
        return site.call(*args, **how)

    return once(lambda t: surround(t, _attention, "forward", acting), at_capture=True)


# ---- graphs: what a capture leaves behind, and replays


def _masks_frozen(trainer: Trainer) -> None:
    """Each replay draws the numbers that are next now, and none are used up."""
    streams, baked = trainer.streams, trainer.streams.get_states()

    def frozen(site: Site, graph: Any) -> None:
        own = streams.get_states()
        streams.set_states(baked)
        site.call(graph)
        streams.set_states(own)

    surround(trainer, _GRAPHS, "replay", frozen)


def _draws_restored(site: Site, graph: Any) -> None:
    """A replay puts back the random numbers that it found."""
    own = site.trainer.streams.get_states()
    site.call(graph)
    site.trainer.streams.set_states(own)


def _captured_step(num_replays: int) -> Planting:
    """The step that is captured is replayed so often right after."""

    def counted(site: Site, function: CapturedFunction) -> Any:
        for _ in range(num_replays if site.number == 1 else 1):
            site.call(function)
        return function.result

    return around(CapturedFunction, "__call__", counted)


def _step_count_on_host(trainer: Trainer) -> None:
    """The optimizer is told the number of its step by Python, as a capture would bake it in."""
    optimizer, num_steps = trainer.optimizer, int(trainer.optimizer.step_count.item())
    count = optimizer.step_count

    @torch.no_grad()
    def stepped(site: Site) -> None:
        # `step` adds one to it.
        optimizer.step_count = torch.full_like(count, float(num_steps + site.number - 1))
        site.call()
        count.add_(1.0)
        optimizer.step_count = count

    surround(trainer, optimizer, "step", stepped)


def _input_not_copied(site: Site, slot: Slot, tensors: Any, pending: Pending) -> Any:
    if slot._name == _FIRST:
        tensors = tuple(static.detach().clone() for static in slot._inputs)
    return site.call(slot, tensors, pending)


def _gradient_not_copied(site: Site, slot: Slot, grads: Any, pending: Pending) -> Any:
    if slot._name == _FIRST:
        # The memory is shared by the graphs of all layers: keep what this one was given first.
        site.kept = site.kept or {}
        grads = site.kept.setdefault(slot, [grad.clone() for grad in grads])
    return site.call(slot, grads, pending)


def _sets(trainer: Trainer) -> list[dict[str, Any]]:
    """Graphs of the layers by name, of each set."""
    parts = trainer._graphs.parts
    assert isinstance(parts, PartialGraphs)
    return [graphs._graphs for graphs in parts._sets[0]]


def _graphs_exchanged(trainer: Trainer) -> None:
    for held in _sets(trainer):
        first, second = list(held)[:2]
        held[first], held[second] = held[second], held[first]


def _graph_of_other_layer(trainer: Trainer) -> None:
    """The second layer launches the first one's graphs."""
    for held in _sets(trainer):
        first, second = itertools.islice(held.values(), 2)
        for slot, other in zip(second._slots, first._slots, strict=True):
            slot._forward, slot._backward = other._forward, other._backward


# ---- graphs: what CUDA alone refuses


def _fork_side_stream(x: torch.Tensor) -> None:
    side = torch.cuda.Stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        x.detach().sum()


def _wait_for_old_event(trainer: Trainer) -> None:
    """As a gather that was begun before the capture, and is waited for inside it."""
    device = trainer.device
    with device.on(trainer.stream):
        event = device.new_stream().record_event()

    def waiting(site: Site, *args: Any, **how: Any) -> Any:
        device.current_stream().wait_event(event)
        return site.call(*args, **how)

    surround(trainer, _attention, "forward", waiting)


_CAPTURE: Mapping[str, Planting] = {
    "skip_graphs": Planting(before_make=_eager),
    "layer_not_captured": _configured(lambda c: {"graph_layers": (0, c.model.layers - 2)}),
    "scope_not_captured": _configured(lambda config: {"graph": config.graph[:1]}),
    "optimizer_not_captured": _configured(lambda config: {"graph_optimizer": False}),
    "microbatches_not_replayed": Planting(before_make=_most_microbatches_eager),
    "one_rank_never_captures": Planting(before_make=_eager),
    "handshake_raise": replace(
        around(
            capture_session,
            "exchange_refusals",
            lambda site, *args: processes.raise_error(site.trainer),
        ),
        at_capture=True,
    ),
    # With tensor parallelism the others wait inside of the very function that failed.
    "warm_up_raise": _at_call(0, processes.raise_error),
    "capture_raise": _at_call(WARM_UPS, processes.raise_error),
    "capture_oom": _at_call(WARM_UPS, processes.ask_for_too_much),
    "capture_sigkill": _at_call(WARM_UPS, processes.sent(signal.SIGKILL)),
    "masks_frozen": once(_masks_frozen),
    "draws_restored": around(_GRAPHS, "replay", _draws_restored),
    "warm_up_draws": instead(Undo, "put_back", lambda put_back: _nothing),
    "warm_up_counts": instead(Undo, "put_back", lambda put_back: _nothing),
    "captured_step_repeated": _captured_step(2),
    "captured_step_not_run": _captured_step(0),
    "step_count_on_host": once(_step_count_on_host),
    "host_read_in_capture": _before_attention(lambda x: float(x.detach().sum())),
    # What counts launches counts the one that does nothing.
    "replay_lost": around(
        _GRAPHS, "replay", lambda site, graph: site.call(graph) if site.number > 1 else None
    ),
    "graph_input_not_copied": around(Slot, "replay_forward", _input_not_copied),
    "graph_gradient_not_copied": around(Slot, "replay_backward", _gradient_not_copied),
    "inputs_not_filled": instead(lambda t: t._inputs, "fill", lambda fill: _nothing),
    "graphs_exchanged": once(_graphs_exchanged),
    "graph_of_other_layer": once(_graph_of_other_layer),
    "side_stream_not_joined": _before_attention(_fork_side_stream),
    "device_wait_in_capture": _before_attention(lambda x: torch.cuda.synchronize(x.device)),
    "event_from_before_capture": once(_wait_for_old_event),
}  # fmt: skip

PLANTINGS: Mapping[str, Planting] = {**_HOOKS, **_MEMORY, **_STREAMS, **_CAPTURE}
"""By name in the catalogue."""
