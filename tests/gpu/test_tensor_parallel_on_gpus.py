"""Tensor parallel on GPUs: one process's numbers within bounds, graphs and streams bit for bit."""

import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from fsdp_core.determinism import make_deterministic
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.param_sharding import Cut, take
from fsdp_core.parallel.rng import RandomStream, RandomStreams
from tests.dist.parity_bounds import bounded
from tests.dist.rank_pool import RankPool
from tests.dist.tensor_parallel_programs import (
    Chain,
    Net,
    Parts,
    batch,
    chain_cotangent,
    chain_roundings,
    chain_weights,
    gradient_parts,
    join,
    load,
    net_weights,
    plain_chain,
    tokens_of,
    train,
    whole_axis,
)

STEPS = 4


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def run_chain(dtype: torch.dtype, sequence_parallel: bool) -> Parts:
    """Forward and backward of the chain on a GPU: its logits and gradients, on the CPU."""
    make_deterministic(0)
    axis = whole_axis()
    model = Chain(axis, sequence_parallel=sequence_parallel).to(gpu(), dtype)
    load(model, {name: t.to(gpu()) for name, t in chain_weights(dtype).items()})
    logits = model(tokens_of().to(gpu()))
    columns = (Cut("tp", 2, axis.size, axis.rank),)
    logits.backward(take(chain_cotangent(dtype), columns).to(gpu()))
    parts = {"output": (logits.detach(), columns), **gradient_parts(model)}
    return {name: (part.cpu(), cuts) for name, (part, cuts) in parts.items()}


# ---- random streams


def draw(own: RandomStream, shared: RandomStream, x: torch.Tensor) -> torch.Tensor:
    """Dropout of two streams, attention with dropout, and the default generator in between."""
    y = own.dropout(x * 2, 0.5, training=True) + torch.rand_like(x)
    with shared.active():
        z = F.scaled_dot_product_attention(y, y, y, dropout_p=0.3)
    return own.dropout(z + F.dropout(x, 0.2), 0.3, training=True)


def runner(
    function: Callable[[], torch.Tensor], streams: RandomStreams, graphed: bool
) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """The function as it is, or replays of a graph that knows the streams; and what ends it."""
    if not graphed:
        return function, lambda: None
    states, default = streams.get_states(), torch.cuda.get_rng_state()
    graph = torch.cuda.CUDAGraph()
    for generator in streams.generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = function()
    streams.set_states(states)
    torch.cuda.set_rng_state(default)

    def replay() -> torch.Tensor:
        graph.replay()
        return result.clone()

    return replay, graph.reset


def states_of(streams: RandomStreams) -> list[torch.Tensor]:
    return [torch.cuda.get_rng_state(), *streams.get_states().values()]


def streams_in_graphs() -> dict[str, bool]:
    """Draws as replays of a graph against eager ones, without a sync of the device."""
    make_deterministic(0)
    axis = Axis("tp", 2, 1, cast("Any", None))
    x = torch.linspace(-1, 1, 2 * 64 * 32, device=gpu()).view(2, 64, 32)
    results, states = [], []
    for graphed in (False, True):
        streams = RandomStreams(5, [axis], gpu())
        drawing = functools.partial(draw, streams.equal_over(), streams.equal_over("tp"), x)
        drawing()  # libraries load with their first kernel
        torch.cuda.manual_seed(1)
        run, end = runner(drawing, streams, graphed)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        results.append([run() for _ in range(STEPS)])
        torch.cuda.set_sync_debug_mode("default")
        states.append(states_of(streams))
        end()
    return {
        "numbers": all(map(torch.equal, *results)),
        "states": all(map(torch.equal, *states)),
        "steps differ": not torch.equal(results[0][0], results[0][1]),
    }


# ---- training


def net_on_gpu(axis: Axis, sequence_parallel: bool) -> tuple[Net, RandomStreams]:
    """The net with its weights and gradients that stay where they are."""
    streams = RandomStreams(3, [axis], gpu())
    model = Net(axis, sequence_parallel, streams).to(gpu())
    load(model, {name: t.to(gpu()) for name, t in net_weights(model).items()})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, streams


def tensors_of(model: Net, streams: RandomStreams, loss: torch.Tensor) -> list[torch.Tensor]:
    """Copies of all that a step changes."""
    grads = [cast("torch.Tensor", p.grad) for p in model.parameters()]
    return [t.detach().clone() for t in (loss, *model.parameters(), *grads)] + states_of(streams)


def replay_and_eager(sequence_parallel: bool) -> list[bool]:
    """Steps eagerly and as replays of one captured step: for each, whether every bit agrees."""
    make_deterministic(0)
    axis, found = whole_axis(), []
    fixed = [t.to(gpu()) for t in batch(0)]
    with torch.cuda.stream(torch.cuda.Stream()):
        train(net_on_gpu(axis, sequence_parallel)[0], *fixed)  # communicators begin when used
        for graphed in (False, True):
            model, streams = net_on_gpu(axis, sequence_parallel)
            torch.cuda.manual_seed(1)
            torch.cuda.synchronize()
            run, end = runner(functools.partial(train, model, *fixed), streams, graphed)
            steps = []
            for step in range(STEPS):
                for static, value in zip(fixed, batch(step), strict=True):
                    static.copy_(value)
                steps.append(tensors_of(model, streams, run()))
            found.append(steps)
            torch.cuda.synchronize()
            end()
    return [all(map(torch.equal, eager, replayed)) for eager, replayed in zip(*found, strict=True)]


@pytest.mark.gpu(1)
def test_streams_draw_in_graphs_as_eagerly(gpu_ranks: RankPool) -> None:
    """Replays draw what eager runs draw, step by step, and neither waits for the device."""
    (found,) = gpu_ranks.run(streams_in_graphs, world_size=1)
    assert found == {"numbers": True, "states": True, "steps differ": True}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_chain_equals_one_process(
    gpu_ranks: RankPool, dtype: torch.dtype, sequence_parallel: bool
) -> None:
    """Logits and every gradient are those of one process; replicated ones agree on every bit."""
    found, disputed = join(gpu_ranks.run(run_chain, dtype, sequence_parallel, world_size=2))
    inputs = chain_weights(dtype) | {"tokens": tokens_of()}
    counts = {"": chain_roundings(2)}
    expected = bounded(plain_chain, inputs, chain_cotangent(dtype), counts, dtype)
    units = {name: expected[name].units(found[name]) for name in expected}
    assert (disputed, {name for name, u in units.items() if u > 1}) == (set(), set()), units


@pytest.mark.gpu(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_replayed_step_has_eagers_bits(gpu_ranks: RankPool, sequence_parallel: bool) -> None:
    """Training as replays of one graph over NCCL, dropout included, has eager's bits."""
    found = gpu_ranks.run(replay_and_eager, sequence_parallel, world_size=2)
    assert found == [[True] * STEPS] * 2
