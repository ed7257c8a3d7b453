"""Faults of hooks and flags: see `harness.faults.hooks`."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fsdp_core.fsdp.fsdp_module import units_in
from fsdp_core.fsdp.gradients import Gradients
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.schedule import Schedule, in_backward
from fsdp_core.fsdp.unit import Unit
from fsdp_core.graph.hooks import ExtractedHooks
from fsdp_core.model.decoder import Layer
from fsdp_core.parallel import pipeline
from fsdp_core.parallel.stage_sync import announce_backward
from fsdp_core.train import Trainer
from fsdp_core.train.build import roots
from harness.worker.plants.planting import Planting


def _layers(trainer: Trainer) -> Iterator[Layer]:
    for stage in trainer.stages:
        yield from stage.numbered_layers.values()


def _first_unit(trainer: Trainer) -> Unit:
    """That of this rank's first layer."""
    return units_in(next(_layers(trainer)))[0]


# ---- hooks of modules


def _pre_hooks_lost(trainer: Trainer) -> None:
    for module in _first_unit(trainer).modules:
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()


def _outputs_unmarked(trainer: Trainer) -> None:
    unit = _first_unit(trainer)
    unit._hook_output = lambda output, forward: True  # type: ignore[method-assign]


def _hooks_not_restored(trainer: Trainer) -> None:
    del trainer
    restore = ExtractedHooks.restore

    def polluted(hooks: ExtractedHooks) -> None:
        for taken in hooks._taken:
            taken.original.clear()
        restore(hooks)

    ExtractedHooks.restore = polluted  # type: ignore[method-assign, assignment]


def _hook_arguments_lost(trainer: Trainer) -> None:
    for module in _first_unit(trainer).modules:
        module._forward_pre_hooks_with_kwargs.clear()


def _root_bypassed(trainer: Trainer) -> None:
    stage: Any = trainer.stages[0]
    stage._call_impl = stage.forward


class _Ramp:
    """A hook that scales a module's output by more each time; it says that graphs may hold it."""

    _cuda_graph_capturable = True

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """The output, scaled by what Python has counted."""
        del module, args
        self.num_calls += 1
        return output * (1 + self.num_calls / 64)


def _hook_counts_on_host(trainer: Trainer) -> None:
    next(_layers(trainer)).attn.norm.register_forward_hook(_Ramp())


# ---- hooks of gradients


def _gradient_hook_late(trainer: Trainer) -> None:
    gradients = _first_unit(trainer).groups[0].gradients
    gradients.arrived = _every_other(gradients)  # type: ignore[method-assign, assignment]


def _every_other(gradients: Gradients) -> Callable[[int], None]:
    """As `arrived`, which of the first parameter hears only every other time."""
    arrived, num_calls = gradients.arrived, 0

    def hear(index: int) -> None:
        nonlocal num_calls
        num_calls += index == 0
        if index or num_calls % 2:
            arrived(index)

    return hear


def _gradient_hook_doubled(trainer: Trainer) -> None:
    parameter = _first_unit(trainer).groups[0].unsharded[0]
    parameter.register_hook(lambda gradient: gradient * 2)


def _final_callback_lost(trainer: Trainer) -> None:
    for root in roots(trainer.stages):
        schedule = root.fsdp_schedule
        schedule.begin_backward = _unqueued(schedule)  # type: ignore[method-assign]


def _unqueued(schedule: Schedule) -> Callable[[], None]:
    """As `begin_backward`, but nobody is asked to call the end."""

    def begin() -> None:
        schedule.reduce_stream.wait_stream(schedule.device.current_stream())

    return begin


# ---- gathers


def _forget_gather(group: ParamGroup) -> None:
    group._gather = lambda full: None  # type: ignore[method-assign]


def _gather_skipped(trainer: Trainer) -> None:
    for group in _first_unit(trainer).groups:
        _forget_gather(group)


def _gather_skipped_in_backward(trainer: Trainer) -> None:
    unit = _first_unit(trainer)
    unshard = unit.unshard

    def in_forward_only() -> None:
        if not in_backward():
            unshard()

    unit.unshard = in_forward_only  # type: ignore[method-assign]


class _AlwaysCurrent(ParamGroup):
    """A group that holds what it has gathered for what there is."""

    is_current = True


def _kept_gathered(trainer: Trainer) -> None:
    for group in _first_unit(trainer).groups:
        group.__class__ = _AlwaysCurrent
        group.reshard = _only_registering(group)  # type: ignore[method-assign, assignment]


def _only_registering(group: ParamGroup) -> Callable[[Any], None]:
    """As `reshard`, but the buffer stays, and counts as gathered."""

    def reshard(stream: Any) -> None:
        del stream
        if group.is_registered:
            group._register(group.sharded)
            group.is_registered = False

    return reshard


# ---- flags


def _zeroing_skipped(trainer: Trainer) -> None:
    for root in roots(trainer.stages):
        root.zero_main_grads = lambda: None  # type: ignore[method-assign]


def _flag_frozen(*, value: bool) -> Callable[[Trainer], None]:
    def act(trainer: Trainer) -> None:
        del trainer
        announce = announce_backward

        def frozen(stage: nn.Module, sync: Any, *, is_last: bool) -> None:
            del is_last
            announce(stage, sync, is_last=value)

        pipeline.announce_backward = frozen  # type: ignore[attr-defined]

    return act


PLANTINGS: Mapping[str, Planting] = MappingProxyType(
    {
        "pre_hooks_lost": Planting(before_step=_pre_hooks_lost),
        "outputs_unmarked": Planting(before_step=_outputs_unmarked),
        "hooks_not_restored": Planting(before_step=_hooks_not_restored),
        "hook_arguments_lost": Planting(before_step=_hook_arguments_lost),
        "root_bypassed": Planting(before_step=_root_bypassed),
        "hook_counts_on_host": Planting(before_step=_hook_counts_on_host),
        "gradient_hook_late": Planting(before_step=_gradient_hook_late),
        "gradient_hook_doubled": Planting(before_step=_gradient_hook_doubled),
        "final_callback_lost": Planting(before_step=_final_callback_lost),
        "gather_skipped": Planting(before_step=_gather_skipped),
        "gather_skipped_in_backward": Planting(before_step=_gather_skipped_in_backward),
        "kept_gathered": Planting(before_step=_kept_gathered),
        "zeroing_skipped": Planting(before_step=_zeroing_skipped),
        "last_flag_lost": Planting(before_step=_flag_frozen(value=False)),
        "last_flag_frozen": Planting(before_step=_flag_frozen(value=True)),
    }
)
"""By name in the catalogue."""
