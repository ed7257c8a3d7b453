"""When a planted fault acts.

A rank is a process of its own that ends with its run, so what a fault patches stays patched: no
fault undoes anything. It touches public seams only: attributes and methods of the trainer's parts,
of torch, of the operating system; nothing in `fsdp_core` knows of faults.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from fsdp_core.config import TrainConfig
from fsdp_core.train import Trainer
from harness.plant_spec import PlantSpec

Act = Callable[[Trainer], None]
ActOn = Callable[[Trainer, str], str]
"""Given the name of a tensor, or "" for one of its own choice; returns which one it was."""
Alteration = Callable[[str], list[str]]
"""From a line of a rank's file to what is written in its place."""


@dataclass(frozen=True, kw_only=True)
class Planting:
    """What a fault does, and when; None where it does nothing then.

    Attributes:
        before_make: before there is a trainer; gives the configuration that it is made from.
        before_step: before the step that the plant names, which capturing may be a part of.
        before_step_on: the same, on the tensor that the plant names.
        from_step: before that step and every later one.
        after_step: after that step's optimizer; the state is digested again afterwards.
        after_step_on: the same, on the tensor that the plant names.
        alter: to the lines of the rank's file; made anew for each run.
        after_end: once the end record is written.
        at_capture: its step is that which captures, whatever the plant names.
    """

    before_make: Callable[[TrainConfig], TrainConfig] | None = None
    before_step: Act | None = None
    before_step_on: ActOn | None = None
    from_step: Act | None = None
    after_step: Act | None = None
    after_step_on: ActOn | None = None
    alter: Callable[[PlantSpec], Alteration] | None = None
    after_end: Callable[[], NoReturn] | None = None
    at_capture: bool = False
