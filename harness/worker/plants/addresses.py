"""Faults of addresses and of who owns memory when: see `harness.faults.addresses`."""

from collections.abc import Mapping
from types import MappingProxyType

from fsdp_core.fsdp.dynamic_pool import DynamicPool
from fsdp_core.stress.pools import WatchedPool
from fsdp_core.train import Trainer
from fsdp_core.train.build import roots
from harness.worker.plants.planting import Planting


def unstable_buffers(trainer: Trainer) -> None:
    """Gathered weights get other memory each time."""
    for schedule in (root.fsdp_schedule for root in roots(trainer.stages)):
        unstable, pool = DynamicPool(schedule.device), schedule.pool
        if isinstance(pool, WatchedPool):
            pool.inner = unstable
            continue
        schedule.pool = unstable
        for unit in schedule.units:
            for group in unit.groups:
                group.pool = unstable


PLANTINGS: Mapping[str, Planting] = MappingProxyType(
    {"unstable_buffers": Planting(before_step=unstable_buffers)}
)
"""By name in the catalogue."""
