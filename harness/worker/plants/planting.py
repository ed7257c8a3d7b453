"""What a fault is made of: when it acts, where, and what it puts there.

    Planting    when: before there is a trainer, before a step, after it, on lines of records
    where       an owner: a class, a module of Python, or found in the trainer by the functions here
    what        `once` does something, `instead` puts another attribute in an owner's place,
                `around` another function in the place of one of its calls

A rank is a process of its own that ends with its run, so what a fault patches stays patched: no
fault undoes anything. It touches public seams only: attributes and methods of the trainer's parts,
of torch, of the operating system; nothing in `fsdp_core` knows of faults.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass, field
from types import FunctionType
from typing import Any, NoReturn, cast

import torch
from torch import nn

from fsdp_core.config import TrainConfig
from fsdp_core.fsdp.fsdp_module import units_in
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.schedule import Schedule
from fsdp_core.fsdp.unit import Unit
from fsdp_core.train import Trainer
from fsdp_core.train.build import roots
from harness.records import PlantSpec

Act = Callable[[Trainer], Any]
ActOn = Callable[[Trainer, str], str]
"""Given the name of a tensor, or "" for one of its own choice; returns which one it was."""
Alteration = Callable[[str], list[str]]
"""From a line of a rank's file to what is written in its place."""
Where = Any
"""An owner, a list or tuple of several, or a function that finds either in the trainer."""


@dataclass(frozen=True, kw_only=True)
class Planting:
    """What a fault does, and when; None where it does nothing then.

    Attributes:
        before_make: before there is a trainer; gives the configuration that it is made from.
        before_step: before the step that the plant names, which capturing may be a part of.
        before_step_on: the same, on the tensor that the plant names.
        from_step: before that step and every later one.
        after_step_on: after that step's optimizer, on the tensor that the plant names; the state
            is digested again afterwards.
        alter: to the lines of the rank's file; made anew for each run.
        after_end: once the end record is written.
        at_capture: its step is that which captures, whatever the plant names.
    """

    before_make: Callable[[TrainConfig], TrainConfig] | None = None
    before_step: Act | None = None
    before_step_on: ActOn | None = None
    from_step: Act | None = None
    after_step_on: ActOn | None = None
    alter: Callable[[PlantSpec], Alteration] | None = None
    after_end: Callable[[], NoReturn] | None = None
    at_capture: bool = False


@dataclass
class Site:
    """Where a function was put in the place of a call.

    Attributes:
        owner: of the attribute.
        body: the function.
        call: what was there.
        number: of the call under way, from 1.
        kept: for whatever the function remembers from call to call; None at first.
    """

    trainer: Trainer
    owner: Any
    body: "Body"
    call: Callable[..., Any] = field(init=False)
    number: int = 0
    kept: Any = None

    def take(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of a call."""
        self.call = call

        def called(*args: Any, **how: Any) -> Any:
            self.number += 1
            return self.body(self, *args, **how)

        return called


Body = Callable[..., Any]
"""`body(site, ...)` with the arguments of the call that it takes the place of."""


def once(act: Act, *, at_capture: bool = False) -> Planting:
    """Done once, before the step."""
    return Planting(before_step=act, at_capture=at_capture)


def on_stream(act: Act) -> Planting:
    """The same on the trainer's stream, and finished when the step begins."""

    def quietly(trainer: Trainer) -> None:
        with on_its_stream(trainer):
            act(trainer)
            trainer.device.synchronize()

    return once(quietly)


def instead(where: Where, name: str, make: Callable[[Any], Any]) -> Planting:
    """From the step on an attribute is `make(what was there)`."""

    def act(trainer: Trainer) -> None:
        for owner in owners(trainer, where):
            wrap(owner, name, make)

    return once(act)


def around(where: Where, name: str, body: Body) -> Planting:
    """From the step on calls of an attribute are calls of `body`."""
    return once(lambda trainer: surround(trainer, where, name, body))


def surround(trainer: Trainer, where: Where, name: str, body: Body) -> None:
    """What `around` does, there and then; `where` may be the owner itself."""
    for owner in owners(trainer, where):
        wrap(owner, name, Site(trainer, owner, body).take)


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(what is there)` in the place of an attribute, of a frozen object too."""
    made = make(getattr(owner, name))
    try:
        setattr(owner, name, made)
    except FrozenInstanceError:
        object.__setattr__(owner, name, made)


# ---- where


class NotHere(LookupError):
    """A rank has no part of the model of that name: it is of another stage."""

    def __init__(self, name: str) -> None:
        super().__init__(f"this rank holds no {name}: plant the fault on one that does")


def owners(trainer: Trainer, where: Where) -> list[Any]:
    """All that `where` names."""
    found = where(trainer) if isinstance(where, FunctionType) else where
    return list(found) if isinstance(found, list | tuple) else [found]


def schedules(trainer: Trainer) -> list[Schedule]:
    """Of every stage of the rank."""
    return [root.fsdp_schedule for root in roots(trainer.stages)]


def layers(trainer: Trainer) -> list[Any]:
    """Those of the rank, in their order."""
    return [layer for stage in trainer.stages for layer in stage.numbered_layers.values()]


def first_unit(trainer: Trainer) -> Unit:
    """That of the rank's first layer."""
    return units_in(layers(trainer)[0])[0]


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


def group_of_layer_1(trainer: Trainer) -> ParamGroup:
    """The parameters of the second layer's unit."""
    return unit_named(trainer, "layers.1").groups[0]


def module_named(trainer: Trainer, name: str) -> Any:
    """The module of that name in the whole model.

    Raises:
        NotHere: this rank has none.
    """
    for stage in trainer.stages:
        held = dict(cast("nn.Module", stage).named_modules())
        if name in held:
            return held[name]
    raise NotHere(name)


# ---- what


@contextlib.contextmanager
def on_its_stream(trainer: Trainer) -> Iterator[None]:
    """Inside, work is the trainer's own, without gradients."""
    with torch.no_grad(), trainer.device.on(trainer.stream):
        yield


def keep(trainer: Trainer, tensor: torch.Tensor) -> None:
    """Hold a tensor for as long as there is the trainer."""
    vars(trainer).setdefault("_held_by_faults", []).append(tensor)


@contextlib.contextmanager
def other_main_weight(group: ParamGroup, weight: torch.Tensor) -> Iterator[None]:
    """Inside, what is gathered or copied from a group's main weight is another one."""
    now, group.main_weight = group.main_weight, weight
    try:
        yield
    finally:
        group.main_weight = now


def before_last_update(trainer: Trainer, group: ParamGroup) -> torch.Tensor:
    """This rank's main weights of a group as they were before the last AdamW step, but for bits."""
    optimizer, options = trainer.optimizer, trainer.config.optim
    with on_its_stream(trainer):
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
