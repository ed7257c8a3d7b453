"""What is said of a fault, held against the truth; and what cheaper checks would have seen of it.

How well an answer of the bisector says where a fault was planted:

    exactly  phase, module and tensor match the entry's pointer, as far as it names them; the step
             is that of the plant, or `later` as the pointer says, and the rank too, where the plant
             has them
    near     not exactly, but in the step of the plant, one later or none that is known, and
               where the pointer names a module or a tensor: in the same part of the model
               (embedding, a layer, final norm, head), or in the part before it or after it, which
               made what it takes or takes what it made;
               where it names none: in the same phase, or on the rank of the plant
    no       anything else, nothing said included

Patterns are those of `fnmatch`; a pointer that names no module or tensor asks for none. A tensor
may be named with or without its quantity (`grads:`), a call of a tap with or without its number
(`[0]`). A plant that acts on every rank has no rank to find, one of no step none to be late for.

What each cheap check would have seen alone, of what both runs hold, as somebody would who compares
two logs: a missing record is not seen, a run that ended by itself is seen by all who wait for it.

    loss at 5 decimals    of the lowest rank, as a log or a curve shows it
    loss bits             of every rank
    final weights         of every rank, after the last step
    digests               of gradients, weights, moments and random states, each step, each rank
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from harness.bisect.found import Location
from harness.checks.evidence import shared_pairs, show_value, step_table
from harness.codec import Json
from harness.faults.fault import Pointer
from harness.records import FloatBits, RunResult, StepRecord, What

Localised = Literal["", "exactly", "near", "no"]
"""Empty where nobody asked."""
_LAYER = re.compile(r"(?:^|[^\w])layers\.(\*|\d+)")
_CALL = re.compile(r"\[\d+\]$")


def localised(
    found: Location, pointer: Pointer, *, step: int | None, rank: int | None, num_layers: int
) -> Localised:
    """Compare an answer with the truth.

    Args:
        found: the bisector's answer.
        pointer: of the catalogue's entry.
        step: in which the fault was planted, None if it has no step.
        rank: on which, None if it acts on all of them, or on none in particular.
        num_layers: of the model.
    """
    step = None if step is None else step + pointer.later
    in_step = step is None or found.step == step
    on_rank = rank is None or found.rank == rank
    if in_step and on_rank and is_named(found, pointer):
        return "exactly"
    if step is not None and found.step is not None and not step <= found.step <= step + 1:
        return "no"
    if pointer.module or pointer.tensor:
        parts = _parts(found.module, found.tensor, num_layers)
        due = _parts(pointer.module, pointer.tensor, num_layers)
        return "near" if any(abs(one - other) <= 1 for one in parts for other in due) else "no"
    right_rank = rank is not None and found.rank == rank
    return "near" if found.phase == pointer.phase or right_rank else "no"


def is_named(found: Location, pointer: Pointer) -> bool:
    """Whether phase, module and tensor are right, whatever the step and the rank."""
    return (
        found.phase == pointer.phase
        and (not pointer.module or fnmatchcase(found.module, pointer.module))
        and (not pointer.tensor or any(fnmatchcase(t, pointer.tensor) for t in _names(found)))
    )


def _names(found: Location) -> Iterator[str]:
    """The ways in which a tensor may be written."""
    plain = _CALL.sub("", found.tensor)
    yield from (found.tensor, plain)
    if found.quantity:
        yield from (f"{found.quantity}:{found.tensor}", f"{found.quantity}:{plain}")
    group, colon, rest = plain.partition(":")
    if colon and group in ("grads", "weights", "optim", "rng"):
        yield rest


def _parts(module: str, tensor: str, num_layers: int) -> range:
    """Where in the line of embedding, layers, norm and head a place is; empty if not known."""
    ends = {"embedding": 0, "norm": num_layers + 1, "head": num_layers + 2}
    for name in (module, tensor):
        if (layer := _LAYER.search(name)) is not None:
            at = layer[1]
            return range(1, num_layers + 1) if at == "*" else range(int(at) + 1, int(at) + 2)
        words = re.split(r"[^a-z]", name)
        if (end := next((at for word, at in ends.items() if word in words), None)) is not None:
            return range(end, end + 1)
    return range(0)


# ---- cheaper checks

DECIMALS = 5
OURS: tuple[What, ...] = ("stale_address", "stale_guards", "race", "capture_refused")
"""What only a run that is watched ends with: a plain one would have gone on."""
How = Literal["step", "end", "no", "watched"]
STRESSED = "digests with stressors"


@dataclass(frozen=True, kw_only=True)
class Sight(Json):
    """What a check saw.

    Attributes:
        how: `step`: a difference in step `step`; `end`: the run ended before anything differed;
            `no`: nothing; `watched`: nothing up to `step`, in which a check of ours ended the run.
        step: where it says so, else None.
    """

    how: How
    step: int | None = None

    @property
    def seen(self) -> bool:
        """Whether somebody would have noticed."""
        return self.how in ("step", "end")

    def __str__(self) -> str:
        words = {"step": f"{self.step}", "end": "ends", "no": "no", "watched": "no, stopped"}
        return words[self.how]


def _loss_rounded(step: StepRecord) -> str:
    """As a log prints it, in which one NaN is like another."""
    loss: FloatBits | None = step.loss
    if loss is None:
        return "none"
    return show_value(loss) if loss.value is None else f"{loss.value:.{DECIMALS}f}"


PLAIN: dict[str, Callable[[StepRecord], object]] = {
    f"loss at {DECIMALS} decimals": _loss_rounded,
    "loss bits": lambda step: step.loss,
    "final weights": lambda step: step.digests.get("weights"),
    "digests": lambda step: step.digests,
}
"""What checks look at of a run without stressors, by the name of the column."""


def seen_plain(reference: RunResult, candidate: RunResult) -> dict[str, Sight]:
    """What each check sees of a run without stressors."""
    return {name: _seen(name, reference, candidate) for name in PLAIN}


def seen_stressed(pairs: Iterable[tuple[RunResult, RunResult]]) -> Sight:
    """What digests see of the best of several runs, with and without stressors."""
    order: tuple[How, ...] = ("step", "end", "watched", "no")
    sights = [_seen("digests", *pair) for pair in pairs]
    best = min(sights, key=lambda s: (order.index(s.how), s.step or 0), default=None)
    return best or Sight(how="no")


def _seen(name: str, reference: RunResult, candidate: RunResult) -> Sight:
    ours, theirs = step_table(reference), step_table(candidate)
    pairs = shared_pairs(ours, theirs)
    if name == "final weights":
        last = max((step for step, _ in ours), default=None)
        pairs = [pair for pair in pairs if pair[0] == last]
    elif PLAIN[name] is _loss_rounded:
        lowest = min((rank for _, rank in pairs), default=0)
        pairs = [pair for pair in pairs if pair[1] == lowest]
    look = PLAIN[name]
    found = min((pair[0] for pair in pairs if look(ours[pair]) != look(theirs[pair])), default=None)
    if found is not None:
        return Sight(how="step", step=found)
    what = candidate.outcome.what
    ended = min((r.error.step for r in candidate.ranks if r.error is not None), default=None)
    if what in OURS:
        return Sight(how="watched", step=ended)
    return Sight(how="end", step=ended) if what else Sight(how="no")
