"""Entries of the catalogue apply to the code as it is, so that none of them rots."""

import pytest

from tests.mutations.__main__ import ALL, applied, main
from tests.mutations.mutation import Mutation


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_applies(mutation: Mutation) -> None:
    """Its text occurs once, what replaces it is other code that compiles, its tests are there."""
    assert mutation.old != mutation.new
    assert mutation.tests
    applied(mutation)


def test_names_are_unique() -> None:
    """`-k` and the table mean one each."""
    assert len({mutation.name for mutation in ALL}) == len(ALL)


def test_an_unknown_name_is_an_error() -> None:
    """A misspelt name must not look like a success."""
    assert main(["-k", "no_such_slip"]) == 4
