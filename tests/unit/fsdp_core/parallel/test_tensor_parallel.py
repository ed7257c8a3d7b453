"""Tensor-parallel layers on one rank: torch's bits, and how they are put together."""

import copy
import itertools
import math
import pickle
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.tensor_parallel import (
    IGNORED,
    ColumnLinear,
    Cut,
    CutModule,
    RowLinear,
    Stretch,
    VocabEmbedding,
    consecutive,
    enter,
    leave,
    named_cuts,
    named_stretches,
    reduce_replicated,
    reduce_replicated_of,
    set_stretches,
    take,
    vocab_cross_entropy,
)
from tests.dist.parity_bounds import cross_entropy
from tests.support.global_weights import place

NO_GROUP = cast("dist.ProcessGroup", None)
ONE, FOUR = Axis("tp", 1, 0, NO_GROUP), Axis("tp", 4, 2, NO_GROUP)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
def test_one_rank_has_torchs_bits(
    kind: type[ColumnLinear | RowLinear], dtype: torch.dtype, sequence_parallel: bool
) -> None:
    """On an axis of one rank a layer is `nn.Linear`: output and gradients, every bit."""
    torch.manual_seed(0)
    due = nn.Linear(12, 20, bias=False, dtype=dtype)
    layer = kind(12, 20, replace(ONE, cuts_sequence=sequence_parallel)).to(dtype)
    layer.load_state_dict(due.state_dict())
    x = torch.randn(2, 6, 12, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [due(inputs[0]), layer(inputs[1])]
    for out in outputs:
        out.square().sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(*[cast("torch.Tensor", t.grad) for t in inputs])
    assert torch.equal(*[cast("torch.Tensor", m.weight.grad) for m in (due, layer)])


def test_layers_hold_their_part() -> None:
    """A column layer has rows of the weight, a row layer columns, and each knows which."""
    column = ColumnLinear(12, 20, replace(FOUR, cuts_sequence=True))
    row = RowLinear(12, 20, FOUR)
    assert column.weight.shape == (5, 12)
    assert row.weight.shape == (20, 3)
    assert named_cuts(column) == {"weight": (Cut("tp", 0, 4, 2),)}
    assert named_cuts(row) == {"weight": (Cut("tp", 1, 4, 2),)}
    assert repr(column) == "ColumnLinear(weight=[5, 12], tp=4, sequence_parallel=True)"


def test_a_forgotten_layer_shows() -> None:
    """Weights that nobody initialised are NaN, so that no loss comes of them."""
    for kind in (ColumnLinear, RowLinear):
        assert kind(4, 4, ONE).weight.isnan().all()


def test_features_that_have_no_equal_parts_are_refused() -> None:
    """What is cut is a multiple of the ranks; what is not cut may be anything."""
    with pytest.raises(AssertionError, match="out_features 6 over 4 ranks of tp"):
        ColumnLinear(4, 6, FOUR)
    with pytest.raises(AssertionError, match="in_features 6 over 4 ranks of tp"):
        RowLinear(6, 4, FOUR)
    ColumnLinear(5, 8, FOUR)
    RowLinear(8, 5, FOUR)


def test_one_rank_gets_the_parameters_themselves() -> None:
    """On an axis of one rank nothing stands in for a parameter, nor for an activation."""
    weight = nn.Parameter(torch.ones(2))
    assert reduce_replicated(weight, ONE) is weight
    x = torch.ones(2, 4, 3)
    for cut in (False, True):
        assert enter(x, replace(ONE, cuts_sequence=cut)) is x
        assert leave(x, replace(ONE, cuts_sequence=cut)) is x


class Foreign(nn.LayerNorm):
    seen: Any = None
    fails = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.seen = self.weight
        if self.fails:
            raise ArithmeticError
        return super().forward(input)


def test_a_foreign_module_runs_with_stand_ins() -> None:
    """Inside of its forward a module sees stand-ins; around it, and in its copies, parameters."""
    norm = Foreign(4)
    reduce_replicated_of(norm, "weight", FOUR)
    copied = copy.deepcopy(norm)
    for module in (norm, copied):
        weight, bias = module.weight, module.bias
        module(torch.ones(2, 4))
        assert module.seen is not weight
        assert module.seen.grad_fn is not None
        assert module.seen.data_ptr() == weight.data_ptr()
        assert (module.weight, module.bias) == (weight, bias)
        assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
        assert isinstance(module, Foreign)
        module.fails = True
        with pytest.raises(ArithmeticError):
            module(torch.ones(2, 4))
        assert module.weight is weight
    assert copied.weight is not norm.weight


SECOND_OF_FOUR = Axis("tp", 4, 1, cast("dist.ProcessGroup", None))
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rank_has_torchs_embedding(dtype: torch.dtype) -> None:
    """On an axis of one rank it is `nn.Embedding`: output and gradient, every bit."""
    due = nn.Embedding(10, 6, dtype=dtype)
    layer = VocabEmbedding(10, 6, replace(ONE, cuts_sequence=True)).to(dtype)
    assert layer.weight.isnan().all()
    layer.load_state_dict(due.state_dict())
    tokens = torch.tensor([[0, 9, 3], [3, 3, 1]])
    outputs = [due(tokens), layer(tokens)]
    for out in outputs:
        (out * torch.arange(6)).sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(*[cast("torch.Tensor", m.weight.grad) for m in (due, layer)])


def test_the_embedding_holds_its_rows() -> None:
    """Rows are cut in rank order, and a vocabulary that cannot be cut evenly is refused."""
    layer = VocabEmbedding(12, 5, SECOND_OF_FOUR)
    assert layer.weight.shape == (3, 5)
    assert named_cuts(layer) == {"weight": (Cut("tp", 0, 4, 1),)}
    with pytest.raises(AssertionError, match="the vocabulary 10 over 4 ranks of tp"):
        VocabEmbedding(10, 5, SECOND_OF_FOUR)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rank_has_torchs_cross_entropy(dtype: torch.dtype) -> None:
    """Loss and gradient are torch's on the wide logits, each within its bound of the exact ones."""
    torch.manual_seed(0)
    logits = (torch.randn(3, 5, 37) * 4).to(dtype).requires_grad_()
    targets = torch.randint(0, 37, (3, 5))
    loss = vocab_cross_entropy(logits, targets, ONE)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    exact_loss, exact_grad = cross_entropy(
        logits.detach().flatten(0, 1), targets.flatten(), 1, dtype
    )
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert grad.dtype == dtype
    assert exact_loss.units(loss.flatten()) <= 1
    assert exact_grad.units(grad.flatten(0, 1)) <= 1
    wide = logits.detach().to(loss.dtype).flatten(0, 1).requires_grad_()
    theirs = F.cross_entropy(wide, targets.flatten(), reduction="none")
    (their_grad,) = torch.autograd.grad(theirs.sum(), wide)
    assert exact_loss.units(theirs) <= 1
    assert exact_grad.units(their_grad.to(dtype)) <= 1


def test_the_inputs_stay_as_they_are() -> None:
    """Loss and backward write into nothing that the caller has; logits may have gaps."""
    storage = torch.randn(4, 6, 16)
    logits = storage[:, ::2, :8].requires_grad_()
    targets = torch.randint(0, 8, (4, 3))
    kept = storage.clone(), targets.clone()
    upstream = torch.ones(4, 3)
    vocab_cross_entropy(logits, targets, ONE, loss_mask=targets > 2).backward(upstream)
    assert torch.equal(storage, kept[0])
    assert torch.equal(targets, kept[1])
    assert torch.equal(upstream, torch.ones(4, 3))
    dense = logits.detach().contiguous().requires_grad_()
    vocab_cross_entropy(dense, targets, ONE, loss_mask=targets > 2).backward(upstream)
    assert torch.equal(cast("torch.Tensor", logits.grad), cast("torch.Tensor", dense.grad))


def test_a_mask_and_an_ignored_target_are_one() -> None:
    """Both ways to leave a token out give the same bits, alone and together: zeros."""
    logits = torch.randn(2, 3, 8)
    logits[0, 1], logits[1, 2, 3] = math.nan, math.inf
    targets = torch.tensor([[1, 2, 3], [4, 5, 6]])
    mask = torch.tensor([[True, False, True], [True, True, False]])
    ignored = targets.masked_fill(~mask, IGNORED)
    found = []
    for those, by_mask in ((targets, mask), (ignored, None), (ignored, mask)):
        leaf = logits.clone().requires_grad_()
        loss = vocab_cross_entropy(leaf, those, ONE, loss_mask=by_mask)
        loss.backward(torch.full((2, 3), 3.0))
        found.append((loss.detach(), cast("torch.Tensor", leaf.grad)))
    for loss, grad in found:
        assert torch.equal(loss, found[0][0])
        assert torch.equal(grad, found[0][1])
        assert (loss[~mask] == 0).all()
        assert (grad[~mask] == 0).all()
        assert (loss[mask] > 0).all()


# --- parts of global tensors, modules that know which they hold, and global names -----------------


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
    with pytest.raises(AssertionError, match=r"dim 0 of \(8,\) 8 over 3 ranks"):
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
        ({"fused.weight": consecutive({"a": 4}, CUTS)}, "6"),
        ({"fused.weight": (Stretch("a", CUTS, 0, 0, 4), Stretch("b", CUTS, 0, 3, 2))}, "6"),
        ({"fused.weight": (Stretch("a", CUTS, 0, 0, 4), Stretch("b", (), 0, 4, 2))}, "6"),
        ({"fused.weight": (Stretch("a", CUTS), Stretch("b", CUTS))}, "6"),
    ],
)
def test_wrong_tables_are_refused(table: dict[str, Stretch], got: str) -> None:
    """A table that leaves elements out or gives them twice would lose weights silently."""
    with pytest.raises(AssertionError, match=rf"fused.*{got}"):
        set_stretches(branch().get_submodule("mlp"), table)
