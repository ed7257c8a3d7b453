"""Tensor-parallel layers in graphs, under the compiler and inside of FSDP units: what ranks run."""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.device import Device
from fsdp_core.fsdp import fully_shard
from fsdp_core.graph.graph import CapturedFunction, GraphedCallable, GraphMaker, Segment
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.param_sharding import named_cuts
from fsdp_core.parallel.rng import RandomStreams
from fsdp_core.parallel.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    VocabEmbedding,
    enter,
    reduce_replicated_of,
    vocab_cross_entropy,
)
from tests.dist.tensor_parallel_programs import (
    BATCH,
    FFN,
    HIDDEN,
    TIME,
    VOCAB,
    draw,
    load,
    same_bits,
    tokens_of,
    whole_axis,
)

STEPS, LR, DROPOUT = 3, 0.05, 0.25


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
            reduce_replicated_of(self.norm, "weight", axis)
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
        return vocab_cross_entropy(self.head(x), targets, self.axis).mean()


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


def net_on(axis: Axis, sequence_parallel: bool, others: tuple[Axis, ...] = ()) -> Net:
    """The net with its weights, and random streams as after the same seed."""
    streams = RandomStreams(3, (*others, axis), torch.device("cpu"))
    model = Net(axis, sequence_parallel, streams)
    load(model, net_weights(model))
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a step, int64 [B, T]."""
    return (tokens_of() + step) % VOCAB, (tokens_of() * 3 + step) % VOCAB


def descend(model: nn.Module) -> None:
    """Plain SGD in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=LR)


def bits_of(model: nn.Module, *others: torch.Tensor) -> list[bytes]:
    """Weights, gradients and `others` as bytes."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    tensors = [*model.parameters(), *grads, *others]
    return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


# ---- graphs


def train(model: Net, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One step: the loss; gradients and weights change in place."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    loss: torch.Tensor = model(tokens, targets)
    loss.backward()
    descend(model)
    return loss.detach()


def replay_and_eager(sequence_parallel: bool) -> list[list[bool]]:
    """Steps eagerly and as replays of one captured step: for each, whether every bit agrees."""
    axis, agreed = whole_axis(), []
    eager, graphed = (net_on(axis, sequence_parallel) for _ in range(2))
    for parameter in (*eager.parameters(), *graphed.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    tokens, targets = batch(0)
    before = bits_of(graphed)
    streams = graphed.layers[0].own, graphed.layers[0].shared
    graph = CapturedFunction(
        GraphMaker(Device("cpu")), lambda: train(graphed, tokens, targets), None
    )
    assert bits_of(graphed) == before, "the capture left a trace"
    for step in range(STEPS):
        due = train(eager, *batch(step))
        for static, value in zip((tokens, targets), batch(step), strict=True):
            static.copy_(value)
        loss = graph()
        states = [cast("Any", s).get_state() for s in streams]
        expected = [cast("Any", s).get_state() for s in (eager.layers[0].own,
                                                         eager.layers[0].shared)]  # fmt: skip
        pairs = zip(bits_of(eager, due, *expected), bits_of(graphed, loss, *states), strict=True)
        agreed.append([a == b for a, b in pairs])
    return agreed


def block_graph_and_eager(sequence_parallel: bool) -> list[list[bool]]:
    """A block as two graphs, forward and backward, against the block: agreement of every bit.

    With dropout: the warm-up puts the random states back.
    """
    axis, agreed = whole_axis(), []
    eager, graphed = (cast("Mlp", net_on(axis, sequence_parallel).layers[0]) for _ in range(2))
    time = TIME // axis.size if sequence_parallel else TIME
    sample = torch.zeros(BATCH, time, HIDDEN).requires_grad_()
    segment = Segment(
        name="block", function=graphed, samples=(sample,), parameters=tuple(graphed.parameters())
    )
    graph = GraphedCallable(GraphMaker(Device("cpu")), segment)
    graph.warm_up()
    graph.capture_forward()
    graph.capture_backward()
    for step in range(STEPS):
        place = axis.rank * sequence_parallel
        x = draw(f"x {step} of {place}", BATCH, time, HIDDEN, dtype=torch.float32)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [eager(inputs[0]), cast("torch.Tensor", graph(inputs[1]))]
        for out in outputs:
            out.square().sum().backward()
        found = []
        for model, out, value in zip((eager, graphed), outputs, inputs, strict=True):
            assert value.grad is not None
            drawn = model.own.get_state(), model.shared.get_state()
            found.append(bits_of(model, out, value.grad, *drawn))
            for parameter in model.parameters():
                parameter.grad = None
        agreed.append([a == b for a, b in zip(*found, strict=True)])
    return agreed


# ---- the compiler


def compiled_and_eager(sequence_parallel: bool, dropout: float) -> list[list[bool]]:
    """Steps with compiled blocks, head and loss against eager ones: agreement of every bit."""
    axis, agreed = whole_axis(), []
    eager, compiled = (net_on(axis, sequence_parallel) for _ in range(2))
    # Dropout leaves the graph, for the random state; without, a block is one graph.
    compile_ = functools.partial(torch.compile, backend="aot_eager", fullgraph=dropout == 0)
    for layer in (*eager.layers, *compiled.layers):
        cast("Mlp", layer).dropout = dropout
    for layer in compiled.layers:
        layer.compile(backend="aot_eager", fullgraph=dropout == 0)
    compiled.embedding.compile(backend="aot_eager", fullgraph=True)
    loss_of: Callable[..., torch.Tensor] = compile_(head_loss)
    for step in range(STEPS):
        losses = []
        for model, run in ((eager, head_loss), (compiled, loss_of)):
            tokens, targets = batch(step)
            x = model.embedding(tokens)
            for layer in model.layers:
                x = layer(x)
            loss = run(model.head, x, targets, axis)
            loss.backward()
            descend(model)
            losses.append(loss.detach())
        pairs = zip(bits_of(eager, losses[0]), bits_of(compiled, losses[1]), strict=True)
        agreed.append([a == b for a, b in pairs])
        eager.zero_grad()
        compiled.zero_grad()
    return agreed


def head_loss(head: nn.Module, x: torch.Tensor, targets: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The end of the net."""
    return vocab_cross_entropy(head(x), targets, axis).mean()


# ---- FSDP units


def axes_of(mesh: DeviceMesh) -> tuple[Axis, Axis]:
    """dp and tp."""
    dp, tp = (
        Axis(name, mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim))
        for dim, name in enumerate(("dp", "tp"))
    )
    return dp, tp


def sharded_and_averaged(sequence_parallel: bool) -> list[str]:
    """What FSDP over dp makes of the net against gradients averaged by hand: what differs."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    dp, tp = axes_of(mesh)
    plain, sharded = (net_on(tp, sequence_parallel, (dp,)) for _ in range(2))
    due = named_cuts(sharded)
    for layer in sharded.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(sharded, mesh=mesh["dp"], reshard_after_forward=False)
    wrong = [] if named_cuts(sharded) == due else ["cuts"]
    for step in range(STEPS):
        tokens, targets = batch(step * 2 + dp.rank)
        for model in (plain, sharded):
            model.zero_grad()
            model(tokens, targets).backward()
        for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            assert p.grad is not None
            dist.all_reduce(p.grad, group=dp.group)
            rows = p.grad.div_(dp.size)
            mine = cast("Any", q.grad)
            due_rows = cast("Any", q).row_spec.own_rows(rows)
            if mine is not None and not same_bits(mine.to_local(), due_rows):
                wrong.append(f"gradient of {name} in step {step}")
        descend(plain)
        with torch.no_grad():
            for q in sharded.parameters():
                if q.grad is not None:
                    q.sub_(q.grad, alpha=LR)
    return wrong
