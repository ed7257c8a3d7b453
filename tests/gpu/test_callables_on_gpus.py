"""Graphed modules on a GPU: our maker and TransformerEngine's keep to one contract."""

import importlib.util

import pytest

from tests.dist.rank_pool import RankPool
from tests.gpu import callables_on_gpus as programs
from tests.unit.fsdp_core.graph.test_callables import ORDERS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs the extra te (transformer-engine), which is not installed",
)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", ["own", "te"])
def test_hooks_run_by_the_table(gpu_ranks: RankPool, way: str, order: str) -> None:
    """The table that the CPU's makers keep to holds for both, outside of every capture."""
    chosen, one_pass = ORDERS[order]
    chunks = None if chosen is None else chosen.chunks
    (found,) = gpu_ranks.run(programs.hook_calls, way, chunks, 2, world_size=1)
    expected = [(number, phase, True) for number, phases in one_pass for phase in phases]
    assert found == [*expected * 3, len(expected) * 3]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("way", ["own", "te"])
def test_replays_equal_eager(gpu_ranks: RankPool, way: str) -> None:
    """Outputs, gradients, counters and the generator over steps of two open microbatches."""
    ((count, different),) = gpu_ranks.run(programs.count_differences, way, world_size=1)
    assert count > 40
    assert different == 0
