"""How well an answer of the bisector says where a fault was planted, and exact bounds of rates.

    exactly  phase, module and tensor match the entry's pointer, as far as it names them; the step
             is that of the plant, or `later` as the pointer says, and the rank too, where the plant
             has them
    near     not exactly, but in the step of the plant, one later or none that is known, and in the
             same layer or outer module, if the pointer names one, else in the same phase, or on
             the plant's rank
    no       anything else, nothing said included

Patterns are those of `fnmatch`. A tensor may be named with or without its quantity (`grads:`), a
call of a tap with or without its number (`[0]`).
"""

import functools
import math
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from harness.bisect.found import Location
from harness.codec import Json
from harness.faults.fault import Pointer

Localised = Literal["", "exactly", "near", "no"]
"""Empty where nobody asked."""
_PART = re.compile(r"layers\.\d+|embedding|norm|head")


def localised(
    found: Location, pointer: Pointer, *, step: int | None, rank: int | None
) -> Localised:
    """Compare an answer with the truth.

    Args:
        found: the bisector's answer.
        pointer: of the catalogue's entry.
        step: in which the fault was planted, None if it has no step.
        rank: on which, None if it acts on all of them, or on none in particular.
    """
    step = None if step is None else step + pointer.later
    on_rank = rank is None or found.rank == rank
    named = (
        found.phase == pointer.phase
        and fnmatchcase(found.module, pointer.module or "*")
        and any(fnmatchcase(name, pointer.tensor or "*") for name in _names(found))
    )
    if named and on_rank and step in (None, found.step):
        return "exactly"
    if step is not None and found.step is not None and found.step not in (step, step + 1):
        return "no"
    if pointer.module or pointer.tensor:
        due = _PART.search(f"{pointer.module} {pointer.tensor}")
        got = _PART.search(f"{found.module} {found.tensor}")
        return "near" if due and got and due[0] == got[0] else "no"
    is_near = found.phase == pointer.phase or (rank is not None and on_rank)
    return "near" if is_near else "no"


def _names(found: Location) -> list[str]:
    """The ways in which a tensor may be written."""
    plain = found.tensor.partition("[")[0]
    group, colon, rest = plain.partition(":")
    names = [found.tensor, plain]
    names += [rest] if colon and group in ("grads", "weights", "optim", "rng") else []
    return names + [f"{found.quantity}:{name}" for name in names[:2] if found.quantity]


# --- rates ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bounds(Json):
    """Exact (Clopper-Pearson) bounds on a rate of which `successes` in `trials` were seen."""

    low: float
    high: float
    successes: int
    trials: int

    def __str__(self) -> str:
        """As a table has it: `19/20 (75.1 to 99.9 %)`, rounded outwards."""
        low, high = math.floor(self.low * 1000) / 10, math.ceil(self.high * 1000) / 10
        return f"{self.successes}/{self.trials} ({low:g} to {high:g} %)"


@functools.cache
def bounds(successes: int, trials: int, confidence: float) -> Bounds:
    """The bounds between which the rate lies with a confidence, whatever it is."""

    def least(n: int) -> float:
        """The rate of which `n` successes or more are just too rare; 0 for none."""
        low, high, log = 0.0, 1.0, math.lgamma
        while n and low < (rate := (low + high) / 2) < high:
            tail = math.fsum(
                math.exp(log(trials + 1) - log(k + 1) - log(trials - k + 1)
                         + k * math.log(rate) + (trials - k) * math.log1p(-rate))
                for k in range(n, trials + 1)
            )  # fmt: skip
            low, high = (rate, high) if tail < (1 - confidence) / 2 else (low, rate)
        return low

    high = 1 - least(trials - successes)
    return Bounds(low=least(successes), high=high, successes=successes, trials=trials)
