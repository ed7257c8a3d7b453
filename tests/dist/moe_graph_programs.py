"""A mixture of experts in the host graph: captured once, replayed over other tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_core.device import Device
from fsdp_core.graph.capture import CapturedFunction, GraphMaker
from fsdp_core.model.moe.layer import MoeLayer, Routed
from fsdp_core.model.moe.preprocess import Delivery, Plan
from fsdp_core.model.moe.routing import RouterRule
from tests.dist.moe_layouts import Layout, make_axes
from tests.dist.moe_programs import Case, build_layer
from tests.dist.moe_reference import HIDDEN, NUM_EXPERTS, problem

RULE = RouterRule(
    num_experts=NUM_EXPERTS, top_k=2, scores="sigmoid", aux_coeff=0.5, z_coeff=0.05,
    expert_bias=True,
)  # fmt: skip
STEPS = 4
TOKENS = 6

Bits = list[bytes]


@dataclass
class Held:
    """A layer with static inputs."""

    layer: MoeLayer
    seed: int
    x: torch.Tensor
    valid: torch.Tensor
    cotangent: torch.Tensor

    def fill(self, step: int) -> None:
        """Other tokens, so another routing, in every step."""
        generator = torch.Generator().manual_seed(1000 * step + self.seed)
        self.x.data.copy_(torch.randn(self.x.shape, generator=generator))
        self.valid.copy_(torch.rand(self.valid.shape, generator=generator) > 0.2)
        self.cotangent.copy_(torch.randn(self.x.shape, generator=generator))

    def step(self) -> tuple[torch.Tensor, ...]:
        """Output and all gradients; the load is counted and the bias moves."""
        y = self.layer(self.x, self.valid)
        wanted = [self.x, *self.layer.parameters()]
        grads = torch.autograd.grad(y, wanted, self.cotangent)
        self.layer.router.update_bias(0.01)
        return (y.detach(), *grads)


def held(layout: Layout, delivery: Delivery, dtype: torch.dtype) -> Held:
    """The same weights at each call."""
    case = Case(problem(RULE), delivery, dtype, "auto")
    layer = build_layer(case, make_axes(layout))
    shape = (1, TOKENS, HIDDEN)
    return Held(
        layer,
        dist.get_rank() // (layout.tp if layout.shares_tokens else 1),
        torch.zeros(shape, dtype=dtype, requires_grad=True),
        torch.ones(shape[:2], dtype=torch.bool),
        torch.zeros(shape, dtype=dtype),
    )


def bits(tensors: tuple[torch.Tensor, ...], layer: MoeLayer) -> Bits:
    """Bytes of results and of the router's buffers."""
    both = (*tensors, *layer.router.buffers())
    return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in both]


def replays_equal_eager(layout: Layout, delivery: Delivery, dtype: torch.dtype) -> int:
    """Capture forward, backward and the bias update, and replay; returns different routings."""
    eager, graphed = held(layout, delivery, dtype), held(layout, delivery, dtype)
    graphed.fill(99)
    untouched = bits((), graphed.layer)
    captured = CapturedFunction(GraphMaker(Device("cpu")), graphed.step, None)
    assert bits((), graphed.layer) == untouched, "the capture left a trace"
    routings = set()
    for step in range(STEPS):
        eager.fill(step)
        graphed.fill(step)
        routing = eager.layer.router(eager.x.detach().flatten(0, 1), eager.valid.flatten())
        routings.add(tuple(routing.experts.flatten().tolist()))
        expected = bits(eager.step(), eager.layer)
        found = bits(captured(), graphed.layer)
        assert found == expected, [i for i, b in enumerate(found) if b != expected[i]]
    captured.reset()
    return len(routings)


def capture_dropless(layout: Layout) -> str:
    """What is said when a dropless layer is captured."""
    graphed = held(layout, Delivery(), torch.float32)
    graphed.fill(0)
    try:
        CapturedFunction(GraphMaker(Device("cpu")), graphed.step, None)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "captured"


def stages_before_dispatch(layout: Layout, delivery: Delivery) -> int:
    """Router and preprocess captured, the rest eager; returns steps that agree with all eager."""
    eager, graphed = (held(layout, delivery, torch.float32) for _ in range(2))
    layer = graphed.layer

    def front() -> tuple[Routed, Plan]:
        routed = layer.router_stage(graphed.x, graphed.valid)
        return routed, layer.preprocess(routed.experts, routed.probs)

    captured: Callable[[], tuple[Routed, Plan]]
    with torch.no_grad():
        captured = CapturedFunction(GraphMaker(Device("cpu")), front, None)
        agreed = 0
        for step in range(STEPS):
            eager.fill(step)
            graphed.fill(step)
            routed, plan = captured()
            y = layer.experts_stage(graphed.x, routed, plan)
            agreed += torch.equal(y, eager.layer(eager.x, eager.valid))
    return agreed
