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
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.config import FsdpConfig, ModelConfig, ParallelConfig
from fsdp_core.device import Device
from fsdp_core.fsdp import MixedPrecisionPolicy
from fsdp_core.layouts import groups
from fsdp_core.mesh import build_axes
from fsdp_core.model.backend import TorchBackend
from fsdp_core.model.decoder import DecoderStage, make_stages
from fsdp_core.model.microbatch import num_averaged
from fsdp_core.model.moe.replay import RoutingTape
from fsdp_core.model.sharding import Sharding, shard_stage
from fsdp_core.model.weights import gather_global_grads, init_weights, load_global
from fsdp_core.parallel.axes import Axes, Axis
from fsdp_core.parallel.dynamic_cp import DynamicContext
from fsdp_core.parallel.pipeline import Microbatch, Pipeline
from fsdp_core.parallel.rng import RandomStreams
from fsdp_core.parallel.stage_transfer import TensorSpec
from tests.dist import parity_faults
from tests.dist.parity_batches import Batch, Share, rank_share, whole_share

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
AXES = ("tp", "cp", "pp", "dp", "dp_outer", "ep", "etp", "edp")
CPU = torch.device("cpu")

Key = tuple[Any, ...]
Found = dict[Key, torch.Tensor]
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
    """How it is trained: degrees, precision, the way of context parallelism, a planted fault."""

    parallel: ParallelConfig
    dtype: str = "fp64"
    way: str = "ring"
    strategy: str = "optim_grads_params"
    fault: str = ""


@dataclass
class Outcome:
    """What a rank has to show: rows of activations by number, its losses, gradients on rank 0."""

    numbers: dict[Key, torch.Tensor] = field(default_factory=dict)
    rows: Found = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


# ---- weights


def single_axes() -> Axes:
    """Axes of one process: no axis has a group that anybody would ask."""
    nobody = cast("Any", None)
    one = {name: Axis(name, 1, 0, nobody) for name in AXES}
    return Axes(**one, dense_mesh=nobody, expert_mesh=nobody, sequence_parallel=False)


def streams_of(axes: Axes) -> RandomStreams:
    """Random streams of a rank."""
    return RandomStreams(11, (axes.pp, axes.dp_outer, axes.dp, axes.cp, axes.tp), CPU)


def whole_model(problem: Problem) -> DecoderStage:
    """The model that is not cut, with its weights, float32."""
    axes, config = single_axes(), problem.model
    model = DecoderStage(config, axes, TorchBackend(), streams_of(axes))
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


# ---- what happens inside


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
            rows = out.detach()
            if self._masks:
                rows = rows != args[0].detach()
            key = ("forward", (microbatch := next(count)), name)
            numbers = local_numbers(self._shares[microbatch], self._tp).flatten()
            self.outcome.numbers[key] = numbers[numbers >= 0]
            self.outcome.rows[key] = rows.flatten(0, 1)[numbers >= 0].double()

        return note

    def _loss_hook(self) -> Any:
        count = iter(range(len(self._shares)))

        def note(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            del module, args
            self.outcome.losses[next(count)] = out.detach().double()

        return note


def local_numbers(share: Share, tp: Axis | None) -> torch.Tensor:
    """Numbers of a rank's tokens as activations are laid out; `tp` where it cuts the sequence."""
    return share.numbers if tp is None else share.numbers.chunk(tp.size, 1)[tp.rank]


def put_tapes(
    stages: list[DecoderStage], routes: Routes | None, shares: list[Share], tp: Axis | None,
    num_experts: int,
) -> dict[str, RoutingTape]:  # fmt: skip
    """A tape in each router: of `routes`, or one that records."""
    tapes = {}
    for stage in stages:
        for name, router in stage.routers.items():
            entries = None
            if routes is not None:
                entries = [
                    _entry(table, local_numbers(share, tp), num_experts)
                    for table, share in zip(routes[name], shares, strict=True)
                ]
            tapes[name] = cast("Any", router).tape = RoutingTape(entries)
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


def run_case(problem: Problem, layout: Layout, routes: Routes | None) -> Outcome:
    """The step on a rank of the default group."""
    with parity_faults.planted(layout.fault):
        return _run_case(problem, layout, routes)


def _run_case(problem: Problem, layout: Layout, routes: Routes | None) -> Outcome:
    stages, axes, watch = take_step(problem, layout, routes)
    outcome = watch.outcome
    outcome.grads = gather_global_grads(stages, axes)
    if dist.get_rank():
        outcome.grads = {}
    return outcome


def take_step(
    problem: Problem, layout: Layout, routes: Routes | None, *, masks: bool = False
) -> tuple[list[DecoderStage], Axes, "Watch"]:
    """Forward and backward of all microbatches on a rank of the default group."""
    parallel, config, batch = layout.parallel, problem.model, problem.batch
    axes = parity_faults.axes_of(build_axes(parallel, Device("cpu")), layout.fault)
    streams = streams_of(axes)
    stages = make_stages(config, axes, TorchBackend(), streams, chunks=parallel.pp_chunks)
    load_global(stages, global_weights(problem))
    dtype = DTYPES[layout.dtype]
    if dtype == torch.float64:
        cast_parameters(stages, dtype)
    for stage in stages:
        shard_stage(stage, axes, sharding_of(layout, dtype))
        parity_faults.after_sharding(stage, axes, layout.fault)
        stage.set_loss_scale(parity_faults.loss_scale(1 / batch.number, layout.fault))
    shares = make_shares(problem, layout, axes)
    tp = axes.tp if axes.sequence_parallel else None
    watch = Watch(stages, shares, tp, masks=masks)
    put_tapes(stages, routes, shares, tp, config.experts)
    rows, time = shares[0].numbers.shape
    spec = TensorSpec((rows, time // (tp.size if tp else 1), config.hidden), dtype)
    pipeline = Pipeline(stages, axes.pp, spec, CPU)
    pipeline.forward_backward([
        Microbatch(share.local.tokens, {"part": share.local.part}) for share in shares
    ])  # fmt: skip
    return stages, axes, watch


def sharding_of(layout: Layout, dtype: torch.dtype) -> Sharding:
    """Precision and strategy of a layout."""
    bf16 = dtype == torch.bfloat16
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if bf16 else None,
        reduce_dtype=torch.float32 if bf16 else None,
        cast_forward_inputs=False,
    )
    return Sharding(fsdp=FsdpConfig(strategy=layout.strategy), policy=policy)


def make_shares(problem: Problem, layout: Layout, axes: Axes) -> list[Share]:
    """This rank's part of every microbatch."""
    batch, parallel = problem.batch, layout.parallel
    ranks = num_averaged(axes)
    weight = problem.weight * ranks
    multiple = (axes.tp.size, axes.sequence_parallel)
    if not parallel.dynamic_cp:
        place = (axes.dp_outer.rank * axes.dp.size + axes.dp.rank, ranks // axes.cp.size)
        return [
            rank_share(batch, m, place, axes.cp, weight, layout.way, multiple)
            for m in range(batch.number)
        ]
    context = DynamicContext(groups(parallel, ("dp", "cp")), parallel.dynamic_cp)
    shares = []
    for number, size in enumerate(batch.sizes):
        at = context.layout(size)
        shares.append(rank_share(batch, number, (at.pack, at.num_packs), context.axis(size),
                                 weight, layout.way, multiple))  # fmt: skip
    return shares


# ---- together again


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
