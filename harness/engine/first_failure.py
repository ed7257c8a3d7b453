"""Who failed first in a run, written in its store, for the ranks that this takes with it.

A rank that failed by itself says so before it exits; for one that was killed its leader does. What
the others see is a lost connection: they look here for the cause.
"""

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

_KEY = "first failure"
_TOLD_CHARS = 500


class FirstFailure(NamedTuple):
    """The rank, and what became of it in words."""

    rank: int
    told: str


def claim(store: Any, failure: FirstFailure) -> None:
    """Write it, if nothing was written before; a store that is gone, or is none, is left alone."""
    if hasattr(store, "compare_set"):
        with suppress(RuntimeError):
            store.compare_set(_KEY, "", json.dumps([failure.rank, failure.told[:_TOLD_CHARS]]))


def find(store: Any, patience: timedelta) -> FirstFailure | None:
    """What was written, or is within `patience`; None if nothing is."""
    if store is None:
        return None
    try:
        store.wait([_KEY], patience)
        rank, told = json.loads(store.get(_KEY))
    except (RuntimeError, ValueError):
        return None
    return FirstFailure(rank, told)
