"""Coordinates, groups and legal layouts: laws that hold for every layout, and examples by hand."""

import itertools
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_core.config import (
    DEGREES,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    divisors,
    model_from_preset,
)
from fsdp_core.layouts import (
    AXES,
    MAX_RANKS,
    Dense,
    Expert,
    axis_rank,
    axis_size,
    dense_coordinates,
    dense_sizes,
    dynamic_cp_groups,
    expert_coordinates,
    expert_sizes,
    group_of,
    groups,
    legal_layouts,
    rank_at,
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
def test_products_are_the_world(parallel: ParallelConfig) -> None:
    """Both meshes have as many places as there are ranks, and one number of stages."""
    assert math.prod(dense_sizes(parallel)) == parallel.world_size
    assert math.prod(expert_sizes(parallel)) == parallel.world_size
    assert dense_sizes(parallel).pp == expert_sizes(parallel).pp
    for axis in AXES:
        sizes = dense_sizes(parallel) if axis in Dense._fields else expert_sizes(parallel)
        assert axis_size(parallel, axis) == getattr(sizes, axis)


@settings(deadline=None)
@given(layouts())
def test_coordinates_number_the_ranks(parallel: ParallelConfig) -> None:
    """Ranks in order are places in order, the last axis fastest; `rank_at` is the inverse."""
    ranks = range(parallel.world_size)
    for sizes, place_of in (
        (dense_sizes(parallel), dense_coordinates),
        (expert_sizes(parallel), expert_coordinates),
    ):
        places = [place_of(parallel, rank) for rank in ranks]
        assert places == list(itertools.product(*(range(size) for size in sizes)))
        assert [rank_at(parallel, place) for place in places] == list(ranks)


@settings(deadline=None)
@given(layouts())
def test_both_meshes_agree_on_stages(parallel: ParallelConfig) -> None:
    """A pipeline stage is the same ranks to dense parameters and to experts."""
    for rank in range(parallel.world_size):
        assert dense_coordinates(parallel, rank).pp == expert_coordinates(parallel, rank).pp
    whole = groups(parallel, ("dp_outer", "dp", "cp", "tp"))
    assert whole == groups(parallel, ("edp", "ep", "etp"))
    assert [len(stage) for stage in whole] == [parallel.stage_size] * parallel.pp


@settings(deadline=None)
@given(layouts(), st.sampled_from([*AXES, *FLATTENED]))
def test_groups_partition_the_ranks(parallel: ParallelConfig, axes: str | tuple[str, ...]) -> None:
    """Each rank is in one group, each group has the size of its axes, and all ascend."""
    found = groups(parallel, axes)
    names = (axes,) if isinstance(axes, str) else axes
    size = math.prod(axis_size(parallel, name) for name in names)
    assert sorted(itertools.chain(*found)) == list(range(parallel.world_size))
    assert {len(group) for group in found} == {size}
    assert all(list(group) == sorted(group) for group in found)
    assert list(found) == sorted(found)
    for group in found:
        assert all(group_of(parallel, axes, rank) == group for rank in group)


@settings(deadline=None)
@given(layouts(), st.sampled_from(AXES))
def test_a_group_is_in_the_order_of_its_axis(parallel: ParallelConfig, axis: str) -> None:
    """Along an axis only its own coordinate changes, from 0 upwards."""
    place_of = dense_coordinates if axis in Dense._fields else expert_coordinates
    for group in groups(parallel, axis):
        assert [axis_rank(parallel, axis, rank) for rank in group] == list(range(len(group)))
        others = {
            tuple(value for name, value in place_of(parallel, rank)._asdict().items()
                  if name != axis)
            for rank in group
        }  # fmt: skip
        assert len(others) == 1


@settings(deadline=None)
@given(layouts())
def test_two_axes_meet_in_one_rank(parallel: ParallelConfig) -> None:
    """Groups of two axes of one mesh have no more than their own rank in common."""
    for mesh in (Dense._fields, Expert._fields):
        for first, second in itertools.combinations(mesh, 2):
            for rank in {0, parallel.world_size // 2, parallel.world_size - 1}:
                ours = set(group_of(parallel, first, rank))
                assert ours & set(group_of(parallel, second, rank)) == {rank}


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


@settings(deadline=None)
@given(layouts(), st.data())
def test_dynamic_groups_cut_rows_of_dp_and_cp(parallel: ParallelConfig, data: Any) -> None:
    """Each is a stretch of one row of dp x cp; that of size cp is the cp group itself."""
    rows = groups(parallel, ("dp", "cp"))
    size = data.draw(st.sampled_from(divisors(parallel.dp * parallel.cp)))
    found = dynamic_cp_groups(parallel, size)
    assert sorted(itertools.chain(*found)) == list(range(parallel.world_size))
    for group in found:
        row = next(row for row in rows if group[0] in row)
        start = row.index(group[0])
        assert start % size == 0
        assert group == row[start : start + size]
    assert dynamic_cp_groups(parallel, parallel.cp) == groups(parallel, "cp")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: dense_coordinates(p, 8), "Expected a rank below 8, got 8."),
        (lambda p: expert_coordinates(p, -1), "Expected a rank below 8, got -1."),
        (lambda p: group_of(p, "tpp", 0), "Expected axes of one mesh"),
        (lambda p: group_of(p, ("dp", "ep"), 0), "Expected axes of one mesh"),
        (lambda p: group_of(p, (), 0), "Expected axes of one mesh"),
        (lambda p: axis_size(p, "dp_cp"), "Expected one of the axes"),
        (lambda p: axis_rank(p, "world_size", 0), "Expected one of the axes"),
        (lambda p: rank_at(p, Dense(0, 0, 4, 0, 0)), "Expected a place within"),
        (lambda p: rank_at(p, Expert(0, 0, -1, 0)), "Expected a place within"),
        (lambda p: dynamic_cp_groups(p, 3), "Expected a size that divides dp * cp = 4, got 3."),
        (lambda p: dynamic_cp_groups(p, 0), "Expected a size that divides dp * cp = 4, got 0."),
    ],
)
def test_what_is_not_there_is_refused(call: Any, message: str) -> None:
    """A rank, an axis or a place outside the layout is an error that says what there is."""
    with pytest.raises(ValueError, match="Expected") as caught:
        call(ParallelConfig(dp=4, tp=2))
    assert message in str(caught.value)


# --- legal layouts ----------------------------------------------------------------------------


def by_trial(
    world_size: int, model: ModelConfig, **options: tuple[Any, ...]
) -> set[ParallelConfig]:
    """Legal layouts found by trying every combination of degrees in a whole run."""
    numbers = divisors(world_size)
    found = set()
    for degrees in itertools.product(numbers, repeat=len(DEGREES)):
        chosen = dict(zip(DEGREES, degrees, strict=True))
        dense = math.prod(chosen[axis] for axis in ("dp", "dp_outer", "tp", "cp", "pp"))
        if dense != world_size:
            continue
        for sequence_parallel in (False, True):
            for values in itertools.product(*options.values()):
                fields = chosen | dict(zip(options, values, strict=True))
                try:
                    parallel = ParallelConfig(**fields, sequence_parallel=sequence_parallel)
                    TrainConfig(model=model, parallel=parallel, microbatches=4)
                except ConfigError:
                    continue
                found.add(parallel)
    return found


@pytest.mark.parametrize("preset", ["dense_tiny", "moe_tiny", "mla_moe_tiny", "moonlight_16b_a3b"])
@pytest.mark.parametrize("world_size", [1, 2, 6, 8])
def test_the_list_is_what_trial_finds(preset: str, world_size: int) -> None:
    """Every legal layout is listed, once, and no other: the rules that skip early skip no more."""
    model = model_from_preset(preset)
    listed = list(legal_layouts(world_size, model, microbatches=4))
    assert len(set(listed)) == len(listed)
    assert set(listed) == by_trial(world_size, model)


def test_options_multiply_the_list() -> None:
    """Chunks and dynamic sizes are tried where they are asked for."""
    model = model_from_preset("moe_tiny", {"layers": 4})
    options: dict[str, tuple[Any, ...]] = {"pp_chunks": (1, 2), "dynamic_cp": ((), (1, 2))}
    listed = set(legal_layouts(4, model, microbatches=4, only=options))
    assert listed == by_trial(4, model, **options)
    assert {(p.pp_chunks, p.dynamic_cp) for p in listed} == set(
        itertools.product(*options.values())
    )


@settings(deadline=None)
@given(st.sampled_from(["dense_tiny", "moe_tiny"]), st.sampled_from([4, 8, 12]), st.data())
def test_only_leaves_out_and_nothing_else(preset: str, world_size: int, data: Any) -> None:
    """Restricting a field gives the layouts of the whole list that have one of its values."""
    model = model_from_preset(preset)
    values = st.sets(st.integers(1, 8), min_size=1)
    only = data.draw(st.dictionaries(st.sampled_from(DEGREES), values, max_size=3))
    whole = legal_layouts(world_size, model)
    kept = [p for p in whole if all(getattr(p, name) in only[name] for name in only)]
    assert list(legal_layouts(world_size, model, only=only)) == kept


def test_the_list_is_lazy() -> None:
    """The first of the layouts of a hundred thousand ranks is there at once."""
    began = time.process_time()
    first = next(legal_layouts(2**17, model_from_preset("qwen3_30b_a3b")))
    assert first.world_size == 2**17
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("world_size", "only", "key"),
    [(0, {}, "world_size"), (MAX_RANKS + 1, {}, "world_size"), (8, {"edp": [1]}, "edp")],
)
def test_bad_questions_are_refused_when_asked(
    world_size: int, only: dict[str, list[int]], key: str
) -> None:
    """The error comes with the call, not with the first layout."""
    with pytest.raises(ConfigError) as caught:
        legal_layouts(world_size, ModelConfig(), only=only)
    assert caught.value.key == key


def test_numbers_of_legal_layouts() -> None:
    """A change of these numbers is a change of rules: say which."""
    counts = {
        preset: [
            sum(1 for _ in legal_layouts(world_size, model_from_preset(preset)))
            for world_size in (8, 64)
        ]
        for preset in ("dense_tiny", "moe_tiny", "mla_moe_tiny", "qwen3_8b", "qwen3_30b_a3b",
                       "moonlight_16b_a3b", "llama3_8b")
    }  # fmt: skip
    assert counts == {
        "dense_tiny": [34, 112], "moe_tiny": [238, 1655], "mla_moe_tiny": [281, 2169],
        "qwen3_8b": [50, 305], "qwen3_30b_a3b": [295, 3891], "moonlight_16b_a3b": [306, 4675],
        "llama3_8b": [50, 305],
    }  # fmt: skip
