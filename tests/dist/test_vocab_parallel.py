"""The vocabulary over ranks: embedding bit for bit, cross entropy within bound and memory."""

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from fsdp_core.parallel import tensor_parallel as vocab
from fsdp_core.parallel.tensor_parallel import (
    IGNORED,
    Cut,
    VocabEmbedding,
    take,
    vocab_cross_entropy,
)
from tests.dist.parity_bounds import Bounded, cross_entropy
from tests.dist.rank_pool import RankPool
from tests.dist.tensor_parallel_programs import (
    BATCH,
    HIDDEN,
    TIME,
    VOCAB,
    Parts,
    draw,
    gradient_parts,
    join,
    load,
    tokens_of,
    whole_axis,
)
from tests.support.operators import Seeing
from tests.support.tensors import same_bits

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def embedding_weight(dtype: torch.dtype) -> torch.Tensor:
    """[V, H] with zeros of both signs."""
    weight = draw("embedding.weight", VOCAB, HIDDEN, dtype=dtype)
    weight[::3, ::2], weight[1::3, 1::2] = -0.0, 0.0
    return weight


def run_embedding(dtype: torch.dtype, sequence_parallel: bool) -> Parts:
    """Forward and backward of the embedding on a rank."""
    axis = whole_axis()
    layer = VocabEmbedding(VOCAB, HIDDEN, replace(axis, cuts_sequence=sequence_parallel)).to(dtype)
    load(layer, {"weight": embedding_weight(dtype)})
    cuts = (Cut("tp", 1, axis.size, axis.rank),) if sequence_parallel else ()
    out = layer(tokens_of())
    out.backward(take(draw("embedding cotangent", BATCH, TIME, HIDDEN, dtype=dtype), cuts))
    return {"output": (out.detach(), cuts), **gradient_parts(layer)}


def embed_outside(token: int) -> str:
    """The error of a token that is not in the vocabulary."""
    layer = VocabEmbedding(VOCAB, HIDDEN, whole_axis())
    try:
        layer(torch.tensor([[1, token]]))
    except IndexError as error:
        return str(error)
    return ""


# ---- cross entropy


def logits_of(case: str) -> torch.Tensor:
    """float64 [B, T, V] of a kind."""
    drawn = draw(f"logits {case}", BATCH, TIME, VOCAB) * 6 - 3
    chosen = draw(f"chosen {case}", BATCH, TIME, VOCAB)
    if case == "large":
        return torch.where(chosen > 1.2, 1e4, torch.where(chosen < 0.3, -1e4, drawn))
    if case == "offset":
        return drawn + 1e4
    if case == "masked":
        return drawn.masked_fill(chosen > 0.5, -math.inf)
    if case == "one shard":
        drawn[..., : VOCAB * 3 // 4] = -math.inf
    return drawn


LOGITS = ["plain", "large", "offset", "masked", "one shard"]


def targets_of(case: str) -> torch.Tensor:
    """int64 [B, T]: every entry of the vocabulary as far as there are tokens; one has no logit."""
    tokens = torch.arange(BATCH * TIME) * 7 % VOCAB
    if case == "one shard":
        tokens = VOCAB * 3 // 4 + tokens % (VOCAB // 4)
        tokens[0] = 0
    return tokens.view(BATCH, TIME)


def ignored_of() -> torch.Tensor:
    """bool [B, T], True where a token has no loss."""
    return (torch.arange(BATCH * TIME) % 5 == 3).view(BATCH, TIME)


def run_cross_entropy(case: str, dtype: torch.dtype, how: str) -> Parts:
    """Loss and the logits' gradient on a rank; ignored tokens by `how`: target, mask or none."""
    axis = whole_axis()
    cuts = (Cut("tp", 2, axis.size, axis.rank),)
    logits = logits_of(case).to(dtype)
    targets, mask = targets_of(case), None
    if how == "target":
        targets = targets.masked_fill(ignored_of(), IGNORED)
        logits[ignored_of()] = math.nan
    elif how == "mask":
        mask = ~ignored_of()
        logits[0, 3, :5] = math.inf
    local = take(logits, cuts).requires_grad_()
    loss = vocab_cross_entropy(local, targets, axis, loss_mask=mask)
    loss.backward(torch.ones_like(loss))
    assert local.grad is not None
    return {"loss": (loss.detach(), ()), "grad": (local.grad, cuts)}


def target_outside(target: int) -> str:
    """The error of a target that is not in the vocabulary."""
    axis = whole_axis()
    logits = torch.zeros(1, 2, VOCAB // axis.size)
    try:
        vocab_cross_entropy(logits, torch.tensor([[1, target]]), axis)
    except (IndexError, RuntimeError) as error:
        return str(error)
    return ""


def not_a_number() -> list[bool]:
    """Whether the loss is NaN: of a NaN in another rank's columns, of all -inf, of an infinity."""
    axis = whole_axis()
    logits = torch.zeros(4, VOCAB)
    logits[1, -1], logits[2], logits[3, 0] = math.nan, -math.inf, math.inf
    local = take(logits, (Cut("tp", 1, axis.size, axis.rank),))
    return vocab_cross_entropy(local, torch.tensor([1, 1, 1, 1]), axis).isnan().tolist()


def sizes_of(made: list[int]) -> Seeing:
    """Lists the elements of every tensor that an operator makes in memory of its own."""

    def see(_: Any, args: Any, out: Any) -> None:
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for value in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in known:
                    made.append(storage.nbytes() // value.element_size())

    return Seeing(see)


def largest_tensors(block_rows: int) -> dict[str, Any]:
    """Sizes of what loss and backward make, with blocks of a few rows."""
    axis = whole_axis()
    columns = 512
    local = torch.randn(2, 64, columns, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, columns * axis.size, (2, 64))
    forward, backward = list[int](), list[int]()
    with mock.patch.object(vocab, "BLOCK_NUMEL", block_rows * columns):
        with sizes_of(forward):
            loss = vocab_cross_entropy(local, targets, axis)
        with sizes_of(backward):
            loss.sum().backward()
    return {
        "numel": local.numel(),
        "block": block_rows * columns,
        "forward": sorted(forward),
        "backward": sorted(backward),
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tp", "dtype"), [(2, DTYPES[0]), (2, DTYPES[2]), (4, DTYPES[1]),
                                           (8, DTYPES[2])])  # fmt: skip
def test_embedding_has_the_bits_of_one_process(
    warm_ranks: RankPool, tp: int, dtype: torch.dtype, sequence_parallel: bool
) -> None:
    """Rows and gradients are those of the whole embedding in every bit, the sign of zero too."""
    weight = embedding_weight(dtype).requires_grad_()
    out = F.embedding(tokens_of(), weight)
    out.backward(draw("embedding cotangent", BATCH, TIME, HIDDEN, dtype=dtype))
    assert weight.grad is not None
    found, disputed = join(warm_ranks.run(run_embedding, dtype, sequence_parallel, world_size=tp))
    assert disputed == set()
    assert same_bits(found["output"], out)
    assert same_bits(found["weight"], weight.grad)


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 7, -VOCAB])
def test_a_token_outside_the_vocabulary_is_an_error(warm_ranks: RankPool, token: int) -> None:
    """A token that no rank has is no zero vector: every rank raises what `F.embedding` does."""
    errors = warm_ranks.run(embed_outside, token, world_size=2)
    assert all("index out of range" in error for error in errors), errors


def expected(case: str, ranks: int, dtype: torch.dtype, how: str) -> dict[str, Bounded]:
    """Loss and gradient of one process; exactly zero where a token is ignored."""
    logits = logits_of(case).to(dtype).flatten(0, 1)
    targets = targets_of(case).flatten()
    loss, grad = cross_entropy(logits, targets, ranks, dtype)
    ignored = ignored_of().flatten() & (how != "none")
    shapes = {"loss": (BATCH, TIME), "grad": (BATCH, TIME, VOCAB)}
    found = {}
    for name, value in (("loss", loss), ("grad", grad)):
        gone = ignored if name == "loss" else ignored[:, None]
        found[name] = Bounded(
            value.exact.masked_fill(gone, 0.0).view(shapes[name]),
            value.bound.masked_fill(gone, 0.0).view(shapes[name]),
        )
    return found


def units(ranks: RankPool, case: str, tp: int, dtype: torch.dtype, how: str) -> dict[str, float]:
    """Worst error of loss and gradient in units of the bound; every rank has the loss's bits."""
    args = (run_cross_entropy, case, dtype, how)
    found, disputed = join(ranks.run(*args, world_size=tp))
    assert disputed == set()
    truth = expected(case, tp, dtype, how)
    return {name: truth[name].units(found[name]) for name in truth}


@pytest.mark.parametrize("case", LOGITS)
@pytest.mark.parametrize(
    ("tp", "dtype"), [(1, DTYPES[1]), (2, DTYPES[0]), (2, DTYPES[2]), (4, DTYPES[0]),
                      (4, DTYPES[1]), (8, DTYPES[1])],
)  # fmt: skip
def test_cross_entropy_equals_one_process(
    warm_ranks: RankPool, case: str, tp: int, dtype: torch.dtype
) -> None:
    """Losses and gradients of extreme and masked logits, targets in every shard."""
    found = units(warm_ranks, case, tp, dtype, "none")
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("how", ["target", "mask"])
@pytest.mark.parametrize("tp", [1, 2])
def test_ignored_tokens_have_no_loss(warm_ranks: RankPool, tp: int, how: str) -> None:
    """An ignored token's loss and gradient are zero, of NaN and infinite logits too."""
    found = units(warm_ranks, "plain", tp, torch.float32, how)
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("target", [-1, VOCAB, VOCAB + 7, -99, -101])
def test_a_target_outside_the_vocabulary_is_an_error(warm_ranks: RankPool, target: int) -> None:
    """A target that no rank has is no loss of its own: every rank raises."""
    errors = warm_ranks.run(target_outside, target, world_size=2)
    assert all("out of bounds" in error for error in errors), errors


def test_what_is_no_number_shows(warm_ranks: RankPool) -> None:
    """A NaN in any rank's columns, no finite logit at all, or an infinity: NaN, as in torch."""
    logits = torch.zeros(4, VOCAB)
    logits[1, -1], logits[2], logits[3, 0] = float("nan"), -float("inf"), float("inf")
    due = F.cross_entropy(logits, torch.ones(4, dtype=torch.int64), reduction="none").isnan()
    assert due.tolist() == [False, True, True, True]
    assert warm_ranks.run(not_a_number, world_size=2) == [due.tolist()] * 2


@pytest.mark.parametrize("tp", [1, 2])
def test_no_second_tensor_of_the_size_of_the_logits(warm_ranks: RankPool, tp: int) -> None:
    """Forward makes nothing larger than a block, backward nothing but the logits' gradient."""
    for found in warm_ranks.run(largest_tensors, 8, world_size=tp):
        assert found["block"] == found["forward"][-1] < found["numel"]
        assert found["backward"][-1] == found["numel"]
        assert found["backward"][-2] == found["block"]
