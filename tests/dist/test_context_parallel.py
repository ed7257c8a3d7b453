"""Attention over context ranks: that of one process, and of each sequence alone."""

import pytest

from tests.dist.context_programs import all_dense_errors, all_packed_errors, sparse_packs_errors
from tests.dist.rank_pool import RankPool

SIZES = (1, 2, 4, 8)
PACK_TOKENS = 112
"""A multiple of 16 that holds the documents, padded for 8 ranks, and leaves a tail."""


@pytest.mark.parametrize("size", SIZES)
def test_attention_is_that_of_one_process(warm_ranks: RankPool, size: int) -> None:
    """Outputs and all gradients, GQA and MLA shapes, are off by rounding alone."""
    for rank, cases in enumerate(warm_ranks.run(all_dense_errors, world_size=size)):
        for case, errors in cases.items():
            assert max(errors.values()) <= 1.0, (rank, case, errors)


@pytest.mark.parametrize("size", SIZES)
def test_packed_sequences_are_as_if_alone(warm_ranks: RankPool, size: int) -> None:
    """Each packed sequence has the attention it has by itself."""
    for rank, cases in enumerate(warm_ranks.run(all_packed_errors, PACK_TOKENS, world_size=size)):
        for case, errors in cases.items():
            assert max(errors.values()) <= 1.0, (rank, case, errors)


def test_ranks_without_a_valid_token(warm_ranks: RankPool) -> None:
    """An empty pack, or one of a single token, is right on the ranks that have none of it too."""
    for cases in warm_ranks.run(sparse_packs_errors, PACK_TOKENS, world_size=4):
        assert len(cases) == 3
        for case, errors in cases.items():
            assert max(errors.values()) <= 1.0, (case, errors)
