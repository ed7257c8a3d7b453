"""When a planted fault acts.

A rank is a process of its own that ends with its run, so what a fault patches stays patched: no
fault undoes anything. It touches public seams only: attributes and methods of the trainer's parts,
of torch, of the operating system; nothing in `fsdp_core` knows of faults.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fsdp_core.config import TrainConfig
from fsdp_core.train import Trainer


@dataclass(frozen=True, kw_only=True)
class Planting:
    """What a fault does, and when; None where it does nothing then.

    Attributes:
        before_make: before there is a trainer; gives the configuration that it is made from.
        before_step: before the step that the plant names, which capturing may be a part of.
        after_step: after that step's optimizer; the state is digested again afterwards.
    """

    before_make: Callable[[TrainConfig], TrainConfig] | None = None
    before_step: Callable[[Trainer], None] | None = None
    after_step: Callable[[Trainer], None] | None = None
