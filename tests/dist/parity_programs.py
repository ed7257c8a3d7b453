"""One training step of a decoder on any layout, and what of it can be compared with one process.

`run_case` runs on a rank: the layout from its configuration, global weights, k microbatches through
the pipeline, FSDP. `run_whole` runs in one process. Both name what they found alike:

    ("forward", microbatch, "layers.0.attn")   [tokens, H] by number of token
    ("loss",)                                  [microbatches], means over the tokens that count
    ("grad", "layers.0.attn.wq.weight")        of the global tensor

Experts are those that one process chose in float64: `Routes` replays them everywhere, for one
rounding may turn a choice into another.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.config import FsdpConfig, ModelConfig, ParallelConfig
from fsdp_core.config.parallel import groups
from fsdp_core.device import Device, make_deterministic, prepare_environment
from fsdp_core.fsdp import MixedPrecisionPolicy
from fsdp_core.model import batch as packing
from fsdp_core.model.batch import (
    Capacity,
    Document,
    LocalTokens,
    PackedBatch,
    packed_part,
    padding_multiple,
)
from fsdp_core.model.decoder import DecoderStage, make_layers, make_stages
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.sharding import init_weights, shard_stage
from fsdp_core.parallel.context import DynamicContext
from fsdp_core.parallel.mesh import Axes, Axis, build_axes
from fsdp_core.parallel.pipeline import Microbatch, Pipeline, TensorSpec
from fsdp_core.parallel.rng import RandomStreams
from tests.dist import parity_faults
from tests.support.dense_parts import dense_part
from tests.support.global_weights import gather_global_grads, load_global
from tests.support.routing_tape import RoutingTape, attach

PACKS = 8
"""Packs of a microbatch at context size 1: as many as there are ranks at most."""


@dataclass(frozen=True)
class Batch:
    """The microbatches of a step.

    Attributes:
        vocab, seq: of the model.
        tokens: a rank has, padding included; of documents that are packed.
        sizes: for each microbatch how many ranks share a pack, which decides its documents; empty
            for rows of one document each.
        number: of microbatches.
    """

    vocab: int
    seq: int
    number: int
    tokens: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def is_packed(self) -> bool:
        return bool(self.sizes)

    def packs(self, microbatch: int) -> list[list[Document]]:
        generator = torch.Generator().manual_seed(1000 + microbatch)
        if not self.is_packed:
            return [[self._document(self.seq, generator)] for _ in range(PACKS)]
        size = self.sizes[microbatch]
        return [self._filled(self.tokens * size, generator) for _ in range(PACKS // size)]

    def _filled(self, room: int, generator: torch.Generator) -> list[Document]:
        """Documents that leave little room: at most two thirds of what is left, at least 5."""
        found = []
        left = room - 2 * PACKS
        while left >= 2 * PACKS + 5:
            most = max(6, min(left * 2 // 3, self.seq))
            length = int(torch.randint(5, most, (), generator=generator))
            found.append(self._document(length, generator))
            left -= -(-length // (2 * PACKS)) * 2 * PACKS
        return found or [self._document(max(1, room // 3), generator)]

    def _document(self, length: int, generator: torch.Generator) -> Document:
        ids = torch.randint(0, self.vocab, (length + 1,), generator=generator)
        counted = None
        if self.is_packed:
            counted = torch.rand(length, generator=generator) < 0.8
        return Document(ids[:-1], ids[1:], counted)

    def num_counted(self) -> int:
        """Tokens of all microbatches whose loss counts."""
        documents = [d for m in range(self.number) for p in self.packs(m) for d in p]
        return sum(len(d.tokens) if d.counted is None else int(d.counted.sum()) for d in documents)

    def num_tokens(self, microbatch: int) -> int:
        return sum(len(d.tokens) for p in self.packs(microbatch) for d in p)


def numbered(packs: list[list[Document]]) -> list[list[Document]]:
    """The documents with the numbers of their tokens in place of the tokens."""
    first, found = 0, []
    for documents in packs:
        row = []
        for document in documents:
            ids = torch.arange(first, first + len(document.tokens))
            first += len(document.tokens)
            row.append(Document(ids, ids))
        found.append(row)
    return found


@dataclass(frozen=True)
class Share:
    """What a rank has of a microbatch: its tokens, and their numbers on the CPU.

    Both [B, T]; the number of padding is -1.
    """

    local: LocalTokens
    numbers: torch.Tensor


CPU = torch.device("cpu")


def whole_share(batch: Batch, microbatch: int, cp: Axis, weight: float) -> Share:
    """All of a microbatch, for one process."""
    packs = batch.packs(microbatch)
    if not batch.is_packed:
        return _dense(packs, cp)
    documents = [document for each in packs for document in each]
    room = sum(-(-len(d.tokens) // 2) * 2 for d in documents)
    return _packed([documents], numbered([documents]), Capacity(
        tokens=room, slots=len(documents) + 1, multiple=2), cp, weight)  # fmt: skip


def rank_share(
    batch: Batch, microbatch: int, place: tuple[int, int], cp: Axis, weight: float,
    tp: Axis, *, device: torch.device = CPU,
) -> Share:  # fmt: skip
    """The part of the data-parallel rank `place` = (rank, ranks), and of the rank of `cp`.

    Args:
        tp: what documents are padded for, if it cuts sequences.
        device: of the tokens.
    """
    packs, numbers = batch.packs(microbatch), numbered(batch.packs(microbatch))
    rank, ranks = place
    mine = slice(rank * len(packs) // ranks, (rank + 1) * len(packs) // ranks)
    if not batch.is_packed:
        return _dense(packs, cp, numbers, mine, device)
    merged = [[d for each in part[mine] for d in each] for part in (packs, numbers)]
    capacity = Capacity(
        tokens=PACKS * batch.tokens // ranks,
        slots=len(merged[0]) + 2,
        multiple=padding_multiple(cp.size, tp),
    )
    return _packed([merged[0]], [merged[1]], capacity, cp, weight, device)


def _dense(
    packs: list[list[Document]], cp: Axis,
    numbers: list[list[Document]] | None = None, mine: slice = slice(None),
    device: torch.device = CPU,
) -> Share:  # fmt: skip
    numbers = numbers or numbered(packs)
    tokens, targets = (
        torch.stack([getattr(p[0], key) for p in packs[mine]]).to(device)
        for key in ("tokens", "targets")
    )
    ids = torch.stack([p[0].tokens for p in numbers[mine]])
    return Share(dense_part(tokens, targets, cp), dense_part(ids, ids, cp).tokens)


def _packed(
    packs: list[list[Document]], numbers: list[list[Document]], capacity: Capacity, cp: Axis,
    weight: float, device: torch.device = CPU,
) -> Share:  # fmt: skip
    batch, ids = packing.pack(packs[0], capacity), packing.pack(numbers[0], capacity)
    local = packed_part(batch.to(device), cp, weight)
    there = packed_part(_like(ids, batch), cp, weight)
    own, valid = there.tokens, there.part.plan.valid
    return Share(local, own if valid is None else own.masked_fill(~valid[None], -1))


def _like(ids: PackedBatch, batch: PackedBatch) -> PackedBatch:
    return replace(ids, loss_mask=batch.loss_mask)


Key = tuple[Any, ...]
Found = dict[Key, torch.Tensor]


@dataclass
class Outcome:
    """What a rank has to show: rows of activations by number, its losses, gradients on rank 0."""

    numbers: dict[Key, torch.Tensor] = field(default_factory=dict)
    rows: Found = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


class Watch:
    """Notes what branches and the last stage give, by microbatch."""

    def __init__(
        self, stages: list[DecoderStage], shares: list[Share], tp: Axis | None, *,
        masks: bool = False,
    ) -> None:  # fmt: skip
        self.outcome, self._shares, self._tp = Outcome(), shares, tp
        self._masks = masks
        for stage in stages:
            watched: dict[str, nn.Module] = {}
            if stage.embedding is not None and not masks:
                watched["embedding"] = stage.embedding
            for number, layer in stage.numbered_layers.items():
                watched |= {f"layers.{number}.attn": layer.attn, f"layers.{number}.mlp": layer.mlp}
            for name, module in watched.items():
                module.register_forward_hook(self._hook(name))
            if stage.head is not None:
                stage.register_forward_hook(self._loss_hook())

    def _hook(self, name: str) -> Any:
        count = iter(range(len(self._shares)))

        def note(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            del module
            rows = out.detach().cpu()
            if self._masks:
                rows = rows != args[0].detach().cpu()
            key = ("forward", (microbatch := next(count)), name)
            numbers = local_numbers(self._shares[microbatch], self._tp).flatten()
            self.outcome.numbers[key] = numbers[numbers >= 0]
            self.outcome.rows[key] = rows.flatten(0, 1)[numbers >= 0].double()

        return note

    def _loss_hook(self) -> Any:
        count = iter(range(len(self._shares)))

        def note(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            del module, args
            self.outcome.losses[next(count)] = out.detach().double().cpu()

        return note


def local_numbers(share: Share, tp: Axis | None) -> torch.Tensor:
    """Numbers of a rank's tokens as activations are laid out; `tp` where it cuts the sequence."""
    return share.numbers if tp is None else share.numbers.chunk(tp.size, 1)[tp.rank]


def join(outcomes: list[Outcome], batch: Batch, num_averaged: int) -> Found:
    """What all ranks found, as one. Copies of a token's row must have the same bits.

    Raises:
        ValueError: copies differ, or a token has none; names what it is of.
    """
    found: Found = {}
    for outcome in outcomes:
        for key, rows in outcome.rows.items():
            numbers = outcome.numbers[key]
            shape = (batch.num_tokens(key[1]), rows.shape[1])
            whole = found.setdefault(key, torch.full(shape, torch.nan, dtype=torch.float64))
            seen = whole[numbers]
            if not torch.equal(torch.where(seen.isnan(), rows, seen), rows):
                raise ValueError(f"Expected equal bits of {key} on every rank that has it.")
            whole[numbers] = rows
    for key, whole in found.items():
        if whole.isnan().any():
            raise ValueError(f"Expected all tokens of {key}, got NaN or none.")
    with_loss = [outcome for outcome in outcomes if outcome.losses]
    losses = [torch.stack([o.losses[m] for m in range(batch.number)]) for o in with_loss]
    found["loss",] = torch.stack(losses).mean(0)
    if len(losses) % num_averaged:
        raise ValueError(f"Expected losses of a multiple of {num_averaged} ranks.")
    for outcome in outcomes:
        found |= {("grad", name): grad.double() for name, grad in outcome.grads.items()}
    return found


DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16,
}  # fmt: skip
"""What parameters and activations are kept in; products of "fp8" are of narrower inputs."""
AXES = ("tp", "cp", "pp", "dp", "dp_outer", "ep", "etp", "edp")
CPU = torch.device("cpu")

Routes = dict[str, list[torch.Tensor]]
"""By the name of a layer's experts: chosen experts of each microbatch, [tokens, K] by number."""


@dataclass(frozen=True)
class Problem:
    """What is trained: a model, its weights by seed, and the global batch of a step."""

    model: ModelConfig
    batch: Batch
    seed: int = 7
    init_std: float = 0.15

    @property
    def weight(self) -> float:
        """Microbatches over tokens that count: of one process."""
        return self.batch.number / self.batch.num_counted()


@dataclass(frozen=True)
class Layout:
    """How it is trained.

    Attributes:
        fault: planted.
        backend, device: of the ranks; what they are compared with is torch on the CPU.
    """

    parallel: ParallelConfig
    dtype: str = "fp64"
    strategy: str = "optim_grads_params"
    fault: str = ""
    backend: str = "torch"
    device: str = "cpu"

    @property
    def arithmetic(self) -> str:
        """Which bound its tensors have: see `parity_rounding.bounds`."""
        return "bf16 fused" if (self.device, self.dtype) == ("cuda", "bf16") else self.dtype


# ---- weights


def single_axes() -> Axes:
    """Axes of one process: no axis has a group that anybody would ask."""
    nobody = cast("Any", None)
    one = {name: Axis(name, 1, 0, nobody) for name in AXES}
    return Axes(**one, dense_mesh=nobody, expert_mesh=nobody)


def moe_model(hidden: int, experts: int, top_k: int = 2, **settings: Any) -> ModelConfig:
    """A model of which only routers and dispatchers are of interest."""
    shapes = {"heads": 1, "kv_heads": 1, "head_dim": 2, "expert_ffn": 4, "normalise_top_k": True}
    return ModelConfig(hidden=hidden, experts=experts, top_k=top_k, **(shapes | settings))


def streams_of(axes: Axes, device: torch.device = CPU) -> RandomStreams:
    return RandomStreams(11, (axes.pp, axes.dp_outer, axes.dp, axes.cp, axes.tp), device)


def whole_model(problem: Problem) -> DecoderStage:
    """The model that is not cut, with its weights, float32."""
    axes, config = single_axes(), problem.model
    model = DecoderStage(config, axes, LayerFactory(), streams_of(axes))
    init_weights([model], problem.seed, layers=config.layers, init_std=problem.init_std)
    generator = torch.Generator().manual_seed(problem.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:  # norms of one are right where they are left out, too
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def global_weights(problem: Problem) -> dict[str, torch.Tensor]:
    """All weights by name, float32 whose values bfloat16 has too: nothing rounds them."""
    named = whole_model(problem).named_parameters()
    return {name: parameter.detach().bfloat16().float() for name, parameter in named}


def cast_parameters(stages: list[DecoderStage], dtype: torch.dtype) -> None:
    """Parameters alone: tables and counters stay as they are."""
    for stage in stages:
        for parameter in stage.parameters():
            parameter.data = parameter.data.to(dtype)


def put_tapes(
    stages: list[DecoderStage], routes: Routes | None, shares: list[Share], tp: Axis | None,
    num_experts: int,
) -> dict[str, RoutingTape]:  # fmt: skip
    """A tape in each router: of `routes`, or one that records."""
    tapes = {}
    device = shares[0].local.tokens.device
    for stage in stages:
        for name, router in stage.routers.items():
            entries = None
            if routes is not None:
                entries = [
                    _entry(table, local_numbers(share, tp), num_experts).to(device)
                    for table, share in zip(routes[name], shares, strict=True)
                ]
            tapes[name] = attach(router, RoutingTape(entries))
    return tapes


def _entry(table: torch.Tensor, numbers: torch.Tensor, num_experts: int) -> torch.Tensor:
    flat = numbers.flatten()
    return table[flat.clamp(min=0)].masked_fill((flat < 0)[:, None], num_experts)


# ---- one process


def run_whole(
    problem: Problem,
    dtype: torch.dtype,
    routes: Routes | None,
    around: AbstractContextManager[Any] | None = None,
) -> tuple[Found, Routes]:
    """The step in one process, `around` it: what it found, and the experts that were chosen."""
    axes, batch = single_axes(), problem.batch
    model = whole_model(problem)
    load_global([model], global_weights(problem))
    cast_parameters([model], dtype)
    shares = [whole_share(batch, m, axes.cp, problem.weight) for m in range(batch.number)]
    watch = Watch([model], shares, None)
    tapes = put_tapes([model], routes, shares, None, problem.model.experts)
    model.set_loss_scale(1 / batch.number)
    with around or contextlib.nullcontext():
        for share in shares:
            loss = model(share.local.tokens, share.local.part)
            (loss * (1 / batch.number)).backward()
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    outcome = watch.outcome
    outcome.grads = grads
    recorded = {
        name: [
            _by_number(share, entry, batch.num_tokens(m))
            for m, (share, entry) in enumerate(zip(shares, tape.entries, strict=True))
        ]
        for name, tape in tapes.items()
    }
    return join([outcome], batch, 1), recorded


def _by_number(share: Share, entry: torch.Tensor, num_tokens: int) -> torch.Tensor:
    numbers = share.numbers.flatten()
    table = entry.new_zeros(num_tokens, entry.shape[1])
    table[numbers[numbers >= 0]] = entry[numbers >= 0]
    return table


# ---- a rank


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a layout; made once for all steps that are taken on it."""

    axes: Axes
    device: Device
    context: DynamicContext | None

    @classmethod
    def of(cls, layout: Layout) -> "Place":
        """That of this rank of the default group. A collective."""
        parallel, device = layout.parallel, Device("cpu")
        if layout.device == "cuda":
            prepare_environment()
            make_deterministic(0)  # no TF32, no sums in narrow types, no atomics
            device = Device("cuda", torch.cuda.current_device())
        context = None
        if parallel.dynamic_cp:
            context = DynamicContext(groups(parallel, ("dp", "cp")), parallel.dynamic_cp)
        return cls(build_axes(parallel, device), device, context)


Case = tuple[Problem, Layout, Routes | None]


def run_case(problem: Problem, layout: Layout, routes: Routes | None) -> Outcome:
    """The step on a rank of the default group."""
    return run_cases([(problem, layout, routes)])[0]


def run_cases(cases: list[Case]) -> list[Outcome]:
    """Several steps one after another, of layouts that have their degrees in common."""
    if len({(layout.parallel, layout.device) for _, layout, _ in cases}) != 1:
        raise ValueError("Expected layouts of the same degrees on the same device.")
    place, found = Place.of(cases[0][1]), []
    for problem, layout, routes in cases:
        with parity_faults.planted(layout.fault):
            stages, axes, watch = take_step(problem, layout, routes, place=place)
            grads = gather_global_grads(stages, axes)
        watch.outcome.grads = {} if dist.get_rank() else grads
        found.append(watch.outcome)
    return found


def take_step(
    problem: Problem, layout: Layout, routes: Routes | None, *, masks: bool = False,
    place: Place | None = None,
) -> tuple[list[DecoderStage], Axes, Watch]:  # fmt: skip
    """Forward and backward of all microbatches on a rank of the default group."""
    place = place or Place.of(layout)
    parallel, config, batch = layout.parallel, problem.model, problem.batch
    axes = parity_faults.axes_of(place.axes, layout.fault)
    device, dtype = place.device.torch_device, DTYPES[layout.dtype]
    # Each tensor scaled by its own largest: one step has no history that a scale could come from.
    backend = make_layers(layout.backend, fp8="current" if layout.dtype == "fp8" else "none")
    streams = streams_of(axes, device)
    stages = make_stages(config, axes, backend, streams, chunks=parallel.pp_chunks)
    load_global(stages, global_weights(problem))
    if dtype == torch.float64:
        cast_parameters(stages, dtype)
    for stage in stages:
        shard_stage(stage.to(device), axes, **sharding_of(layout, dtype))
        parity_faults.after_sharding(stage, axes, layout.fault)
        stage.set_loss_scale(parity_faults.loss_scale(1 / batch.number, layout.fault))
    shares = make_shares(problem, layout, place)
    tp = axes.tp if axes.tp.cuts_sequence else None
    watch = Watch(stages, shares, tp, masks=masks)
    put_tapes(stages, routes, shares, tp, config.experts)
    rows, time = shares[0].numbers.shape
    spec = TensorSpec((rows, time // (tp.size if tp else 1), config.hidden), dtype)
    pipeline = Pipeline(stages, axes.pp, spec, device, num_slots=len(shares))
    pipeline.forward_backward([
        Microbatch(share.local.tokens, {"part": share.local.part}) for share in shares
    ])  # fmt: skip
    return stages, axes, watch


def sharding_of(layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    bf16 = dtype == torch.bfloat16
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if bf16 else None,
        reduce_dtype=torch.float32 if bf16 else None,
        cast_forward_inputs=False,
    )
    return {"fsdp": FsdpConfig(strategy=layout.strategy), "policy": policy}


def make_shares(problem: Problem, layout: Layout, place: Place) -> list[Share]:
    batch, axes, device = problem.batch, place.axes, place.device.torch_device
    ranks = axes.num_averaged
    weight = problem.weight * ranks
    shares = []
    for number in range(batch.number):
        if place.context is None:
            where = (axes.dp_outer.rank * axes.dp.size + axes.dp.rank, ranks // axes.cp.size)
            cp = axes.cp
        else:
            at = place.context.layout(batch.sizes[number])
            where, cp = (at.pack, at.num_packs), place.context.axis(at.size)
        shares.append(rank_share(batch, number, where, cp, weight, axes.tp, device=device))
    return shares


@functools.cache
def order(config: ModelConfig) -> tuple[str, ...]:
    """Names of gradients in the order in which backward makes them: last layer first."""
    names = [n for n, _ in whole_model(Problem(config, Batch(1, 1, 1))).named_parameters()]
    return tuple(reversed(names))


def keys_in_order(found: Found, config: ModelConfig) -> Iterator[Key]:
    """Activations in the order of forward, losses, gradients in the order of backward."""

    def place(key: Key) -> tuple[Any, ...]:
        name = key[2]
        if name == "embedding":
            return key[1], -1, 0
        _, number, branch = name.split(".")
        return key[1], int(number), ("attn", "mlp").index(branch)

    yield from sorted((k for k in found if k[0] == "forward"), key=place)
    yield ("loss",)
    for name in order(config):
        yield "grad", name


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads, much slower beside busy ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
