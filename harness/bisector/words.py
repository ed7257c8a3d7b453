"""Short phrases that evidence is told in."""

from collections.abc import Iterable, Sequence

from harness.bisector.legs import Tensor

MOST_NAMES = 3


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
