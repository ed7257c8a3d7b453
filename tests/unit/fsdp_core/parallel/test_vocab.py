"""The vocabulary on one rank: torch's embedding bit for bit, torch's cross entropy."""

import math
from typing import cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_core.parallel import tensor_parallel as vocab
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.param_sharding import Cut, named_cuts
from fsdp_core.parallel.tensor_parallel import IGNORED, VocabEmbedding, vocab_cross_entropy
from tests.dist.parity_bounds import cross_entropy

ONE = Axis("tp", 1, 0, cast("dist.ProcessGroup", None))
FOUR = Axis("tp", 4, 1, cast("dist.ProcessGroup", None))
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
    layer = VocabEmbedding(12, 5, FOUR, sequence_parallel=False)
    assert layer.weight.shape == (3, 5)
    assert named_cuts(layer) == {"weight": (Cut("tp", 0, 4, 1),)}
    with pytest.raises(ValueError, match="Expected the vocabulary to be a multiple of the 4 ranks"):
        VocabEmbedding(10, 5, FOUR, sequence_parallel=False)


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


@pytest.mark.parametrize("rows", [1, 3, 7, 15])
def test_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """However many rows are widened at a time, also where the last block is shorter."""
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 8).requires_grad_()
    targets = torch.randint(0, 8, (3, 5))
    found = []
    for numel in (2**22, rows * 8 + 3):
        monkeypatch.setattr(vocab, "BLOCK_NUMEL", numel)
        loss = vocab_cross_entropy(logits, targets, ONE)
        found.append((loss, *torch.autograd.grad(loss.square().sum(), logits)))
    for whole, in_blocks in zip(*found, strict=True):
        assert torch.equal(whole, in_blocks)


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


def test_no_tokens_have_no_loss() -> None:
    """A rank without tokens gets an empty loss, and an empty gradient."""
    logits = torch.zeros(2, 0, 8, requires_grad=True)
    loss = vocab_cross_entropy(logits, torch.zeros(2, 0, dtype=torch.int64), ONE)
    assert loss.shape == (2, 0)
    loss.sum().backward()
    assert cast("torch.Tensor", logits.grad).shape == logits.shape
