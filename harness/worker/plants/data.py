"""Faults of tokens and random numbers: see `harness.faults.data`."""

from collections.abc import Mapping
from types import MappingProxyType

from harness.worker.plants.planting import Planting

PLANTINGS: Mapping[str, Planting] = MappingProxyType({})
"""By name in the catalogue."""
