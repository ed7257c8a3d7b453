"""The pool of fixed slots, double: which addresses hold, who moves when, and who is refused."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from fsdp_core.device import Device, HostEvent, HostStream
from fsdp_core.fsdp.pool import DoublePool, Key, Pool, make_pool

NUMEL = 64
NBYTES = 2 * NUMEL
GATHER = [Key(owner, "gather") for owner in range(5)]
GRADS = [Key(owner, "grad") for owner in range(3)]
GRAD = [Key(owner, "grad") for owner in range(5)]


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


def cycle(pool: Pool, keys: list[Key]) -> list[int]:
    """A pass in which each key in turn is acquired and released; returns addresses."""
    addresses = []
    for key in keys:
        addresses.append(take(pool, key).data_ptr())
        give(pool, key)
    pool.end_of_pass()
    return addresses


def rivals(pool: Pool) -> tuple[Key, Key, int]:
    """Two keys of one slot, after a pass, and the slot's address."""
    homes = dict(zip(GATHER, cycle(pool, GATHER), strict=True))
    other = next(key for key in GATHER[1:] if homes[key] == homes[GATHER[0]])
    return GATHER[0], other, homes[other]


# ---- addresses and memory


def test_double_alternates_two_buffers(device: Device) -> None:
    """Successive keys of one class alternate between exactly two buffers."""
    pool = DoublePool(device, persistent_on_miss=True)
    a, b, c, d, e = cycle(pool, GATHER)
    assert a != b
    assert {c, d} == {a, b}
    assert c != d
    assert e in (a, b)


@pytest.mark.parametrize("keys", [GATHER, GRAD], ids=["gather", "grad"])
def test_a_key_that_stays_leaves_two_buffers_to_the_others(device: Device, keys: list[Key]) -> None:
    """A root of a layer's size: layers alternate, so one can be gathered while another computes."""
    pool = DoublePool(device, persistent_on_miss=True)
    root = take(pool, keys[0]).data_ptr()
    found = []
    for key in keys[1:]:
        found.append(take(pool, key).data_ptr())
        give(pool, key)
    assert (len(set(found)), root in found) == (2, False)
    assert all(one != ahead for one, ahead in pairwise(found))
    assert pool.misses == 0


def test_double_addresses_are_sticky(device: Device) -> None:
    """A key gets the address of its first time at every later time, in any order."""
    pool = DoublePool(device, persistent_on_miss=True)
    addresses = dict(zip(GATHER, cycle(pool, GATHER), strict=True))
    order = [*GATHER[::-1], *GATHER, GATHER[3]]
    assert cycle(pool, order) == [addresses[key] for key in order]
    assert pool.misses == 0


def test_double_holds_two_buffers_a_class(device: Device) -> None:
    """Memory is two buffers a (role, dtype, size), not one a key, and is never given back."""
    pool = DoublePool(device, persistent_on_miss=True)
    with device.counting_memory():
        cycle(pool, GATHER)
        assert device.live_bytes() == 2 * NBYTES
        cycle(pool, GRAD[:4])
        assert device.live_bytes() == 4 * NBYTES
        take(pool, Key(9, "gather"), numel=8)
        assert device.live_bytes() == 4 * NBYTES + 16


def test_a_third_key_at_once_gets_a_buffer_for_ever(device: Device) -> None:
    """With `persistent_on_miss` it keeps that buffer, and shares it with nobody."""
    pool = DoublePool(device, persistent_on_miss=True)
    with device.counting_memory():
        a, b, c = (take(pool, key).data_ptr() for key in GATHER[:3])
        assert len({a, b, c}) == 3
        assert pool.misses == 1
        assert device.live_bytes() == 3 * NBYTES
        give(pool, *GATHER[:3])
        pool.end_of_pass()
        assert cycle(pool, GATHER[:3]) == [a, b, c]
        assert c not in cycle(pool, GATHER[3:])
        assert device.live_bytes() == 3 * NBYTES
        assert pool.misses == 1


def test_a_taken_home_moves_the_key_once(device: Device) -> None:
    """A key whose buffer another one holds in training gets its own, and stays there afterwards.

    Also if the miss is in the forward pass: that gradients follow is known only at the end.
    """
    pool = DoublePool(device, persistent_on_miss=True)
    holder, rival, home = rivals(pool)
    held = take(pool, holder).data_ptr()
    with torch.no_grad():  # as in a backward pass, and as gathers are issued
        moved = take(pool, rival).data_ptr()
        take(pool, GRAD[0])
    assert held == home != moved
    give(pool, holder, rival, GRAD[0])
    pool.end_of_pass()
    assert cycle(pool, [rival, holder]) == [moved, held]
    assert pool.misses == 1


def test_an_evaluation_leaves_the_addresses_as_they_are(device: Device) -> None:
    """A key whose buffer is taken in an evaluation uses another one, until the end of that pass."""
    pool = DoublePool(device, persistent_on_miss=True)
    holder, rival, home = rivals(pool)
    moved = set()
    for _ in range(3):
        with torch.no_grad():
            assert take(pool, holder).data_ptr() == home
            moved.add(take(pool, rival).data_ptr())
            give(pool, holder, rival)
            assert take(pool, rival).data_ptr() in moved, "moved back within a pass"
            give(pool, rival)
            pool.end_of_pass()
        assert cycle(pool, [rival, holder]) == [home, home]
    assert len(moved) == 1
    assert moved != {home}
    assert pool.reserved_bytes() == 3 * NBYTES
    assert pool.misses == 3


def test_a_displaced_key_that_is_held_stays_where_it_is(device: Device) -> None:
    """If an evaluation's buffer is still out when its pass ends, it is not moved under its user."""
    pool = DoublePool(device, persistent_on_miss=True)
    holder, rival, home = rivals(pool)
    with torch.no_grad():
        take(pool, holder)
        moved = take(pool, rival)
        give(pool, holder)
        pool.end_of_pass()
        assert take(pool, rival) is moved
        give(pool, rival)
        pool.end_of_pass()
    assert cycle(pool, [rival]) == [home]


def test_overflow_without_persistence_is_dynamic(device: Device) -> None:
    """Without `persistent_on_miss` the third buffer's bytes are freed on release.

    It is served so until the end of the pass, because autograd may have saved views of it.
    """
    pool = DoublePool(device, persistent_on_miss=False)
    with device.counting_memory():
        take(pool, GATHER[0])
        take(pool, GATHER[1])
        third = take(pool, GATHER[2])
        assert device.live_bytes() == 3 * NBYTES
        give(pool, GATHER[2])
        assert third.untyped_storage().nbytes() == 0
        assert device.live_bytes() == 2 * NBYTES
        give(pool, GATHER[1])
        assert take(pool, GATHER[2]) is third
        assert device.live_bytes() == 3 * NBYTES
        give(pool, GATHER[0], GATHER[2])
        pool.end_of_pass()
        assert take(pool, GATHER[2]).untyped_storage().nbytes() > 0
        assert device.live_bytes() == 2 * NBYTES


def test_a_displaced_key_returns_home_without_persistence(device: Device) -> None:
    """Without `persistent_on_miss` a taken home costs a dynamic buffer for the rest of the pass."""
    pool = DoublePool(device, persistent_on_miss=False)
    holder, rival, home = rivals(pool)
    take(pool, holder)
    moved = take(pool, rival)
    assert moved.data_ptr() != home
    take(pool, GRAD[0])
    give(pool, holder, rival, GRAD[0])
    assert moved.untyped_storage().nbytes() == 0
    assert take(pool, rival) is moved
    give(pool, rival)
    pool.end_of_pass()
    assert cycle(pool, [rival, holder]) == [home, home]
    assert pool.reserved_bytes() == 3 * NBYTES


def test_double_orders_reuse_after_release(device: Device) -> None:
    """Whoever takes a buffer next waits for its last release, whichever key that was of."""
    pool = DoublePool(device, persistent_on_miss=True)
    first, second, _ = rivals(pool)
    releasing, acquiring = LoggingStream(), LoggingStream()
    take(pool, first)
    pool.release(first, releasing)
    take(pool, second, acquiring)
    assert acquiring.waited == releasing.recorded
    pool.release(second, releasing)
    pool.forget_events()
    quiet = LoggingStream()
    take(pool, second, quiet)
    assert quiet.waited == []


# ---- freeze


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_frozen_pool_refuses_a_change(device: Device, persistent: bool, grad_mode: bool) -> None:
    """After `freeze` a key whose buffer is taken is an error that names both keys."""
    pool = DoublePool(device, persistent_on_miss=persistent)
    holder, rival, home = rivals(pool)
    pool.freeze()
    assert cycle(pool, [holder, rival]) == [home, home]
    with torch.set_grad_enabled(grad_mode):
        take(pool, holder)
        with pytest.raises(RuntimeError, match="a graph would read foreign data") as caught:
            take(pool, rival)
        assert str(rival) in str(caught.value)
        assert str(holder) in str(caught.value)
        give(pool, holder)
        assert take(pool, rival).data_ptr() == home


def test_gradients_of_a_frozen_pool_may_move(device: Device) -> None:
    """After `freeze` a gradient's key whose buffer is taken gets another, and keeps it."""
    pool = DoublePool(device, persistent_on_miss=True)
    homes = cycle(pool, GRADS)
    assert homes[2] == homes[0]
    pool.freeze()
    take(pool, GRADS[0])
    moved = take(pool, GRADS[2]).data_ptr()
    assert moved not in homes
    give(pool, GRADS[0], GRADS[2])
    pool.end_of_pass()
    assert cycle(pool, GRADS) == [*homes[:2], moved]


def test_a_frozen_pool_serves_keys_that_no_graph_holds(device: Device) -> None:
    """After `freeze` a key never seen shares a free buffer, or gets its own; nobody else moves."""
    pool = DoublePool(device, persistent_on_miss=True)
    a, b = cycle(pool, GATHER[:2])
    pool.freeze()
    assert take(pool, GATHER[2]).data_ptr() == a
    assert take(pool, GATHER[3]).data_ptr() == b
    own = take(pool, GATHER[4]).data_ptr()
    assert own not in (a, b)
    give(pool, *GATHER[2:])
    assert cycle(pool, GATHER) == [a, b, a, b, own]


# ---- views that autograd saved


def forward(pool: Pool, key: Key, x: torch.Tensor, value: float) -> torch.Tensor:
    """y = x @ w.t(), with w of one value in the key's buffer: autograd saves the view w.t()."""
    # `.data`, as parameters are bound: gathering again is no in-place change of what was saved.
    y = x @ take(pool, key).fill_(value).data.view(8, 8).t()
    give(pool, key)
    return y


@pytest.mark.parametrize("persistent", [True, False])
def test_a_key_does_not_move_under_saved_views(device: Device, persistent: bool) -> None:
    """A key whose buffer is taken between forward and backward is refused, naming both keys."""
    pool = DoublePool(device, persistent_on_miss=persistent)
    holder, rival, _ = rivals(pool)
    x = torch.ones(8, 8, dtype=torch.bfloat16, requires_grad=True)
    forward(pool, rival, x, 2.0)
    with torch.no_grad():
        take(pool, holder).fill_(5)
        with pytest.raises(RuntimeError, match="views that autograd saved") as caught:
            take(pool, rival)
    assert str(rival) in str(caught.value)
    assert str(holder) in str(caught.value)


@pytest.mark.parametrize("name", ["dynamic", "double", "traced"])
@pytest.mark.parametrize("persistent", [True, False])
def test_saved_views_are_read_where_the_key_is(name: str, persistent: bool) -> None:
    """Buffers that missed in forward are where backward gathers them again, with other keys out."""
    pool = make_pool(name, Device("cpu"), persistent_on_miss=persistent)
    for _ in range(3):
        x = torch.ones(8, 8, dtype=torch.bfloat16, requires_grad=True)
        take(pool, GATHER[0])
        take(pool, GATHER[1])
        y = forward(pool, GATHER[2], x, 2.0)
        give(pool, GATHER[0], GATHER[1])
        with torch.no_grad():
            # The memory goes through other hands before the backward pass gathers it again.
            for key in (GATHER[0], GATHER[1], GRAD[0]):
                take(pool, key).fill_(9)
            take(pool, GATHER[2]).fill_(3)
        y.sum().backward()
        assert x.grad is not None
        assert bool((x.grad == 24).all())
        give(pool, *GATHER[:3], GRAD[0])
        pool.end_of_pass()


@pytest.mark.parametrize("gathered_under_grad_mode", [True, False])
def test_grad_mode_counts_at_either_end(device: Device, gathered_under_grad_mode: bool) -> None:
    """A buffer acquired or released under grad mode does not move in that pass.

    A unit without gradients may gather ahead for one with them, which then releases it.
    """
    pool = DoublePool(device, persistent_on_miss=True)
    holder, rival, _ = rivals(pool)
    with torch.set_grad_enabled(gathered_under_grad_mode):
        take(pool, rival)
    with torch.set_grad_enabled(not gathered_under_grad_mode):
        give(pool, rival)
    with torch.no_grad():
        take(pool, holder)
        with pytest.raises(RuntimeError, match="views that autograd saved"):
            take(pool, rival)


@pytest.mark.parametrize("frozen", [True, False])
def test_can_acquire_says_whether_acquire_would_raise(device: Device, frozen: bool) -> None:
    """A key that must not move cannot be acquired while its buffer is taken; all others can."""
    pool = DoublePool(device, persistent_on_miss=True)
    holder, rival, home = rivals(pool)
    if frozen:
        pool.freeze()
    else:
        take(pool, rival)
        give(pool, rival)
    assert pool.can_acquire(rival)
    take(pool, holder)
    assert not pool.can_acquire(rival)
    assert pool.can_acquire(holder)
    assert pool.can_acquire(Key(9, "gather"))
    with pytest.raises(RuntimeError):
        take(pool, rival)
    give(pool, holder)
    assert pool.can_acquire(rival)
    assert take(pool, rival).data_ptr() == home
    give(pool, rival)
    pool.end_of_pass()
    take(pool, holder)
    assert pool.can_acquire(rival) is not frozen


def test_gradient_buffers_may_move_at_any_time(device: Device) -> None:
    """Autograd saves no views of gradient buffers, so they move even under grad mode."""
    pool = DoublePool(device, persistent_on_miss=True)
    addresses = cycle(pool, GRAD[:3])
    assert addresses[2] == addresses[0]
    for key in (GRAD[0], GRAD[2], GRAD[0]):
        take(pool, key)
        give(pool, key)
    take(pool, GRAD[0])
    assert pool.can_acquire(GRAD[2])
    assert take(pool, GRAD[2]).data_ptr() not in addresses
