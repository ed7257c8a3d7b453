"""Short phrases that evidence is told in."""

from collections.abc import Iterable, Sequence

from harness.bisector.found import Location
from harness.bisector.legs import Tensor
from harness.checks.evidence import show_ranks

MOST_NAMES = 3
UNKNOWN = "not known"


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:MOST_NAMES])
    more = len(names) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def differ(number: int) -> str:
    """The verb."""
    return "differs" if number == 1 else "differ"


def ranks_of(tensors: Iterable[Tensor], name: str) -> tuple[int, ...]:
    """Ranks on which the tensor of that name is among these."""
    return tuple(sorted({tensor.rank for tensor in tensors if tensor.name == name}))


def where(place: Location | None) -> str:
    """`step 7, backward, microbatch 1, layers.0.attn.wq, rank 3`."""
    if place is None:
        return UNKNOWN
    parts = [
        "" if place.step is None else "before step 0" if place.step < 0 else f"step {place.step}",
        place.phase or "",
        "" if place.microbatch is None else f"microbatch {place.microbatch}",
        place.module,
        show_ranks(set(place.ranks)) if place.ranks else "",
    ]
    return ", ".join(part for part in parts if part) or UNKNOWN
