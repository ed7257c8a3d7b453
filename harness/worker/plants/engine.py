"""Faults of captures and of replays: see `harness.faults.capture`.

What makes graphs on a GPU and on the CPU is reached through the classes that both sides have in
common: `CapturedFunction`, `Slot`, `LayerGraphs` and `Undo`; and through both kinds of graph.
"""

import copy
import itertools
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fsdp_core.config import TrainConfig
from fsdp_core.device import Device
from fsdp_core.graph import capture_session
from fsdp_core.graph.capture import CapturedFunction
from fsdp_core.graph.cuda import CudaGraph
from fsdp_core.graph.host import HostGraph
from fsdp_core.graph.slot import Pending, Slot
from fsdp_core.graph.undo import Undo
from fsdp_core.model.microbatch import Part
from fsdp_core.train import Trainer
from fsdp_core.train.partial_graphs import PartialGraphs
from fsdp_core.train.stage_graphs import StageGraphs
from harness.worker.plants import endings
from harness.worker.plants.planting import Act, Planting

_KINDS: tuple[Any, ...] = (HostGraph, CudaGraph)
_FIRST = "layers.0.attn"
WARM_UPS = 2
"""Calls of a partial scope's function before it is captured."""


def _attention(trainer: Trainer) -> nn.Module:
    """Of this rank's first layer."""
    return next(iter(trainer.stages[0].numbered_layers.values())).attn.attention


# ---- what a capture leaves behind


def _masks_frozen(trainer: Trainer) -> None:
    """Each replay draws the numbers that are next now, and none are used up."""
    streams, baked = trainer.streams, trainer.streams.get_states()

    def frozen(replay: Callable[[Any], None]) -> Callable[[Any], None]:
        def replayed(graph: Any) -> None:
            own = streams.get_states()
            streams.set_states(baked)
            replay(graph)
            streams.set_states(own)

        return replayed

    for kind in _KINDS:
        kind.replay = frozen(kind.replay)


def _draws_restored(trainer: Trainer) -> None:
    """Each replay puts back the random numbers that it found."""
    streams = trainer.streams

    def restored(replay: Callable[[Any], None]) -> Callable[[Any], None]:
        def replayed(graph: Any) -> None:
            own = streams.get_states()
            replay(graph)
            streams.set_states(own)

        return replayed

    for kind in _KINDS:
        kind.replay = restored(kind.replay)


def _warm_up_leaves_all(trainer: Trainer) -> None:
    del trainer
    Undo.put_back = lambda undo: None  # type: ignore[method-assign, assignment]


def _captured_step(num_replays: int) -> Callable[[Trainer], None]:
    """The step that is captured is replayed so often right after."""

    def act(trainer: Trainer) -> None:
        del trainer
        call, is_first = CapturedFunction.__call__, True

        def counted(function: CapturedFunction) -> Any:
            nonlocal is_first
            times, is_first = num_replays if is_first else 1, False
            for _ in range(times):
                call(function)
            return function.result

        CapturedFunction.__call__ = counted  # type: ignore[method-assign, assignment]

    return act


def _step_count_on_host(trainer: Trainer) -> None:
    """The optimizer is told the number of its step by Python, as a capture would bake it in."""
    optimizer, num_steps = trainer.optimizer, int(trainer.optimizer.step_count.item())
    step, count = optimizer.step, optimizer.step_count

    @torch.no_grad()
    def stepped() -> None:
        nonlocal num_steps
        # `step` adds one to it.
        optimizer.step_count = torch.full_like(count, float(num_steps))
        step()
        num_steps += 1
        count.add_(1.0)
        optimizer.step_count = count

    optimizer.step = stepped  # type: ignore[method-assign]


# ---- ranks that are not of one mind


def _never_captures(config: TrainConfig) -> TrainConfig:
    return replace(config, graph=())


def _forced(config: TrainConfig, **values: Any) -> TrainConfig:
    """The configuration with other values, whatever its rules say to them."""
    changed = copy.copy(config)
    vars(changed).update(values)
    return changed


def _leaves_a_layer_out(config: TrainConfig) -> TrainConfig:
    return _forced(config, graph_layers=(0, config.model.layers - 2))


def _leaves_a_scope_out(config: TrainConfig) -> TrainConfig:
    return _forced(config, graph=config.graph[:1])


def _leaves_the_optimizer_out(config: TrainConfig) -> TrainConfig:
    return _forced(config, graph_optimizer=False)


def _most_microbatches_eager(config: TrainConfig) -> TrainConfig:
    """All but the first of each step."""
    begin, calls = StageGraphs._begin, itertools.count()

    def begun(graphs: StageGraphs, part: Part, slot: int) -> None:
        begin(graphs, part, slot)
        if next(calls) % config.microbatches:
            graphs._chosen = None

    StageGraphs._begin = begun  # type: ignore[method-assign, assignment]
    return config


def _before_attention(act: Callable[[torch.Tensor], None]) -> Callable[[Trainer], None]:
    """Something is done with what attention takes, wherever it runs."""

    def plant(trainer: Trainer) -> None:
        attention: Any = _attention(trainer)
        forward = attention.forward

        def acting(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            act(x)
            return forward(x, *args, **kwargs)

        attention.forward = acting

    return plant


def _at_call(number: int, act: Act) -> Act:
    """Done once, before that call of attention; a scope that is not partial has no warm-up."""

    def plant(trainer: Trainer) -> None:
        calls = itertools.count()
        at = 0 if trainer.config.graph == ("full_iteration",) else number

        def acting(x: torch.Tensor) -> None:
            del x
            if next(calls) == at:
                act(trainer)

        _before_attention(acting)(trainer)

    return plant


def _before_exchange(act: Act) -> Act:
    """Done once, as ranks agree to capture."""

    def plant(trainer: Trainer) -> None:
        exchange = capture_session.exchange_refusals

        def act_first(device: Device, what: str, refusal: str | None) -> dict[int, str]:
            act(trainer)
            return exchange(device, what, refusal)

        capture_session.exchange_refusals = act_first

    return plant


def _read(x: torch.Tensor) -> None:
    float(x.detach().sum())


# ---- replays


def _replay_lost(trainer: Trainer) -> None:
    """One launch does nothing; what counts launches counts it."""
    del trainer
    for kind in _KINDS:
        _lose_next(kind)


def _lose_next(kind: Any) -> None:
    replay = kind.replay

    def lost(graph: Any) -> None:
        del graph
        kind.replay = replay

    kind.replay = lost


def _of_first(slot: Slot) -> bool:
    return slot._name == _FIRST


def _input_not_copied(trainer: Trainer) -> None:
    del trainer
    replay = Slot.replay_forward

    def stale(slot: Slot, tensors: tuple[torch.Tensor, ...], pending: Pending) -> Any:
        if _of_first(slot):
            tensors = tuple(static.detach().clone() for static in slot._inputs)
        return replay(slot, tensors, pending)

    Slot.replay_forward = stale  # type: ignore[method-assign, assignment]


def _gradient_not_copied(trainer: Trainer) -> None:
    del trainer
    replay, kept = Slot.replay_backward, dict[Slot, list[torch.Tensor]]()

    def stale(slot: Slot, grads: Any, pending: Pending) -> Any:
        if _of_first(slot):
            # The memory is shared by the graphs of all layers: keep what this one was given first.
            kept.setdefault(slot, [grad.clone() for grad in grads])
            grads = kept[slot]
        return replay(slot, grads, pending)

    Slot.replay_backward = stale  # type: ignore[method-assign, assignment]


def _inputs_not_filled(trainer: Trainer) -> None:
    trainer._inputs.fill = lambda step: None  # type: ignore[method-assign]


def _graphs_exchanged(trainer: Trainer) -> None:
    parts = trainer._graphs.parts
    assert isinstance(parts, PartialGraphs)
    for graphs in parts._sets[0]:
        names = list(graphs._graphs)
        first, second = names[:2]
        held = graphs._graphs
        held[first], held[second] = held[second], held[first]


def _graph_of_other_layer(trainer: Trainer) -> None:
    """The second layer launches the first one's graphs."""
    parts = trainer._graphs.parts
    assert isinstance(parts, PartialGraphs)
    for graphs in parts._sets[0]:
        first, second = itertools.islice(graphs._graphs.values(), 2)
        for slot, other in zip(second._slots, first._slots, strict=True):
            slot._forward, slot._backward = other._forward, other._backward


# ---- what CUDA alone refuses


def _fork_side_stream(x: torch.Tensor) -> None:
    side = torch.cuda.Stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        x.detach().sum()


def _wait_for_device(x: torch.Tensor) -> None:
    torch.cuda.synchronize(x.device)


def _wait_for_old_event(trainer: Trainer) -> None:
    """As a gather that was begun before the capture, and is waited for inside it."""
    device = trainer.device
    with device.on(trainer.stream):
        event = device.new_stream().record_event()
    _before_attention(lambda x: device.current_stream().wait_event(event))(trainer)


def _failing(plant: Act) -> Planting:
    return Planting(before_step=plant, at_capture=True)


PLANTINGS: Mapping[str, Planting] = MappingProxyType(
    {
        "skip_graphs": Planting(before_make=_never_captures),
        "layer_not_captured": Planting(before_make=_leaves_a_layer_out),
        "scope_not_captured": Planting(before_make=_leaves_a_scope_out),
        "optimizer_not_captured": Planting(before_make=_leaves_the_optimizer_out),
        "microbatches_not_replayed": Planting(before_make=_most_microbatches_eager),
        "one_rank_never_captures": Planting(before_make=_never_captures),
        "handshake_raise": _failing(_before_exchange(endings.raise_error)),
        # With tensor parallelism the others wait inside of the very function that failed.
        "warm_up_raise": _failing(_at_call(0, endings.raise_error)),
        "capture_raise": _failing(_at_call(WARM_UPS, endings.raise_error)),
        "capture_oom": _failing(_at_call(WARM_UPS, endings.ask_for_too_much)),
        "capture_sigkill": _failing(_at_call(WARM_UPS, endings.sent(signal.SIGKILL))),
    }
    | {
        name: Planting(before_step=act)
        for name, act in {
            "masks_frozen": _masks_frozen,
            "draws_restored": _draws_restored,
            "warm_up_draws": _warm_up_leaves_all,
            "warm_up_counts": _warm_up_leaves_all,
            "captured_step_repeated": _captured_step(2),
            "captured_step_not_run": _captured_step(0),
            "step_count_on_host": _step_count_on_host,
            "host_read_in_capture": _before_attention(_read),
            "replay_lost": _replay_lost,
            "graph_input_not_copied": _input_not_copied,
            "graph_gradient_not_copied": _gradient_not_copied,
            "inputs_not_filled": _inputs_not_filled,
            "graphs_exchanged": _graphs_exchanged,
            "graph_of_other_layer": _graph_of_other_layer,
            "side_stream_not_joined": _before_attention(_fork_side_stream),
            "device_wait_in_capture": _before_attention(_wait_for_device),
            "event_from_before_capture": _wait_for_old_event,
        }.items()
    }
)
"""By name in the catalogue."""
