"""Faults in the trainer with its graphs, each a context manager over its public parts."""

import contextlib
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import torch

from fsdp_core.fsdp.api import units_in
from fsdp_core.fsdp.unit import Unit
from fsdp_core.graph.capture_session import Undo
from fsdp_core.graph.cuda_graph import CudaGraph
from fsdp_core.graph.graph import GraphedCallable
from fsdp_core.graph.host_graph import HostGraph
from fsdp_core.train.build import roots
from harness.worker.plants import act_before_step
from tests.graph_faults.programs import WARMUP, Moments, Planting
from tests.graph_faults.training import Training

CAPTURED = WARMUP + 1
"""The first step that only replays."""


def _layer_units(training: Training) -> Iterator[Unit]:
    for stage in training.trainer.stages:
        for layer in stage.numbered_layers.values():
            yield units_in(layer)[0]


# ---- hooks


@contextlib.contextmanager
def pre_hooks_not_put_back(moments: Moments) -> Iterator[None]:
    """F08: what gathers before a layer's forward is gone after the capture."""

    def take(training: Training) -> None:
        for unit in _layer_units(training):
            for module in unit.modules:
                module._forward_pre_hooks.clear()
                module._forward_pre_hooks_with_kwargs.clear()

    moments.before(CAPTURED, take)
    yield


@contextlib.contextmanager
def outputs_marked_at_capture(moments: Moments) -> Iterator[None]:
    """F01: the forward hook that has backward gather marked the capture's outputs, not these."""

    def forget(training: Training) -> None:
        for unit in _layer_units(training):
            unit._hook_output = lambda output, inputs: True  # type: ignore[method-assign]

    moments.before(CAPTURED, forget)
    yield


# ---- flags and objects


@contextlib.contextmanager
def all_reduce_off_at_capture(moments: Moments) -> Iterator[None]:
    """F13: the flag is what it is for all but the last microbatch, at capture."""

    def set_to(value: bool) -> Any:
        def act(training: Training) -> None:
            for root in roots(training.trainer.stages):
                root.set_requires_all_reduce(value)

        return act

    moments.before(WARMUP, set_to(False))
    moments.before(CAPTURED, set_to(True))
    yield


@contextlib.contextmanager
def loads_in_place(moments: Moments) -> Iterator[None]:
    """A right program that loads other weights while it trains."""

    def load(training: Training) -> None:
        trainer = training.trainer
        with torch.no_grad(), trainer.device.on(trainer.stream):
            for group in trainer.groups:
                group.main_weight.mul_(0.5)
            for root in roots(trainer.stages):
                root.refresh_model_weights()

    moments.before(CAPTURED, load)
    yield


@contextlib.contextmanager
def loads_by_assigning(moments: Moments) -> Iterator[None]:
    """F17: the weights that are loaded take the place of the captured ones."""

    def load(training: Training) -> None:
        trainer = training.trainer
        optimizer = trainer.optimizer
        with torch.no_grad(), trainer.device.on(trainer.stream):
            for group in trainer.groups:
                group.main_weight = group.main_weight * 0.5
                for index, name in enumerate(group.names):
                    rows = group.local_rows(group.main_weight, index)
                    if name in optimizer.names:
                        optimizer.params[optimizer.names.index(name)] = rows

    moments.before(CAPTURED, load)
    yield


# ---- numbers and state


@contextlib.contextmanager
def masks_frozen(moments: Moments) -> Iterator[None]:
    """F65: each replay draws the numbers of the capture."""
    baked: dict[str, torch.Tensor] = {}
    streams: list[Any] = []

    def bake(training: Training) -> None:
        streams.append(training.trainer.streams)
        baked.update(streams[0].get_states())

    def frozen(replay: Any) -> Any:
        def replayed(graph: Any) -> None:
            if not streams:
                replay(graph)
                return
            own = streams[0].get_states()
            streams[0].set_states(baked)
            replay(graph)
            streams[0].set_states(own)

        return replayed

    moments.before(CAPTURED, bake)
    with (
        mock.patch.object(HostGraph, "replay", frozen(HostGraph.replay)),
        mock.patch.object(CudaGraph, "replay", frozen(CudaGraph.replay)),
    ):
        yield


@contextlib.contextmanager
def warm_up_leaves_state(moments: Moments) -> Iterator[None]:
    """F67: generators are put back after a warm-up, other persistent tensors are not."""
    del moments

    def put_back(undo: Undo) -> None:
        undo._rng_states.put_back()
        # What else was saved and is random state, as the CPU keeps it.
        for live, saved in undo._saved.values():
            if live.numel() == undo._rng_states._defaults[0].numel():
                live.copy_(saved)

    with mock.patch.object(Undo, "put_back", put_back):
        yield


@contextlib.contextmanager
def gradients_alias(moments: Moments) -> Iterator[None]:
    """F19: replays return the static gradients themselves."""
    del moments
    replay = GraphedCallable.replay_backward

    def aliased(graph: GraphedCallable, *args: Any) -> Any:
        replay(graph, *args)
        return tuple(None if grad is None else grad.detach() for grad in graph._grads)

    with mock.patch.object(GraphedCallable, "replay_backward", aliased):
        yield


# ---- order and memory


def misordered(name: str, step: int = CAPTURED) -> Planting:
    """A fault of `harness.worker.plants`, by default from the first step that only replays."""

    @contextlib.contextmanager
    def plant(moments: Moments) -> Iterator[None]:
        moments.before(step, lambda p: act_before_step(name, cast("Training", p).trainer))
        yield

    return plant
