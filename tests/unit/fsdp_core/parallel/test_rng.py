"""Random streams: who draws the same numbers, in every way to run a program."""

import itertools
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_core.device import Device
from fsdp_core.graph.graph import CapturedFunction, GraphMaker
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.rng import RandomStream, RandomStreams

CPU = torch.device("cpu")
SIZES = {"dp": 2, "cp": 2, "tp": 2}
NUMEL = 4096
FAR = math.sqrt(math.log(2e9) / (2 * NUMEL))
"""Two independent masks of p = 1/2 agree on more or less than half by this with probability 1e-9
(Hoeffding, 1963)."""


def streams_at(place: dict[str, int], seed: int = 7) -> RandomStreams:
    group = cast("dist.ProcessGroup", None)
    return RandomStreams(seed, [Axis(n, SIZES[n], r, group) for n, r in place.items()], CPU)


def places() -> list[dict[str, int]]:
    return [
        dict(zip(SIZES, ranks, strict=True))
        for ranks in itertools.product(*(range(size) for size in SIZES.values()))
    ]


def mask_of(stream: RandomStream) -> torch.Tensor:
    return stream.dropout(torch.ones(NUMEL), 0.5, training=True) > 0


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    """Share of elements on which two masks agree: 1, or about 1/2 if they are independent."""
    return (a == b).double().mean().item()


@pytest.mark.parametrize(
    "shared", [(), ("tp",), ("cp",), ("dp",), ("cp", "tp"), ("dp", "cp", "tp")]
)
def test_ranks_agree_where_they_should(shared: tuple[str, ...]) -> None:
    """Ranks that differ on the named axes alone draw the same numbers; all others their own."""
    masks = [(place, mask_of(streams_at(place).equal_over(*shared))) for place in places()]
    for (a, mask_a), (b, mask_b) in itertools.combinations(masks, 2):
        differ = {name for name in SIZES if a[name] != b[name]}
        if differ <= set(shared):
            assert torch.equal(mask_a, mask_b), (a, b)
        else:
            assert abs(agreement(mask_a, mask_b) - 0.5) < FAR, (a, b)


def test_a_stream_is_known_by_what_it_means() -> None:
    """The order of names and axes is nothing; the seed and the place are all."""
    one = streams_at({"dp": 1, "cp": 0, "tp": 1})
    other = streams_at({"tp": 1, "dp": 1, "cp": 0})
    assert one.equal_over("cp", "tp") is one.equal_over("tp", "cp")
    assert torch.equal(mask_of(one.equal_over("cp")), mask_of(other.equal_over("cp")))
    reseeded = streams_at({"dp": 1, "cp": 0, "tp": 1}, seed=8)
    again = streams_at({"dp": 1, "cp": 0, "tp": 1})
    assert agreement(mask_of(again.equal_over("cp")), mask_of(reseeded.equal_over("cp"))) < 0.6


def test_the_default_generator_is_left_alone() -> None:
    """Drawing from a stream, also where it fails, changes no number that others draw."""
    stream = streams_at({"tp": 0}).equal_over()
    before = torch.get_rng_state()
    stream.dropout(torch.ones(8), 0.5, training=True)
    with pytest.raises(ArithmeticError), stream.active():
        fail_after_drawing()
    assert torch.equal(torch.get_rng_state(), before)


def fail_after_drawing() -> None:
    torch.rand(3)
    raise ArithmeticError


def test_nothing_is_drawn_where_nothing_is_dropped() -> None:
    """In evaluation, or with p = 0, the input comes back and the stream stands still."""
    stream = streams_at({"tp": 0}).equal_over()
    before, x = stream.get_state(), torch.ones(4)
    assert stream.dropout(x, 0.5, training=False) is x
    assert stream.dropout(x, 0.0, training=True) is x
    assert torch.equal(stream.get_state(), before)
    stream.dropout(x, 0.5, training=True)
    assert not torch.equal(stream.get_state(), before)


def test_streams_do_not_nest() -> None:
    """A stream inside of another would not say whose numbers are drawn."""
    streams = streams_at({"tp": 0})
    own, shared = streams.equal_over(), streams.equal_over("tp")
    with own.active(), pytest.raises(AssertionError, match="within"):
        mask_of(shared)
    mask_of(shared)


def test_states_continue_a_run() -> None:
    """States put back, into other objects too, continue with the same numbers."""
    streams = streams_at({"tp": 0})
    own, shared = streams.equal_over(), streams.equal_over("tp")
    mask_of(own)
    states = streams.get_states()
    assert [stream.name for stream in streams.streams] == list(states)
    due = [mask_of(own), mask_of(shared)]
    streams.set_states(states)
    fresh = streams_at({"tp": 0})
    pair = fresh.equal_over(), fresh.equal_over("tp")
    fresh.set_states(states)
    for stream, other, expected in zip((own, shared), pair, due, strict=True):
        assert torch.equal(mask_of(stream), expected)
        assert torch.equal(mask_of(other), expected)


# ---- ways to run


def program(own: RandomStream, shared: RandomStream, x: torch.Tensor) -> torch.Tensor:
    """Dropout of two streams, attention with dropout, and the default generator in between."""
    y = own.dropout(x * 2, 0.5, training=True) + torch.rand(x.shape)
    with shared.active():
        z = F.scaled_dot_product_attention(y, y, y, dropout_p=0.3)
    return own.dropout(z + F.dropout(x, 0.2), 0.3, training=True)


def run_times(make: Callable[[Callable[[], torch.Tensor]], Callable[[], Any]]) -> list[Any]:
    """Results of three runs of what `make` makes of the program, then every random state."""
    torch.manual_seed(1)
    streams = streams_at({"tp": 1})
    own, shared = streams.equal_over(), streams.equal_over("tp")
    x = torch.linspace(-1, 1, 2 * 6 * 8).view(2, 6, 8)
    run = make(lambda: program(own, shared, x))
    found = [run().clone() for _ in range(3)]
    return [*found, torch.get_rng_state(), *streams.get_states().values()]


def test_a_replay_draws_what_eager_draws() -> None:
    """A captured program leaves every state as it was, and its replays draw as eager runs do."""

    def capture(function: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        return CapturedFunction(GraphMaker(Device("cpu")), function, None)

    for eager, graphed in zip(run_times(lambda f: f), run_times(capture), strict=True):
        assert torch.equal(eager, graphed)


def test_the_compiler_draws_what_eager_draws() -> None:
    """Compiled code draws from the streams in the order of the program."""

    def compile_(function: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        compiled: Callable[[], Any] = torch.compile(function, backend="aot_eager")
        return compiled

    for eager, compiled in zip(run_times(lambda f: f), run_times(compile_), strict=True):
        assert torch.equal(eager, compiled)


def squared(stream: RandomStream, x: torch.Tensor) -> torch.Tensor:
    """What is checkpointed: the gradient is 8 x where kept, so it shows the mask."""
    return stream.dropout(x, 0.5, training=True).square()


def test_what_is_computed_again_draws_the_same() -> None:
    """A checkpointed part draws its first numbers again, and later draws come as without it."""
    found = []
    for context in (None, "context"):
        streams = streams_at({"tp": 0})
        stream = streams.equal_over()
        x = torch.ones(NUMEL, requires_grad=True)
        if context is None:
            outputs = [squared(stream, x), squared(stream, x)]
        else:
            options: Any = {"use_reentrant": False, "context_fn": streams.checkpoint_contexts}
            outputs = [cast("Any", checkpoint)(squared, stream, x, **options) for _ in range(2)]
        between = mask_of(stream)
        (outputs[0] + 3 * outputs[1]).sum().backward()
        found.append([*outputs, between, x.grad, mask_of(stream)])
    for plain, checkpointed in zip(*found, strict=True):
        assert torch.equal(plain, checkpointed)


def test_computing_again_with_other_numbers_is_refused() -> None:
    """A checkpoint that does not know the streams fails in its backward pass, and says why."""
    stream = streams_at({"tp": 0}).equal_over()
    x = torch.ones(8, requires_grad=True)
    out = cast("Any", checkpoint)(squared, stream, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"context_fn=streams\.checkpoint_contexts"):
        out.sum().backward()
    squared(stream, x)
