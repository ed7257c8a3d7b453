"""Parts of a trainer that faults change, found by name, and how an attribute is changed."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.schedule import Schedule
from fsdp_core.fsdp.unit import Unit
from fsdp_core.parallel.rng import RandomStream
from fsdp_core.train import Trainer
from fsdp_core.train.build import roots


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(what is there)` in the place of an attribute, of a frozen object too."""
    made = make(getattr(owner, name))
    if isinstance(owner, ModuleType | type):
        setattr(owner, name, made)
    else:
        object.__setattr__(owner, name, made)


def schedules(trainer: Trainer) -> Iterator[Schedule]:
    """Of every stage of the rank."""
    return (root.fsdp_schedule for root in roots(trainer.stages))


def unit_named(trainer: Trainer, name: str) -> Unit:
    """The FSDP unit of that name."""
    return next(
        unit for schedule in schedules(trainer) for unit in schedule.units if unit.name == name
    )


def group_named(trainer: Trainer, name: str) -> ParamGroup:
    """The parameters of the FSDP unit of that name."""
    return unit_named(trainer, name).groups[0]


def module_named(trainer: Trainer, name: str) -> nn.Module:
    """The module of that name in the whole model."""
    stages = [cast("nn.Module", stage) for stage in trainer.stages]
    return next(stage.get_submodule(name) for stage in stages if _holds(stage, name))


def _holds(stage: nn.Module, name: str) -> bool:
    return any(found == name for found, _ in stage.named_modules())


def last_matrix(trainer: Trainer) -> tuple[ParamGroup, int]:
    """Of the parameters that this rank has two rows of or more, the last: group, number in it."""
    return [
        (group, index)
        for group in trainer.groups
        for index, spec in enumerate(group.specs)
        if len(spec.local_shape) > 1 and spec.local_shape[0] > 1
    ][-1]


def random_state(trainer: Trainer, seed: int) -> torch.Tensor:
    """The state of a generator that was just seeded."""
    return torch.Generator(trainer.device.torch_device).manual_seed(seed).get_state()


def dropout_stream(trainer: Trainer) -> RandomStream:
    """What the first stage's dropout draws from."""
    layer = next(iter(trainer.stages[0].numbered_layers.values()))
    return layer.attn.residual.stream
