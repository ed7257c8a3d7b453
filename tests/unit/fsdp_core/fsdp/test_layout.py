"""The flat layout: whole rows, nothing overlaps, nothing is lost, little is wasted."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdp_core.config import MODEL_PRESETS, STRATEGIES, ModelConfig, model_from_preset
from fsdp_core.fsdp.layout import ALIGN_NUMEL, FlatLayout, build_layout, placements_of

PRIMES = [2, 3, 5, 7, 13, 31, 97, 127, 251, 509]
dims = st.one_of(st.integers(0, 24), st.sampled_from(PRIMES))
shape_lists = st.lists(st.lists(dims, max_size=3).map(tuple), max_size=8)
Shapes = list[tuple[int, ...]]


@given(shape_lists, st.integers(1, 9))
@example([], 1)
@example([()], 9)
@example([(), ()], 2)
@example([(0,), (0, 5), (5, 0)], 3)
@example([(1, 509), (127, 3)], 7)
@example([(97, 31), (13,), (251, 7), ()], 5)
@settings(max_examples=150, deadline=None)
def test_places(shapes: Shapes, num_shards: int) -> None:
    """Parameters lie in order at aligned starts, and gaps and slots tile the buffer exactly."""
    layout = build_layout(shapes, num_shards)
    assert [slot.shape for slot in layout.slots] == shapes
    assert layout.total_numel == layout.shard_numel * layout.num_shards
    assert layout.num_shards == num_shards
    cursor = 0
    for slot in layout.slots:
        assert slot.offset % ALIGN_NUMEL == 0
        assert slot.offset >= cursor
        assert slot.numel == math.prod(slot.shape)
        cursor = slot.offset + slot.numel
    assert cursor <= layout.total_numel
    ranges = [(s.offset, s.offset + s.numel) for s in layout.slots if s.numel]
    tiles = sorted([*ranges, *layout.gaps])
    assert all(start < stop for start, stop in tiles)
    assert [start for start, _ in tiles] == [0, *(stop for _, stop in tiles[:-1])]
    assert tiles[-1][1] == layout.total_numel


@given(shape_lists, st.integers(1, 9))
@example([(1, 509), (127, 3)], 7)
@example([(8, 0), (3, 5)], 2)
@settings(max_examples=150, deadline=None)
def test_rows_of_shards(shapes: Shapes, num_shards: int) -> None:
    """Shards hold whole rows that cover a parameter once, in order, cut where the shards are."""
    layout = build_layout(shapes, num_shards)
    for index, slot in enumerate(layout.slots):
        bounds = layout.row_bounds(index)
        assert len(bounds) == num_shards + 1
        assert list(bounds) == sorted(bounds)
        assert (bounds[0], bounds[-1]) == (0, slot.shape[0] if slot.shape else 1)
        end = slot.offset + slot.numel
        for shard, row in enumerate(bounds):
            boundary = shard * layout.shard_numel
            cut = min(max(boundary, slot.offset), end)
            assert slot.offset + row * slot.row_numel == cut


@given(shape_lists, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_shards_are_aligned_and_bounded(shapes: Shapes, num_shards: int) -> None:
    """A shard is aligned, so a collective's parts are; never larger than the search promises."""
    layout = build_layout(shapes, num_shards)
    assert layout.shard_numel % ALIGN_NUMEL == 0
    padded = [-(-math.prod(s) // ALIGN_NUMEL) * ALIGN_NUMEL for s in shapes]
    if num_shards == 1:
        # Only alignment, and one stride of 1/64, may pad a buffer that no boundary cuts.
        assert layout.total_numel <= max(sum(padded) * 65 / 64 + ALIGN_NUMEL, ALIGN_NUMEL)
    # One parameter whole a shard and the rest beside it is always a solution of this size, and the
    # search steps over sizes by 1/64 of what it has.
    bound = (max(padded, default=ALIGN_NUMEL) + sum(padded)) * 65 / 64 + 2 * ALIGN_NUMEL
    assert layout.shard_numel <= bound


def block_shapes(config: ModelConfig) -> Shapes:
    """Parameters of one decoder block, in the order of the modules."""
    h, kv = config.hidden, config.kv_heads * config.head_dim
    attention = [(h,), (h, h), (kv, h), (kv, h), (h, h)]
    return [*attention, (h,), (config.ffn, h), (config.ffn, h), (h, config.ffn)]


def root_shapes(config: ModelConfig) -> Shapes:
    return [
        (config.vocab_size, config.hidden),
        (config.hidden,),
        (config.vocab_size, config.hidden),
    ]


@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_waste_is_small_for_transformers(preset: str) -> None:
    """Padding of real units stays within 2 % of the buffer."""
    config = model_from_preset(preset)
    for shapes in (block_shapes(config), root_shapes(config)):
        for num_shards in range(1, 9):
            layout = build_layout(shapes, num_shards)
            waste = sum(stop - start for start, stop in layout.gaps)
            assert waste <= 0.02 * layout.total_numel, (shapes, layout)


def test_example() -> None:
    """A boundary inside a matrix cuts it between two rows."""
    layout = build_layout([(6, 8), (2, 8)], 2)
    assert layout.shard_numel == 32
    assert [slot.offset for slot in layout.slots] == [0, 48]
    assert layout.row_bounds(0) == (0, 4, 6)
    assert layout.row_bounds(1) == (0, 0, 2)


def test_gaps_of_an_empty_layout() -> None:
    """A unit of no elements is all padding, and still has a shard for the collective."""
    layout = build_layout([], 3)
    assert layout.gaps == ((0, layout.total_numel),)
    assert layout.shard_numel >= 1
    assert isinstance(layout, FlatLayout)


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
