"""What each rank runs for the tests of tensor parallel, and the same in one process.

`Chain` has every kind of layer and only adds and multiplies, so that its bounds need no propagation
(see `parity_bounds`). All ranks draw the same global weights, of which each takes its part.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_core.parallel import tensor_parallel as tensor_module
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.param_sharding import Cut, named_cuts, take
from fsdp_core.parallel.rng import RandomStreams
from fsdp_core.parallel.tensor_parallel import ColumnLinear, RowLinear, VocabEmbedding, enter
from tests.dist.parity_bounds import Named, Roundings, product
from tests.support.global_weights import place
from tests.support.tensors import same_bits

BATCH, TIME, HIDDEN, FFN, VOCAB = 2, 16, 24, 32, 40
TOKENS = BATCH * TIME
Parts = dict[str, tuple[torch.Tensor, tuple[Cut, ...]]]
"""A rank's parts of global tensors by name."""


def draw(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The global tensor `name`: mostly positive, so that sums do not hide what is missing."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 0.5).to(dtype)


def whole_axis(name: str = "tp") -> Axis:
    group = dist.group.WORLD
    assert group is not None
    return Axis(name, dist.get_world_size(), dist.get_rank(), group)


def tokens_of(name: str = "tokens") -> torch.Tensor:
    """int64 [B, T]."""
    generator = torch.Generator().manual_seed(len(name))
    return torch.randint(0, VOCAB, (BATCH, TIME), generator=generator)


# ---- a chain of every layer


class Chain(nn.Module):
    """Embedding, a norm's scale, gated MLP with residual, head: [B, T] -> [B, T, V / tp]."""

    def __init__(self, axis: Axis, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        cut: Any = {"sequence_parallel": sequence_parallel}
        self.embedding = VocabEmbedding(VOCAB, HIDDEN, axis, **cut)
        self.scale = nn.Parameter(torch.full((HIDDEN,), torch.nan))
        self.gate = ColumnLinear(HIDDEN, FFN, axis, **cut)
        self.up = ColumnLinear(HIDDEN, FFN, axis, **cut)
        self.down = RowLinear(FFN, HIDDEN, axis, **cut)
        self.head = ColumnLinear(HIDDEN, VOCAB, axis, **cut)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [B, T] -> this rank's logits [B, T, V / tp]."""
        x = self.embedding(tokens)
        scale: torch.Tensor = self.scale
        if self.sequence_parallel:
            scale = tensor_module.reduce_replicated(scale, self.axis)
        whole = enter(x * scale, self.axis, sequence_parallel=self.sequence_parallel)
        gated = self.gate(whole, entered=True) * self.up(whole, entered=True)
        logits: torch.Tensor = self.head(x + self.down(gated))
        return logits


def chain_weights(dtype: torch.dtype) -> Named:
    """Global weights by the names that `Chain` has for them."""
    shapes = {
        "embedding.weight": (VOCAB, HIDDEN),
        "scale": (HIDDEN,),
        "gate.weight": (FFN, HIDDEN),
        "up.weight": (FFN, HIDDEN),
        "down.weight": (HIDDEN, FFN),
        "head.weight": (VOCAB, HIDDEN),
    }
    return {name: draw(name, *shape, dtype=dtype) for name, shape in shapes.items()}


def plain_chain(named: Named) -> torch.Tensor:
    """`Chain` in one process, by torch's functions: inputs and weights by name -> [B, T, V]."""
    x = F.embedding(named["tokens"], named["embedding.weight"])
    scaled = x * named["scale"]
    gated = F.linear(scaled, named["gate.weight"]) * F.linear(scaled, named["up.weight"])
    return F.linear(x + F.linear(gated, named["down.weight"]), named["head.weight"])


def chain_roundings(ranks: int) -> Roundings:
    """The longest way of a term into any result: through the chain, back, and over the tokens."""
    embedded = Roundings(stored=ranks - 1)
    scale, gate, join = Roundings(1), Roundings(1), Roundings(1)
    column, down, head = product(HIDDEN), product(FFN // ranks, ranks), product(HIDDEN)
    there = embedded + scale + column + gate + down + join + head
    head_back, down_back = product(VOCAB // ranks, ranks), product(HIDDEN)
    column_back = product(FFN // ranks, ranks) + Roundings(1)  # the sum of gate's and up's
    back = head_back + join + down_back + gate + column_back + scale
    # A weight's gradient is a sum over tokens, the scale's also over ranks, the embedding's stored
    # after each addition.
    return there + back + Roundings(stored=TOKENS + ranks, accumulated=TOKENS)


def load(model: nn.Module, weights: Named) -> None:
    """Give each parameter its part of its global weight."""
    cuts = named_cuts(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(take(weights[name], cuts[name]))


def chain_on(axis: Axis, dtype: torch.dtype, *, sequence_parallel: bool) -> Chain:
    model = Chain(axis, sequence_parallel=sequence_parallel).to(dtype)
    load(model, chain_weights(dtype))
    return model


def chain_cotangent(dtype: torch.dtype) -> torch.Tensor:
    return draw("cotangent", BATCH, TIME, VOCAB, dtype=dtype)


def run_chain(dtype: torch.dtype, sequence_parallel: bool) -> Parts:
    """Forward and backward on a rank: its logits and its gradients."""
    axis = whole_axis()
    model = chain_on(axis, dtype, sequence_parallel=sequence_parallel)
    logits = model(tokens_of())
    columns = (Cut("tp", 2, axis.size, axis.rank),)
    logits.backward(take(chain_cotangent(dtype), columns))
    return {"output": (logits.detach(), columns), **gradient_parts(model)}


def gradient_parts(model: nn.Module) -> Parts:
    found, cuts = {}, named_cuts(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = (parameter.grad, cuts[name])
    return found


# ---- together again


def join(ranks: list[Parts]) -> tuple[Named, set[str]]:
    """Global tensors out of every rank's parts, and names of those on which replicas disagree."""
    found, disputed = {}, set()
    for name, (first, cuts) in ranks[0].items():
        shape = list(first.shape)
        for cut in cuts:
            shape[cut.dim] *= cut.axis_size
        whole = torch.full(shape, torch.nan, dtype=first.dtype)
        for rank in ranks:
            place(rank[name][0], whole, rank[name][1])
        if not all(same_bits(take(whole, r[name][1]), r[name][0]) for r in ranks):
            disputed.add(name)
        found[name] = whole
    return found, disputed


# ---- a net with dropout and a loss, which GPUs train

LR, DROPOUT = 0.05, 0.25


class Mlp(nn.Module):
    """x + dropout(down(dropout(gate * up)(norm(x)))): the inner dropout is cut over tp.

    The norm is any library's: it is made to sum its gradient from outside. One operator of it reads
    its input, so that the gradient of `x` is a sum of two, in whatever pieces this is compiled.
    """

    def __init__(self, axis: Axis, sequence_parallel: bool, streams: RandomStreams) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.norm = nn.LayerNorm(HIDDEN, bias=False)
        if sequence_parallel:
            tensor_module.reduce_replicated_of(self.norm, "weight", axis)
        cut: Any = {"sequence_parallel": sequence_parallel}
        self.gate = ColumnLinear(HIDDEN, FFN, axis, **cut)
        self.up = ColumnLinear(HIDDEN, FFN, axis, **cut)
        self.down = RowLinear(FFN, HIDDEN, axis, **cut)
        self.own = streams.equal_over()
        self.shared = self.own if sequence_parallel else streams.equal_over(axis.name)
        self.dropout = DROPOUT

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, H] or [B, T / tp, H] -> the same."""
        whole = enter(self.norm(x), self.axis, sequence_parallel=self.sequence_parallel)
        gated = self.gate(whole, entered=True) * self.up(whole, entered=True)
        out = self.down(self.own.dropout(gated, self.dropout, training=self.training))
        return x + self.shared.dropout(out, self.dropout, training=self.training)


class Net(nn.Module):
    """Embedding, two MLPs, head and loss: tokens and targets [B, T] -> scalar."""

    def __init__(self, axis: Axis, sequence_parallel: bool, streams: RandomStreams) -> None:
        super().__init__()
        self.axis = axis
        cut: Any = {"sequence_parallel": sequence_parallel}
        self.embedding = VocabEmbedding(VOCAB, HIDDEN, axis, **cut)
        self.layers = nn.ModuleList(Mlp(axis, sequence_parallel, streams) for _ in range(2))
        self.head = ColumnLinear(HIDDEN, VOCAB, axis, **cut)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """int64 [B, T] twice -> the mean loss."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return tensor_module.vocab_cross_entropy(self.head(x), targets, self.axis).mean()


def net_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Global weights for every parameter of a `Net`, centred on zero but for the norms'."""
    shapes = {
        "embedding": (VOCAB, HIDDEN),
        "head": (VOCAB, HIDDEN),
        "gate": (FFN, HIDDEN),
        "up": (FFN, HIDDEN),
        "down": (HIDDEN, FFN),
        "norm": (HIDDEN,),
    }
    found = {}
    for name, _ in model.named_parameters():
        kind = name.split(".")[-2]
        drawn = draw(name, *shapes[kind], dtype=torch.float32)
        found[name] = drawn if kind == "norm" else (drawn - 0.5) * 0.3
    return found


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a step, int64 [B, T]."""
    return (tokens_of() + step) % VOCAB, (tokens_of() * 3 + step) % VOCAB


def train(model: Net, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One step: the loss; gradients and weights change in place."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    loss: torch.Tensor = model(tokens, targets)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=LR)
    return loss.detach()
