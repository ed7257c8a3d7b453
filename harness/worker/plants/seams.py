"""Parts of a trainer that faults change, found by name, and how an attribute is changed."""

import contextlib
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


def keep(trainer: Trainer, tensor: torch.Tensor) -> None:
    """Hold a tensor for as long as there is the trainer."""
    vars(trainer).setdefault("_held_by_faults", []).append(tensor)


def schedules(trainer: Trainer) -> Iterator[Schedule]:
    """Of every stage of the rank."""
    return (root.fsdp_schedule for root in roots(trainer.stages))


class NotHere(LookupError):
    """A rank has no part of the model of that name: it is of another stage."""

    def __init__(self, name: str) -> None:
        super().__init__(f"this rank holds no {name}: plant the fault on one that does")


def unit_named(trainer: Trainer, name: str) -> Unit:
    """The FSDP unit of that name.

    Raises:
        NotHere: this rank has none.
    """
    for schedule in schedules(trainer):
        for unit in schedule.units:
            if unit.name == name:
                return unit
    raise NotHere(name)


def group_named(trainer: Trainer, name: str) -> ParamGroup:
    """The parameters of the FSDP unit of that name."""
    return unit_named(trainer, name).groups[0]


def module_named(trainer: Trainer, name: str) -> nn.Module:
    """The module of that name in the whole model.

    Raises:
        NotHere: this rank has none.
    """
    for stage in trainer.stages:
        if _holds(module := cast("nn.Module", stage), name):
            return module.get_submodule(name)
    raise NotHere(name)


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


def before_last_update(trainer: Trainer, group: ParamGroup) -> torch.Tensor:
    """This rank's main weights of a group as they were before the last AdamW step, but for bits."""
    optimizer, options = trainer.optimizer, trainer.config.optim
    old, taken = group.main_weight.clone(), optimizer.step_count
    for index, name in enumerate(group.names):
        if name not in optimizer.names:
            continue
        place, rows = optimizer.names.index(name), group.local_rows(old, index)
        mean = optimizer.exp_avg[place] / (1.0 - options.beta1**taken)
        square = optimizer.exp_avg_sq[place] / (1.0 - options.beta2**taken)
        rows.add_(optimizer.lr * mean / (square.sqrt() + options.eps))
        if rows.dim() >= 2:
            rows.div_(1.0 - optimizer.lr * options.weight_decay)
    return old


@contextlib.contextmanager
def other_main_weight(group: ParamGroup, weight: torch.Tensor) -> Iterator[None]:
    """Inside, what is gathered or copied from a group's main weight is another one."""
    now, group.main_weight = group.main_weight, weight
    try:
        yield
    finally:
        group.main_weight = now


def random_state(trainer: Trainer, seed: int) -> torch.Tensor:
    """The state of a generator that was just seeded."""
    return torch.Generator(trainer.device.torch_device).manual_seed(seed).get_state()


def dropout_stream(trainer: Trainer) -> RandomStream:
    """What the first stage's dropout draws from."""
    layer = next(iter(trainer.stages[0].numbered_layers.values()))
    return layer.attn.residual.stream
