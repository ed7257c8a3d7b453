"""A mesh of three of which this process is the middle rank, and the others are not there."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD, RANK = 3, 1


@pytest.fixture(scope="module")
def trio() -> Iterator[DeviceMesh]:
    """Rank 1 of a mesh of three whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield init_device_mesh("cpu", (WORLD,))
    dist.destroy_process_group()
