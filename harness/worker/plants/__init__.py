"""What each planted fault does in a rank, by its name in the catalogue.

One module a kind of `harness.faults`; each has its PLANTINGS, and this one has them all.
"""

from collections.abc import Mapping
from types import MappingProxyType

from fsdp_core.train import Trainer
from harness.worker.plants import (
    addresses,
    collectives,
    data,
    engine,
    hooks,
    numbers,
    processes,
    streams,
)
from harness.worker.plants.planting import Planting

_KINDS = (
    hooks, addresses, streams, engine, collectives, numbers, data, processes,
)  # fmt: skip

PLANTINGS: Mapping[str, Planting] = MappingProxyType(
    {name: planting for kind in _KINDS for name, planting in kind.PLANTINGS.items()}
)
"""Every fault of the catalogue."""


def act_before_step(name: str, trainer: Trainer) -> None:
    """Plant a fault that acts before a step, at once.

    Raises:
        KeyError: no fault of that name acts then.
    """
    act = PLANTINGS[name].before_step
    if act is None:
        raise KeyError(name)
    act(trainer)
