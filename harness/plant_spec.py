"""Which known faults a run is given, and how surely.

A run has one `PlantSpec`, or none. Several faults at once are one of them with the others `beside`
it, so whoever passes plants on need not know how many there are; `each` and `joined` take them
apart and put them together.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from harness.codec import Json


@dataclass(frozen=True, kw_only=True)
class PlantSpec(Json):
    """A known fault to plant in a run.

    Attributes:
        fault: its name in the catalogue.
        rank: -1 is the last rank.
        tensor: name of a parameter, "" for the fault's own choice.
        legs: of a case, those that it is planted in.
        chance: that it fires, decided once a run, for all ranks.
        beside: further faults of the same run, which have none beside themselves.
    """

    fault: str
    step: int = 0
    rank: int = -1
    tensor: str = ""
    legs: tuple[str, ...] = ("candidate",)
    chance: float = 1.0
    beside: "tuple[PlantSpec, ...]" = ()

    def __post_init__(self) -> None:
        # As it is read back from JSON, or another key would come of it.
        object.__setattr__(self, "chance", float(self.chance))

    @property
    def each(self) -> "tuple[PlantSpec, ...]":
        """Every fault by itself."""
        return (dataclasses.replace(self, beside=()), *self.beside)


def joined(plants: Iterable[PlantSpec]) -> PlantSpec | None:
    """All of them as one; None if there are none."""
    held = [fault for plant in plants for fault in plant.each]
    return dataclasses.replace(held[0], beside=tuple(held[1:])) if held else None


def each_of(plant: PlantSpec | None) -> tuple[PlantSpec, ...]:
    """The faults of a plant, none of no plant."""
    return () if plant is None else plant.each
