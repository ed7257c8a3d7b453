"""Layouts: coordinates and groups by law, and what random models accept and refuse."""

import itertools
import math
from dataclasses import fields
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_core.config import (
    DEGREES,
    DENSE_DEGREES,
    LAYOUT_RULES,
    PARALLEL_RULES,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    divisors,
)
from fsdp_core.config.parallel import (
    AXES,
    Dense,
    Expert,
    axis_rank,
    dense_sizes,
    expert_sizes,
    groups,
)
from harness.scenario.schema import legal_layouts

FLATTENED = (("dp", "cp"), ("dp_outer", "dp"), ("dp_outer", "dp", "cp", "tp"), ("ep", "etp"))


@st.composite
def legal(draw: st.DrawFn) -> ParallelConfig:
    """Any layout of at most a few hundred ranks; expert degrees divide a stage."""
    small = st.sampled_from([1, 1, 2, 3, 4])
    pp, dp_outer, dp, cp, tp = (draw(small) for _ in range(5))
    stage = dp_outer * dp * cp * tp
    ep = draw(st.sampled_from(divisors(stage)))
    etp = draw(st.sampled_from(divisors(stage // ep)))
    return ParallelConfig(pp=pp, dp_outer=dp_outer, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp)


@settings(deadline=None)
@given(legal())
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
@given(legal(), st.sampled_from([*AXES, *FLATTENED]))
def test_groups_partition_the_ranks(parallel: ParallelConfig, axes: str | tuple[str, ...]) -> None:
    """Each rank is in one group, which has the size of its axes, ascends."""
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


NAMES = tuple(field.name for field in fields(ParallelConfig))
RULES = {rule.name for rule in PARALLEL_RULES} | {rule.name for rule in LAYOUT_RULES}
Fields = dict[str, Any]


def of(*numbers: int) -> st.SearchStrategy[int]:
    return st.sampled_from(numbers)


EVEN: Fields = {
    "heads": 12, "kv_heads": 12, "head_dim": 8, "ffn": 24, "vocab_size": 24, "seq": 48,
    "layers": 12,
}  # fmt: skip
EVEN_EXPERTS: Fields = {"experts": 12, "top_k": 2, "expert_ffn": 12, "shared_expert_ffn": 12}
ODD: dict[str, tuple[int, ...]] = {
    "heads": (8,), "kv_heads": (1, 2, 3), "ffn": (27, 16), "vocab_size": (27, 16),
    "seq": (8, 12, 18, 27), "layers": (1, 2, 3), "experts": (4, 9), "expert_ffn": (8, 9),
    "shared_expert_ffn": (0, 8, 9), "first_dense_layers": (1,),
}  # fmt: skip
"""What may be otherwise than in a model that every degree divides."""


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    sizes = EVEN | (EVEN_EXPERTS if draw(of(0, 1, 1, 1)) else {})
    names = [name for name in ODD if name in sizes or "experts" in sizes] + ["seq", "layers"] * 3
    for name in draw(
        st.lists(st.sampled_from(names), min_size=draw(of(0, 1)), max_size=2, unique=True)
    ):
        sizes = sizes | {name: draw(of(*ODD[name]))}
    if sizes["heads"] % sizes["kv_heads"]:
        sizes = sizes | {"kv_heads": sizes["heads"]}
    if sizes.get("first_dense_layers", 0) >= sizes["layers"]:
        sizes = sizes | {"layers": 2}
    return ModelConfig(**sizes)


@st.composite
def layouts(draw: st.DrawFn) -> Fields:
    found: Fields = dict.fromkeys((*DEGREES, "pp_chunks"), 1)
    for name in draw(
        st.lists(st.sampled_from((*DEGREES, "tp", "cp", "pp")), min_size=1, max_size=4, unique=True)
    ):
        found[name] = draw(of(2, 3, 4))
    if draw(of(0, 1, 1)):  # room for experts
        found["dp"] *= found["ep"] * found["etp"]
    if found["pp"] > 1 or draw(of(*[0] * 9, 1)):
        found["pp_chunks"] = draw(of(1, 2))
    chance = (0, 1) if found["tp"] > 1 else (0,) * 19 + (1,)
    found["sequence_parallel"] = bool(draw(of(*chance)))
    sizes = draw(st.lists(of(1, 2, 3, 4), max_size=2, unique=True)) if draw(of(0, 1)) else []
    found["dynamic_cp"] = tuple(sorted(sizes) if draw(of(0, 1, 1)) else sizes)
    return found


def attempt(model: ModelConfig, layout: Fields, microbatches: int) -> ConfigError | None:
    try:
        TrainConfig(model=model, parallel=ParallelConfig(**layout), microbatches=microbatches)
    except ConfigError as error:
        return error
    return None


def is_sound(model: ModelConfig, layout: Fields, microbatches: int) -> bool:
    """Whether everything that the layout cuts comes out even, said without the rules."""
    tp, cp, pp, ep, etp = (layout[name] for name in ("tp", "cp", "pp", "ep", "etp"))
    cuts_tokens = tp if layout["sequence_parallel"] else 1
    sizes, context_ranks = layout["dynamic_cp"], layout["dp"] * cp
    cut = [(model.heads, tp), (model.kv_heads, tp), (model.vocab_size, tp)]
    cut += [(model.shared_expert_ffn, tp), (model.experts, ep), (model.expert_ffn, etp)]
    cut += [(model.ffn, tp)] if model.has_dense_ffn else []
    cut += [(context_ranks * layout["dp_outer"] * tp, ep * etp)]
    # Two chunks a context rank, unless there is one: then a sequence is not cut in chunks. Packed
    # sequences are padded to two chunks even then.
    cut += [(model.seq, (2 * cp if cp > 1 else 1) * cuts_tokens)]
    cut += [(model.seq, 2 * size * cuts_tokens) for size in sizes]
    cut += [(context_ranks, size) for size in sizes]
    return (
        all(whole % parts == 0 for whole, parts in cut)
        and all(size in (1, 2, 4) for size in sizes)
        and list(sizes) == sorted(sizes)
        and (tp > 1 or not layout["sequence_parallel"])
        and pp * layout["pp_chunks"] <= model.layers
        and (layout["pp_chunks"] == 1 or (pp > 1 and microbatches % pp == 0))
        and (model.experts > 0 or ep * etp == 1)
        # Ranks of tp hold the same tokens: experts see them once only if they are cut alike.
        and (not model.experts or tp == 1 or tp == etp or layout["sequence_parallel"])
    )


@settings(deadline=None, max_examples=200)
@given(models(), layouts(), of(1, 2, 3, 6))
def test_accepted_is_what_comes_out_even(
    model: ModelConfig, layout: Fields, microbatches: int
) -> None:
    """No legal layout is refused, and none is accepted that some cut leaves uneven."""
    accepted = attempt(model, layout, microbatches) is None
    assert accepted == is_sound(model, layout, microbatches)


@settings(deadline=None, max_examples=80)
@given(models(), layouts(), of(1, 2, 3, 6))
def test_listed_exactly_when_accepted(
    model: ModelConfig, layout: Fields, microbatches: int
) -> None:
    """The list has a layout if, and only if, a run with it is accepted."""
    only = {name: [layout[name]] for name in NAMES}
    world_size = math.prod(layout[name] for name in DENSE_DEGREES)
    listed = list(legal_layouts(world_size, model, microbatches=microbatches, only=only))
    accepted = attempt(model, layout, microbatches) is None
    assert listed == ([ParallelConfig(**layout)] if accepted else [])


@settings(deadline=None, max_examples=100)
@given(models(), layouts(), of(1, 2, 3, 6))
def test_a_refusal_tells_the_truth(model: ModelConfig, layout: Fields, microbatches: int) -> None:
    """It names a rule, the key with the value that was given, and values that keep the rule."""
    error = attempt(model, layout, microbatches)
    if error is None:
        return
    key = error.key.removeprefix("parallel.")
    assert error.rule in RULES
    got = microbatches if key == "microbatches" else layout[key]
    assert error.got == (list(got) if isinstance(got, tuple) else got)
    said = str(error)
    assert said.startswith(f"{error.key}: expected {error.expected}, got {error.got!r}")
    assert said.endswith(f"; rule: {error.rule}")
    for value in error.legal:
        assert str(value) in said
        other = (value,) if key == "dynamic_cp" else value
        again = attempt(model, layout | {key: other}, microbatches)
        assert again is None or again.rule != error.rule or again.key != error.key
