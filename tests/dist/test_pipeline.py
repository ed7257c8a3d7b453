"""Pipelines over ranks: the bits of one process, and failures that name themselves."""

import pytest

from fsdp_core.parallel.pipeline_schedule import peak_live
from tests.dist.pipeline_programs import Seen, one_process, train
from tests.dist.rank_pool import RankPool

SHAPES = [
    (pp, chunks, microbatches)
    for pp in (1, 2, 4)
    for chunks in (1, 2)
    for microbatches in (1, 2, 3, 8)
    if chunks == 1 or microbatches % pp == 0
]


@pytest.mark.parametrize(("pp", "chunks", "microbatches"), SHAPES)
def test_equals_one_process(warm_ranks: RankPool, pp: int, chunks: int, microbatches: int) -> None:
    """Losses and every gradient have the bits of a loop in one process; peaks are the theory's."""
    (losses, grads) = warm_ranks.run(one_process, microbatches, world_size=1)[0]
    ranks = [seen for (seen,) in warm_ranks.run(train, chunks, [microbatches], world_size=pp)]
    assert [seen.losses for seen in ranks] == [None] * (pp - 1) + [losses]
    assert joined(ranks) == grads
    for rank, seen in enumerate(ranks):
        assert seen.peak_live == peak_live(pp, chunks, microbatches, rank)
        assert seen.slots == [list(range(microbatches))] * chunks


def joined(ranks: list[Seen]) -> dict[str, bytes]:
    """Gradients of all ranks; no parameter is on two."""
    found: dict[str, bytes] = {}
    for seen in ranks:
        assert not found.keys() & seen.grads.keys()
        found |= seen.grads
    return found
