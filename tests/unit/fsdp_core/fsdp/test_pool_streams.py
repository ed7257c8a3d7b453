"""Order between streams: no kernel may write memory that an earlier one still uses."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_core.device import Device
from fsdp_core.fsdp.pool import Key, Pool, make_pool
from fsdp_core.stress.races import ClockStream, Races

NUMEL = 64
GATHER = [Key(owner, "gather") for owner in range(4)]
GRAD = [Key(owner, "grad") for owner in range(4)]
NAMES = ["dynamic", "double", "traced"]
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


def take(pool: Pool, key: Key, stream: ClockStream) -> torch.Tensor:
    return pool.acquire(key, NUMEL, torch.bfloat16, stream)


def work(stream: ClockStream) -> tuple[ClockStream, int]:
    """Something that is issued on the stream."""
    stream.issue()
    return stream, stream.time


Move = tuple[Key, int, int, bool]
"""A key to acquire or release, the number of the stream, that of the current one, end of pass."""
MOVES = st.lists(
    st.tuples(
        st.sampled_from([*GATHER, *GRAD[:2]]), st.integers(0, 2), st.integers(0, 2), st.booleans()
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
                    held[key] = take(pool, key, stream), stream
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
        storage = take(pool, key, stream).untyped_storage()
        pool.release(key, stream)
        return watched.races._memory_of(storage, "").home

    for _ in range(3):
        for key, stream in ((GATHER[0], watched.gather), (GRAD[0], watched.reduce)):
            assert home(key, stream) is watched.main
    with CPU.on(watched.reduce):
        assert home(GATHER[0], watched.gather) is watched.reduce


@pytest.mark.parametrize("name", ["double", "traced"])
def test_a_new_slot_is_written_after_what_its_stream_did_before(
    watched: Watched, name: str
) -> None:
    """The first user of a slot comes after the stream that its memory was allocated on."""
    pool = make_pool(name, CPU, persistent_on_miss=True)
    for key in (GATHER[0], GRAD[0]):
        take(pool, key, watched.main)
        pool.release(key, watched.main)
    earlier = work(watched.main)
    pool.end_of_pass()
    take(pool, GATHER[1 if name == "double" else 0], watched.gather)
    assert watched.gather.comes_after(*earlier)


@pytest.mark.parametrize("name", ["double", "traced"])
def test_the_next_holder_waits_for_the_last_release_and_no_more(
    watched: Watched, name: str
) -> None:
    """A slot is written after its last release; work issued since then need not be over."""
    pool = make_pool(name, CPU, persistent_on_miss=True)
    _, main, gather, _ = watched
    for _ in range(2):
        for key in (*GATHER[:3], GRAD[0]):
            take(pool, key, gather)
            pool.release(key, main)
        pool.end_of_pass()
    take(pool, GATHER[0], gather)
    use = work(main)
    pool.release(GATHER[0], main)
    later = work(main)
    take(pool, GATHER[2], gather)
    assert gather.comes_after(*use)
    assert not gather.comes_after(*later)
    pool.release(GATHER[2], main)
    pool.forget_events()
    take(pool, GATHER[0], gather)
    assert not gather.comes_after(*later)
