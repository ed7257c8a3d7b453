"""What each planted fault does in a rank, by its name in the catalogue."""

from collections.abc import Mapping
from types import MappingProxyType

from fsdp_core.train import Trainer
from harness.worker.plants import engine, numbers, processes
from harness.worker.plants.planting import Planting

PLANTINGS: Mapping[str, Planting] = MappingProxyType(
    {**engine.PLANTINGS, **numbers.PLANTINGS, **processes.PLANTINGS}
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
