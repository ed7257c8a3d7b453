"""The device layer on the CPU: storage counted exactly, host streams that never lag."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from fsdp_core.device import Device, HostEvent, HostStream, StorageCounter, is_collective
from harness.recorder.rounding import RandomRounding
from tests.support.operators import Seeing


def test_counts_a_storage_once_through_views_and_writes() -> None:
    """A storage counts once, however many views, reshapes and in-place writes it goes through."""
    with StorageCounter() as counter:
        tensor = torch.zeros(10, 10)
        views = [tensor[2:5], tensor.t(), tensor.view(-1), tensor.unsqueeze(0), *tensor.unbind()]
        tensor.add_(1).mul_(2)
        torch.add(tensor, 1, out=tensor)
        assert counter.live_bytes == counter.peak_bytes == 400
        del tensor
        assert counter.live_bytes == 400
        del views
        assert counter.live_bytes == 0
        assert counter.peak_bytes == 400


def test_saved_for_backward_counts_until_backward() -> None:
    """What autograd keeps for the backward pass is live until the backward pass frees it."""
    with StorageCounter() as counter:
        x = torch.zeros(8, requires_grad=True)
        loss = x.repeat(3).sin().sum()
        assert counter.live_bytes == 32 + 96 + 4
        loss.backward()
        assert counter.live_bytes == 32 + 32 + 4


def test_resize_of_a_storage_keeps_the_count() -> None:
    """Freeing and growing a storage in place changes the count by exactly the difference."""
    device = Device("cpu")
    with device.counting_memory():
        tensor = torch.zeros(100)
        storage = tensor.untyped_storage()
        device.resize_storage(storage, 0)
        assert device.live_bytes() == 0
        device.resize_storage(storage, 1000)
        assert (device.live_bytes(), device.peak_bytes()) == (1000, 1000)
        device.resize_storage(storage, 40)
        assert (device.live_bytes(), device.peak_bytes()) == (40, 1000)
        del tensor, storage
        assert device.live_bytes() == 0


def test_resize_by_an_operator_keeps_the_count() -> None:
    """A tensor that an operator grows (resize_, or a small `out`) is counted anew."""
    with StorageCounter() as counter:
        tensor = torch.zeros(4)
        tensor.resize_(100)
        assert counter.live_bytes == 400
        out = torch.empty(0)
        torch.mul(tensor, 2.0, out=out)
        assert counter.live_bytes == 800
        del tensor, out
        assert counter.live_bytes == 0


def test_foreign_storages_do_not_count() -> None:
    """Only what an operator makes is counted."""
    outside = torch.zeros(16)
    with StorageCounter() as counter:
        made = outside + 1
        assert counter.live_bytes == 64
        halves = outside.add_(1).split(8)
        assert counter.live_bytes == 64
        del made
        assert counter.live_bytes == 0
    assert len(halves) == 2


def test_cycles_count_until_collected() -> None:
    """A tensor in a reference cycle is live until the collector runs, as it really is."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with StorageCounter() as counter:
            cycle: list[object] = [torch.zeros(25)]
            cycle.append(cycle)
            del cycle
            assert counter.live_bytes == 100
            gc.collect()
            assert counter.live_bytes == 0
    finally:
        if collecting:
            gc.enable()


def test_counting_is_off_outside() -> None:
    """Outside `counting_memory` the CPU reports 0, and a new count starts from 0."""
    device = Device("cpu")
    assert (device.live_bytes(), device.peak_bytes()) == (0, 0)
    with device.counting_memory():
        kept = torch.zeros(5)
        assert device.live_bytes() == 20
    assert (device.live_bytes(), device.peak_bytes()) == (0, 0)
    with device.counting_memory():
        assert device.live_bytes() == 0
    del kept


def test_watchers_are_told_after_the_resize() -> None:
    """A storage watcher sees each resize with the new size already there."""
    seen = []

    class Watcher:
        def resized(self, storage: torch.UntypedStorage) -> None:
            seen.append((storage._cdata, storage.nbytes()))

    storage = torch.zeros(8).untyped_storage()
    with Device("cpu").watching_storages(Watcher()):
        # Another object of the same device: its storages are the same.
        Device("cpu").resize_storage(storage, 0)
        Device("cpu").resize_storage(storage, 64)
    Device("cpu").resize_storage(storage, 32)
    assert seen == [(storage._cdata, 0), (storage._cdata, 64)]


def test_objects_of_one_device_count_together() -> None:
    """What one object resizes is counted by another that means the same device; not twice."""
    storage = torch.zeros(8).untyped_storage()
    with Device("cpu").counting_memory():
        grown = torch.zeros(8)
        Device("cpu").resize_storage(grown.untyped_storage(), 64)
        assert Device("cpu").live_bytes() == 64
        with pytest.raises(RuntimeError, match="Expected no other counting"):
            Device("cpu").counting_memory().__enter__()
    assert Device("cpu").live_bytes() == 0
    del storage


def test_host_stream_keeps_order() -> None:
    """On the CPU work is done when it is issued, so every wait is satisfied and events complete."""
    device = Device("cpu")
    stream, other = device.new_stream(), device.new_stream()
    assert isinstance(stream, HostStream)
    with device.on(stream):
        value = torch.ones(3).sum()
        event = stream.record_event()
    assert isinstance(event, HostEvent)
    other.wait_event(event)
    other.wait_stream(stream)
    device.current_stream().wait_stream(other)
    event.synchronize()
    device.synchronize()
    assert value.item() == 3


def test_rng_states_are_copies() -> None:
    """Saved generator states survive later draws, and putting them back repeats the draws."""
    device = Device("cpu")
    states = device.rng_states()
    saved = [state.clone() for state in states]
    first = torch.rand(50)
    assert all(torch.equal(a, b) for a, b in zip(states, saved, strict=True))
    device.set_rng_states(states)
    assert torch.equal(torch.rand(50), first)


def test_properties_and_refusals() -> None:
    """The CPU is named, uses gloo, and a wrong or absent device is an error."""
    device = Device("cpu")
    assert (device.is_cuda, device.collective_backend, device.name) == (False, "gloo", "cpu")
    assert device.torch_device == torch.device("cpu")
    with pytest.raises(ValueError, match="cpu or cuda, got 'tpu'"):
        Device("tpu")


def test_absent_cuda_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for cuda where torch sees none says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="cuda was asked for, but torch sees no CUDA device"):
        Device("cuda")


def test_tensors_without_memory_are_handed_on() -> None:
    """DTensor plans operators on fake tensors: they run inside, and nothing of them counts."""
    for mode in (StorageCounter(), RandomRounding(0)):
        with mode, FakeTensorMode():
            planned = torch.zeros(4, 4).detach() @ torch.zeros(4, 2)
            assert planned.shape == (4, 2)
        assert getattr(mode, "peak_bytes", 0) == 0


# --- collectives get aliases: whose memory dies when is decided by the program, on its own thread -


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
