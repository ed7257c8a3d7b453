"""Placements: what each strategy cuts over which mesh axis, and in which order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_core.config import STRATEGIES
from fsdp_core.fsdp.layout import placements_of

Strategy = str | tuple[str, ...]
ZERO1, ZERO2, ZERO3 = "optim", "optim_grads", "optim_grads_params"

# strategy, axes -> nest, levels of (weight, grad, main), replicated axes
TABLE: list[tuple[Strategy, int, tuple[int, ...], tuple[int, int, int], tuple[int, ...]]] = [
    ("no_shard", 1, (), (0, 0, 0), (0,)),
    (ZERO1, 1, (0,), (0, 0, 1), ()),
    (ZERO2, 1, (0,), (0, 1, 1), ()),
    (ZERO3, 1, (0,), (1, 1, 1), ()),
    ((ZERO3,), 1, (0,), (1, 1, 1), ()),
    # One name on two axes: that on the inner axis, and the outer one replicates. HSDP is the last.
    ("no_shard", 2, (), (0, 0, 0), (0, 1)),
    (ZERO1, 2, (1,), (0, 0, 1), (0,)),
    (ZERO2, 2, (1,), (0, 1, 1), (0,)),
    (ZERO3, 2, (1,), (1, 1, 1), (0,)),
    (("no_shard", ZERO3), 2, (1,), (1, 1, 1), (0,)),
    # The axis that cuts more is the coarser one, whatever its place in the mesh. HFSDP is first.
    ((ZERO1, ZERO3), 2, (1, 0), (1, 1, 2), ()),
    ((ZERO2, ZERO3), 2, (1, 0), (1, 2, 2), ()),
    ((ZERO3, ZERO1), 2, (0, 1), (1, 1, 2), ()),
    ((ZERO2, ZERO1), 2, (0, 1), (0, 1, 2), ()),
    ((ZERO3, "no_shard"), 2, (0,), (1, 1, 1), (1,)),
    # Ties go to the inner axis.
    ((ZERO1, ZERO1), 2, (1, 0), (0, 0, 2), ()),
    ((ZERO2, ZERO2), 2, (1, 0), (0, 2, 2), ()),
    ((ZERO3, ZERO3), 2, (1, 0), (2, 2, 2), ()),
]


@pytest.mark.parametrize(("strategy", "axes", "nest", "levels", "replicated"), TABLE)
def test_table(
    strategy: Strategy,
    axes: int,
    nest: tuple[int, ...],
    levels: tuple[int, int, int],
    replicated: tuple[int, ...],
) -> None:
    """Each strategy cuts what its row says, in that order of axes."""
    found = placements_of(strategy, axes)
    assert found.nest == nest
    assert found.levels == levels
    assert found.replicated == replicated


@pytest.mark.parametrize(
    ("strategy", "axes"),
    [("zero3", 1), ("", 1), ((), 1), ((ZERO1, ZERO3), 1), ((ZERO1,), 2), ((ZERO1, "x"), 2)],
)
def test_other_names_are_refused(strategy: Strategy, axes: int) -> None:
    """An unknown name, or another number of names than axes, lists what is legal."""
    with pytest.raises(ValueError, match=f"one for each of {axes} mesh axes, of .*'optim_grads'"):
        placements_of(strategy, axes)


@given(st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=4))
def test_every_role_is_cut_over_a_prefix_of_the_nest(names: list[str]) -> None:
    """Cuts nest: at its level a role is cut over exactly the axes that it says; none is lost."""
    found = placements_of(names, len(names))
    for level, least in zip(found.levels, (3, 2, 1), strict=True):
        cut = {axis for axis, name in enumerate(names) if STRATEGIES.index(name) >= least}
        assert cut == set(found.nest[:level])
    assert list(found.levels) == sorted(found.levels)
    assert len(found.nest) == found.levels[2]
    assert sorted((*found.nest, *found.replicated)) == list(range(len(names)))
