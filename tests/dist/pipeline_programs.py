"""What the ranks of pipeline tests run."""

import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_core.fsdp import fully_shard
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.pipeline import Microbatch, Pipeline, TensorSpec, Transfers
from fsdp_core.parallel.pipeline_schedule import Exchange, Transfer, split_layers
from tests.dist import fsdp_sides

LAYERS, VOCAB, HIDDEN, SEQ, ROWS = 9, 19, 12, 5, 2


class Watch:
    """Counts autograd graphs and outputs that are alive when a forward begins.

    Attributes:
        peak_graphs: graphs of earlier forwards and the one that begins, at most.
        peak_outputs: outputs of earlier forwards, at most.
    """

    def __init__(self) -> None:
        self.peak_graphs = self.peak_outputs = 0
        self._graphs: list[Any] = []
        self._outputs: list[Any] = []

    def look(self) -> None:
        self.peak_graphs = max(self.peak_graphs, 1 + _alive(self._graphs))
        self.peak_outputs = max(self.peak_outputs, _alive(self._outputs))

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """The output as new memory that autograd does not need, from a node that is watched."""
        out: torch.Tensor = _Copied.apply(x)
        self._graphs.append(weakref.ref(out.grad_fn))
        self._outputs.append(weakref.ref(out.untyped_storage()))
        return out


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        del ctx
        return grad


def _alive(references: list[Any]) -> int:
    return sum(reference() is not None for reference in references)


class Block(nn.Module):
    """x + down(tanh(up(norm(x)))), [B, T, H] -> [B, T, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Stage(nn.Module):
    """Some layers; the first stage has the embedding, the last one norm, head and loss.

    Attributes:
        slots: the microbatch slot of each forward so far.
        watch: counts what each forward keeps, and its outputs.
    """

    def __init__(self, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.slots: list[int] = []
        self.watch = Watch()
        self.embedding = nn.Embedding(VOCAB, HIDDEN) if is_first else None
        self.layers = nn.ModuleDict({str(number): Block() for number in layers})
        self.norm = nn.LayerNorm(HIDDEN) if is_last else None
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False) if is_last else None
        for name, parameter in self.named_parameters():
            fill(name, parameter)

    def forward(
        self, x: torch.Tensor, targets: torch.Tensor | None = None, *, microbatch: int
    ) -> torch.Tensor:
        """Tokens or [B, T, H] -> [B, T, H] or the mean loss."""
        self.slots.append(microbatch)
        self.watch.look()
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if x.requires_grad:
            x = self.watch.keep(x)
        if self.head is None or self.norm is None:
            return x
        assert targets is not None
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def fill(name: str, parameter: torch.Tensor) -> None:
    """Values that depend on nothing but the name and the shape."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        if name.endswith("norm.weight"):
            parameter.add_(1.0)


def whole() -> Stage:
    return Stage(range(LAYERS), is_first=True, is_last=True)


def batches(number: int, part: int = 0) -> list[Microbatch]:
    """Microbatches of one data-parallel rank, all different."""
    found = []
    for i in range(number):
        generator = torch.Generator().manual_seed(1000 * part + i)
        tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
        found.append(Microbatch(tokens[:, :-1], {"targets": tokens[:, 1:]}))
    return found


def loop(
    model: nn.Module, microbatches: list[Microbatch], number: int | None = None
) -> torch.Tensor:
    """The reference: one microbatch after another; losses [microbatches], gradients in `grad`.

    Args:
        number: microbatches of the whole pass, if more than these.
    """
    losses = torch.zeros(len(microbatches))
    for i, batch in enumerate(microbatches):
        loss = model(batch.tokens, microbatch=i, **batch.keywords)
        (loss * (1.0 / (number or len(microbatches)))).backward()
        losses[i].copy_(loss.detach())
    return losses


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def gradients(modules: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and gradient of every parameter of some stages."""
    for module in modules:
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            yield name, parameter.grad


CPU = torch.device("cpu")
SPEC = TensorSpec((ROWS, SEQ, HIDDEN), torch.float32)
TIMEOUT_S = 1.0


@dataclass
class Seen:
    """What one rank saw of a pass: bits of losses and gradients, and counts."""

    losses: bytes
    grads: dict[str, bytes]
    slots: list[list[int]]
    graphs: int
    outputs: int


def world_axis(timeout_s: float | None = None) -> Axis:
    """All ranks as one pipeline, with a group of its own if messages are to time out soon."""
    group = dist.group.WORLD
    if timeout_s is not None:
        group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    assert group is not None
    return Axis("pp", dist.get_world_size(), dist.get_rank(), group)


def make_stages(axis: Axis, chunks: int = 1) -> list[Stage]:
    last = axis.size * chunks - 1
    parts = split_layers(LAYERS, axis.size, chunks)[axis.rank]
    numbers = range(axis.rank, axis.size * chunks, axis.size)
    stages = [
        Stage(layers, is_first=number == 0, is_last=number == last)
        for number, layers in zip(numbers, parts, strict=True)
    ]
    watch_anew(stages)
    return stages


def watch_anew(stages: list[Stage]) -> None:
    """Count from here on, over all stages of the rank."""
    watch = Watch()
    for stage in stages:
        stage.slots, stage.watch = [], watch


def grads_of(stages: list[Stage]) -> dict[str, bytes]:
    return {name: raw(grad) for name, grad in gradients(stages)}


def one_process(number: int) -> tuple[bytes, dict[str, bytes]]:
    """The reference: bits of the losses and gradients of a loop over microbatches.

    On a rank, since the bits of a matrix product depend on the number of threads.
    """
    model = whole()
    losses = loop(model, batches(number))
    return raw(losses), grads_of([model])


def train(chunks: int, counts: list[int], num_slots: int = 16) -> list[Seen]:
    """Training passes of some numbers of microbatches, each from fresh gradients."""
    axis = world_axis()
    stages = make_stages(axis, chunks)
    pipeline = Pipeline(stages, axis, SPEC, CPU, num_slots=num_slots)
    found = []
    for number in counts:
        losses = raw(pipeline.forward_backward(batches(number)))
        slots, watch = [stage.slots for stage in stages], stages[0].watch
        found.append(Seen(losses, grads_of(stages), slots, watch.peak_graphs, watch.peak_outputs))
        for stage in stages:
            stage.zero_grad()
        watch_anew(stages)
    return found


def two_parts(number: int, each: int) -> dict[str, bytes]:
    """Gradients of two data-parallel halves, averaged after `each` microbatches."""
    models = [whole(), whole()]
    parts = [batches(number, part) for part in range(2)]
    total: dict[str, torch.Tensor] = {}
    for first in range(0, number, each):
        for model, part in zip(models, parts, strict=True):
            model.zero_grad()
            loop(model, part[first : first + each], number)
        grads = [dict(gradients([model])) for model in models]
        for name, grad in grads[0].items():
            mean = (grad + grads[1][name]) * 0.5
            total[name] = total[name] + mean if name in total else mean
    return {name: raw(grad) for name, grad in total.items()}


def train_sharded(
    chunks: int, number: int, by_torch: bool, options: dict[str, Any]
) -> tuple[dict[str, bytes], list[list[bool]]]:
    """2 x 2 ranks, second pass: gradients, and what each stage was told before its backwards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_coordinate() or (0, 0)
    axis = Axis("pp", 2, pp, mesh.get_group("pp"))
    stages: list[Any] = make_stages(axis, chunks)
    shard: Any = torch_fully_shard if by_torch else fully_shard
    flags: list[list[bool]] = [[] for _ in stages]
    for stage, seen in zip(stages, flags, strict=True):
        for block in stage.layers.values():
            shard(block, mesh=mesh["dp"], **options)
        shard(stage, mesh=mesh["dp"], **options)
        stage.set_is_last_backward = _noting(stage.set_is_last_backward, seen)
    pipeline = Pipeline(stages, axis, SPEC, CPU, num_slots=16)
    for _ in range(2):  # the second pass by what the first has recorded
        for stage, seen in zip(stages, flags, strict=True):
            stage.zero_grad()
            seen.clear()
        pipeline.forward_backward(batches(number, part=dp))
    own = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    grads = fsdp_sides.whole(own, mesh["dp"])
    return {name: raw(grad) for name, grad in grads.items() if grad is not None}, flags


def _noting(function: Callable[[bool], None], seen: list[bool]) -> Callable[[bool], None]:
    def noted(is_last: bool) -> None:
        seen.append(is_last)
        function(is_last)

    return noted


def evaluate(chunks: int) -> dict[str, Any]:
    """Forward-only passes after a training pass; any number of microbatches."""
    axis = world_axis()
    stages = make_stages(axis, chunks)
    pipeline = Pipeline(stages, axis, SPEC, CPU, num_slots=16)
    trained = pipeline.forward_backward(batches(4))
    before = grads_of(stages)
    watch_anew(stages)
    pipeline.forward_only(batches(5))
    losses = pipeline.forward_only(batches(4))
    return {
        "trained": raw(trained), "losses": raw(losses), "kept": before == grads_of(stages),
        "needs grad": losses.requires_grad or trained.requires_grad,
        "graphs": len(stages[0].watch._graphs),
    }  # fmt: skip


class Static(nn.Module):
    """A stage that returns the same memory at every call, as a graph does."""

    def __init__(self, stage: Stage, ran: dist.Store | None) -> None:
        super().__init__()
        self.inner, self._ran = stage, ran
        self._memory = torch.zeros(SPEC.shape)

    def forward(self, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
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


def train_static(path: str, copy_sent: bool) -> bytes:
    """Losses where the first stage runs twice before the second takes its first output."""
    axis = world_axis()
    (inner,) = make_stages(axis)
    store = dist.FileStore(path, 2)
    stage = Static(inner, store) if axis.rank == 0 else inner
    pipeline = Pipeline([stage], axis, SPEC, CPU, num_slots=3, copy_sent=copy_sent)
    pipeline.forward_backward(batches(3))  # ranks compare their programs, and must meet
    store.set(f"rank {axis.rank}", "ready")
    store.wait([f"rank {1 - axis.rank}"])
    if axis.rank == 0:
        store.delete_key("second")
        store.set("cleared", "yes")
    else:
        store.wait(["cleared"])
        store.wait(["second"])
    return raw(pipeline.forward_backward(batches(3)))


# ---- failures


def caught(function: Callable[[], Any]) -> str:
    """Type and text of what a call raises, notes included; empty if it returns."""
    try:
        function()
    except Exception as error:  # noqa: BLE001  (the test looks at whatever it is)
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return ""


class Raising(Stage):
    """Fails in the second microbatch."""

    where = ""

    def forward(self, x: torch.Tensor, *args: Any, microbatch: int, **keywords: Any) -> Any:
        """As a stage, but for the second microbatch."""
        out = super().forward(x, *args, microbatch=microbatch, **keywords)
        if microbatch != 1:
            return out
        if self.where == "forward":
            raise ArithmeticError("planted")
        if self.where == "backward":
            out.register_hook(_raise)
        made = {"shape": out[:, :2], "dtype": out.double(), "gradient": out.detach(), "number": 1.0}
        return made.get(self.where, out)


def _raise(grad: torch.Tensor) -> None:
    raise ArithmeticError("planted")


def fail(rank: int, where: str) -> tuple[str, float, str]:
    """What a rank raises, how long it takes, and what it says to a second pass."""
    axis = world_axis(TIMEOUT_S)
    (stage,) = make_stages(axis)
    if axis.rank == rank:
        stage.__class__ = Raising
        stage.where = where  # type: ignore[assignment]
    pipeline = Pipeline([stage], axis, SPEC, CPU, num_slots=8)
    began = time.monotonic()
    text = caught(lambda: pipeline.forward_backward(batches(8)))
    took = time.monotonic() - began
    return text, took, caught(lambda: pipeline.forward_backward(batches(8)))


def lose(lost: Transfer, microbatches: int, side: str) -> str:
    """What a rank raises where one message is never sent, or never received."""
    axis = world_axis(TIMEOUT_S)
    (stage,) = make_stages(axis)
    loser = (lost.source if side == "send" else lost.target) % axis.size

    def post(self: Transfers, exchange: Exchange, outbox: Any) -> None:
        if lost in exchange.transfers and loser == axis.rank:
            outbox.pop(lost, None)
            exchange = Exchange(tuple(t for t in exchange.transfers if t != lost))
        if exchange.transfers:
            original(self, exchange, outbox)

    original, Transfers.post = Transfers.post, post  # type: ignore[method-assign]
    try:
        pipeline = Pipeline([stage], axis, SPEC, CPU, num_slots=microbatches)
        return caught(lambda: pipeline.forward_backward(batches(microbatches)))
    finally:
        Transfers.post = original  # type: ignore[method-assign]


def disagree(case: str) -> str:
    """What ranks raise of which the last runs something else."""
    axis = world_axis(TIMEOUT_S)
    is_last = axis.rank == axis.size - 1
    spec = replace(SPEC, dtype=torch.bfloat16) if is_last and case == "activation" else SPEC
    stages = make_stages(axis, 2 if is_last and case == "chunks" else 1)
    pipeline = Pipeline(stages, axis, spec, CPU, num_slots=4)
    if case == "later":
        pipeline.forward_backward(batches(4))
    if case == "kind" and is_last:
        return caught(lambda: pipeline.forward_only(batches(4)))
    number = 3 if is_last and case in ("microbatches", "later") else 4
    return caught(lambda: pipeline.forward_backward(batches(number)))


def misused(case: str) -> str:
    """What a rank raises that gives a pipeline what it cannot take, or returns no loss from it."""
    axis = world_axis(TIMEOUT_S)
    stages: list[Any] = make_stages(axis, 2 if case == "groups" else 1)
    if axis.rank == axis.size - 1 and case in (made := {"vector": [0.5], "number": 1.0, "int": 1}):
        wrong = made[case] if case == "number" else torch.tensor(made[case])
        stages[0].register_forward_hook(lambda *_: wrong)
    pipeline = Pipeline(stages, axis, SPEC, CPU, num_slots=1 if case == "slots" else 4)
    number = {"nothing": 0, "groups": 3}.get(case, 4)
    given = [replace(b, tokens=None) if case == "tokens" else b for b in batches(number)]
    run = pipeline.forward_backward if case in ("slots", "groups") else pipeline.forward_only
    return caught(lambda: run(given))
