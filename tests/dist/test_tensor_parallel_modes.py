"""Tensor parallel in every way to run it: graphs, the compiler, FSDP units, all bit for bit."""

import pytest

from tests.dist import tensor_parallel_modes as programs
from tests.dist.rank_pool import RankPool

COMPILE_TIMEOUT_S = 240.0
"""The first program in a rank imports the compiler, which takes seconds on an idle machine."""


def assert_all(ranks: list[list[list[bool]]]) -> None:
    """Every bit of every tensor in every step on every rank."""
    for number, steps in enumerate(ranks):
        assert len(steps) == programs.STEPS
        for step, agreed in enumerate(steps):
            assert agreed == [True] * len(agreed), (number, step)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_replayed_step_has_eagers_bits(
    warm_ranks: RankPool, tp: int, sequence_parallel: bool
) -> None:
    """Replays of one step: loss, gradients, weights and random states are eager's."""
    assert_all(warm_ranks.run(programs.replay_and_eager, sequence_parallel, world_size=tp))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_blocks_graphs_have_eagers_bits(warm_ranks: RankPool, sequence_parallel: bool) -> None:
    """A block as graphs of forward and backward sums the norm's gradient once, as eager does."""
    assert_all(warm_ranks.run(programs.block_graph_and_eager, sequence_parallel, world_size=2))


@pytest.mark.parametrize(("sequence_parallel", "dropout"), [(False, 0.25), (True, 0.0)])
def test_compiled_blocks_have_eagers_bits(
    warm_ranks: RankPool, sequence_parallel: bool, dropout: float
) -> None:
    """Compiled layers and loss run eager's operators; without dropout each is one whole graph."""
    assert_all(
        warm_ranks.run(
            programs.compiled_and_eager,
            sequence_parallel,
            dropout,
            world_size=2,
            timeout_s=COMPILE_TIMEOUT_S,
        )
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_inside_of_fsdp_units(warm_ranks: RankPool, sequence_parallel: bool) -> None:
    """Over dp FSDP averages what tp has summed, and parameters keep their cuts, both kinds."""
    found = warm_ranks.run(programs.sharded_and_averaged, sequence_parallel, world_size=4)
    assert found == [[]] * 4
