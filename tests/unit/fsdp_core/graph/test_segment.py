"""Graphed segments: eager's bits for any inputs and outputs, in every slot, or a clear refusal."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.device import Device
from fsdp_core.graph.capture import GraphMaker
from fsdp_core.graph.segment import GraphedSegment, Segment

DEVICE = Device("cpu")


class Router(nn.Module):
    """Several inputs and outputs: some integer, some without a gradient; counts its tokens."""

    counts: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.shared = nn.Linear(8, 4), nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((8,), 0.5), requires_grad=False)
        self.register_buffer("counts", torch.zeros(4))

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        probs = self.gate(F.dropout(x * self.frozen, 0.25)).softmax(-1)
        probs = probs * valid[:, None]
        top, chosen = probs.max(-1)
        with torch.no_grad():
            self.counts.add_((chosen[:, None] == torch.arange(4)).sum(0))
        return self.shared(x), top, chosen + positions, probs.detach(), valid.logical_not()


def router_inputs(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens that get a gradient, positions, and which tokens are real."""
    drawn = torch.randn(6, 8, generator=torch.Generator().manual_seed(number))
    return drawn.requires_grad_(), torch.arange(6) * number, torch.arange(6) % (number + 2) != 1


def capture(segment: Segment, num_slots: int = 1) -> GraphedSegment:
    """Warmed up, all forwards captured, then all backwards in reverse."""
    graphed = GraphedSegment(GraphMaker(DEVICE), segment, num_slots=num_slots, resolve=None)
    graphed.warm_up()
    for slot in range(num_slots):
        graphed.capture_forward(slot)
    for slot in reversed(range(num_slots)):
        graphed.capture_backward(slot)
    return graphed


def train(module: Router, call: Callable[..., Any]) -> list[object]:
    """Everything that three steps of three overlapping microbatches show; None where none is."""
    torch.manual_seed(5)
    seen: list[object] = []
    for step in range(3):
        module.zero_grad()
        forwards = []
        for microbatch in range(3):
            inputs = router_inputs(step * 3 + microbatch + 1)
            forwards.append((inputs[0], call(*inputs, slot=microbatch)))
        for microbatch in (1, 0, 2):
            x, outputs = forwards[microbatch]
            (outputs[0].square().sum() + outputs[1].sum()).backward()
            seen += [x.grad, *(output.detach().clone() for output in outputs)]
        for parameter in module.parameters():
            seen.append(None if parameter.grad is None else parameter.grad.clone())
        seen.append(module.counts.clone())
    return [*seen, torch.get_rng_state()]


def same(one: object, other: object) -> bool:
    """Bits of tensors, or two times None."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    return one is other


def test_many_inputs_and_outputs_equal_eager() -> None:
    """Three microbatches at a time, kinds of inputs and outputs mixed: eager's bits everywhere."""
    torch.manual_seed(0)
    eager = Router()
    module = copy.deepcopy(eager)
    segment = Segment(
        name="router", function=module, samples=router_inputs(1),
        parameters=tuple(module.parameters()),
    )  # fmt: skip
    graphed = capture(segment, num_slots=3)
    expected = train(eager, lambda *inputs, slot: eager(*inputs))
    got = train(module, graphed)
    assert [same(a, b) for a, b in zip(expected, got, strict=True)] == [True] * len(expected)
