"""The mesh: named axes over the ranks that are there."""

import pytest
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.config import ParallelConfig
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import build_mesh


def test_degree_one_is_a_mesh(mesh: DeviceMesh) -> None:
    """One rank has a mesh with axis dp of size 1 and a process group of its own."""
    assert mesh.mesh_dim_names == ("dp",)
    assert mesh.size() == 1
    assert mesh.get_local_rank("dp") == 0
    assert mesh.get_group().size() == 1


def test_an_outer_degree_of_one_adds_no_axis(mesh: DeviceMesh) -> None:
    """A layout without outer groups has the axis dp alone: nothing to reduce over twice."""
    del mesh
    assert build_mesh(ParallelConfig(dp=1, dp_outer=1), Device("cpu")).mesh_dim_names == ("dp",)


def test_wrong_world_is_refused(mesh: DeviceMesh) -> None:
    """Degrees that do not multiply to the ranks that joined are an error with both numbers."""
    del mesh
    with pytest.raises(ValueError, match=r"Expected 3 ranks for .*, got 1\."):
        build_mesh(ParallelConfig(dp=3), Device("cpu"))
    with pytest.raises(ValueError, match=r"Expected 2 ranks for .*dp_outer=2.*, got 1\."):
        build_mesh(ParallelConfig(dp=1, dp_outer=2), Device("cpu"))
