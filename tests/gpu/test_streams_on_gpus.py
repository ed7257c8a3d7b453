"""Random streams on a GPU: graphs draw as eager runs do, and nobody waits for the device."""

import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from fsdp_core.device import make_deterministic
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.rng import RandomStream, RandomStreams
from tests.dist.rank_pool import RankPool

STEPS = 4


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


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


@pytest.mark.gpu(1)
def test_streams_draw_in_graphs_as_eagerly(gpu_ranks: RankPool) -> None:
    """Replays draw what eager runs draw, step by step, and neither waits for the device."""
    (found,) = gpu_ranks.run(streams_in_graphs, world_size=1)
    assert found == {"numbers": True, "states": True, "steps differ": True}
