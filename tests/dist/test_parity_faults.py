"""Faults that touch few tokens: the parity check finds them, tenfold past the bound, by name."""

from collections.abc import Iterator

import pytest

from fsdp_core.config import ParallelConfig
from tests.dist.parity_check import compare, packs_of, problem_of
from tests.dist.parity_programs import Layout, one_thread
from tests.dist.rank_pool import RankPool


@pytest.fixture(autouse=True)
def _calm() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("half the gradients", "gradient of head.weight"),
        ("swapped halves", "layers.0.attn forward"),
        ("swapped heads", "layers.0.attn forward"),
        ("one prediction", "loss"),
        ("one position", "layers.0.attn forward"),
        ("one boundary", "layers.0.attn forward"),
    ],
)
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_fault_of_one_token_is_found_by_name(
    fault: str, first: str, dtype: str, warm_ranks: RankPool
) -> None:
    """However few tokens a fault touches, in packs and in rows, it exceeds the bound tenfold."""
    parallel = ParallelConfig(cp=2)
    packed = fault.startswith("one ")
    layout = Layout(parallel, dtype, fault=fault)
    problem = problem_of("dense_tiny", packs_of(parallel, packed=packed))
    wrong = compare(problem, layout, warm_ranks).first_wrong
    assert wrong is not None
    assert first in wrong[0]
    assert wrong[1] > 10
