"""A process group of one rank: degree 1 runs the same code as any other."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.config import ParallelConfig
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import Axes, build_axes, init_ranks


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    device = Device("cpu")
    init_ranks(device, dist.HashStore(), 0, 1, timeout_s=300)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def axes(mesh: DeviceMesh) -> Axes:
    """All axes of this process alone."""
    return build_axes(ParallelConfig(), Device("cpu"))


@pytest.fixture
def determinism_as_before() -> Iterator[None]:
    """Puts back the switches that a trainer sets for the whole process."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
