"""How well an answer of the bisector says where a fault was planted.

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
"""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Literal

from harness.bisect.found import Location
from harness.faults.fault import Pointer

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
