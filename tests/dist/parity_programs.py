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
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from fsdp_core.config import FsdpConfig, ModelConfig, ParallelConfig
from fsdp_core.determinism import make_deterministic, prepare_environment
from fsdp_core.device import Device
from fsdp_core.fsdp import MixedPrecisionPolicy
from fsdp_core.layouts import groups
from fsdp_core.model.batch import num_averaged
from fsdp_core.model.decoder import DecoderStage, make_layers, make_stages
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.sharding import Sharding, shard_stage
from fsdp_core.model.weights import init_weights
from fsdp_core.parallel.context import DynamicContext
from fsdp_core.parallel.mesh import Axes, Axis, build_axes
from fsdp_core.parallel.pipeline import Microbatch, Pipeline
from fsdp_core.parallel.pipeline_p2p import TensorSpec
from fsdp_core.parallel.rng import RandomStreams
from tests.dist import parity_faults
from tests.dist.parity_batches import Batch, Share, rank_share, whole_share
from tests.dist.parity_watch import Found, Key, Outcome, Watch, join, local_numbers
from tests.support.global_weights import gather_global_grads, load_global
from tests.support.routing_tape import RoutingTape, attach

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
    return Axes(**one, dense_mesh=nobody, expert_mesh=nobody, sequence_parallel=False)


def streams_of(axes: Axes, device: torch.device = CPU) -> RandomStreams:
    """Random streams of a rank."""
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
        shard_stage(stage.to(device), axes, sharding_of(layout, dtype))
        parity_faults.after_sharding(stage, axes, layout.fault)
        stage.set_loss_scale(parity_faults.loss_scale(1 / batch.number, layout.fault))
    shares = make_shares(problem, layout, place)
    tp = axes.tp if axes.sequence_parallel else None
    watch = Watch(stages, shares, tp, masks=masks)
    put_tapes(stages, routes, shares, tp, config.experts)
    rows, time = shares[0].numbers.shape
    spec = TensorSpec((rows, time // (tp.size if tp else 1), config.hidden), dtype)
    pipeline = Pipeline(stages, axes.pp, spec, device, num_slots=len(shares))
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


def make_shares(problem: Problem, layout: Layout, place: Place) -> list[Share]:
    """This rank's part of every microbatch."""
    batch, axes, device = problem.batch, place.axes, place.device.torch_device
    ranks = num_averaged(axes)
    weight = problem.weight * ranks
    multiple = (axes.tp.size, axes.sequence_parallel)
    shares = []
    for number in range(batch.number):
        if place.context is None:
            where = (axes.dp_outer.rank * axes.dp.size + axes.dp.rank, ranks // axes.cp.size)
            cp = axes.cp
        else:
            at = place.context.layout(batch.sizes[number])
            where, cp = (at.pack, at.num_packs), place.context.axis(at.size)
        shares.append(rank_share(batch, number, where, cp, weight, multiple, device=device))
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
