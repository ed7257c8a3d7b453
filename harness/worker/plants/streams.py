"""Faults in the order of FSDP's work, and of memory given back too soon: what stressors are for.

    gather_ignores_writes        gathers do not wait for what is written on the compute stream
    compute_ignores_gather       compute does not wait for the gather of its weights
    buffer_ignores_reduction     a gradient buffer is given back while it is being reduced
    reduction_freed_early        outputs of a reduction are freed while it writes them
    early_release                the root's weights are given back before they are used
    reduction_ignores_gradients  reductions do not wait for what backward writes
    clip_ignores_reductions      what follows backward does not wait for the last reduction
    refilled_while_reduced       a microbatch's gradients go where the last one's are being reduced
    replica_sum_unordered        replicas are summed on a stream that nothing waits for
    clip_unordered               gradients are clipped on a stream that nothing waits for
    gathered_ahead               weights are gathered for a step before the update that it follows

On the CPU, and on a GPU that has nothing else to do, a plain run shows none of them but the last.
Each is planted from a step on; but for the last, in one rank, and changes no collective.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

import fsdp_core.fsdp.gradients
import fsdp_core.train.trainer
from fsdp_core.device import Device
from fsdp_core.fsdp.gradients import Gradients
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.schedule import Schedule
from fsdp_core.fsdp.unit import Unit
from fsdp_core.train import Trainer
from harness.worker.plants.planting import Planting
from harness.worker.plants.seams import (
    before_last_update,
    other_main_weight,
    schedules,
    unit_named,
    wrap,
)


def _gather_ignores_writes(trainer: Trainer) -> None:
    for schedule in schedules(trainer):
        schedule.gather_stream.wait_stream = lambda stream: None


def _compute_ignores_gather(trainer: Trainer) -> None:
    def forget(unit: Unit) -> Callable[[], None]:
        return lambda: setattr(unit, "gathered_event", None)

    for schedule in schedules(trainer):
        for unit in schedule.units:
            unit._wait_gather = forget(unit)  # type: ignore[method-assign]


def _buffer_ignores_reduction(trainer: Trainer) -> None:
    for schedule in schedules(trainer):
        schedule.drain = _draining(schedule)  # type: ignore[method-assign, assignment]


def _draining(schedule: Schedule) -> Callable[[int], None]:
    def drain(keep: int) -> None:
        while len(schedule._reductions) > keep:
            gradients = schedule._reductions.pop(0).gradients
            gradients.release_full(schedule.device.current_stream())

    return drain


def _reduction_freed_early(trainer: Trainer) -> None:
    for group in trainer.groups:
        group.gradients.reduce = _dropping(group)  # type: ignore[method-assign]


def _dropping(group: ParamGroup) -> Callable[..., list[Any]]:
    reduce = group.gradients.reduce

    def reduce_and_drop(stream: Any, *, final: bool) -> list[Any]:
        reduce(stream, final=final)
        return []

    return reduce_and_drop


def _early_release(trainer: Trainer) -> None:
    for schedule in schedules(trainer):
        unit = schedule.root
        for group in unit.groups:
            _give_back_twice(schedule, unit, group)


def _give_back_twice(schedule: Schedule, unit: Unit, group: ParamGroup) -> None:
    """Release the group's buffer as soon as it is gathered; the real release does nothing."""
    wait, reshard = unit.wait_unshard, group.reshard
    pool, key = group.pool, group._gather_key
    is_out = False

    def wait_and_release() -> None:
        nonlocal is_out
        wait()
        if group.is_unsharded and group.nest.weight_level and not is_out:
            is_out = True
            pool.release(key, schedule.device.current_stream())

    def take_again(stream: Any) -> None:
        nonlocal is_out
        if is_out:
            is_out = False
            release = pool.release
            pool.release = lambda key, stream: None  # type: ignore[method-assign]
            try:
                reshard(stream)
            finally:
                pool.release = release  # type: ignore[method-assign]
        else:
            reshard(stream)

    unit.wait_unshard = wait_and_release  # type: ignore[method-assign]
    group.reshard = take_again  # type: ignore[method-assign]


def _reduction_ignores_gradients(trainer: Trainer) -> None:
    for schedule in schedules(trainer):
        schedule.reduce_stream.wait_stream = lambda stream: None


def _clip_ignores_reductions(trainer: Trainer) -> None:
    for schedule in schedules(trainer):
        wrap(schedule, "end_backward", functools.partial(_not_joining, schedule))


def _not_joining(schedule: Schedule, end: Callable[[], None]) -> Callable[[], None]:
    """The end of backward as if there were no stream of reductions."""

    def end_backward() -> None:
        streams = schedule._side_streams
        for reduction in schedule._reductions:
            reduction.event = None
        schedule.__dict__["_side_streams"] = (streams[0], streams[0])
        try:
            end()
        finally:
            schedule.__dict__["_side_streams"] = streams

    return end_backward


def _refilled_while_reduced(trainer: Trainer) -> None:
    def room(schedule: Schedule, gradients: Gradients) -> None:
        if not gradients.is_pending:
            schedule.drain(keep=1)

    for schedule in schedules(trainer):
        schedule.make_room = functools.partial(room, schedule)  # type: ignore[method-assign]


def _aside(device: Device, work: Callable[..., Any]) -> Callable[..., Any]:
    """The same work on a stream of its own, which waits for none and for which none waits."""
    streams: list[Any] = []

    def done_aside(*args: Any) -> Any:
        if not streams:
            streams.append(device.new_stream("aside"))
        with device.on(streams[0]):
            return work(*args)

    return done_aside


def _replica_sum_unordered(trainer: Trainer) -> None:
    wrap(fsdp_core.fsdp.gradients, "all_reduce", functools.partial(_aside, trainer.device))


def _clip_unordered(trainer: Trainer) -> None:
    wrap(fsdp_core.train.trainer, "clip_grads", functools.partial(_aside, trainer.device))


def _gathered_ahead(trainer: Trainer) -> None:
    """The next step finds the layer gathered, from main weights before the last update."""
    unit = unit_named(trainer, "layers.1")
    group = unit.groups[0]
    with torch.no_grad(), trainer.device.on(trainer.stream):
        old = before_last_update(trainer, group)
        with other_main_weight(group, old):
            unit.unshard()
        group.gathered_version = group.main_weight._version


PLANTINGS: Mapping[str, Planting] = MappingProxyType(
    {
        "gather_ignores_writes": Planting(before_step=_gather_ignores_writes),
        "compute_ignores_gather": Planting(before_step=_compute_ignores_gather),
        "buffer_ignores_reduction": Planting(before_step=_buffer_ignores_reduction),
        "reduction_freed_early": Planting(before_step=_reduction_freed_early),
        "early_release": Planting(before_step=_early_release),
        "reduction_ignores_gradients": Planting(before_step=_reduction_ignores_gradients),
        "clip_ignores_reductions": Planting(before_step=_clip_ignores_reductions),
        "refilled_while_reduced": Planting(before_step=_refilled_while_reduced),
        "replica_sum_unordered": Planting(before_step=_replica_sum_unordered),
        "clip_unordered": Planting(before_step=_clip_unordered),
        "gathered_ahead": Planting(before_step=_gathered_ahead),
    }
)
"""By name in the catalogue."""
