"""Captured functions, and modules as segments: eager's bits forward and backward, or a refusal."""

import copy
import functools
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.device import Device
from fsdp_core.graph.graph import CapturedFunction, GraphedCallable, GraphMaker, Segment
from fsdp_core.graph.ledger import Resolver, StaleAddress
from fsdp_core.graph.recorder import CaptureRefused
from fsdp_core.model.attention import apply_rope, rope_tables

DEVICE = Device("cpu")
TIME = 12


class Branch(nn.Module):
    """Two linears with dropout, a residual, and a constant input."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.dropout = dropout

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(x) * scale.to(x.dtype))), self.dropout)


class CausalAttention(nn.Module):
    """Attention of four heads with RoPE from constant tables, dropout and a residual."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.dropout = dropout

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)) for part in self.qkv(x).chunk(3, -1))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        out = self.out(mixed.transpose(1, 2).flatten(2))
        return x + F.dropout(out, self.dropout, self.training)


def branch(dropout: float) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The small branch and its constant."""
    return Branch(dropout), (torch.full((24,), 0.7),)


def attention(dropout: float) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The attention branch and its RoPE tables."""
    model = CausalAttention(dropout)
    return model, rope_tables(TIME, 4, 1e4, torch.device("cpu"))


Make = Callable[[float], tuple[nn.Module, tuple[torch.Tensor, ...]]]


def inputs(number: int) -> torch.Tensor:
    """One microbatch."""
    drawn = torch.randn(2, TIME, 16, generator=torch.Generator().manual_seed(number))
    return drawn.requires_grad_()


def sample() -> torch.Tensor:
    """Like a microbatch, with other values."""
    return torch.zeros(2, TIME, 16, requires_grad=True)


class Captured(GraphedCallable):
    """A captured module of one input and constants."""

    def __init__(
        self,
        module: nn.Module,
        constants: tuple[torch.Tensor, ...],
        like: torch.Tensor,
        resolve: Resolver | None,
    ) -> None:
        segment = Segment(
            name="module", function=lambda x: module(x, *constants), samples=(like,),
            parameters=tuple(module.parameters()), resolve=resolve,
        )  # fmt: skip
        super().__init__(GraphMaker(DEVICE), segment)
        self.warm_up()
        self.capture_forward()
        self.capture_backward()

    def replay(self, x: torch.Tensor) -> torch.Tensor:
        """The one output."""
        result = self(x)
        assert isinstance(result, torch.Tensor)
        return result


def captured_module(
    module: nn.Module, constants: tuple[torch.Tensor, ...], *, named: bool = True
) -> Captured:
    """Captured forward and backward, the ledger knowing every parameter and constant."""

    def resolve() -> dict[str, torch.Tensor]:
        found = {name: p.data for name, p in module.named_parameters()}
        return found | {f"constant {i}": c for i, c in enumerate(constants)}

    return Captured(module, constants, sample(), resolve if named else None)


def train(
    module: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], microbatches: int, steps: int
) -> list[torch.Tensor]:
    """Accumulated gradients, input gradients and outputs of some steps of plain SGD, copied."""
    seen = []
    torch.manual_seed(77)
    for step in range(steps):
        module.zero_grad(set_to_none=step % 2 == 0)
        for number in range(microbatches):
            x = inputs(step * microbatches + number)
            # The upstream uses x twice, so that its gradient is accumulated inside autograd too.
            output = call(x * 1.5) + x
            (output.square().mean() + output[0, 0, 0]).backward()
            assert x.grad is not None
            seen += [output.detach().clone(), x.grad.clone()]
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                seen.append(parameter.grad.clone())
                parameter.sub_(parameter.grad, alpha=0.05)
    return [*seen, torch.get_rng_state()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("make", [branch, attention])
def test_module_equals_eager(make: Make, dropout: float, dtype: torch.dtype) -> None:
    """Outputs, every gradient and the generator equal eager's over steps of three microbatches."""
    torch.manual_seed(0)
    eager, constants = make(dropout)
    if dtype == torch.bfloat16:
        eager = eager.bfloat16()
    module = copy.deepcopy(eager)
    graphed = Captured(module, constants, sample().detach().to(dtype).requires_grad_(), None)
    expected = train(eager, lambda x: eager(x.to(dtype), *constants).float(), 3, 3)
    got = train(module, lambda x: graphed.replay(x.to(dtype)).float(), 3, 3)
    assert len(expected) == len(got)
    for index, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert torch.equal(a, b), index


def test_capture_leaves_no_trace() -> None:
    """Warm-up and capture change no parameter, no gradient and no generator."""
    torch.manual_seed(0)
    module, constants = branch(0.3)
    before = [p.detach().clone() for p in module.parameters()]
    state = torch.get_rng_state()
    captured_module(module, constants)
    assert torch.equal(torch.get_rng_state(), state)
    for parameter, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None


def test_parameters_are_read_in_place() -> None:
    """An optimizer's in-place update is seen by the next replay."""
    module, constants = branch(0.0)
    graphed = captured_module(module, constants)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    x = inputs(0)
    assert torch.equal(graphed.replay(x), x)


def test_forward_without_grad() -> None:
    """Under `no_grad` the forward replays alone and gives eager's bits."""
    module, constants = branch(0.0)
    graphed = captured_module(module, constants)
    with torch.no_grad():
        result = graphed.replay(inputs(4))
        assert torch.equal(result, module(inputs(4), *constants))
    assert not result.requires_grad


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, TIME + 1, 16),
        torch.zeros(1, TIME, 16),
        torch.zeros(2, TIME, 16, dtype=torch.bfloat16),
    ],
    ids=["longer", "fewer rows", "dtype"],
)
def test_wrong_input_is_refused(wrong: torch.Tensor) -> None:
    """Another shape or dtype than captured is an error with both, never a broadcast copy."""
    module, constants = branch(0.0)
    graphed = captured_module(module, constants)
    with pytest.raises(ValueError, match=r"captured input 0 of module, \(2, 12, 16\)") as caught:
        graphed.replay(wrong)
    assert str(tuple(wrong.shape)) in str(caught.value)
    assert str(wrong.dtype) in str(caught.value)


def test_moved_parameter_is_stale_in_both_graphs() -> None:
    """A parameter that moved stops the forward, and one that moves later stops the backward."""
    module, constants = branch(0.0)
    graphed = captured_module(module, constants)
    assert isinstance(module, Branch)
    assert "up.weight" in graphed.ledgers[0].names
    assert "down.weight" in graphed.ledgers[1].names
    output = graphed.replay(inputs(0))
    kept = module.down.weight.data
    module.down.weight.data = kept.clone()
    with pytest.raises(StaleAddress, match=r"down\.weight"):
        output.sum().backward()
    del output
    with pytest.raises(StaleAddress, match=r"down\.weight"):
        graphed.replay(inputs(1))
    module.down.weight.data = kept
    graphed.replay(inputs(1)).sum().backward()


def test_pair_has_no_unnamed_externals() -> None:
    """Of a captured pair every external storage has the name of who owns it."""
    module, constants = attention(0.1)
    graphed = captured_module(module, constants)
    forward, backward = graphed.ledgers
    used = {n for n, _ in module.named_parameters()} | {"constant 0", "constant 1"}
    assert set(forward.names) == used | {"module input 0"}
    assert "module output gradient 0" in backward.names
    assert [*forward.places, *backward.places] == []


def test_data_dependent_module_is_refused() -> None:
    """A module that reads data in Python is refused, and works eagerly as before."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if x.sum() >= 0 else x

    module = Skips()
    with pytest.raises(CaptureRefused, match="_local_scalar_dense"):
        captured_module(module, ())
    assert module(inputs(0)).shape == (2, TIME, 16)


def test_captured_function_returns_its_result() -> None:
    """A captured function gives its structure of results, fresh after each call, until reset."""
    x = torch.ones(3)
    captured = CapturedFunction(GraphMaker(DEVICE), lambda: {"sum": x.sum(), "twice": x * 2}, None)
    assert captured.ledger is None
    x.fill_(5)
    result = captured()
    assert (result["sum"].item(), result["twice"].tolist()) == (15, [10, 10, 10])
    captured.reset()
    with pytest.raises(RuntimeError, match="empty"):
        captured()


def test_what_the_function_uses_lives_as_long_as_the_graph() -> None:
    """Nobody else needs to hold the model: on CUDA a replay over freed memory is illegal."""
    model = nn.Linear(4, 4)
    alive = weakref.ref(model)
    x = torch.ones(2, 4)
    captured = CapturedFunction(
        GraphMaker(DEVICE), functools.partial(_without_grad, model, x), None
    )
    del model
    gc.collect()
    assert alive() is not None
    captured.reset()
    gc.collect()
    assert alive() is None


def _without_grad(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(x)
    return result


def test_reset_drops_both_graphs() -> None:
    """After `reset` neither direction replays."""
    module, constants = branch(0.0)
    graphed = captured_module(module, constants, named=False)
    assert graphed.ledgers == []
    output = graphed.replay(inputs(0))
    graphed.reset()
    with pytest.raises(RuntimeError, match="empty"):
        output.sum().backward()
    with pytest.raises(RuntimeError, match="empty"):
        graphed.replay(inputs(0))
