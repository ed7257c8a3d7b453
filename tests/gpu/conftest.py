"""GPUs for tests: warm ranks, each with a GPU of its own or with a share of one."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.conftest import RANKS_PER_GPU
from tests.dist.rank_pool import RankPool


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[RankPool]:
    """GPU ranks that stay warm for the whole run: `gpu_ranks.run(function, world_size=4)`."""
    num_gpus = max(torch.cuda.device_count(), 1)
    pool = RankPool(
        num_gpus * RANKS_PER_GPU,
        timeout_s=float(os.environ.get("GPU_TIMEOUT_S", "90")),
        device="cuda",
        ranks_per_gpu=RANKS_PER_GPU,
    )
    yield pool
    pool.close()
