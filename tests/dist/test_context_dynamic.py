"""Context sizes that change from microbatch to microbatch: one training, whatever the sizes."""

from fsdp_core.parallel.context import MicrobatchLayout
from tests.dist.dynamic_context_programs import (
    SIZES,
    alone,
    bank_of_graphs,
    dynamic_run,
    groups_of_a_rank,
)
from tests.dist.rank_pool import RankPool


def test_sizes_change_nothing_but_rounding(warm_ranks: RankPool) -> None:
    """Sizes 1, 2, 4 and 8 in one run, and size 1 throughout, give one process's losses and grads.

    The last microbatch has a document that only all ranks together hold.
    """
    runs = ((*SIZES, 2, 8), (1, 1, 1, 1, 1, 8))
    (expected,) = warm_ranks.run(alone, len(runs[0]), world_size=1)
    for sizes in runs:
        for results in warm_ranks.run(dynamic_run, sizes, world_size=8):
            for size, result, bounds in zip(sizes, results, expected, strict=True):
                errors = {name: bound.units(result[name]) for name, bound in bounds.items()}
                assert max(errors.values()) <= 1.0, (size, errors)


def test_groups_are_neighbours_and_kept(warm_ranks: RankPool) -> None:
    """Each rank is in the group of its neighbours within its row; other groups are refused."""
    for rank, found in enumerate(warm_ranks.run(groups_of_a_rank, world_size=8)):
        row, place = rank % 2, rank // 2
        ranks = [2 * i + row for i in range(4)]
        first = place // 2 * 2
        assert found["axes"] == {
            1: (MicrobatchLayout(1, 4, place, 0), 0, [rank]),
            2: (
                MicrobatchLayout(2, 2, place // 2, place % 2), place % 2, ranks[first : first + 2],
            ),
            4: (MicrobatchLayout(4, 1, 0, place), place, ranks),
        }  # fmt: skip
        assert found["kept"]
        assert "process group that is kept for context size 4" in found["refused"]


def test_graphs_of_all_sizes_replay_in_any_order(warm_ranks: RankPool) -> None:
    """A graph for each size, given new tokens and offsets, has eager's bits at every replay."""
    order = (4, 1, 2, 2, 4, 1, 4)
    assert warm_ranks.run(bank_of_graphs, order, world_size=4) == [len(order)] * 4
