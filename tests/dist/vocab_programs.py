"""What each rank runs for the tests of the vocabulary that is cut over tensor-parallel ranks."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_core.parallel import tensor_parallel as vocab
from fsdp_core.parallel.collectives import all_gather
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.param_sharding import Cut, take
from fsdp_core.parallel.tensor_parallel import IGNORED, VocabEmbedding, vocab_cross_entropy
from tests.dist.tensor_parallel_programs import (
    BATCH,
    HIDDEN,
    TIME,
    VOCAB,
    Parts,
    draw,
    gradient_parts,
    load,
    tokens_of,
    whole_axis,
)


def embedding_weight(dtype: torch.dtype) -> torch.Tensor:
    """[V, H] with zeros of both signs."""
    weight = draw("embedding.weight", VOCAB, HIDDEN, dtype=dtype)
    weight[::3, ::2], weight[1::3, 1::2] = -0.0, 0.0
    return weight


def run_embedding(dtype: torch.dtype, sequence_parallel: bool) -> Parts:
    """Forward and backward of the embedding on a rank."""
    axis = whole_axis()
    layer = VocabEmbedding(VOCAB, HIDDEN, axis, sequence_parallel=sequence_parallel).to(dtype)
    load(layer, {"weight": embedding_weight(dtype)})
    cuts = (Cut("tp", 1, axis.size, axis.rank),) if sequence_parallel else ()
    out = layer(tokens_of())
    out.backward(take(draw("embedding cotangent", BATCH, TIME, HIDDEN, dtype=dtype), cuts))
    return {"output": (out.detach(), cuts), **gradient_parts(layer)}


def embed_outside(token: int) -> str:
    """The error of a token that is not in the vocabulary."""
    layer = VocabEmbedding(VOCAB, HIDDEN, whole_axis(), sequence_parallel=False)
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


CASES = ["plain", "large", "offset", "masked", "one shard"]


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


def run_cross_entropy(case: str, dtype: torch.dtype, how: str, plant: str = "") -> Parts:
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
    with planted(plant):
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


class Sizes(TorchDispatchMode):
    """Elements of every tensor that an operator makes in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for value in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in known:
                    self.made.append(storage.nbytes() // value.element_size())
        return out


def largest_tensors(block_rows: int) -> dict[str, Any]:
    """Sizes of what loss and backward make, with blocks of a few rows."""
    axis = whole_axis()
    columns = 512
    local = torch.randn(2, 64, columns, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, columns * axis.size, (2, 64))
    kept, vocab.BLOCK_NUMEL = vocab.BLOCK_NUMEL, block_rows * columns
    try:
        with Sizes() as forward:
            loss = vocab_cross_entropy(local, targets, axis)
        with Sizes() as backward:
            loss.sum().backward()
    finally:
        vocab.BLOCK_NUMEL = kept
    return {
        "numel": local.numel(),
        "block": block_rows * columns,
        "forward": sorted(forward.made),
        "backward": sorted(backward.made),
    }


# ---- faults


def _alone(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """In place of an all-gather, this rank's part as often as there are ranks."""
    return torch.cat([x] * axis.size, dim)


def _unscaled(mine: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Totals added up although each is relative to a top of its own."""
    tops, totals, hits = all_gather(mine[None], axis, 0).unbind(1)
    return tops.amax(0), totals.sum(0), hits.amax(0)


PLANTS: dict[str, dict[str, Any]] = {
    "": {},
    "own columns only": {"all_gather": _alone},
    "totals of different tops": {"_join": _unscaled},
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Run with a fault in the loss."""
    original = {key: getattr(vocab, key) for key in PLANTS[name]}
    try:
        for key, faulty in PLANTS[name].items():
            setattr(vocab, key, faulty)
        yield
    finally:
        for key, function in original.items():
            setattr(vocab, key, function)
