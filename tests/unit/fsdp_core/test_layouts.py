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
    dense_sizes,
    expert_sizes,
    groups,
    legal_layouts,
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
