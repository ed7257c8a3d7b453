"""What each planted fault does in a rank, by its name in the catalogue.

One module a class of `harness.faults`; each has its PLANTINGS, and this one has them all.
"""

from collections.abc import Mapping
from types import MappingProxyType

from harness.worker.plants.planting import Planting
from harness.worker.plants.streams import ORDER_FAULTS

PLANTINGS: Mapping[str, Planting] = MappingProxyType(
    {name: Planting(before_step=act) for name, act in ORDER_FAULTS.items()}
)
"""Every fault that is no business of records or processes, which `harness.worker.plant` sees to."""
