"""Parts of global tensors, modules that know which they hold, and global names."""

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_core.parallel.tensor_parallel import (
    Cut,
    CutModule,
    Stretch,
    consecutive,
    named_cuts,
    named_stretches,
    set_stretches,
    take,
)
from tests.support.global_weights import place

CUTS = (Cut("tp", 0, 2, 1),)


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
        assert part.is_contiguous()
        assert part.data_ptr() != whole.data_ptr()
        place(part, again, cuts)
        place(take(times, cuts) + 1, times, cuts)
    assert torch.equal(again, whole)
    assert torch.equal(times, torch.ones_like(times))


def test_chunks_lie_in_rank_order() -> None:
    """The first cut of a dim is the outer one; chunks are equal."""
    whole = torch.arange(8)
    assert take(whole, (Cut("tp", 0, 4, 1),)).tolist() == [2, 3]
    assert take(whole, (Cut("ep", 0, 2, 1), Cut("etp", 0, 2, 0))).tolist() == [4, 5]
    assert take(whole, ()).tolist() == whole.tolist()
    with pytest.raises(ValueError, match=r"dim 0 of \(8,\) to be a multiple of the 3 ranks"):
        take(whole, (Cut("tp", 0, 3, 0),))


class Halves(CutModule):
    def __init__(self) -> None:
        super().__init__()
        self.register_cut("part", nn.Parameter(torch.ones(2, 3)), *CUTS)
        self.scale = nn.Parameter(torch.ones(3))


def test_a_parameter_made_anew_keeps_its_cuts() -> None:
    """Copies, pickles, conversions and memory after the meta device leave a part a part."""
    with torch.device("meta"):
        meta = Halves()
    made = {
        "built": Halves(),
        "copied inside": copy.deepcopy(nn.Sequential(Halves()))[0],
        "pickled": pickle.loads(pickle.dumps(Halves())),
        "converted": Halves().double(),
        "emptied": nn.Sequential(meta).to_empty(device="cpu")[0],
    }
    for name, module in made.items():
        assert named_cuts(module) == {"part": CUTS, "scale": ()}, name


def branch() -> nn.Module:
    return nn.ModuleDict({"mlp": nn.ModuleDict({"fused": nn.Linear(3, 6)})})


def test_names_are_those_of_the_whole_model() -> None:
    """Names join the module's, or that of the module around it; others keep theirs."""
    model = branch()
    mlp = model.get_submodule("mlp")
    set_stretches(mlp, {"fused.weight": consecutive({"gate.weight": 4, "up.weight": 2}, CUTS)})
    found = named_stretches(model)
    assert [s.name for s in found["mlp.fused.weight"]] == ["mlp.gate.weight", "mlp.up.weight"]
    assert found["mlp.fused.bias"] == (Stretch("mlp.fused.bias"),)
    assert named_cuts(model) == {"mlp.fused.weight": CUTS, "mlp.fused.bias": ()}
    set_stretches(mlp, {"fused.bias": Stretch("../norm.weight")})
    assert named_stretches(model)["mlp.fused.bias"] == (Stretch("norm.weight"),)


def test_stretches_lie_one_after_another() -> None:
    """Each is its own part of the parameter, along its dim, and they join to it."""
    parameter = torch.randn(2, 6, 3)
    stretches = consecutive({"a": 4, "b": 2}, CUTS, dim=1)
    parts = [stretch.of(parameter) for stretch in stretches]
    assert [part.shape[1] for part in parts] == [4, 2]
    assert torch.equal(torch.cat(parts, 1), parameter)


@pytest.mark.parametrize(
    ("table", "got"),
    [
        ({"fused.wait": Stretch("a")}, "None"),
        ({"fused.weight": consecutive({"a": 4}, CUTS)}, r"\(6, 3\)"),
        ({"fused.weight": (Stretch("a", CUTS, 0, 0, 4), Stretch("b", CUTS, 0, 3, 2))}, "6"),
        ({"fused.weight": (Stretch("a", CUTS, 0, 0, 4), Stretch("b", (), 0, 4, 2))}, "6"),
        ({"fused.weight": (Stretch("a", CUTS), Stretch("b", CUTS))}, "6"),
    ],
)
def test_wrong_tables_are_refused(table: dict[str, Stretch], got: str) -> None:
    """A table that leaves elements out or gives them twice would lose weights silently."""
    with pytest.raises(ValueError, match=rf"ModuleDict to have a parameter fused.*, got.*{got}"):
        set_stretches(branch().get_submodule("mlp"), table)
