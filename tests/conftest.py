"""Fixtures and rules for every test: GPU markers, warm ranks, one worker for the ranks."""

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.dist.rank_pool import RankPool

MAX_RANKS = 8
RANKS_PER_GPU = int(os.environ.get("RANKS_PER_GPU", "1"))
"""Tests of more ranks than there are GPUs run where ranks may share them."""
# How long an example takes is the machine's affair: none of Hypothesis' limits in seconds.
settings.register_profile(
    "any_machine",
    settings(),
    deadline=None,
    suppress_health_check=[*settings().suppress_health_check, HealthCheck.too_slow],
)
settings.load_profile("any_machine")


def pytest_configure() -> None:
    """One thread of torch: several wait busily for cores that other tests are on."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # What is imported above has torch read it already: it counts for workers and children alone.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def warm_ranks() -> Iterator[RankPool]:
    """CPU ranks that stay warm for the whole run: `warm_ranks.run(function, world_size=4)`."""
    pool = RankPool(MAX_RANKS)
    yield pool
    pool.close()


def pytest_report_header() -> list[str]:
    """Say that GPU tests ran with shared GPUs."""
    return [f"ranks per GPU: {RANKS_PER_GPU}"] if RANKS_PER_GPU > 1 else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where GPUs lack; keep tests that share the ranks on one xdist worker."""
    for item in items:
        if "warm_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("warm_ranks"))
        marker = item.get_closest_marker("gpu")
        if marker is not None:
            needed = int(marker.args[0])
            ranks_a_gpu = RANKS_PER_GPU if marker.kwargs.get("shared", True) else 1
            if (found := _num_gpus() * ranks_a_gpu) < needed:
                reason = f"needs {needed} CUDA device{'s' * (needed > 1)}, found {found}"
                item.add_marker(pytest.mark.skip(reason=reason))


def _num_gpus() -> int:
    # Imported here: most runs of a few unit tests need no torch.
    import torch

    return torch.cuda.device_count()
