"""Stressors: poison, jitter and scrambled memory, and pools that tell of their buffers."""

import time

import pytest
import torch

from fsdp_core.config import STRESSORS
from fsdp_core.device import Device
from fsdp_core.fsdp.pool import Key, Pool, make_pool
from fsdp_core.stress import stressors as module
from fsdp_core.stress.races import ClockStream
from fsdp_core.stress.stressors import (
    Jitter,
    Scramble,
    StressorMissing,
    Stressors,
    WatchedPool,
    Watcher,
)

CPU = Device("cpu")


def slept(monkeypatch: pytest.MonkeyPatch, seed: int, operators: int = 3000) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    with Jitter(CPU, seed) as jitter:
        x = torch.zeros(1)
        for _ in range(operators):
            x.add_(1)
    assert x.item() == operators
    assert jitter.delays == len(found)
    return found


def test_jitter_delays_now_and_then_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a delay an operator's gap, each of the stated length, repeatable by its seed."""
    one, again, other = (slept(monkeypatch, seed) for seed in (1, 1, 2))
    assert 3000 // module.OPERATORS[1] <= len(one) <= 3000 // module.OPERATORS[0]
    assert all(module.SLEEP_S[0] <= seconds <= module.SLEEP_S[1] for seconds in one)
    assert one == again != other


def test_ranks_are_delayed_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal delays on all ranks would leave their order alone."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    drawn = []
    for rank in range(2):
        stressors = Stressors(("jitter",), device=CPU, seed=0, rank=rank)
        assert stressors.jitter is not None
        drawn.append(stressors.jitter._random.random())
    assert drawn[0] != drawn[1]


def test_each_name_is_a_stressor_and_no_other_is_active() -> None:
    """Every name of the configuration does something, alone."""
    pool = make_pool("double", CPU, persistent_on_miss=True)
    for name in STRESSORS:
        stressors = Stressors((name,), device=CPU, seed=0, rank=0)
        parts = (stressors.jitter, stressors.scramble, stressors.races)
        kinds = [type(part).__name__.lower() for part in parts if part is not None]
        assert kinds == ([] if name == "poison" else [name])
        assert (stressors.watched(pool) is pool) == (name == "jitter")


def test_active_stressors_go_again() -> None:
    """Streams keep clocks inside, and are plain outside, also when the inside raises."""
    stressors = Stressors(STRESSORS, device=CPU, seed=0, rank=0)

    def fail() -> None:
        with stressors.active():
            assert isinstance(CPU.new_stream("x"), ClockStream)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not isinstance(CPU.new_stream("x"), ClockStream)
    assert CPU.storage_watchers == ()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_races_are_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of a GPU cannot be watched: saying so beats finding nothing."""
    monkeypatch.setattr(CPU, "kind", "cuda")
    with pytest.raises(StressorMissing, match="Expected device cpu for stressor races, got cuda"):
        Stressors(("races",), device=CPU, seed=0, rank=0)


def test_stressors_of_a_turn_are_at_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison fills, jitter delays and scramble churns in its own turn only, races in every one."""
    stressors = Stressors(STRESSORS, device=CPU, seed=0, rank=0)
    assert stressors.scramble is not None
    churned: list[str] = []
    monkeypatch.setattr(stressors.scramble, "churn", lambda: churned.append("scramble"))
    pool = stressors.watched(make_pool("double", CPU, persistent_on_miss=True))
    seen = {}
    for number, name in enumerate(("jitter", "poison", "scramble")):
        stressors.only((name,))
        with stressors.active():
            stream = CPU.current_stream()
            pool.acquire(Key(number, "grad"), 4, torch.float32, stream).zero_()
            held = pool.acquire(Key(number, "grad"), 4, torch.float32, stream)
            pool.release(Key(number, "grad"), stream)
            modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            is_jittered = stressors.jitter in modes
        stressors.before_step()
        seen[name] = (is_jittered, bool(held.isnan().all()), list(churned))
    assert seen == {
        "jitter": (True, False, []),
        "poison": (False, True, []),
        "scramble": (False, False, ["scramble"]),
    }
    with pytest.raises(ValueError, match=r"Expected some of jitter, .*, got thunder\."):
        stressors.only(("thunder",))


KEY = Key(0, "gather")
KINDS = ("dynamic", "double", "traced")


def poisoned_pool(kind: str) -> Pool:
    inner = make_pool(kind, CPU, persistent_on_miss=True)
    return Stressors(("poison",), device=CPU, seed=0, rank=0).watched(inner)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_handed_out_is_nan(kind: str, dtype: torch.dtype) -> None:
    """In every kind of pool, at the first acquire and at later ones."""
    poisoned, stream = poisoned_pool(kind), CPU.current_stream()
    for _ in range(2):
        buffer = poisoned.acquire(KEY, 33, dtype, stream)
        assert buffer.isnan().all()
        buffer.zero_()
        poisoned.release(KEY, stream)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_poison_is_nan_in_eight_bits_too(dtype: torch.dtype) -> None:
    """Both formats that are trained in; buffers of them hold bytes."""
    buffer = poisoned_pool("double").acquire(KEY, 5, torch.uint8, CPU.current_stream())
    assert buffer.view(dtype).float().isnan().all()


def test_what_is_given_back_is_nan_where_it_lies() -> None:
    """Whoever still looks at a fixed buffer reads NaN as soon as it is released."""
    poisoned, stream = poisoned_pool("double"), CPU.current_stream()
    buffer = poisoned.acquire(KEY, 8, torch.float32, stream).zero_()
    late = buffer[2:4]
    poisoned.release(KEY, stream)
    assert late.isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_held_buffer_is_left_alone(kind: str) -> None:
    """Acquiring a held key tells nobody; watchers see buffers that have memory."""
    log: list[tuple[str, Key, bool]] = []

    def logs(what: str) -> Watcher:
        return lambda key, buffer, stream: log.append((what, key, buffer.data_ptr() != 0))

    inner, stream = make_pool(kind, CPU, persistent_on_miss=True), CPU.current_stream()
    watched = WatchedPool(inner, [logs("given")], [logs("returned")])
    watched.acquire(KEY, 8, torch.float32, stream).zero_()
    assert not watched.acquire(KEY, 8, torch.float32, stream).any()
    watched.release(KEY, stream)
    assert log == [("given", KEY, True), ("returned", KEY, True)]


def test_a_release_without_an_acquire_is_the_pools_to_refuse() -> None:
    """Watching changes no error."""
    with pytest.raises(RuntimeError, match="release without an acquire"):
        poisoned_pool("double").release(KEY, CPU.current_stream())


def test_poison_keeps_autograds_counters() -> None:
    """A saved view of a parameter over the buffer is not seen to change in place."""
    poisoned, stream = poisoned_pool("double"), CPU.current_stream()
    buffer = poisoned.acquire(KEY, 4, torch.float32, stream).zero_()
    weight = torch.nn.Parameter(torch.empty(0))
    weight.data = buffer.view(2, 2)
    loss = (torch.ones(1, 2, requires_grad=True) @ weight).sum()
    poisoned.release(KEY, stream)
    poisoned.acquire(KEY, 4, torch.float32, stream).fill_(1.0)
    loss.backward()
    assert weight.grad is not None


def test_everything_else_is_the_pools() -> None:
    """Freezing, passes, events and sizes reach the pool inside."""
    inner, stream = make_pool("double", CPU, persistent_on_miss=True), CPU.current_stream()
    watched = WatchedPool(inner)
    watched.acquire(KEY, 8, torch.float32, stream)
    assert watched.reserved_bytes() == watched.inner.reserved_bytes() == 32
    assert watched.can_acquire(KEY)
    watched.release(KEY, stream)
    watched.end_of_pass()
    watched.forget_events()
    watched.freeze()
    others = [Key(owner, "gather") for owner in (1, 2, 3)]
    for other in others:
        watched.acquire(other, 8, torch.float32, stream)
    with pytest.raises(RuntimeError, match="captured buffer"):
        watched.acquire(KEY, 8, torch.float32, stream)


NUMEL, ROUNDS = 1500, 10


def test_a_block_that_is_freed_between_steps_moves() -> None:
    """Every time; without, the allocator gives the same block back as a rule."""
    scramble, buffer = Scramble(CPU, 1), torch.zeros(NUMEL)
    for owner in range(4):
        scramble.note(Key(owner, "gather"), buffer, None)
    for _ in range(ROUNDS):
        before = buffer.data_ptr()
        buffer.untyped_storage().resize_(0)
        scramble.churn()
        buffer.untyped_storage().resize_(NUMEL * 4)
        assert buffer.data_ptr() != before
    scramble.release()


def test_what_is_taken_is_no_memory_of_the_programs() -> None:
    """The count of live bytes, default generators and modes see nothing of it."""
    scramble = Scramble(CPU, 1)
    scramble.note(Key(0, "gather"), torch.zeros(4096), None)
    with CPU.counting_memory():
        state = torch.get_rng_state()
        scramble.churn()
        assert CPU.live_bytes() == CPU.peak_bytes() == 0
        assert torch.equal(torch.get_rng_state(), state)


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the buffers of the pools are."""
    monkeypatch.setattr(module, "MOST_HELD_BYTES", 2048)
    scramble = Scramble(CPU, 1)
    for owner in range(5):
        buffer = torch.empty(1024, dtype=torch.uint8)
        scramble.note(Key(owner, "gather"), buffer, None)
    scramble.churn()
    assert sum(block.numel() for block in scramble._held) == 2048
    scramble.release()
    assert scramble._held == []


def test_churn_is_the_same_with_the_same_seed() -> None:
    """So a run that fails can be run again."""

    def drawn(seed: int) -> list[int]:
        scramble = Scramble(CPU, seed)
        for owner in range(6):
            scramble.note(Key(owner, "gather"), torch.zeros(owner + 1), None)
        scramble.churn()
        return [block.numel() for block in scramble._held]

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
