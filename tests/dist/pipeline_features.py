"""What the ranks of pipeline tests run: tied weights, other activations, slots, forwards alone."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.device import Device
from fsdp_core.fsdp import fully_shard
from fsdp_core.graph.capture import CapturedFunction, GraphMaker
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.pipeline import Microbatch, Pipeline, PipelineOptions
from fsdp_core.parallel.pipeline_p2p import TensorSpec
from fsdp_core.parallel.tied_weights import TiedWeights
from tests.dist.pipeline_models import (
    LAYERS,
    ROWS,
    SEQ,
    Stage,
    batches,
    fill,
    gradients,
    loop,
    raw,
    whole,
)
from tests.dist.pipeline_programs import CPU, SPEC, make_stages, whole_gradients, world_axis

ENDS = ("embedding.weight", "head.weight")

# ---- tied weights


def tie(*stages: Stage) -> list[nn.Parameter]:
    """Give the head the values of the embedding; the ends that these stages have."""
    named = [(name, p) for stage in stages for name, p in stage.named_parameters()]
    found = [parameter for name, parameter in named if name in ENDS]
    for weight in found:
        fill(ENDS[0], weight)
    return found


def ends_of_loop(number: int, part: int = 0) -> list[torch.Tensor]:
    """Gradients of embedding and head in one process, as two parameters of the same values."""
    model = whole()
    tie(model)
    loop(model, batches(number, part))
    grads = dict(gradients([model]))
    return [grads[name] for name in ENDS]


def tied_process(number: int) -> dict[str, torch.Tensor]:
    """One process.

    Returns:
        tied: gradient of one parameter at both ends; apart: the two ends' gradients added;
        magnitude: absolute values of all that is added up, in float64.
    """
    model = whole()
    tie(model)
    assert model.head is not None
    assert model.embedding is not None
    model.head.weight = model.embedding.weight
    loop(model, batches(number))
    apart, magnitude = whole(), torch.zeros_like(model.head.weight, dtype=torch.float64)
    tie(apart)
    for batch in batches(number):
        apart.zero_grad()
        loop(apart, [replace(batch, weight=1.0 / number)])
        magnitude += sum(dict(gradients([apart]))[name].double().abs() for name in ENDS)
    embedding, head = ends_of_loop(number)
    return {
        "tied": dict(gradients([model]))[ENDS[0]].clone(),
        "apart": embedding + head,
        "magnitude": magnitude.detach(),
    }


def train_tied(chunks: int, number: int) -> list[torch.Tensor]:
    """Gradients of the ends that this rank has, after a pass with tied weights."""
    axis = world_axis()
    stages = make_stages(axis, chunks)
    ends = tie(*stages)
    Pipeline(stages, axis, SPEC, CPU, tied=ends).forward_backward(batches(number))
    return [end.grad.clone() for end in ends if end.grad is not None]


def halves_tied(number: int) -> bytes:
    """The tied gradient of two data-parallel halves: ends averaged, then added."""
    parts = [ends_of_loop(number, part) for part in range(2)]
    embedding, head = ((one + other) * 0.5 for one, other in zip(*parts, strict=True))
    return raw(embedding + head)


def train_tied_sharded(number: int, own_units: bool) -> dict[str, bytes]:
    """2 x 2 ranks with tied weights; the head in a unit of its own or in one with the norm."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_coordinate() or (0, 0)
    axis = Axis("pp", 2, pp, mesh.get_group("pp"))
    (stage,) = make_stages(axis)
    tie(stage)
    end = stage.embedding or stage.head
    assert end is not None
    if own_units:
        fully_shard(end, mesh=mesh["dp"])
    fully_shard(stage, mesh=mesh["dp"])
    ends = [p for name, p in stage.named_parameters() if name in ENDS]
    Pipeline([stage], axis, SPEC, CPU, tied=ends).forward_backward(batches(number, dp))
    found = whole_gradients([stage], mesh["dp"])
    return {name: found[name] for name in ENDS if name in found}


def train_tied_wrongly(case: str) -> str:
    """What a pipeline says that is given weights that are not tied."""
    axis = world_axis()
    (stage,) = make_stages(axis)
    ends = tie(stage)
    if case == "values":
        fill(f"rank {axis.rank}", ends[0])
    if case == "missing" and axis.rank == 0:
        ends = []
    if case == "frozen" and axis.rank == 0:
        ends[0].requires_grad_(False)
    if case == "many":
        ends = list(stage.parameters())[:2]
    return caught(
        lambda: Pipeline([stage], axis, SPEC, CPU, tied=ends).forward_backward(batches(2))
    )


def sum_without_gradient() -> str:
    """What a weight says of which one end was not in the loss."""
    ends = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    ends[0].grad = torch.ones(2)
    return caught(TiedWeights(world_axis(), ends).sum_gradients)


def caught(function: Any) -> str:
    """Type and text of what a call raises, notes included; empty if it returns."""
    try:
        function()
    except Exception as error:  # noqa: BLE001  (the test looks at whatever it is)
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return ""


# ---- other activations


class Bundle(nn.Module):
    """A stage whose activation is (hidden, auxiliary loss, tokens): two with a gradient, one not.

    The first of a chain makes them from tokens, the last one's targets are the tokens.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.inner = stage

    def forward(self, x: Any, *, microbatch: int, scale: float) -> Any:
        """Tokens or a bundle -> a bundle or the loss."""
        first = self.inner.embedding is not None
        hidden, aux, tokens = (x, torch.zeros(1), x) if first else x
        if self.inner.head is not None:
            loss = self.inner(hidden, tokens.flip(1), microbatch=microbatch)
            return loss + scale * aux.squeeze(0) if scale else loss
        hidden = self.inner(hidden, microbatch=microbatch)
        return hidden, aux + hidden.square().mean(), tokens


def bundles(axis_size: int, rank: int) -> Bundle:
    """The stage of a rank with a bundle as activation."""
    step = LAYERS // axis_size
    layers = range(rank * step, (rank + 1) * step)
    return Bundle(Stage(layers, is_first=rank == 0, is_last=rank == axis_size - 1))


def weighted(number: int, scale: float) -> list[Microbatch]:
    """Microbatches of different weights, numbers and tensors, and a keyword for every stage."""
    weights = [0.1 * (i + 1) if i % 2 else torch.tensor(0.1 * (i + 1)) for i in range(number)]
    return [
        Microbatch(batch.tokens, {"scale": scale}, weight)
        for batch, weight in zip(batches(number), weights, strict=True)
    ]


class Chain(nn.Module):
    """Bundles one after another in one process."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(bundles(size, rank) for rank in range(size))

    def forward(self, x: Any, **keywords: Any) -> Any:
        """Tokens -> the loss."""
        for part in self.parts:
            x = part(x, **keywords)
        return x


def chain_process(size: int, number: int, scale: float) -> tuple[bytes, list[dict[str, bytes]]]:
    """Losses, and gradients by part, of one process."""
    model = Chain(size)
    losses = loop(model, weighted(number, scale))
    parts = [{n: raw(g) for n, g in gradients([part])} for part in model.parts]
    return raw(losses), parts


def train_bundles(number: int, scale: float) -> tuple[bytes | None, dict[str, bytes]]:
    """The same over ranks."""
    axis = world_axis()
    stage = bundles(axis.size, axis.rank)
    specs = (SPEC, TensorSpec((1,), torch.float32),
             TensorSpec((ROWS, SEQ), torch.int64, requires_grad=False))  # fmt: skip
    losses = Pipeline([stage], axis, specs, CPU).forward_backward(weighted(number, scale))
    return None if losses is None else raw(losses), {n: raw(g) for n, g in gradients([stage])}


def train_frozen(number: int) -> dict[str, bytes]:
    """Gradients where the first of three stages is frozen, so that none goes back to it."""
    axis = world_axis()
    (stage,) = make_stages(axis)
    if axis.rank == 0:
        stage.requires_grad_(False)
    specs = {0: (replace(SPEC, requires_grad=False),), 1: (SPEC,)}
    Pipeline([stage], axis, specs, CPU).forward_backward(batches(number))
    return {name: raw(p.grad) for name, p in stage.named_parameters() if p.grad is not None}


class Identity(nn.Module):
    """A stage without layers."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor, *, microbatch: int) -> torch.Tensor:
        """Its input itself."""
        del targets, microbatch
        return x


def train_around_identity(number: int) -> dict[str, bytes]:
    """Gradients with an empty stage between the two that have the layers."""
    axis = world_axis()
    middle = LAYERS // 2
    stage = [
        Stage(range(middle), is_first=True, is_last=False),
        Identity(),
        Stage(range(middle, LAYERS), is_first=False, is_last=True),
    ][axis.rank]
    Pipeline([stage], axis, SPEC, CPU).forward_backward(batches(number))
    return {name: raw(grad) for name, grad in gradients([stage])}


# ---- forwards alone, slots, static memory


def evaluate(chunks: int) -> dict[str, Any]:
    """Forward-only passes between training passes, with losses for every rank."""
    axis = world_axis()
    stages = make_stages(axis, chunks)
    pipeline = Pipeline(stages, axis, SPEC, CPU)
    trained = pipeline.forward_backward(batches(4), broadcast_loss=True)
    before = {name: raw(grad) for name, grad in gradients(stages)}
    assert trained is not None
    peaks = [pipeline.peak_live]
    quiet = pipeline.forward_only(batches(8))
    told = pipeline.forward_only(batches(4), broadcast_loss=True)
    peaks.append(pipeline.peak_live)
    after = {name: raw(grad) for name, grad in gradients(stages)}
    assert told is not None
    return {
        "trained": raw(trained), "told": raw(told), "quiet": quiet is not None, "peaks": peaks,
        "kept": before == after, "needs grad": told.requires_grad or trained.requires_grad,
    }  # fmt: skip


def frozen_slots() -> dict[str, str]:
    """What a pipeline with frozen slots does with other numbers of microbatches."""
    axis = world_axis()
    stages = make_stages(axis)
    pipeline = Pipeline(stages, axis, SPEC, CPU)
    early = caught(pipeline.freeze_slots)
    pipeline.forward_backward(batches(4))
    pipeline.freeze_slots()
    return {
        "early": early,
        "fewer": caught(lambda: pipeline.forward_backward(batches(3))),
        "more": caught(lambda: pipeline.forward_backward(batches(5))),
        "more forwards": caught(lambda: pipeline.forward_only(batches(5))),
        "fewer forwards": caught(lambda: pipeline.forward_only(batches(3))),
        "same": caught(lambda: pipeline.forward_backward(batches(4))),
    }


class Static(nn.Module):
    """A stage that returns the same memory at every call, as a graph does."""

    def __init__(self, stage: Stage, ran: dist.Store | None) -> None:
        super().__init__()
        self.inner, self._ran = stage, ran
        self._memory = torch.zeros(SPEC.shape)

    def forward(self, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """The stage's output, in static memory."""
        out: torch.Tensor = _Into.apply(self.inner(x, **keywords), self._memory)
        if keywords["microbatch"] == 1 and self._ran is not None:
            self._ran.set("second", "ran")
        return out


class _Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        del ctx
        return memory.copy_(x).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return grad, None


def train_static(path: str, copy_sent: bool) -> bytes | None:
    """Losses where the first stage runs twice before the second takes its first output."""
    axis = world_axis()
    (inner,) = make_stages(axis)
    store = dist.FileStore(path, 2)
    stage = Static(inner, store) if axis.rank == 0 else inner
    pipeline = Pipeline([stage], axis, SPEC, CPU, options=PipelineOptions(copy_sent=copy_sent))
    pipeline.forward_backward(batches(3))  # ranks compare their programs, and must meet
    store.set(f"rank {axis.rank}", "ready")
    store.wait([f"rank {1 - axis.rank}"])
    if axis.rank == 0:
        store.delete_key("second")
        store.set("cleared", "yes")
    else:
        store.wait(["cleared"])
        store.wait(["second"])
    losses = pipeline.forward_backward(batches(3))
    return None if losses is None else raw(losses)


def loss_of_wrong_kind(kind: str) -> str:
    """What a pipeline of one rank says of a last stage that returns no scalar loss."""

    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor, **_: Any) -> Any:
            return {"vector": F.one_hot(x).float(), "number": 1.0, "int": x.sum()}[kind]

    pipeline = Pipeline([Wrong()], world_axis(), (), CPU)
    return caught(lambda: pipeline.forward_only([Microbatch(torch.arange(3))]))


def train_captured(chunks: int) -> tuple[list[bytes], list[bytes]]:
    """Losses and gradients of passes with new tokens, eager and replayed from one host graph."""
    axis, device = world_axis(), Device("cpu")
    stages = make_stages(axis, chunks)
    pipeline = Pipeline(stages, axis, SPEC, CPU)
    pipeline.forward_backward(batches(4))
    static = batches(4)
    grads = [grad for _, grad in gradients(stages)]
    losses = torch.zeros(4)

    def iteration() -> None:
        torch._foreach_zero_(grads)
        found = pipeline.forward_backward(static, broadcast_loss=True)
        assert found is not None
        losses.copy_(found)

    def run(step: Any) -> list[bytes]:
        seen = []
        for part in range(3):
            for batch, new in zip(static, batches(4, part), strict=True):
                assert batch.tokens is not None
                assert new.tokens is not None
                batch.tokens.copy_(new.tokens)
                batch.keywords["targets"].copy_(new.keywords["targets"])
            step()
            seen.append(b"".join(raw(tensor) for tensor in (losses, *grads)))
        return seen

    eager = run(iteration)
    graph = CapturedFunction(GraphMaker(device), iteration, None)
    return eager, run(graph)
