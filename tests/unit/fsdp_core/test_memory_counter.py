"""Collectives get aliases: whose memory dies when is decided by the program, on its own thread."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from fsdp_core.device import Device, StorageCounter, is_collective
from tests.support.operators import Seeing

pytestmark = pytest.mark.usefixtures("mesh")
_OPS: Any = torch.ops._c10d_functional


def world() -> str:
    group = dist.group.WORLD
    assert group is not None
    return group.group_name


def reduced(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def gathered(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    dist.all_gather([out], x)
    return out


def summed(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _OPS.wait_tensor(_OPS.all_reduce(x, "sum", world()))
    return out


def summed_in_place(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _OPS.wait_tensor(_OPS.all_reduce_(x, "sum", world()))
    return out


COLLECTIVES = (reduced, gathered, summed, summed_in_place)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_gets_the_memory_and_not_the_tensor(
    collective: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Values are right, in the program's memory, but nothing that gloo holds keeps it alive."""
    given: list[torch.Tensor] = []

    def see(operator: Any, args: Any, _: Any) -> None:
        if is_collective(operator):
            given.extend(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))

    with Seeing(see), StorageCounter():
        x = torch.arange(6.0).view(2, 3)[:, 1:].contiguous()
        out = collective(x)
        assert torch.equal(out, torch.tensor([[1.0, 2.0], [4.0, 5.0]]))
        assert x.data_ptr() in {leaf.data_ptr() for leaf in given}
        lent = {leaf.untyped_storage()._cdata for leaf in given}
        assert not {x.untyped_storage()._cdata, out.untyped_storage()._cdata} & lent


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_memory_of_collectives_dies_at_once(
    collective: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """After the program's last reference nothing is counted, whatever gloo's threads are doing."""
    device, threads = Device("cpu"), set()
    with device.counting_memory():
        for _ in range(40):
            x = torch.ones(4)
            for storage in (x.untyped_storage(), collective(x).untyped_storage()):
                weakref.finalize(storage, lambda: threads.add(threading.get_ident()))
            del x, storage
            assert device.live_bytes() == 0
    assert threads == {threading.get_ident()}


def test_a_functional_collective_is_waited_for_when_the_program_does(mesh: DeviceMesh) -> None:
    """Torch's list of works under way has it until `wait_tensor` of what the program was given."""
    del mesh
    pending = torch._C._distributed_c10d._get_work_registry_size
    with StorageCounter() as counter:
        x = torch.ones(3)
        out = _OPS.all_reduce(x, "sum", world())
        del x
        assert pending() == 1
        assert counter.live_bytes == 24
        assert _OPS.wait_tensor(out) is out
        assert pending() == 0
        assert counter.live_bytes == 12


def test_a_death_leaves_the_peak_alone() -> None:
    """What dies, perhaps on another thread, never writes the peak: it could take back a rise."""
    with StorageCounter() as counter:
        x, y = torch.zeros(10), torch.zeros(5)
        counter.peak_bytes = 0
        del y
        assert counter.peak_bytes == 0
        assert counter.live_bytes == 40
        del x
