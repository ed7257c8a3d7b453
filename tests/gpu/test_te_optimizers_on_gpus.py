"""TransformerEngine's fused optimizers over sharded parameters: the bits of plain parameters."""

import importlib.util

import pytest
import torch
from torch.distributed.tensor import DTensor

from fsdp_core.fsdp.row_sharded import RowSharded
from tests.dist.rank_pool import RankPool
from tests.gpu import te_optimizers_on_gpus as programs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs the extra te (transformer-engine), which is not installed",
)
STRATEGIES = ["no_shard", "optim_grads_params"]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_gpu_has_the_bits_of_plain_parameters(
    gpu_ranks: RankPool, name: str, strategy: str
) -> None:
    """Gradients, parameters and states are those of the same optimizer without sharding."""
    assert gpu_ranks.run(programs.compare_with_plain, name, strategy, world_size=1) == [[]]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_gpus_have_the_bits_of_plain_parameters(
    gpu_ranks: RankPool, name: str, strategy: str
) -> None:
    """With equal data the mean of two ranks is exact: uneven and empty shards change no bit."""
    assert gpu_ranks.run(programs.compare_with_plain, name, strategy, world_size=2) == [[], []]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_torchs_adamw_up_to_rounding(gpu_ranks: RankPool, strategy: str) -> None:
    """Given the same gradients, weights agree with torch's AdamW within a bound on roundings."""
    for distance, moved in gpu_ranks.run(programs.distance_to_torch, strategy, world_size=1):
        assert distance <= 1
        assert moved > 1


@pytest.mark.gpu(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_gpu_replays_its_steps(gpu_ranks: RankPool, strategy: str) -> None:
    """A capturable FusedAdam inside a graph of the whole iteration gives the bits of eager."""
    assert gpu_ranks.run(programs.compare_with_graph, strategy, world_size=1) == [[]]


@pytest.mark.gpu(1)
@pytest.mark.skipif(
    issubclass(RowSharded, DTensor),
    reason=f"TransformerEngine makes DTensors of uneven rows on torch {torch.__version__}, "
    "which torch refuses",
)
def test_one_gpu_resumes(gpu_ranks: RankPool) -> None:
    """FusedAdam's own state dict holds sharded states, and a new optimizer goes on from it."""
    assert gpu_ranks.run(programs.resumes, world_size=1) == [[]]
