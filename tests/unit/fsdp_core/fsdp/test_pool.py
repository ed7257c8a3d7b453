"""What every pool promises, the dynamic and the double one: addresses, memory, refusals."""

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_core.device import Device, HostStream
from fsdp_core.fsdp.pool import DoublePool, DynamicPool, Key, Pool, make_pool
from fsdp_core.stress.races import ClockStream, Races

NUMEL = 64
NBYTES = 2 * NUMEL
GATHER = [Key(owner, "gather") for owner in range(5)]
GRAD = [Key(owner, "grad") for owner in range(5)]
NAMES = ["dynamic", "double", "traced"]


@pytest.fixture
def device() -> Device:
    return Device("cpu")


def make(name: str, device: Device, persistent: bool = True) -> Any:
    return make_pool(name, device, persistent_on_miss=persistent)


def take(pool: Pool, key: Key, stream: Any = None, numel: int = NUMEL) -> torch.Tensor:
    tensor = pool.acquire(key, numel, torch.bfloat16, stream or HostStream())
    assert tensor.shape == (numel,)
    assert tensor.dtype == torch.bfloat16
    return tensor


def give(pool: Pool, *keys: Key) -> None:
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


def cycle(pool: Pool, keys: list[Key]) -> list[int]:
    """A pass in which each key in turn is acquired and released; returns addresses."""
    addresses = []
    for key in keys:
        addresses.append(take(pool, key).data_ptr())
        give(pool, key)
    pool.end_of_pass()
    return addresses


def rivals(pool: Pool) -> tuple[Key, Key, int]:
    homes = dict(zip(GATHER, cycle(pool, GATHER), strict=True))
    other = next(key for key in GATHER[1:] if homes[key] == homes[GATHER[0]])
    return GATHER[0], other, homes[other]


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


def test_a_taken_home_moves_the_key_once(device: Device) -> None:
    """A key whose buffer another one holds in training gets its own, and stays there afterwards."""
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
    """Without `persistent_on_miss` the third buffer's bytes are freed on release."""
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


@pytest.mark.parametrize("keys", [GATHER, GRAD], ids=["gather", "grad"])
def test_double_alternates_two_sticky_buffers_a_class(device: Device, keys: list[Key]) -> None:
    """Keys of a class alternate, and keep their addresses in any order; memory stays."""
    pool = DoublePool(device, persistent_on_miss=True)
    with device.counting_memory():
        addresses = dict(zip(keys, cycle(pool, keys), strict=True))
        assert len(set(addresses.values())) == 2
        assert all(one != following for one, following in pairwise(list(addresses.values())[:4]))
        assert device.live_bytes() == 2 * NBYTES
        order = [*keys[::-1], *keys, keys[3]]
        assert cycle(pool, order) == [addresses[key] for key in order]
        assert pool.misses == 0
        other = GRAD if keys is GATHER else GATHER
        cycle(pool, other[:4])
        assert device.live_bytes() == 4 * NBYTES
        take(pool, Key(9, "gather"), numel=8)
        assert device.live_bytes() == 4 * NBYTES + 16


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_may_move_at_any_time(device: Device, frozen: bool) -> None:
    """Autograd saves no views of them: one whose place is taken gets another for ever."""
    pool = DoublePool(device, persistent_on_miss=True)
    homes = cycle(pool, GRAD[:3])
    assert homes[2] == homes[0]
    if frozen:
        pool.freeze()
    for key in (GRAD[0], GRAD[2], GRAD[0]):
        take(pool, key)
        give(pool, key)
    take(pool, GRAD[0])
    assert frozen or pool.can_acquire(GRAD[2])
    moved = take(pool, GRAD[2]).data_ptr()
    assert moved not in homes
    give(pool, GRAD[0], GRAD[2])
    pool.end_of_pass()
    assert cycle(pool, GRAD[:3]) == [*homes[:2], moved]


@pytest.mark.parametrize("grad_mode_at", ["acquire", "release", "both"])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_key_does_not_move_under_saved_views(
    device: Device, persistent: bool, grad_mode_at: str
) -> None:
    """A buffer acquired or released under grad mode does not move in that pass: both are named."""
    pool = DoublePool(device, persistent_on_miss=persistent)
    holder, rival, _ = rivals(pool)
    with torch.set_grad_enabled(grad_mode_at != "release"):
        take(pool, rival)
    with torch.set_grad_enabled(grad_mode_at != "acquire"):
        give(pool, rival)
    with torch.no_grad():
        take(pool, holder)
        with pytest.raises(RuntimeError, match="views that autograd saved") as caught:
            take(pool, rival)
    assert str(rival) in str(caught.value)
    assert str(holder) in str(caught.value)


# --- order between streams: no kernel may write memory that an earlier one still uses -------------


GATHERS = [Key(owner, "gather") for owner in range(4)]
GRADS = [Key(owner, "grad") for owner in range(4)]

CPU = Device("cpu")


class Watched(NamedTuple):
    """The race detector, and three streams that run ahead; the first is current."""

    races: Races
    main: ClockStream
    gather: ClockStream
    reduce: ClockStream


@contextlib.contextmanager
def watching() -> Iterator[Watched]:
    races = Races()
    with CPU.modelling_streams(races.clocks), CPU.watching_storages(races), races:
        made = [races.clocks.new_stream(name) for name in ("gather", "reduce")]
        yield Watched(races, races.clocks.current_stream(), *made)


@pytest.fixture
def watched() -> Iterator[Watched]:
    with watching() as found:
        yield found


def take_on(pool: Pool, key: Key, stream: ClockStream) -> torch.Tensor:
    return pool.acquire(key, NUMEL, torch.bfloat16, stream)


def work(stream: ClockStream) -> tuple[ClockStream, int]:
    """Something that is issued on the stream."""
    stream.issue()
    return stream, stream.time


Move = tuple[Key, int, int, bool]
"""A key to acquire or release, the number of the stream, that of the current one, end of pass."""
MOVES = st.lists(
    st.tuples(
        st.sampled_from([*GATHERS, *GRADS[:2]]), st.integers(0, 2), st.integers(0, 2), st.booleans()
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(NAMES), persistent=st.booleans(), moves=MOVES)
def test_no_two_uses_of_memory_race(name: str, persistent: bool, moves: list[Move]) -> None:
    """Whatever streams acquire, use and release, every write comes after the block's last use."""
    with watching() as watched, torch.no_grad():
        races, *streams = watched
        pool = make_pool(name, CPU, persistent_on_miss=persistent)
        held: dict[Key, tuple[torch.Tensor, ClockStream]] = {}
        for key, number, current, ends in moves:
            stream = streams[number]
            with CPU.on(streams[current]):
                is_new = key not in held
                if is_new:
                    held[key] = take_on(pool, key, stream), stream
                tensor, writer = held[key]
                stream.wait_stream(writer)  # the user's part: it reads what was written
                with CPU.on(stream):
                    tensor.fill_(number)
                if not is_new:
                    del held[key]
                    pool.release(key, stream)
                if ends:
                    pool.end_of_pass()
    assert [str(race) for race in races.found] == []


def test_dynamic_allocates_on_the_current_stream(watched: Watched) -> None:
    """All memory comes from the stream that is current, never from the stream it is used on."""
    pool = make_pool("dynamic", CPU, persistent_on_miss=True)

    def home(key: Key, stream: ClockStream) -> ClockStream:
        storage = take_on(pool, key, stream).untyped_storage()
        pool.release(key, stream)
        return watched.races._memory_of(storage, "").home

    for _ in range(3):
        for key, stream in ((GATHERS[0], watched.gather), (GRADS[0], watched.reduce)):
            assert home(key, stream) is watched.main
    with CPU.on(watched.reduce):
        assert home(GATHERS[0], watched.gather) is watched.reduce


@pytest.mark.parametrize("name", ["double", "traced"])
def test_a_new_slot_is_written_after_what_its_stream_did_before(
    watched: Watched, name: str
) -> None:
    """The first user of a slot comes after the stream that its memory was allocated on."""
    pool = make_pool(name, CPU, persistent_on_miss=True)
    for key in (GATHERS[0], GRADS[0]):
        take_on(pool, key, watched.main)
        pool.release(key, watched.main)
    earlier = work(watched.main)
    pool.end_of_pass()
    take_on(pool, GATHERS[1 if name == "double" else 0], watched.gather)
    assert watched.gather.comes_after(*earlier)


@pytest.mark.parametrize("name", ["double", "traced"])
def test_the_next_holder_waits_for_the_last_release_and_no_more(
    watched: Watched, name: str
) -> None:
    """A slot is written after its last release; work issued since then need not be over."""
    pool = make_pool(name, CPU, persistent_on_miss=True)
    _, main, gather, _ = watched
    for _ in range(2):
        for key in (*GATHERS[:3], GRADS[0]):
            take_on(pool, key, gather)
            pool.release(key, main)
        pool.end_of_pass()
    take_on(pool, GATHERS[0], gather)
    use = work(main)
    pool.release(GATHERS[0], main)
    later = work(main)
    take_on(pool, GATHERS[2], gather)
    assert gather.comes_after(*use)
    assert not gather.comes_after(*later)
    pool.release(GATHERS[2], main)
    pool.forget_events()
    take_on(pool, GATHERS[0], gather)
    assert not gather.comes_after(*later)
