"""GPUs for tests: warm ranks, each with a GPU of its own."""

from collections.abc import Iterator

import pytest
import torch

from tests.dist.rank_pool import RankPool


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[RankPool]:
    """GPU ranks that stay warm for the whole run: `gpu_ranks.run(function, world_size=4)`."""
    num_gpus = max(torch.cuda.device_count(), 1)
    pool = RankPool(num_gpus, timeout_s=120.0, device="cuda", one_world=True)
    yield pool
    pool.close()
