"""Layers over pipeline stages: each once and in order, as even as can be, and what is refused."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fsdp_core.parallel.pipeline_schedule import split_layers


def sizes_of(split: tuple[tuple[range, ...], ...]) -> list[int]:
    """Layers of every stage, in the order of the model."""
    return [len(part) for chunk in zip(*split, strict=True) for part in chunk]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4), st.booleans(), st.booleans())
def test_layers_are_dealt_evenly(
    layers: int, pp: int, chunks: int, embedding: bool, head: bool
) -> None:
    """Stages in order hold all layers in order; with what counts they differ by one at most."""
    assume(layers + embedding + head >= pp * chunks)
    split = split_layers(layers, pp, chunks, counts_embedding=embedding, counts_head=head)
    assert [len(rank) for rank in split] == [chunks] * pp
    stages = [part for chunk in zip(*split, strict=True) for part in chunk]
    assert list(itertools.chain.from_iterable(stages)) == list(range(layers))
    pieces = sizes_of(split)
    pieces[0] += embedding
    pieces[-1] += head
    assert max(pieces) - min(pieces) <= 1
    assert min(pieces) >= 1


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"num_layers": 8, "pp": 4}, [2, 2, 2, 2]),
        ({"num_layers": 10, "pp": 4}, [2, 3, 3, 2]),
        ({"num_layers": 11, "pp": 4}, [3, 3, 3, 2]),
        ({"num_layers": 10, "pp": 4, "counts_embedding": True, "counts_head": True}, [2, 3, 3, 2]),
        ({"num_layers": 9, "pp": 4, "counts_head": True}, [2, 2, 3, 2]),
        ({"num_layers": 3, "pp": 4, "counts_embedding": True}, [0, 1, 1, 1]),
        ({"num_layers": 9, "pp": 2, "chunks": 2}, [2, 2, 3, 2]),
        ({"num_layers": 6, "pp": 3, "sizes": [0, 6, 0]}, [0, 6, 0]),
        ({"num_layers": 1, "pp": 1}, [1]),
    ],
)
def test_who_gets_what_does_not_divide(options: dict[str, Any], sizes: list[int]) -> None:
    """Later stages first, the last one at the end unless the head counts."""
    assert sizes_of(split_layers(**options)) == sizes


def test_ranks_have_every_pp_th_stage() -> None:
    """Chunk c of rank r is stage c * pp + r."""
    assert split_layers(8, 2, 2) == ((range(2), range(4, 6)), (range(2, 4), range(6, 8)))


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: split_layers(3, 4), "at least one layer .* for each of 4 stages, got 3"),
        (lambda: split_layers(0, 1), "num_layers >= 1, got 0"),
        (lambda: split_layers(4, 0), "pp >= 1, got 0"),
        (lambda: split_layers(4, 2, True), "chunks >= 1, got True"),
        (lambda: split_layers(4, 2, sizes=[4]), r"sizes of 2 stages that sum to 4 layers, got"),
        (lambda: split_layers(4, 2, sizes=[1, 2]), "sizes of 2 stages that sum to 4 layers, got"),
        (lambda: split_layers(4, 3, sizes=[2, 0, 2]), "at least one layer in every inner stage"),
        (lambda: split_layers(4, 2, sizes=[5, -1]), "at least one layer in every inner stage"),
    ],
)
def test_impossible_splits_name_the_rule(call: Callable[[], Any], rule: str) -> None:
    """A stage that would hold nothing, and sizes that do not fit, are refused."""
    with pytest.raises(ValueError, match=rule):
        call()
