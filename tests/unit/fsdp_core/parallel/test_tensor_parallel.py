"""Tensor-parallel layers on one rank: torch's bits, and how they are put together."""

import copy
import math
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.tensor_parallel import (
    IGNORED,
    ColumnLinear,
    Cut,
    RowLinear,
    VocabEmbedding,
    enter,
    leave,
    named_cuts,
    reduce_replicated,
    reduce_replicated_of,
    vocab_cross_entropy,
)
from tests.dist.parity_bounds import cross_entropy

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
    layer = kind(12, 20, ONE, sequence_parallel=sequence_parallel).to(dtype)
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
    column = ColumnLinear(12, 20, FOUR, sequence_parallel=True)
    row = RowLinear(12, 20, FOUR, sequence_parallel=False)
    assert column.weight.shape == (5, 12)
    assert row.weight.shape == (20, 3)
    assert named_cuts(column) == {"weight": (Cut("tp", 0, 4, 2),)}
    assert named_cuts(row) == {"weight": (Cut("tp", 1, 4, 2),)}
    assert repr(column) == "ColumnLinear(weight=[5, 12], tp=4, sequence_parallel=True)"


def test_a_forgotten_layer_shows() -> None:
    """Weights that nobody initialised are NaN, so that no loss comes of them."""
    for kind in (ColumnLinear, RowLinear):
        assert kind(4, 4, ONE, sequence_parallel=False).weight.isnan().all()


def test_features_that_have_no_equal_parts_are_refused() -> None:
    """What is cut is a multiple of the ranks; what is not cut may be anything."""
    with pytest.raises(ValueError, match="Expected out_features to be a multiple of the 4 ranks"):
        ColumnLinear(4, 6, FOUR, sequence_parallel=False)
    with pytest.raises(ValueError, match="Expected in_features to be a multiple of the 4 ranks"):
        RowLinear(6, 4, FOUR, sequence_parallel=False)
    ColumnLinear(5, 8, FOUR, sequence_parallel=False)
    RowLinear(8, 5, FOUR, sequence_parallel=False)


def test_one_rank_gets_the_parameters_themselves() -> None:
    """On an axis of one rank nothing stands in for a parameter, nor for an activation."""
    weight = nn.Parameter(torch.ones(2))
    assert reduce_replicated(weight, ONE) is weight
    x = torch.ones(2, 4, 3)
    for cut in (False, True):
        assert enter(x, ONE, sequence_parallel=cut) is x
        assert leave(x, ONE, sequence_parallel=cut) is x


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
    layer = VocabEmbedding(10, 6, ONE, sequence_parallel=True).to(dtype)
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
    layer = VocabEmbedding(12, 5, SECOND_OF_FOUR, sequence_parallel=False)
    assert layer.weight.shape == (3, 5)
    assert named_cuts(layer) == {"weight": (Cut("tp", 0, 4, 1),)}
    with pytest.raises(ValueError, match="Expected the vocabulary to be a multiple of the 4 ranks"):
        VocabEmbedding(10, 5, SECOND_OF_FOUR, sequence_parallel=False)


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
    for given, by_mask in ((targets, mask), (ignored, None), (ignored, mask)):
        leaf = logits.clone().requires_grad_()
        loss = vocab_cross_entropy(leaf, given, ONE, loss_mask=by_mask)
        loss.backward(torch.full((2, 3), 3.0))
        found.append((loss.detach(), cast("torch.Tensor", leaf.grad)))
    for loss, grad in found:
        assert torch.equal(loss, found[0][0])
        assert torch.equal(grad, found[0][1])
        assert (loss[~mask] == 0).all()
        assert (grad[~mask] == 0).all()
        assert (loss[mask] > 0).all()
