"""The stub ranks, whose leaders go by `leader_clock`: an entry, never imported by tests."""

from tests.planted import leader_clock, stub_ranks

rank_main = stub_ranks.rank_main
leader_clock.install()
