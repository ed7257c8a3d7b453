"""Programs with graphed modules on a GPU, by our maker and by TransformerEngine's."""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.graph import callables, te_callables
from fsdp_core.graph.capture_order import Order
from fsdp_core.graph.graph import GraphMaker
from fsdp_core.graph.hooks import PHASES
from fsdp_core.model.backend import make_backend
from tests.gpu.fsdp_on_gpus import device_here

WIDTH, ROWS = 64, 32


class Block(nn.Module):
    """A linear of torch or TransformerEngine with dropout, a residual and a counter."""

    tokens: torch.Tensor

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("tokens", torch.zeros(1, device=device_here().torch_device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[ROWS, WIDTH] -> [ROWS, WIDTH]."""
        with torch.no_grad():
            self.tokens.add_(x.shape[0])
        return x + F.dropout(self.linear(x), 0.3, self.training)


def blocks() -> list[Block]:
    """Two, the same each time."""
    make_backend("te")
    import transformer_engine.pytorch as te

    device = device_here().torch_device
    torch.manual_seed(0)
    made = (te.Linear, nn.Linear)
    return [Block(kind(WIDTH, WIDTH, device=device)) for kind in made]


def sample() -> tuple[torch.Tensor]:
    """Like an input."""
    return (torch.ones(ROWS, WIDTH, device=device_here().torch_device, requires_grad=True),)


def make_of(way: str) -> Callable[..., list[callables.GraphedModule]]:
    """The maker by name, on a fresh pool."""
    maker = GraphMaker(device_here())
    make = callables if way == "own" else te_callables
    return functools.partial(make.make_graphed_callables, maker)


def hook_calls(way: str, chunks: tuple[int, ...] | None, iterations: int) -> list[Any]:
    """Calls of hooks as (module, phase, whether it was captured), then how often they wrote."""
    modules, seen = blocks(), list[Any]()
    written = torch.zeros(1, device=device_here().torch_device)
    torch.cuda.synchronize()  # else the zeros might come after the first hook's addition

    def record(number: int, phase: str, module: nn.Module) -> None:
        right = module is modules[number] and not torch.cuda.is_current_stream_capturing()
        seen.append((number, phase, right))
        written.add_(1)

    hooks = [
        {phase: {7: functools.partial(record, number, phase)} for phase in PHASES}
        for number in range(2)
    ]
    order = None if chunks is None else Order(chunks)
    with torch.cuda.stream(torch.cuda.Stream()):
        graphed = make_of(way)(
            modules, [sample()] * 2, order=order, num_warmup_iters=iterations,
            capture_time_hooks=hooks,
        )  # fmt: skip
        for each in graphed:
            each(*sample()).sum().backward()
        torch.cuda.synchronize()
        for each in graphed:
            each.reset()
    return [*seen, written.item()]


def train(way: str | None) -> list[torch.Tensor]:
    """Gradients, outputs, counters of steps of two open microbatches."""
    with torch.cuda.stream(torch.cuda.Stream()):
        modules = blocks()
        graphed: list[callables.GraphedModule] = []
        if way is not None:
            graphed = make_of(way)(modules, [sample()] * 2, order=Order((1, 1, -1, -1)))

        def call(number: int, x: torch.Tensor, slot: int) -> torch.Tensor:
            out = graphed[number](x, slot=slot) if graphed else modules[number](x)
            return cast("torch.Tensor", out)

        torch.manual_seed(3)
        seen = []
        for step in range(4):
            open_ones = []
            for slot in range(2):
                x = torch.randn(ROWS, WIDTH, device=device_here().torch_device).requires_grad_()
                open_ones.append((x, call(1, call(0, x, slot) * 2, slot)))
            for x, out in open_ones:
                out.square().sum().backward()
                assert x.grad is not None
                seen += [x.grad, out.detach().clone()]
            for module in modules:
                seen += [p.grad.clone() for p in module.parameters() if p.grad is not None]
                seen.append(module.tokens.clone())
                module.zero_grad(set_to_none=step % 2 == 0)
        torch.cuda.synchronize()
        for each in graphed:
            each.reset()
    return [*(each.cpu() for each in seen), torch.cuda.get_rng_state()]


def count_differences(way: str) -> tuple[int, int]:
    """Values seen, and how many differ from eager's."""
    expected, got = train(None), train(way)
    pairs = zip(expected, got, strict=True)
    return len(got), sum(not torch.equal(a, b) for a, b in pairs)
