"""Who failed first: the first to say so is found, by whoever asks in time."""

from datetime import timedelta

import torch.distributed as dist

from harness.engine.outcome import FirstFailure, claim, find

AT_ONCE = timedelta(milliseconds=1)


def test_the_first_claim_stays() -> None:
    """A later failure does not take the place of the first."""
    store = dist.HashStore()
    claim(store, FirstFailure(3, "died by SIGKILL"))
    claim(store, FirstFailure(1, "Connection closed"))
    assert find(store, AT_ONCE) == FirstFailure(3, "died by SIGKILL")


def test_nothing_is_found_where_nothing_was_said() -> None:
    """Without a claim, or a store, the answer is None after the patience, and no error."""
    assert find(dist.HashStore(), AT_ONCE) is None
    assert find(None, AT_ONCE) is None


def test_what_is_no_store_is_left_alone() -> None:
    """A leader whose ranks need no torch has a socket in its place."""
    claim(object(), FirstFailure(0, "x"))
    claim(None, FirstFailure(0, "x"))


def test_long_words_are_cut() -> None:
    """A message of any length fits into the store's answer."""
    store = dist.HashStore()
    claim(store, FirstFailure(0, "x" * 100_000))
    found = find(store, AT_ONCE)
    assert found is not None
    assert found.told == "x" * 500
