"""Why a program does not repeat itself, as far as its own two runs tell, and what to set.

first difference                          likely cause
random generators before step 0           seed: nobody seeds them
weights before step 0                     initialisation
inputs of the first module that differs   data: its order, or augmentation from the clock
losses, from equal state                  forward: data, or an operator that is not deterministic
gradients, from equal losses              backward: an operator, or the order of a reduction
weights or optimizer, from equal gradients   update: an operator of the optimizer
random generators after a step            draws: their number depends on time or threads
"""

from dataclasses import dataclass
from typing import Literal

from harness.checks.evidence import BEFORE, state_table, step_table
from harness.program.spec import program_of
from harness.records import Difference, RunResult

Kind = Literal["seed", "initialisation", "data", "forward", "backward", "update", "draws"]
ENVIRONMENT_EVENT = "environment"


@dataclass(frozen=True)
class Cause:
    """The likely cause, in words, and what to do about it."""

    kind: Kind
    told: str
    remedy: str

    def __str__(self) -> str:
        return f"likely cause: {self.told}; {self.remedy}"


_TOLD: dict[Kind, str] = {
    "seed": "random generators are not seeded",
    "initialisation": "weights are drawn from an unseeded generator, or loaded from elsewhere",
    "data": "the program read other data: unseeded shuffling, or workers in another order",
    "forward": "the program read other data, or an operator of the forward pass varies",
    "backward": "an operator of the backward pass is not deterministic",
    "update": "an operator of the optimizer is not deterministic",
    "draws": "random numbers are drawn by the clock, by threads or by library code",
}
_TAPPED_INPUT = "taps.input"


def cause_of(reference: RunResult, control: RunResult, first: Difference) -> Cause:
    """The likely cause of the first difference between a program's own two runs."""
    kind = _kind(reference, control, first)
    told = _TOLD[kind]
    if kind == "backward" and reference.spec.world_size > 1:
        told += ", or a collective adds its parts in another order (NCCL_ALGO)"
    program = program_of(reference.spec.config)
    remedy = "set determinism: enforce, which seeds the generators and asks for such operators"
    if program is not None and program.determinism == "enforce":
        remedy = (
            "determinism is enforced already: look for generators of the program's own, worker "
            "processes, and what depends on time"
        )
    elif kind in ("backward", "update", "forward") and _is_deterministic(reference):
        remedy = "torch is asked for deterministic operators already: look for kernels of others"
    return Cause(kind, told, remedy)


def _kind(reference: RunResult, control: RunResult, first: Difference) -> Kind:
    if first.quantity == _TAPPED_INPUT:
        return "data"
    if first.quantity.startswith("taps."):
        return "backward" if first.quantity.endswith("gradient") else "forward"
    at, rank = first.step, first.rank
    ours, theirs = state_table(reference), state_table(control)
    key = (at, rank)
    groups = {
        group
        for group, text in (ours[key].digests.items() if key in ours and key in theirs else ())
        if text != theirs[key].digests.get(group)
    }
    if at == BEFORE:
        return "initialisation" if "weights" in groups else "seed"
    mine, other = step_table(reference).get(key), step_table(control).get(key)
    if mine is None or other is None or mine.microbatch_losses != other.microbatch_losses:
        return "forward"
    if groups & {"grads", "losses", "buffers"}:
        return "backward"
    return "update" if groups & {"weights", "optim"} else "draws"


def _is_deterministic(run: RunResult) -> bool:
    return any(
        event.name == ENVIRONMENT_EVENT and event.detail.get("deterministic") is True
        for records in run.ranks
        for event in records.events
    )
