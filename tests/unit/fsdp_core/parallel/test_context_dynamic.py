"""Context sizes by microbatch: who works on what, and which size a sequence needs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.parallel.context import (
    DynamicContext,
    microbatch_layout,
    smallest_size,
)


@settings(deadline=None)
@given(st.sampled_from((1, 2, 3, 4, 8)), st.integers(1, 4))
def test_every_part_of_every_pack_has_one_rank(size: int, num_packs: int) -> None:
    """Over the ranks, (pack, part) are all pairs, each once; neighbours share a pack."""
    ranks = size * num_packs
    layouts = [microbatch_layout(size, ranks, rank) for rank in range(ranks)]
    assert {layout.num_packs for layout in layouts} == {num_packs}
    assert [(layout.pack, layout.cp_rank) for layout in layouts] == [
        (pack, part) for pack in range(num_packs) for part in range(size)
    ]


@pytest.mark.parametrize(("size", "ranks"), [(3, 8), (16, 8), (0, 8)])
def test_sizes_that_do_not_cover_the_ranks(size: int, ranks: int) -> None:
    """A context size must divide the ranks of dp x cp."""
    with pytest.raises(ValueError, match=f"divides {ranks} ranks, got {size}"):
        microbatch_layout(size, ranks, 0)


@pytest.mark.parametrize(
    ("longest", "size"), [(1, 1), (32, 1), (33, 2), (64, 2), (65, 8), (256, 8)]
)
def test_the_smallest_size_that_holds_a_sequence(longest: int, size: int) -> None:
    """Of sizes 1, 2 and 8 with 32 tokens a rank."""
    assert smallest_size(longest, 32, (8, 1, 2)) == size


def test_a_sequence_that_nothing_holds() -> None:
    """The message has the limit and what makes it."""
    with pytest.raises(ValueError, match=r"at most 256 tokens \(32 a rank.* 8\), got one of 257"):
        smallest_size(257, 32, (1, 8))


def test_a_rank_alone(mesh: DeviceMesh) -> None:
    """One rank has the axis of size 1, the same object each time, and no other."""
    dynamic = DynamicContext([[0]], (1,))
    axis = dynamic.axis(1)
    assert dynamic.axis(1) is axis
    assert (axis.name, axis.size, axis.rank, axis.group.size()) == ("cp", 1, 0, 1)
    dynamic.check(axis)
    with pytest.raises(ValueError, match=r"context size out of \(1,\), got 2"):
        dynamic.axis(2)
    assert mesh.size() == 1


@pytest.mark.parametrize("rows", [[[1]], [[0], [0]], [[0], [1, 2]]])
def test_rows_that_do_not_tell_where_a_rank_is(mesh: DeviceMesh, rows: list[list[int]]) -> None:
    """This rank must be in exactly one row, and rows must be of equal length."""
    assert mesh.size() == 1
    with pytest.raises(ValueError, match="rows of equal length, one with rank 0"):
        DynamicContext(rows, (1,))


def test_a_size_that_does_not_divide_the_row(mesh: DeviceMesh) -> None:
    """It is refused before any group is made."""
    assert mesh.size() == 1
    with pytest.raises(ValueError, match="divides 1 ranks, got 2"):
        DynamicContext([[0]], (2,))
