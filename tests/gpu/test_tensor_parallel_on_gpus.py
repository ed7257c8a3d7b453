"""Tensor parallel on GPUs: one process's numbers within bounds, graphs and streams bit for bit."""

import pytest
import torch

from tests.dist.parity_bounds import bounded
from tests.dist.rank_pool import RankPool
from tests.dist.tensor_parallel_programs import (
    chain_cotangent,
    chain_roundings,
    chain_weights,
    join,
    plain_chain,
    tokens_of,
)
from tests.gpu import tensor_parallel_on_gpus as programs


@pytest.mark.gpu(1)
def test_streams_draw_in_graphs_as_eagerly(gpu_ranks: RankPool) -> None:
    """Replays draw what eager runs draw, step by step, and neither waits for the device."""
    (found,) = gpu_ranks.run(programs.streams_in_graphs, world_size=1)
    assert found == {"numbers": True, "states": True, "steps differ": True}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_chain_equals_one_process(
    gpu_ranks: RankPool, dtype: torch.dtype, sequence_parallel: bool
) -> None:
    """Logits and every gradient are those of one process; replicated ones agree on every bit."""
    found, disputed = join(
        gpu_ranks.run(programs.run_chain, dtype, sequence_parallel, world_size=2)
    )
    inputs = chain_weights(dtype) | {"tokens": tokens_of()}
    counts = {"": chain_roundings(2)}
    expected = bounded(plain_chain, inputs, chain_cotangent(dtype), counts, dtype)
    units = {name: expected[name].units(found[name]) for name in expected}
    assert (disputed, {name for name, u in units.items() if u > 1}) == (set(), set()), units


@pytest.mark.gpu(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_replayed_step_has_eagers_bits(gpu_ranks: RankPool, sequence_parallel: bool) -> None:
    """Training as replays of one graph over NCCL, dropout included, has eager's bits."""
    found = gpu_ranks.run(programs.replay_and_eager, sequence_parallel, world_size=2)
    assert found == [[True] * programs.STEPS] * 2
