"""Poison, and the pool that tells of its buffers."""

import pytest
import torch

from fsdp_core.device import Device
from fsdp_core.fsdp.pool import Key, Pool, make_pool
from fsdp_core.stress.stressors import Stressors, WatchedPool, Watcher

CPU = Device("cpu")
KEY = Key(0, "gather")
KINDS = ("dynamic", "double", "traced")


def poisoned_pool(kind: str) -> Pool:
    """A pool of a kind under the stressor."""
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
