"""The two pools: who gets which memory, which addresses hold, and who is refused."""

from typing import Any

import pytest
import torch

from fsdp_core.device import Device, HostEvent, HostStream
from fsdp_core.fsdp.pool import DoublePool, DynamicPool, Key, make_pool

NUMEL = 64
GATHER = [Key(owner, "gather") for owner in range(5)]


class LoggingStream(HostStream):
    """A stream that notes what it waited for."""

    def __init__(self) -> None:
        self.waited: list[HostEvent] = []
        self.recorded: list[HostEvent] = []

    def wait_event(self, event: HostEvent) -> None:
        self.waited.append(event)

    def record_event(self) -> HostEvent:
        self.recorded.append(HostEvent())
        return self.recorded[-1]


@pytest.fixture
def device() -> Device:
    """The CPU."""
    return Device("cpu")


def take(pool: Any, key: Key, stream: Any = None, numel: int = NUMEL) -> torch.Tensor:
    """Acquire a bf16 buffer."""
    tensor: torch.Tensor = pool.acquire(key, numel, torch.bfloat16, stream or HostStream())
    assert tensor.shape == (numel,)
    assert tensor.dtype == torch.bfloat16
    return tensor


def test_dynamic_keeps_identity_and_frees_bytes(device: Device) -> None:
    """A key keeps its tensor and storage object for ever, and holds bytes only while acquired."""
    pool = DynamicPool(device)
    with device.counting_memory():
        first = take(pool, GATHER[0])
        identity = first.untyped_storage()._cdata
        assert device.live_bytes() == 2 * NUMEL
        pool.release(GATHER[0], HostStream())
        assert device.live_bytes() == 0
        assert first.untyped_storage().nbytes() == 0
        again = take(pool, GATHER[0])
        assert again is first
        assert again.untyped_storage()._cdata == identity
        again.fill_(3)
        assert device.live_bytes() == 2 * NUMEL
        other = take(pool, GATHER[1])
        assert other.untyped_storage()._cdata != identity
        assert device.live_bytes() == device.peak_bytes() == 4 * NUMEL


def test_dynamic_orders_reuse_after_release(device: Device) -> None:
    """The next acquire waits for the release's event, and so does the stream of the allocation."""
    pool = DynamicPool(device)
    home, user, later = LoggingStream(), LoggingStream(), LoggingStream()
    take(pool, GATHER[0], home)
    pool.release(GATHER[0], user)
    assert home.waited == user.recorded
    take(pool, GATHER[0], later)
    assert later.waited == user.recorded


def test_dynamic_forgets_events(device: Device) -> None:
    """After `forget_events` no acquire waits for what was recorded before."""
    pool = DynamicPool(device)
    take(pool, GATHER[0])
    pool.release(GATHER[0], LoggingStream())
    pool.forget_events()
    later = LoggingStream()
    take(pool, GATHER[0], later)
    assert later.waited == []
    pool.freeze()
    pool.release(GATHER[0], later)


def cycle(pool: DoublePool, keys: list[Key]) -> list[int]:
    """Each key in turn: acquire, note the address, release; no two overlap."""
    addresses = []
    for key in keys:
        addresses.append(take(pool, key).data_ptr())
        pool.release(key, HostStream())
    return addresses


def test_double_alternates_two_buffers(device: Device) -> None:
    """Successive keys of one class alternate between exactly two buffers."""
    pool = DoublePool(device, persistent_on_miss=True)
    a, b, c, d, e = cycle(pool, GATHER)
    assert a != b
    assert {c, d} == {a, b}
    assert c != d
    assert e in (a, b)


def test_double_addresses_are_sticky(device: Device) -> None:
    """A key gets the address of its first time at every later time, in any order."""
    pool = DoublePool(device, persistent_on_miss=True)
    addresses = dict(zip(GATHER, cycle(pool, GATHER), strict=True))
    order = [*GATHER[::-1], *GATHER, GATHER[3]]
    assert cycle(pool, order) == [addresses[key] for key in order]


def test_double_holds_two_buffers_a_class(device: Device) -> None:
    """Memory is two buffers a (role, dtype, size), not one a key, and is never given back."""
    pool = DoublePool(device, persistent_on_miss=True)
    with device.counting_memory():
        cycle(pool, GATHER)
        assert device.live_bytes() == 2 * 2 * NUMEL
        cycle(pool, [Key(owner, "grad") for owner in range(4)])
        assert device.live_bytes() == 4 * 2 * NUMEL
        take(pool, Key(9, "gather"), numel=8)
        assert device.live_bytes() == 4 * 2 * NUMEL + 16


def test_double_same_key_twice_is_the_same_buffer(device: Device) -> None:
    """Acquiring what one already holds changes nothing."""
    pool = DoublePool(device, persistent_on_miss=True)
    assert take(pool, GATHER[0]) is take(pool, GATHER[0])


def test_persistent_on_miss_gives_a_third_buffer_for_ever(device: Device) -> None:
    """A third key at once gets a buffer of its own, keeps it, and shares it with nobody."""
    pool = DoublePool(device, persistent_on_miss=True)
    with device.counting_memory():
        a, b, c = (take(pool, key).data_ptr() for key in GATHER[:3])
        assert len({a, b, c}) == 3
        assert device.live_bytes() == 3 * 2 * NUMEL
        for key in GATHER[:3]:
            pool.release(key, HostStream())
        assert cycle(pool, GATHER[:3]) == [a, b, c]
        assert c not in cycle(pool, GATHER[3:])
        assert device.live_bytes() == 3 * 2 * NUMEL


def test_a_taken_home_moves_the_key_once(device: Device) -> None:
    """A key whose sticky buffer another one holds gets its own, and stays there afterwards."""
    pool = DoublePool(device, persistent_on_miss=True)
    homes = dict(zip(GATHER, cycle(pool, GATHER), strict=True))
    rival = next(key for key in GATHER[1:] if homes[key] == homes[GATHER[0]])
    held = take(pool, GATHER[0]).data_ptr()
    moved = take(pool, rival).data_ptr()
    assert held == homes[GATHER[0]]
    assert moved not in homes.values()
    pool.release(GATHER[0], HostStream())
    pool.release(rival, HostStream())
    assert cycle(pool, [rival, GATHER[0]]) == [moved, held]


def test_overflow_without_persistence_is_dynamic(device: Device) -> None:
    """Without `persistent_on_miss` the third buffer's bytes are freed on release."""
    pool = DoublePool(device, persistent_on_miss=False)
    with device.counting_memory():
        take(pool, GATHER[0])
        take(pool, GATHER[1])
        third = take(pool, GATHER[2])
        assert device.live_bytes() == 3 * 2 * NUMEL
        pool.release(GATHER[2], HostStream())
        assert third.untyped_storage().nbytes() == 0
        assert device.live_bytes() == 2 * 2 * NUMEL
        pool.release(GATHER[1], HostStream())
        assert take(pool, GATHER[2]).untyped_storage().nbytes() > 0
        assert device.live_bytes() == 2 * 2 * NUMEL


@pytest.mark.parametrize("persistent", [True, False])
def test_frozen_pool_refuses_a_change(device: Device, persistent: bool) -> None:
    """After `freeze` a key whose buffer is taken is an error that names both keys."""
    pool = DoublePool(device, persistent_on_miss=persistent)
    homes = dict(zip(GATHER, cycle(pool, GATHER), strict=True))
    rival = next(key for key in GATHER[1:] if homes[key] == homes[GATHER[0]])
    pool.freeze()
    assert cycle(pool, GATHER) == list(homes.values())
    take(pool, GATHER[0])
    with pytest.raises(RuntimeError, match="a graph would read foreign data") as caught:
        take(pool, rival)
    assert str(rival) in str(caught.value)
    assert str(GATHER[0]) in str(caught.value)


def test_frozen_pool_refuses_a_new_key_on_a_miss(device: Device) -> None:
    """After `freeze` a key without a home may share a free buffer, but gets no new one."""
    pool = DoublePool(device, persistent_on_miss=True)
    cycle(pool, GATHER[:2])
    pool.freeze()
    take(pool, GATHER[2])
    take(pool, GATHER[3])
    with pytest.raises(RuntimeError, match="every buffer of its class"):
        take(pool, GATHER[4])


def test_double_orders_reuse_after_release(device: Device) -> None:
    """Whoever takes a buffer next waits for its last release, whichever key that was of."""
    pool = DoublePool(device, persistent_on_miss=True)
    homes = dict(zip(GATHER, cycle(pool, GATHER), strict=True))
    rival = next(key for key in GATHER[1:] if homes[key] == homes[GATHER[0]])
    releasing, acquiring = LoggingStream(), LoggingStream()
    take(pool, GATHER[0])
    pool.release(GATHER[0], releasing)
    take(pool, rival, acquiring)
    assert acquiring.waited == releasing.recorded
    pool.release(rival, releasing)
    pool.forget_events()
    quiet = LoggingStream()
    take(pool, rival, quiet)
    assert quiet.waited == []


def test_make_pool(device: Device) -> None:
    """The configuration's names make the two pools."""
    assert isinstance(make_pool("dynamic", device, persistent_on_miss=True), DynamicPool)
    assert isinstance(make_pool("double", device, persistent_on_miss=True), DoublePool)
