"""The pool of warm ranks: results in order, failures by name, nothing carried over."""

import ctypes
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.dist.rank_pool import MOST_THREADS, RankError, RankPool


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """A pool of its own, for tests that wreck it."""
    pool = RankPool(2, timeout_s=30)
    yield pool
    pool.close()


def describe(offset: int) -> tuple[int, int, int, float]:
    """Rank, world, threads and a sum over the ranks."""
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), total.item()


def own_pid() -> int:
    return os.getpid()


def raise_on(rank: int) -> None:
    """One rank raises; the others wait for it in a collective."""
    if dist.get_rank() == rank:
        raise KeyError("planted")
    dist.barrier()


def crash_on(rank: int) -> None:
    """One rank crashes in C; the others wait for it."""
    if dist.get_rank() == rank:
        ctypes.string_at(0)
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


def unpicklable() -> object:
    return threading.Lock()


def leave_default_dtype() -> torch.dtype:
    """Leaves state behind, as a careless test would."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    raise RuntimeError(str(before))


def test_every_world_size_is_its_own_world(warm_ranks: RankPool) -> None:
    """Each call sees exactly the ranks that it asked for, each with one thread."""
    for world_size in (2, 1, 4, 3):
        expected_sum = sum(rank + 5 for rank in range(world_size))
        assert warm_ranks.run(describe, 5, world_size=world_size) == [
            (rank, world_size, 1, expected_sum) for rank in range(world_size)
        ]


def test_a_raise_names_its_rank_and_place(pool: RankPool) -> None:
    """The error is that of the rank that raised, not of those that lost it."""
    with pytest.raises(RankError, match=r"(?s)rank 1: KeyError.*in raise_on.*planted") as caught:
        pool.run(raise_on, 1, world_size=2)
    assert (caught.value.rank, caught.value.kind) == (1, "KeyError")


def test_a_crash_names_its_place(pool: RankPool) -> None:
    """A rank that ends in C code says from which Python function it went there."""
    with pytest.raises(RankError, match=r"(?s)exit code -11.*in crash_on") as caught:
        pool.run(crash_on, 1, world_size=2)
    assert (caught.value.rank, caught.value.kind, caught.value.exit_code) == (1, "died", -11)


def test_a_hang_ends_at_the_limit(pool: RankPool) -> None:
    """A silent rank is named at the time limit, with the place where it is."""
    pool.run(own_pid, world_size=2)
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"no answer within 1.5 s from ranks \[") as caught:
        pool.run(hang_on, 1, world_size=2, timeout_s=1.5)
    assert time.monotonic() - begin < 10
    assert caught.value.kind == "hang"
    assert "in hang_on" in str(caught.value)


def test_wrecked_ranks_are_replaced(pool: RankPool) -> None:
    """After a failure the next call runs in new processes, without the old one's leftovers."""
    before = pool.run(own_pid, world_size=2)
    for _ in range(2):
        with pytest.raises(RankError, match="float32"):
            pool.run(leave_default_dtype, world_size=2)
    after = pool.run(own_pid, world_size=2)
    assert not set(before) & set(after)
    assert pool.starts == 6
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_unpicklable_result_is_an_error(pool: RankPool) -> None:
    """A result that cannot be sent is reported, not waited for."""
    with pytest.raises(RankError, match="pickle"):
        pool.run(unpicklable, world_size=1)


def test_misuse_is_refused(pool: RankPool) -> None:
    """A world too large, or a function without a name of its own, is refused before any rank."""
    with pytest.raises(ValueError, match=r"world_size in 1\.\.2, got 3"):
        pool.run(own_pid, world_size=3)
    with pytest.raises(ValueError, match="top of a module"):
        pool.run(lambda: 0, world_size=1)
    assert pool.pids == []


def keep_threads(number: int) -> int:
    for _ in range(number):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def test_ranks_with_many_threads_are_replaced(pool: RankPool) -> None:
    """What libraries leave in a rank does not pile up; the results of that call still come."""
    first = pool.run(keep_threads, MOST_THREADS // 2, world_size=2)
    assert pool.run(keep_threads, MOST_THREADS, world_size=2) == first
    assert not set(pool.run(own_pid, world_size=2)) & set(first)
