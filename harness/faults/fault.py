"""What is known of a planted fault: where it bites, what catches it, where a search must end.

Data only, no torch. A fault is planted through public seams of the trainer, of torch or of the
operating system, never by code in `fsdp_core`; the worker implements it under the same name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.records import What

Argument = Literal["step", "rank", "tensor"]
Kind = Literal[
    "hooks", "addresses", "streams", "capture", "collectives", "numerics", "data",
    "infrastructure",
]  # fmt: skip
Phase = Literal[
    "initialisation", "input", "forward", "backward", "reduce", "optimizer", "state", "capture",
    "outside",
]  # fmt: skip
"""Of a step, in the order of its work. `initialisation`: before step 0; `input`: tokens, masks and
random numbers that go in; `reduce`: gradients over ranks, and their norm; `state`: what is kept
between steps and changed by none of these; `capture`: making graphs; `outside`: the process, its
records, its machine."""

AT_STEP: tuple[Argument, ...] = ("step", "rank")
AT_TENSOR: tuple[Argument, ...] = ("step", "rank", "tensor")
HOLD_ATTENTION = ("attn", "layer", "full_iteration")
"""Scopes in which attention is captured."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The smallest run in which a fault bites.

    Attributes:
        settings: over those of `harness.faults.catalogue.BASE`, as `base` of a scenario has them.
        graph: scopes of the candidate; empty if it is eager, as the reference always is.
        stress: stressors of the candidate.
        step: `plant.step`, of a fault that takes one: graphs are captured in step 2.
        rank: `plant.rank`, of a fault that takes one; -1 is the last.
        tensor: `plant.tensor`, of a fault that takes one; "" for the fault's own choice.
        legs: `plant.legs`.
        checks: with their limits, beside loss, state and finite: `{"peak_memory": {...}}`.
        timeout_s: of a run; little where it ends in one.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    graph: tuple[str, ...] = ()
    stress: tuple[str, ...] = ()
    step: int = 3
    rank: int = -1
    tensor: str = ""
    legs: tuple[str, ...] = ("candidate",)
    checks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timeout_s: float = 120.0


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """Where a search for a fault must end; patterns as in `fnmatch`, "" where there is no such.

    Attributes:
        phase: in which the fault acts.
        module: dotted name of the module, or of the one that holds the tensor.
        tensor: of the first tensor that is wrong: a parameter, or a tap such as `norm:output`.
        later: steps from the plant's to the first in which anything can be wrong: weights that are
            not gathered again are right until the next update.
    """

    phase: Phase
    module: str = ""
    tensor: str = ""
    later: int = 0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry of the catalogue.

    Attributes:
        name: what a scenario's `plant.fault` says.
        description: one sentence for people.
        takes: which of step, rank and tensor mean something to it; giving another is an error.
        expects: the `what` values that a verdict may name when the fault is in the candidate.
        devices: where it can be planted.
        counterpart: fault planted in the legs that do not get this one, or "".
        scopes: graph scopes of which the run needs one; empty if it needs none.
        layout: what the run's `parallel` must have, each at least; empty if any will do.
        kind: class of the fault.
        source: numbers of known failure modes that it stands for ("F31"), or "" for our own.
        symptom: what somebody would see who only looks at the training.
        everywhere: acts on every rank, and `plant.rank` means nothing to it.
        cell: where it bites.
        points_at: where a search must end; None until the entry is used for that.
    """

    name: str
    description: str
    takes: tuple[Argument, ...]
    expects: tuple[What, ...]
    devices: tuple[str, ...] = ("cpu", "cuda")
    counterpart: str = ""
    scopes: tuple[str, ...] = ()
    layout: Mapping[str, int] = field(default_factory=dict)
    kind: Kind = "infrastructure"
    source: str = ""
    symptom: str = ""
    everywhere: bool = False
    cell: Cell = field(default_factory=Cell)
    points_at: Pointer | None = None

    def lacks(self, parallel: Mapping[str, Any]) -> str:
        """What of `layout` a whole `parallel` section has not: 'tp 2 or more'; "" if it has all."""
        return " and ".join(
            name if least is True else f"{name} {least} or more"
            for name, least in self.layout.items()
            if parallel[name] < least
        )
