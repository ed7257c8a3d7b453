"""Cuts: parts of global tensors, and parameters that know which part they are."""

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_core.parallel.param_sharding import (
    Cut,
    CutModule,
    chunk_of,
    cut_of,
    global_shape,
    place,
    set_cuts,
    take,
)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["tp", "ep", "etp"]), unique=True, max_size=3),
    st.lists(st.integers(0, 2), min_size=3, max_size=3),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
)
def test_parts_tile_the_whole(axes: list[str], dims: list[int], sizes: list[int]) -> None:
    """The parts of all ranks, put in their places, are the whole, each element once."""
    lengths = [1, 2, 3]
    for _, dim, size in zip(axes, dims, sizes, strict=False):
        lengths[dim] *= size
    whole = torch.arange(1.0, 1 + torch.Size(lengths).numel()).view(lengths)
    again, times = torch.zeros_like(whole), torch.zeros_like(whole)
    for ranks in itertools.product(*(range(size) for size in sizes[: len(axes)])):
        cuts = tuple(map(Cut, axes, dims, sizes, ranks))
        part = take(whole, cuts)
        parameter = nn.Parameter(part)
        set_cuts(parameter, *cuts)
        assert global_shape(parameter) == whole.shape
        assert part.is_contiguous()
        assert part.data_ptr() != whole.data_ptr()
        place(part, again, cuts)
        place(take(times, cuts) + 1, times, cuts)
    assert torch.equal(again, whole)
    assert torch.equal(times, torch.ones_like(times))


def test_chunks_lie_in_rank_order() -> None:
    """The first cut of a dim is the outer one."""
    whole = torch.arange(8)
    assert take(whole, (Cut("tp", 0, 4, 1),)).tolist() == [2, 3]
    assert take(whole, (Cut("ep", 0, 2, 1), Cut("etp", 0, 2, 0))).tolist() == [4, 5]
    assert take(whole, ()).tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("cut", "shape"), [(Cut("tp", 0, 3, 0), (8, 2)), (Cut("tp", 2, 2, 0), (8, 2))]
)
def test_what_cannot_be_cut_evenly_is_refused(cut: Cut, shape: tuple[int, ...]) -> None:
    """No chunk is shorter than another, and no dim is made up."""
    with pytest.raises(ValueError, match=r"Expected dim \d to be a multiple of the \d ranks"):
        take(torch.zeros(shape), (cut,))
    with pytest.raises(ValueError, match=r"Expected dim \d to be a multiple of the \d ranks"):
        place(torch.zeros(shape), torch.zeros(shape), (cut,))


def test_a_part_of_another_shape_is_not_broadcast() -> None:
    """A part that would fit by broadcasting is refused."""
    with pytest.raises(ValueError, match=r"Expected a part of shape \(2, 3\) of \(4, 3\), got"):
        place(torch.ones(1, 3), torch.zeros(4, 3), (Cut("tp", 0, 2, 0),))


@pytest.mark.parametrize(
    ("axis_size", "index", "dim"), [(2, 2, 0), (2, -1, 0), (0, 0, 0), (2, 0, -1)]
)
def test_impossible_cuts_are_refused(axis_size: int, index: int, dim: int) -> None:
    """An index outside of the axis and a negative dim are mistakes."""
    with pytest.raises(ValueError, match=r"Expected an? (index|dim)"):
        Cut("tp", dim, axis_size, index)


def test_cuts_that_a_parameter_cannot_have_are_refused() -> None:
    """A cut has a dim of the parameter and an axis of its own."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="Expected a dim below 2"):
        set_cuts(parameter, Cut("tp", 2, 2, 0))
    with pytest.raises(ValueError, match="Expected one cut an axis, got tp, tp"):
        set_cuts(parameter, Cut("tp", 0, 2, 0), Cut("tp", 1, 2, 0))
    assert cut_of(parameter) == ()
    assert global_shape(parameter) == (2, 2)


def test_uneven_totals_are_refused_by_name() -> None:
    """The message says what is to be a multiple of what."""
    assert chunk_of(12, "heads", "tp", 4) == 3
    with pytest.raises(ValueError, match="Expected heads to be a multiple of the 5 ranks of axis "):
        chunk_of(12, "heads", "tp", 5)


class Halves(CutModule):
    """A module of one cut parameter and one that is replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.register_cut("part", nn.Parameter(torch.ones(2, 3)), Cut("tp", 0, 2, 1))
        self.scale = nn.Parameter(torch.ones(3))


def test_a_parameter_made_anew_keeps_its_cuts() -> None:
    """Copies, pickles, conversions and memory after the meta device leave a part a part."""
    due = (Cut("tp", 0, 2, 1),)
    with torch.device("meta"):
        meta = Halves()
    made = {
        "built": Halves(),
        "copied": copy.deepcopy(Halves()),
        "copied inside": copy.deepcopy(nn.Sequential(Halves()))[0],
        "pickled": pickle.loads(pickle.dumps(Halves())),
        "converted": Halves().double(),
        "emptied": nn.Sequential(meta).to_empty(device="cpu")[0],
    }
    for name, module in made.items():
        assert cut_of(module.part) == due, name
        assert cut_of(module.scale) == (), name
        assert global_shape(module.part) == (4, 3), name
