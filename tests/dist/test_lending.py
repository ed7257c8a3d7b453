"""Memory that a collective under way may still write is nobody else's."""

from tests.dist.lending_programs import drop_while_under_way
from tests.dist.rank_pool import RankPool


def test_what_is_lent_lives_until_the_work_is_complete(warm_ranks: RankPool) -> None:
    """A tensor that the program drops while gloo works on it stays, and is counted, until then."""
    assert warm_ranks.run(drop_while_under_way, world_size=2) == [[4004, 4], []]
