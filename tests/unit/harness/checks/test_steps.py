"""Words that messages of checks are made of."""

import pytest

from harness.checks.steps import count


@pytest.mark.parametrize(
    ("number", "noun", "told"),
    [
        (1, "microbatch", "1 microbatch"),
        (2, "microbatch", "2 microbatches"),
        (0, "tensor", "0 tensors"),
        (3, "rank", "3 ranks"),
    ],
)
def test_a_number_of_things_is_plural_unless_one(number: int, noun: str, told: str) -> None:
    """Nouns that end in a hiss take -es."""
    assert count(number, noun) == told
