"""Coordinates and groups: laws that hold for every layout, and examples by hand."""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_core.config import (
    ParallelConfig,
    divisors,
)
from fsdp_core.layouts import (
    AXES,
    Dense,
    Expert,
    axis_rank,
    dense_sizes,
    expert_sizes,
    groups,
)

FLATTENED = (("dp", "cp"), ("dp_outer", "dp"), ("dp_outer", "dp", "cp", "tp"), ("ep", "etp"))


@st.composite
def layouts(draw: st.DrawFn) -> ParallelConfig:
    """Any layout of at most a few hundred ranks; expert degrees divide a stage."""
    small = st.sampled_from([1, 1, 2, 3, 4])
    pp, dp_outer, dp, cp, tp = (draw(small) for _ in range(5))
    stage = dp_outer * dp * cp * tp
    ep = draw(st.sampled_from(divisors(stage)))
    etp = draw(st.sampled_from(divisors(stage // ep)))
    return ParallelConfig(pp=pp, dp_outer=dp_outer, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp)


@settings(deadline=None)
@given(layouts())
def test_coordinates_number_the_ranks(parallel: ParallelConfig) -> None:
    """Ranks in order are places in order, the last axis fastest, in both meshes alike stages."""
    ranks = range(parallel.world_size)
    for sizes in (dense_sizes(parallel), expert_sizes(parallel)):
        assert math.prod(sizes) == parallel.world_size
        axes = sizes._fields
        places = [tuple(axis_rank(parallel, axis, rank) for axis in axes) for rank in ranks]
        assert places == list(itertools.product(*(range(size) for size in sizes)))
    assert dense_sizes(parallel).pp == expert_sizes(parallel).pp
    whole = groups(parallel, ("dp_outer", "dp", "cp", "tp"))
    assert whole == groups(parallel, ("edp", "ep", "etp"))
    assert [len(stage) for stage in whole] == [parallel.stage_size] * parallel.pp


@settings(deadline=None)
@given(layouts(), st.sampled_from([*AXES, *FLATTENED]))
def test_groups_partition_the_ranks(parallel: ParallelConfig, axes: str | tuple[str, ...]) -> None:
    """Each rank is in one group, which has the size of its axes, ascends, and differs in no other.

    Along one axis its coordinate is the place in the group.
    """
    found = groups(parallel, axes)
    names = (axes,) if isinstance(axes, str) else axes
    mesh = Dense._fields if set(names) <= set(Dense._fields) else Expert._fields
    assert sorted(itertools.chain(*found)) == list(range(parallel.world_size))
    assert {len(group) for group in found} == {math.prod(getattr(parallel, n) for n in names)}
    assert list(found) == sorted(found)
    for group in found:
        assert list(group) == sorted(group)
        for axis in set(mesh) - set(names):
            assert len({axis_rank(parallel, axis, rank) for rank in group}) == 1
        if len(names) == 1:
            places = [axis_rank(parallel, names[0], rank) for rank in group]
            assert places == list(range(len(group)))


def test_the_drawing_of_the_module() -> None:
    """The example that the module's docstring draws."""
    parallel = ParallelConfig(dp=2, cp=2, tp=2, ep=2, etp=2)
    assert groups(parallel, "tp") == ((0, 1), (2, 3), (4, 5), (6, 7)) == groups(parallel, "etp")
    assert groups(parallel, "cp") == ((0, 2), (1, 3), (4, 6), (5, 7)) == groups(parallel, "ep")
    assert groups(parallel, "dp") == ((0, 4), (1, 5), (2, 6), (3, 7)) == groups(parallel, "edp")
    assert groups(parallel, ("dp", "cp")) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert groups(parallel, "pp") == tuple((rank,) for rank in range(8))


def test_experts_cut_a_stage_and_not_the_pipeline() -> None:
    """With two stages of four ranks, ep 4 is each stage; pp joins ranks four apart."""
    parallel = ParallelConfig(dp_outer=2, dp=2, pp=2, ep=4)
    assert groups(parallel, "ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups(parallel, "pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups(parallel, "dp_outer") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert groups(parallel, "edp") == tuple((rank,) for rank in range(8))
