"""What each rank runs for the tests of tensor parallel, and the same in one process.

`Chain` has every kind of layer and only adds and multiplies, so that its bounds need no propagation
(see `parity_bounds`). All ranks draw the same global weights, of which each takes its part.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_core.parallel import tensor_parallel as tensor_module
from fsdp_core.parallel.collectives import gather_from, reduce_from, reduce_scatter_to
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.param_sharding import Cut, named_cuts, place, take
from fsdp_core.parallel.tensor_parallel import ColumnLinear, RowLinear, VocabEmbedding, enter
from tests.dist.parity_bounds import Named, Roundings, product

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
    """One axis over all ranks."""
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
    """The chain with its weights."""
    model = Chain(axis, sequence_parallel=sequence_parallel).to(dtype)
    load(model, chain_weights(dtype))
    return model


def chain_cotangent(dtype: torch.dtype) -> torch.Tensor:
    """Gradient of the global logits."""
    return draw("cotangent", BATCH, TIME, VOCAB, dtype=dtype)


def run_chain(dtype: torch.dtype, sequence_parallel: bool, plant: str = "") -> Parts:
    """Forward and backward on a rank: its logits and its gradients."""
    axis = whole_axis()
    with planted(plant):
        model = chain_on(axis, dtype, sequence_parallel=sequence_parallel)
        logits = model(tokens_of())
        columns = (Cut("tp", 2, axis.size, axis.rank),)
        logits.backward(take(chain_cotangent(dtype), columns))
    return {"output": (logits.detach(), columns), **gradient_parts(model)}


def gradient_parts(model: nn.Module) -> Parts:
    """Every parameter's gradient."""
    found, cuts = {}, named_cuts(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = (parameter.grad, cuts[name])
    return found


# ---- one layer


def plain_layer(named: Named) -> torch.Tensor:
    """A linear layer by torch's function."""
    return F.linear(named["x"], named["weight"])


def layer_inputs(kind: str, dtype: torch.dtype) -> tuple[Named, torch.Tensor]:
    """Global input and weight of a `column` or `row` layer, and the output's gradient."""
    width, out = (HIDDEN, FFN) if kind == "column" else (FFN, HIDDEN)
    named = {
        "x": draw(f"{kind} x", BATCH, TIME, width, dtype=dtype),
        "weight": draw(f"{kind} weight", out, width, dtype=dtype),
    }
    return named, draw(f"{kind} cotangent", BATCH, TIME, out, dtype=dtype)


def layer_roundings(kind: str, ranks: int) -> dict[str, Roundings]:
    """Of the output, and of the gradients of the weight and the input."""
    inner, summed = product(HIDDEN), product(FFN // ranks, ranks)
    weight = product(TOKENS)
    output, x = (inner, summed) if kind == "column" else (summed, inner)
    return {"output": output, "weight": weight, "x": x}


def run_layer(kind: str, dtype: torch.dtype, sequence_parallel: bool, plant: str = "") -> Parts:
    """Forward and backward of one layer on a rank."""
    axis = whole_axis()
    features, sequence = (Cut("tp", dim, axis.size, axis.rank) for dim in (2, 1))
    outside = (sequence,) if sequence_parallel else ()
    x_cuts, out_cuts = (outside, (features,)) if kind == "column" else ((features,), outside)
    named, cotangent = layer_inputs(kind, dtype)
    made = ColumnLinear if kind == "column" else RowLinear
    width, out = named["weight"].shape[1], named["weight"].shape[0]
    with planted(plant):
        layer = made(width, out, axis, sequence_parallel=sequence_parallel).to(dtype)
        load(layer, named)
        x = take(named["x"], x_cuts).requires_grad_()
        output = layer(x)
        output.backward(take(cotangent, out_cuts))
    assert x.grad is not None
    return {
        "output": (output.detach(), out_cuts),
        "x": (x.grad, x_cuts),
        **gradient_parts(layer),
    }


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


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*flat)


# ---- faults


def _keep(x: torch.Tensor, axis: Axis, dim: int | None = None) -> torch.Tensor:
    """No communication at all; where a dim is to be cut or joined, its shape only."""
    return x if dim is None else x.chunk(axis.size, dim)[axis.rank]


class _GatherKeep(torch.autograd.Function):
    """An all-gather whose backward does not sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return gather_from(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.chunk(ctx.axis.size, ctx.dim)[ctx.axis.rank], None, None


def _mean(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, axis, *dim: function(x, axis, *dim) / axis.size


def _swap(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, axis, dim: function(x, axis, dim).roll(x.shape[dim], dim)


def _plants() -> dict[str, dict[str, Any]]:
    return {
        "": {},
        "no sum on the way out": {"reduce_from": _keep, "reduce_scatter_to": _keep},
        "no sum of the input's gradient": {
            "copy_to": _keep,
            "gather_from": lambda x, axis, dim: _GatherKeep.apply(x, axis, dim),
        },
        "mean for sum": {
            "reduce_from": _mean(reduce_from),
            "reduce_scatter_to": _mean(reduce_scatter_to),
        },
        "replicated not summed": {"reduce_replicated": _keep},
        "gathered in another order": {"gather_from": _swap(gather_from)},
    }


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Run with a fault in the layers."""
    faults = _plants()[name]
    original = {key: getattr(tensor_module, key) for key in faults}
    try:
        for key, faulty in faults.items():
            setattr(tensor_module, key, faulty)
        yield
    finally:
        for key, function in original.items():
            setattr(tensor_module, key, function)
