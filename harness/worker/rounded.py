"""Steps that round at random, for who wants to know how far rounding takes a run's tensors."""

import contextlib
from typing import Any

from fsdp_core.rounding import RandomRounding
from harness.records import RunSpec

_RANKS = 1 << 20
"""Seeds of a run's ranks lie beside each other, those of runs further apart."""


def rounded(spec: RunSpec, rank: int) -> contextlib.AbstractContextManager[Any]:
    """Inside, operators of this rank round at random, if the run does; for each step anew."""
    if not spec.rounding:
        return contextlib.nullcontext()
    return RandomRounding(spec.rounding * _RANKS + rank)
