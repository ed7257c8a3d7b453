"""Faults in the order of FSDP's work, and of memory given back too soon: what stressors are for.

    gather_ignores_writes      gathers do not wait for what is written on the compute stream
    compute_ignores_gather     compute does not wait for the gather of its weights
    buffer_ignores_reduction   a gradient buffer is given back while it is being reduced
    reduction_freed_early      outputs of a reduction are freed while it writes them
    early_release              the root's weights are given back before they are used

On the CPU, and on a GPU that has nothing else to do, a plain run shows none of them. Each is
planted in one rank, from a step on, and changes no collective.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.schedule import Schedule
from fsdp_core.fsdp.unit import Unit
from fsdp_core.train import Trainer
from fsdp_core.train.build import roots
from harness.worker.plants.planting import Planting


def _schedules(trainer: Trainer) -> Iterator[Schedule]:
    return (root.fsdp_schedule for root in roots(trainer.stages))


def _gather_ignores_writes(trainer: Trainer) -> None:
    for schedule in _schedules(trainer):
        schedule.gather_stream.wait_stream = lambda stream: None


def _compute_ignores_gather(trainer: Trainer) -> None:
    def forget(unit: Unit) -> Callable[[], None]:
        return lambda: setattr(unit, "gathered_event", None)

    for schedule in _schedules(trainer):
        for unit in schedule.units:
            unit._wait_gather = forget(unit)  # type: ignore[method-assign]


def _buffer_ignores_reduction(trainer: Trainer) -> None:
    for schedule in _schedules(trainer):
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
    for schedule in _schedules(trainer):
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


PLANTINGS: Mapping[str, Planting] = MappingProxyType(
    {
        "gather_ignores_writes": Planting(before_step=_gather_ignores_writes),
        "compute_ignores_gather": Planting(before_step=_compute_ignores_gather),
        "buffer_ignores_reduction": Planting(before_step=_buffer_ignores_reduction),
        "reduction_freed_early": Planting(before_step=_reduction_freed_early),
        "early_release": Planting(before_step=_early_release),
    }
)
"""By name in the catalogue."""
