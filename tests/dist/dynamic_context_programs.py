"""Programs with a context size that changes from microbatch to microbatch, and graphs of them.

The model is one attention layer whose inputs are table rows of each token times parameters of a
head, times a wave in the token's position: elementwise, so that queries, keys and values have the
same bits in every layout, and what differs is attention and the sums over tokens.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_core.device import Device
from fsdp_core.graph.host_graph import HostGraph
from fsdp_core.model.batch import (
    Capacity,
    Document,
    PackedBatch,
    pack,
    padding_multiple,
)
from fsdp_core.model.cp_attention import causal_attention
from fsdp_core.parallel.context import ContextPlan, DynamicContext
from fsdp_core.parallel.mesh import Axis
from tests.dist.attention_bounds import attention_with_bounds
from tests.dist.context_programs import CPU, SHAPES
from tests.dist.parity_bounds import Bounded, gamma

SHAPE = SHAPES["mla"]
VOCAB, TOKENS_PER_RANK, SLOTS = 40, 32, 20
SIZES = (1, 2, 4, 8)
DOCUMENTS = ((5, 9), (16,), (1,), (), (12, 3), (7,), (31,), (2, 2))
"""Lengths by what fits on one rank, also when padded to 16."""
LONG = ((200,), (3,), (17,))
"""A document that no smaller group holds than one of 8 ranks."""
NAMES = ("q", "k", "v")
Named = dict[str, torch.Tensor]


@functools.cache
def tables() -> Named:
    """Of each token what its query, key, value and gradient are made of; float64."""
    generator = torch.Generator().manual_seed(7)
    sizes = {
        "q": (SHAPE.heads, SHAPE.width), "k": (SHAPE.kv_heads, SHAPE.width),
        "v": (SHAPE.kv_heads, SHAPE.value_width), "grad": (SHAPE.heads, SHAPE.value_width),
    }  # fmt: skip
    return {
        name: torch.randn(VOCAB, *size, generator=generator, dtype=torch.float64)
        for name, size in sizes.items()
    }


def parameters() -> Named:
    """One factor for each head and component; float64."""
    generator = torch.Generator().manual_seed(8)
    return {
        name: 1.0 + 0.5 * torch.randn(t.shape[1:], generator=generator, dtype=torch.float64)
        for name, t in tables().items()
        if name in NAMES
    }


def wave(positions: torch.Tensor) -> torch.Tensor:
    """A factor that depends on a token's position: float64 [T, 1, 1]."""
    return (1.0 + 0.01 * positions.to(torch.float64))[:, None, None]


def documents(lengths: Sequence[int], seed: int) -> list[Document]:
    """Documents of random tokens, every third prediction not counted."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        ids = torch.randint(1, VOCAB, (length + 1,), generator=generator)
        found.append(Document(ids[:-1], ids[1:], torch.arange(length) % 3 != 1))
    return found


def documents_of(bins: Sequence[Sequence[int]], seed: int) -> list[list[Document]]:
    """The documents of a microbatch, by bin."""
    return [documents(lengths, 100 * seed + number) for number, lengths in enumerate(bins)]


def packed_for(bins: Sequence[Sequence[int]], seed: int, size: int, pack_index: int) -> PackedBatch:
    """The pack of a group of `size` ranks: the documents of as many bins."""
    mine = documents_of(bins, seed)[pack_index * size : (pack_index + 1) * size]
    capacity = Capacity(
        tokens=TOKENS_PER_RANK * size,
        slots=SLOTS,
        multiple=padding_multiple(size, 1, sequence_parallel=False),
    )
    return pack(list(itertools.chain(*mine)), capacity)


def copy_contents(batch: PackedBatch, other: PackedBatch) -> None:
    """What a graph reads is that of another batch of the same capacity."""
    for name in ("tokens", "targets", "loss_mask", "offsets", "padded_offsets"):
        getattr(batch, name).copy_(getattr(other, name))


def local_loss(
    batch: PackedBatch, plan: ContextPlan, axis: Axis, trained: Named
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses that count here, and their number."""
    tokens, targets, mask = (t[plan.rows] for t in (batch.tokens, batch.targets, batch.loss_mask))
    table, phase = tables(), wave(plan.positions)
    q, k, v = ((table[n][tokens] * phase * trained[n])[None] for n in NAMES)
    out = causal_attention(q, k, v, plan=plan, axis=axis)[0]
    losses = (table["grad"][targets] * out).sum((1, 2))
    kept = torch.where(mask > 0, losses, torch.zeros((), dtype=losses.dtype))
    return (kept * mask).sum(), mask.sum()


def train(
    dynamic: DynamicContext, sizes: Sequence[int], data: Sequence[Sequence[Sequence[int]]]
) -> list[Named]:
    """Loss and gradients of each microbatch, summed over all ranks."""
    found = []
    for step, (size, bins) in enumerate(zip(sizes, data, strict=True)):
        axis, layout = dynamic.axis(size), dynamic.layout(size)
        batch = packed_for(bins, step, size, layout.pack)
        plan = batch.plan(size, layout.cp_rank)
        trained = {name: t.requires_grad_() for name, t in parameters().items()}
        total, count = local_loss(batch, plan, axis, trained)
        dist.all_reduce(count)
        loss = total / count
        grads = torch.autograd.grad(loss, list(trained.values()))
        result = {"loss": loss.detach(), **dict(zip(NAMES, grads, strict=True))}
        for tensor in result.values():
            dist.all_reduce(tensor)
        found.append(result)
    return found


@dataclass
class _Sum:
    """A sum with a bound on its rounding errors."""

    value: torch.Tensor
    errors: torch.Tensor
    magnitude: torch.Tensor

    def add(self, value: torch.Tensor, error: torch.Tensor) -> None:
        self.value = self.value + value.sum(0)
        self.errors = self.errors + error.sum(0)
        self.magnitude = self.magnitude + value.abs().sum(0)

    def bounded(self, terms: int) -> Bounded:
        return Bounded(self.value, self.errors + gamma(terms, torch.float64) * self.magnitude)


def alone(num: int) -> list[dict[str, Bounded]]:
    """Losses and gradients of a run's microbatches, by one process."""
    return [one_microbatch(bins, step) for step, bins in enumerate(microbatches(num))]


def one_microbatch(bins: Sequence[Sequence[int]], seed: int) -> dict[str, Bounded]:
    """Loss and gradients of a microbatch, document by document, unpacked, in one process."""
    every = list(itertools.chain(*documents_of(bins, seed)))
    table, trained = tables(), parameters()
    counted = [d.counted for d in every if d.counted is not None]
    count = sum(int(c.sum()) for c in counted)
    zeros = {"loss": torch.zeros(()), **trained}
    sums = {n: _Sum(*(torch.zeros_like(t, dtype=torch.float64),) * 3) for n, t in zeros.items()}
    terms = 8  # the products on either side of attention, and the division
    for document, mask in zip(every, counted, strict=True):
        length = len(document.tokens)
        terms += length * SHAPE.heads * SHAPE.value_width
        phase = wave(torch.arange(length))
        base = {n: table[n][document.tokens] * phase for n in NAMES}
        grad = table["grad"][document.targets] * (mask[:, None, None].double() / count)
        q, k, v = (base[n] * trained[n] for n in NAMES)
        results = attention_with_bounds(
            q,
            k,
            v,
            grad,
            scale=SHAPE.width**-0.5,
            joins=2 * max(SIZES),
            dtype=torch.float64,
        )
        out = results["out"]
        sums["loss"].add((grad * out.exact).flatten(), (grad.abs() * out.bound).flatten())
        for name in NAMES:
            share = results[f"d{name}"]
            sums[name].add(share.exact * base[name], share.bound * base[name].abs())
    return {name: total.bounded(terms) for name, total in sums.items()}


def rows_of_all_ranks() -> list[list[int]]:
    """All ranks as one row of dp x cp."""
    return [list(range(dist.get_world_size()))]


def microbatches(num: int) -> list[Sequence[Sequence[int]]]:
    """Lengths by bin of each microbatch; the last has a long document."""
    return [*[DOCUMENTS] * (num - 1), LONG]


def dynamic_run(sizes: Sequence[int]) -> list[Named]:
    """Losses and gradients of a run with these context sizes."""
    dynamic = DynamicContext(rows_of_all_ranks(), SIZES)
    before = {size: dynamic.axis(size).group for size in SIZES}
    results = train(dynamic, sizes, microbatches(len(sizes)))
    for size, group in before.items():
        assert dynamic.axis(size).group is group
        dynamic.check(dynamic.axis(size))
    return results


def groups_of_a_rank() -> dict[str, object]:
    """What `DynamicContext` makes of 2 rows of 4 ranks, and how it takes an axis that exists."""
    rows = [[0, 2, 4, 6], [1, 3, 5, 7]]
    dynamic = DynamicContext(rows, (1, 2, 4))
    found = {
        size: (
            dynamic.layout(size),
            dynamic.axis(size).rank,
            dist.get_process_group_ranks(dynamic.axis(size).group),
        )
        for size in dynamic.sizes
    }
    known = DynamicContext(rows, (2, 4), {2: dynamic.axis(2)})
    kept = known.axis(2) is dynamic.axis(2)
    refused = ""
    try:
        known.check(dynamic.axis(4))
    except RuntimeError as error:
        refused = str(error)
    return {"axes": found, "kept": kept, "refused": refused}


def bank_of_graphs(order: Sequence[int]) -> int:
    """Capture the loss and its gradients once for each size, replay in `order` over new packs.

    Each graph holds the plan too: it is given tokens and offsets, and nothing else. Returns the
    replays that agreed with eager bit for bit.
    """
    world = dist.get_world_size()
    sizes = [size for size in SIZES if size <= world]
    dynamic = DynamicContext(rows_of_all_ranks(), sizes)
    trained = {name: t.requires_grad_() for name, t in parameters().items()}

    def run(batch: PackedBatch, size: int) -> list[torch.Tensor]:
        plan = batch.plan(size, dynamic.layout(size).cp_rank)
        total, _ = local_loss(batch, plan, dynamic.axis(size), trained)
        return [total.detach(), *torch.autograd.grad(total, list(trained.values()))]

    def packed(seed: int, size: int) -> PackedBatch:
        bins = (DOCUMENTS * 2)[seed : seed + world]
        return packed_for(bins, seed, size, dynamic.layout(size).pack)

    inputs = {size: packed(0, size).to(CPU) for size in sizes}
    graphs = {size: HostGraph(Device("cpu")) for size in sizes}
    results = {
        size: graphs[size].capture(functools.partial(run, inputs[size], size)) for size in sizes
    }
    agreed = 0
    for seed, size in enumerate(order):
        batch = packed(seed, size)
        eager = run(batch, size)
        copy_contents(inputs[size], batch)
        graphs[size].replay()
        for ours, theirs in zip(results[size], eager, strict=True):
            assert torch.equal(ours.view(torch.int64), theirs.view(torch.int64)), (seed, size)
        agreed += 1
    return agreed
