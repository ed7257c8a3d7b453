"""The vocabulary over ranks: embedding bit for bit, cross entropy within bound and memory."""

import pytest
import torch
import torch.nn.functional as F

from tests.dist import vocab_programs as programs
from tests.dist.parity_bounds import Bounded, cross_entropy
from tests.dist.rank_pool import RankPool
from tests.dist.tensor_parallel_programs import (
    BATCH,
    HIDDEN,
    TIME,
    VOCAB,
    draw,
    join,
    same_bits,
    tokens_of,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tp", "dtype"), [(2, DTYPES[0]), (2, DTYPES[2]), (4, DTYPES[1]),
                                           (8, DTYPES[2])])  # fmt: skip
def test_embedding_has_the_bits_of_one_process(
    warm_ranks: RankPool, tp: int, dtype: torch.dtype, sequence_parallel: bool
) -> None:
    """Rows and gradients are those of the whole embedding in every bit, the sign of zero too."""
    weight = programs.embedding_weight(dtype).requires_grad_()
    out = F.embedding(tokens_of(), weight)
    out.backward(draw("embedding cotangent", BATCH, TIME, HIDDEN, dtype=dtype))
    assert weight.grad is not None
    found, disputed = join(
        warm_ranks.run(programs.run_embedding, dtype, sequence_parallel, world_size=tp)
    )
    assert disputed == set()
    assert same_bits(found["output"], out)
    assert same_bits(found["weight"], weight.grad)


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 7, -VOCAB])
def test_a_token_outside_the_vocabulary_is_an_error(warm_ranks: RankPool, token: int) -> None:
    """A token that no rank has is no zero vector: every rank raises what `F.embedding` does."""
    errors = warm_ranks.run(programs.embed_outside, token, world_size=2)
    assert all("index out of range" in error for error in errors), errors


def expected(case: str, ranks: int, dtype: torch.dtype, how: str) -> dict[str, Bounded]:
    """Loss and gradient of one process; exactly zero where a token is ignored."""
    logits = programs.logits_of(case).to(dtype).flatten(0, 1)
    targets = programs.targets_of(case).flatten()
    loss, grad = cross_entropy(logits, targets, ranks, dtype)
    ignored = programs.ignored_of().flatten() & (how != "none")
    shapes = {"loss": (BATCH, TIME), "grad": (BATCH, TIME, VOCAB)}
    found = {}
    for name, value in (("loss", loss), ("grad", grad)):
        gone = ignored if name == "loss" else ignored[:, None]
        found[name] = Bounded(
            value.exact.masked_fill(gone, 0.0).view(shapes[name]),
            value.bound.masked_fill(gone, 0.0).view(shapes[name]),
        )
    return found


def units(
    ranks: RankPool, case: str, tp: int, dtype: torch.dtype, how: str, plant: str = ""
) -> dict[str, float]:
    """Worst error of loss and gradient in units of the bound; every rank has the loss's bits."""
    args = (programs.run_cross_entropy, case, dtype, how, plant)
    found, disputed = join(ranks.run(*args, world_size=tp))
    assert plant or disputed == set()
    truth = expected(case, tp, dtype, how)
    return {name: truth[name].units(found[name]) for name in truth}


@pytest.mark.parametrize("case", programs.CASES)
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


@pytest.mark.parametrize(
    ("plant", "case"), [("own columns only", "plain"), ("totals of different tops", "plain"),
                        ("totals of different tops", "large")],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_faults_exceed_the_bound(
    warm_ranks: RankPool, dtype: torch.dtype, plant: str, case: str
) -> None:
    """A rank that sees its own columns only, or adds what is not comparable, is far out."""
    found = units(warm_ranks, case, 2, dtype, "none", plant)
    assert min(found.values()) >= 10, found


@pytest.mark.parametrize("target", [-1, VOCAB, VOCAB + 7, -99, -101])
def test_a_target_outside_the_vocabulary_is_an_error(warm_ranks: RankPool, target: int) -> None:
    """A target that no rank has is no loss of its own: every rank raises."""
    errors = warm_ranks.run(programs.target_outside, target, world_size=2)
    assert all("out of bounds" in error for error in errors), errors


def test_what_is_no_number_shows(warm_ranks: RankPool) -> None:
    """A NaN in any rank's columns, no finite logit at all, or an infinity: NaN, as in torch."""
    logits = torch.zeros(4, VOCAB)
    logits[1, -1], logits[2], logits[3, 0] = float("nan"), -float("inf"), float("inf")
    due = F.cross_entropy(logits, torch.ones(4, dtype=torch.int64), reduction="none").isnan()
    assert due.tolist() == [False, True, True, True]
    assert warm_ranks.run(programs.not_a_number, world_size=2) == [due.tolist()] * 2


@pytest.mark.parametrize("tp", [1, 2])
def test_no_second_tensor_of_the_size_of_the_logits(warm_ranks: RankPool, tp: int) -> None:
    """Forward makes nothing larger than a block, backward nothing but the logits' gradient."""
    for found in warm_ranks.run(programs.largest_tensors, 8, world_size=tp):
        assert found["block"] == found["forward"][-1] < found["numel"]
        assert found["backward"][-1] == found["numel"]
        assert found["backward"][-2] == found["block"]
