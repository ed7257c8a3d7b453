"""A rank rehearsed alone takes the memory that the same rank takes among others."""

import dataclasses

import pytest

from tests.dist.rank_pool import RankPool
from tests.memory_table.comparison import compare, small
from tests.memory_table.rehearsal import can_rehearse, predict_at_rest, rehearse


def test_prediction_is_what_ranks_measure(warm_ranks: RankPool) -> None:
    """At rest to the byte, the peak to 1 %, and all of the measured peak has an owner.

    `python -m tests.memory_table` does the same for every axis, strategy and pool.
    """
    config = small("dense_tiny", tp=2, sequence_parallel=True)
    model = dataclasses.replace(config.model, layers=1)
    config = dataclasses.replace(config, model=model, microbatches=1)
    for row in compare(warm_ranks, "tp2", config):
        assert row.is_exact_at_rest
        assert abs(row.error) <= 0.01
        assert row.unexplained <= max(0.01 * row.measured, 4096)


def test_what_other_ranks_decide_is_not_rehearsed() -> None:
    """Dropless experts on several ranks are refused; what is at rest is known all the same."""
    dropless, capacity = small("moe_tiny", dp=2, ep=2), small("moe_tiny", capacity=1.0, dp=2, ep=2)
    assert (can_rehearse(dropless), can_rehearse(capacity)) == (False, True)
    with pytest.raises(NotImplementedError, match="capacity_factor"):
        rehearse(dropless, 0)
    assert predict_at_rest(dropless, 1) == predict_at_rest(capacity, 1)


def test_a_rank_that_there_is_not_is_refused() -> None:
    """Of two ranks there is no third."""
    with pytest.raises(ValueError, match="a rank from 0 to 1, got 2"):
        predict_at_rest(small("dense_tiny", dp=2), 2)
