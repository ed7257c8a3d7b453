"""Faults of numbers: see `harness.faults.numerics`."""

from collections.abc import Mapping
from types import MappingProxyType

from harness.worker.plants.planting import Planting

PLANTINGS: Mapping[str, Planting] = MappingProxyType({})
"""By name in the catalogue."""
