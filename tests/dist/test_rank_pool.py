"""The pool of warm ranks: results in order, failures by name, nothing carried over."""

import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.rank_pool import MOST_THREADS, RankError, RankPool


@pytest.fixture(scope="module")
def own_pool() -> Iterator[RankPool]:
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


def unpicklable_on(rank: int) -> object:
    return threading.Lock() if dist.get_rank() == rank else None


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


@pytest.mark.parametrize(
    ("function", "rank", "kind", "code", "said"),
    [
        (raise_on, 1, "KeyError", 0, r"rank 1: KeyError.*in raise_on.*planted"),
        (crash_on, 1, "died", -11, "exit code -11.*in crash_on"),
        (hang_on, 0, "hang", 0, r"no answer within 3 s from ranks \[.*in hang_on"),
        (unpicklable_on, 1, "TypeError", 0, "pickle"),
    ],
)
def test_a_failure_names_its_rank_and_place(
    own_pool: RankPool, function: Any, rank: int, kind: str, code: int, said: str
) -> None:
    """The rank that raised or crashed in C, not those that lost it; new ranks replace all."""
    before = own_pool.run(own_pid, world_size=2)
    with pytest.raises(RankError, match=f"(?s){said}") as caught:
        own_pool.run(function, 1, world_size=2, timeout_s=3)
    error = caught.value
    assert (error.rank, error.kind, error.exit_code) == (rank, kind, code)
    assert not set(before) & set(own_pool.run(own_pid, world_size=2))


def test_wrecked_ranks_are_replaced(own_pool: RankPool) -> None:
    """After a failure the next call runs in new processes, without the old one's leftovers."""
    before, starts = own_pool.run(own_pid, world_size=2), own_pool.starts
    for _ in range(2):
        with pytest.raises(RankError, match="float32"):
            own_pool.run(leave_default_dtype, world_size=2)
    after = own_pool.run(own_pid, world_size=2)
    assert not set(before) & set(after)
    assert own_pool.starts == starts + 4
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_misuse_is_refused(own_pool: RankPool) -> None:
    """A world too large, or a function without a name of its own, is refused before any rank."""
    with pytest.raises(ValueError, match=r"world_size in 1\.\.2, got 3"):
        own_pool.run(own_pid, world_size=3)
    with pytest.raises(ValueError, match="top of a module"):
        own_pool.run(lambda: 0, world_size=1)


def keep_threads(number: int) -> int:
    for _ in range(number):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def test_ranks_with_many_threads_are_replaced(own_pool: RankPool) -> None:
    """What libraries leave in a rank does not pile up; the results of that call still come."""
    first = own_pool.run(keep_threads, MOST_THREADS // 2, world_size=2)
    assert own_pool.run(keep_threads, MOST_THREADS, world_size=2) == first
    assert not set(own_pool.run(own_pid, world_size=2)) & set(first)
