"""What every pool promises, and the dynamic one: who gets which memory, and who is refused."""

from typing import Any

import pytest
import torch

from fsdp_core.device import Device, HostStream
from fsdp_core.fsdp.pool import DoublePool, DynamicPool, Key, Pool, TracedPool, make_pool
from fsdp_core.graph.host_graph import HostGraph

NUMEL = 64
NBYTES = 2 * NUMEL
GATHER = [Key(owner, "gather") for owner in range(5)]
GRAD = [Key(owner, "grad") for owner in range(5)]
NAMES = ["dynamic", "double", "traced"]


@pytest.fixture
def device() -> Device:
    """The CPU."""
    return Device("cpu")


def make(name: str, device: Device, persistent: bool = True) -> Any:
    """A pool by name, with the attributes of its class."""
    return make_pool(name, device, persistent_on_miss=persistent)


def take(pool: Pool, key: Key, stream: Any = None, numel: int = NUMEL) -> torch.Tensor:
    """Acquire a bf16 buffer."""
    tensor = pool.acquire(key, numel, torch.bfloat16, stream or HostStream())
    assert tensor.shape == (numel,)
    assert tensor.dtype == torch.bfloat16
    return tensor


def give(pool: Pool, *keys: Key) -> None:
    """Release keys."""
    for key in keys:
        pool.release(key, HostStream())


# ---- all pools


@pytest.mark.parametrize("name", NAMES)
def test_a_release_without_an_acquire_is_refused(device: Device, name: str) -> None:
    """A key that was never acquired, or was released already, cannot be released."""
    pool = make(name, device)
    with pytest.raises(RuntimeError, match=r"Expected Key\(owner=0, role='gather'\) to be held"):
        give(pool, GATHER[0])
    for _ in range(3):
        take(pool, GATHER[0])
        take(pool, GRAD[0])
        give(pool, GATHER[0], GRAD[0])
        with pytest.raises(RuntimeError, match="to be held"):
            give(pool, GATHER[0])
        pool.end_of_pass()


@pytest.mark.parametrize("name", NAMES)
def test_acquiring_what_is_held_changes_nothing(device: Device, name: str) -> None:
    """A second acquire, after an exception say, gives the same buffer at the same address."""
    pool = make(name, device)
    for _ in range(3):
        first, grad = take(pool, GATHER[0]), take(pool, GRAD[0])
        address = first.data_ptr()
        first.fill_(7)
        assert take(pool, GATHER[0]) is first
        assert first.data_ptr() == address != grad.data_ptr()
        assert bool((first == 7).all())
        give(pool, GATHER[0], GRAD[0])
        pool.end_of_pass()


@pytest.mark.parametrize("name", NAMES)
def test_a_key_keeps_its_size(device: Device, name: str) -> None:
    """A key that comes back with another numel or dtype, held or not, is refused."""
    pool = make(name, device)
    stream = HostStream()
    for _ in range(2):
        take(pool, GATHER[0])
        take(pool, GRAD[0])
        for held in (True, False):
            with pytest.raises(ValueError, match=r"64 x torch.bfloat16 as before, got 65 x"):
                pool.acquire(GATHER[0], NUMEL + 1, torch.bfloat16, stream)
            with pytest.raises(ValueError, match=r"got 64 x torch.float16"):
                pool.acquire(GATHER[0], NUMEL, torch.float16, stream)
            if held:
                give(pool, GATHER[0], GRAD[0])
        pool.end_of_pass()


@pytest.mark.parametrize("name", NAMES)
def test_buffers_made_in_inference_mode_can_be_trained_with(device: Device, name: str) -> None:
    """An evaluation in inference mode may come first: autograd can save its buffers later."""
    pool = make(name, device)
    for _ in range(2):
        with torch.inference_mode():
            take(pool, GATHER[0])
            take(pool, GRAD[0])
            give(pool, GATHER[0], GRAD[0])
            pool.end_of_pass()
    x = torch.ones(NUMEL, dtype=torch.bfloat16, requires_grad=True)
    (x * take(pool, GATHER[0]).fill_(3)).sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 3).all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("persistent", [True, False])
def test_reserved_bytes_are_what_the_pool_holds(name: str, persistent: bool) -> None:
    """`reserved_bytes` equals the live storage at every point, at rest and with buffers out."""
    device = Device("cpu")
    with device.counting_memory():
        pool = make(name, device, persistent)
        for _ in range(3):
            for keys in (GATHER[:1], GATHER[1:4], GRAD[:3]):
                with torch.no_grad():
                    held = [take(pool, key) for key in keys]
                assert pool.reserved_bytes() == device.live_bytes() >= NBYTES * len(keys)
                give(pool, *keys)
                assert pool.reserved_bytes() == device.live_bytes()
                del held
            pool.end_of_pass()
            assert pool.reserved_bytes() == device.live_bytes()
        assert (device.live_bytes() == 0) == (name == "dynamic")


@pytest.mark.parametrize("name", NAMES)
def test_keys_have_version_counters_of_their_own(device: Device, name: str) -> None:
    """Writing one key's buffer is, to autograd, no in-place change of another's in its slot."""
    pool = make(name, device)
    for _ in range(2):
        tensors = []
        for key in (*GATHER[:3], GRAD[0]):
            tensors.append(take(pool, key))
            give(pool, key)
        versions = [tensor._version for tensor in tensors]
        take(pool, GATHER[2]).fill_(1)
        versions[2] += 1
        assert [tensor._version for tensor in tensors] == versions
        give(pool, GATHER[2])
        pool.end_of_pass()


# ---- dynamic


def test_dynamic_keeps_identity_and_frees_bytes(device: Device) -> None:
    """A key keeps its tensor and storage object for ever, and holds bytes only while acquired."""
    pool = DynamicPool(device)
    with device.counting_memory():
        first = take(pool, GATHER[0])
        identity = first.untyped_storage()._cdata
        assert device.live_bytes() == NBYTES
        give(pool, GATHER[0])
        assert device.live_bytes() == 0
        assert first.untyped_storage().nbytes() == 0
        again = take(pool, GATHER[0])
        assert again is first
        assert again.untyped_storage()._cdata == identity
        again.fill_(3)
        assert device.live_bytes() == NBYTES
        other = take(pool, GATHER[1])
        assert other.untyped_storage()._cdata != identity
        assert device.live_bytes() == device.peak_bytes() == 2 * NBYTES


# ---- inside a graph


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warm_passes", [0, 1])
def test_a_pass_can_be_captured_whole(name: str, warm_passes: int) -> None:
    """Acquire, release, miss and plan inside a capture: replays compute what eager does."""
    device = Device("cpu")
    pool = make(name, device)
    source, out = torch.zeros(NUMEL), torch.zeros(NUMEL)

    def one_pass() -> None:
        for key in (*GATHER[:3], GRAD[0]):
            take(pool, key).copy_(source).add_(key.owner)
        out.zero_()
        for key in (*GATHER[:3], GRAD[0]):
            out.add_(take(pool, key))
            give(pool, key)
        pool.end_of_pass()

    for _ in range(warm_passes):
        one_pass()
    pool.forget_events()
    graph = HostGraph(device)
    graph.capture(one_pass)
    pool.forget_events()
    if name != "traced" or warm_passes:
        pool.freeze()
    for value in (1.0, 2.0):
        source.fill_(value)
        out.zero_()
        graph.replay()
        assert bool((out == 4 * value + 3).all())
        # Eager passes between replays use the pool too.
        one_pass()
        assert bool((out == 4 * value + 3).all())


def test_make_pool_knows_three_names(device: Device) -> None:
    """The configuration's names make the pools; another name is refused."""
    assert isinstance(make_pool("dynamic", device, persistent_on_miss=True), DynamicPool)
    assert isinstance(make_pool("double", device, persistent_on_miss=True), DoublePool)
    assert isinstance(make_pool("traced", device, persistent_on_miss=True), TracedPool)
    with pytest.raises(ValueError, match="Expected pool dynamic, double or traced, got 'triple'"):
        make_pool("triple", device, persistent_on_miss=True)
