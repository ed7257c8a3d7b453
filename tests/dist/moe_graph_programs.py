"""A mixture of experts in the host graph: captured once, replayed over other tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.device import Device
from fsdp_core.graph.graph import CapturedFunction, GraphMaker
from fsdp_core.model.moe.dispatcher import Delivery, MoeAxes, Plan
from fsdp_core.model.moe.layer import MoeLayer, Routed
from fsdp_core.model.moe.router import RouterRule
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


def held(
    layout: Layout, delivery: Delivery, dtype: torch.dtype, axes: MoeAxes | None = None
) -> Held:
    """The same weights at each call."""
    case = Case(problem(RULE), delivery, dtype, "auto")
    layer = build_layer(case, axes or make_axes(layout))
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


# ---- stages in graphs of their own, forward and backward apart


class TwoGraphs:
    """A stage of one tensor as two graphs that are joined to autograd, whatever tensors it gives.

    Args:
        stage: the static input to a tuple of tensors.
    """

    def __init__(
        self,
        stage: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
        x: torch.Tensor,
        parameters: list[nn.Parameter],
    ) -> None:
        maker = GraphMaker(Device("cpu"))
        self.forward, self.backward, self.x = maker.new(), maker.new(), x
        self.parameters = parameters
        outputs = self.forward.capture(lambda: stage(x))
        assert all(isinstance(output, torch.Tensor) for output in outputs)
        self.rooted = [output.requires_grad for output in outputs]
        roots = [output for output in outputs if output.requires_grad]
        self.root_grads = [torch.zeros_like(root) for root in roots]
        surface = [x, *parameters]
        self.grads = self.backward.capture(
            lambda: torch.autograd.grad(roots, surface, self.root_grads)
        )
        self.outputs = tuple(output.detach() for output in outputs)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Replay forward now and backward when autograd asks."""
        results: tuple[torch.Tensor, ...] = _Replay.apply(self, x, *self.parameters)
        return results


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graphs: TwoGraphs, x: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        del parameters
        ctx.graphs = graphs
        graphs.x.data.copy_(x)
        graphs.forward.replay()
        results = tuple(output.clone() for output in graphs.outputs)
        pairs = zip(results, graphs.rooted, strict=True)
        ctx.mark_non_differentiable(*(result for result, rooted in pairs if not rooted))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        graphs = ctx.graphs
        given = [grad for grad, rooted in zip(grads, graphs.rooted, strict=True) if rooted]
        for static, grad in zip(graphs.root_grads, given, strict=True):
            static.copy_(grad)
        graphs.backward.replay()
        return (None, *(grad.clone() for grad in graphs.grads))


Stage = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def _front(layer: MoeLayer, valid: torch.Tensor, scope: str) -> Stage:
    """What the graphs of a scope hold: x to the tensors that cross."""

    def router(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routed = layer.router_stage(x, valid)
        assert routed.shared is not None
        return routed.probs, routed.experts, routed.shared

    def preprocess(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        probs, experts, shared = router(x)
        return (probs, experts, shared, *layer.preprocess(experts, probs))

    def moe(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (layer(x, valid),)

    return {"moe_router": router, "moe_preprocess": preprocess, "moe": moe}[scope]


def _rest(
    layer: MoeLayer, x: torch.Tensor, crossed: tuple[torch.Tensor, ...], scope: str
) -> torch.Tensor:
    """What stays eager, from the tensors that crossed."""
    if scope == "moe":
        return crossed[0]
    routed = Routed(*crossed[:3])
    plan = Plan(*crossed[3:]) if crossed[3:] else layer.preprocess(routed.experts, routed.probs)
    return layer.experts_stage(x, routed, plan)


def _parameters(layer: MoeLayer, scope: str) -> list[nn.Parameter]:
    """Those that the graphs of a scope use."""
    outside = () if scope == "moe" else ("experts.",)
    return [p for name, p in layer.named_parameters() if not name.startswith(outside)]


def stages_in_graphs(layout: Layout, cases: list[tuple[Delivery, torch.dtype, str]]) -> list[int]:
    """The numbers of different routings that each delivery and scope has seen."""
    axes = make_axes(layout)
    return [_stage_in_graphs(layout, axes, *case) for case in cases]


def _stage_in_graphs(
    layout: Layout, axes: MoeAxes, delivery: Delivery, dtype: torch.dtype, scope: str
) -> int:
    """Forward and backward of a scope in graphs, the rest eager: every bit is that of all eager."""
    eager, graphed = (held(layout, delivery, dtype, axes) for _ in range(2))
    graphed.fill(99)
    untouched = bits((), graphed.layer)
    parameters = _parameters(graphed.layer, scope)
    graphs = TwoGraphs(_front(graphed.layer, graphed.valid, scope), graphed.x, parameters)
    assert bits((), graphed.layer) == untouched, "the capture left a trace"
    routings = set()
    for step in range(STEPS):
        results = []
        for run, front in (
            (eager, _front(eager.layer, eager.valid, scope)),
            (graphed, graphs),
        ):
            run.fill(step)
            run.layer.zero_grad()
            run.layer.router.loss_scale.fill_(1.0 / (step + 1))
            x = run.x.detach().clone().requires_grad_()
            # A view, so that gradients inside of the stage are summed before the others join.
            crossed = front(x.view_as(x))
            _rest(run.layer, x, crossed, scope).backward(run.cotangent)
            grads = [x.grad, *(p.grad for p in run.layer.parameters())]
            assert all(grad is not None for grad in grads)
            run.layer.router.update_bias(0.01)
            results.append(bits((*crossed, *(g for g in grads if g is not None)), run.layer))
            if run is eager:
                routing = run.layer.router(x.detach().flatten(0, 1), run.valid.flatten())
                routings.add(tuple(routing.experts.flatten().tolist()))
        assert results[0] == results[1], [i for i, b in enumerate(results[0]) if b != results[1][i]]
    return len(routings)
