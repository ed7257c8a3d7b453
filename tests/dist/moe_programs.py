"""What ranks run in the tests of a mixture of experts, and how their parts make one result."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.model.moe.dispatcher import Delivery, MoeAxes
from fsdp_core.model.moe.experts import Experts
from fsdp_core.model.moe.layer import MoeLayer
from fsdp_core.parallel.param_sharding import Cut, CutModule, named_cuts, place, take
from tests.dist.moe_layouts import Layout, make_axes, whole_shape
from tests.dist.moe_reference import FFN, HIDDEN, SHARED_FFN, Problem
from tests.support.gated_experts import SharedExperts
from tests.support.routing_tape import RoutingTape, attach

BIAS_RATE = 0.25


@dataclass(frozen=True)
class Case:
    """One run of the layer in a layout.

    Attributes:
        experts: routing to replay, int64 [N, K] of all tokens; None lets the router choose.
        fault: a planted mistake, see `planted`.
    """

    task: Problem
    delivery: Delivery
    dtype: torch.dtype = torch.float64
    path: str = "loop"
    experts: torch.Tensor | None = None
    fault: str = ""


@dataclass(frozen=True)
class Part:
    """What one rank computed; gradients of parameters have their cuts; the bias after an update."""

    y: torch.Tensor
    x_grad: torch.Tensor
    grads: dict[str, tuple[torch.Tensor, tuple[Cut, ...]]]
    balance: float
    z: float
    slots: torch.Tensor
    bias: list[float]


@dataclass(frozen=True)
class Whole:
    """The ranks' parts put together: global tensors, gradients of the mean over dp."""

    tensors: dict[str, torch.Tensor]
    balance: list[float]
    z: list[float]
    slots: torch.Tensor
    bias: list[list[float]]


def build_layer(case: Case, axes: MoeAxes) -> MoeLayer:
    """This rank's part of the layer with the task's weights."""
    shared = SharedExperts(
        HIDDEN, SHARED_FFN, axes.tp, sequence_parallel=axes.sequence_parallel, gated=True
    )
    experts = Experts(case.task.rule.num_experts, HIDDEN, FFN, axes, case.path)
    layer = MoeLayer(
        HIDDEN, case.task.rule, axes, delivery=case.delivery, experts=experts, shared=shared
    )
    if case.fault == "down slices swapped":
        cuts = cast("CutModule", layer.get_submodule("experts.down"))._cuts
        ep, etp = cuts["weight"]
        cuts["weight"] = (ep, replace(etp, index=etp.axis_size - 1 - etp.index))
    load(layer, case.task, case.dtype)
    if case.task.bias is not None:
        assert layer.router.expert_bias is not None
        layer.router.expert_bias.copy_(case.task.bias)
    return layer


def load(layer: nn.Module, task: Problem, dtype: torch.dtype) -> None:
    """Give every parameter its part of the global weights."""
    cuts_of = named_cuts(layer)
    for name, parameter in layer.named_parameters():
        cuts = cuts_of[name]
        parameter.data = take(task.weights[name], cuts).to(dtype)
        assert whole_shape(parameter, cuts) == list(task.weights[name].shape), name


@contextmanager
def planted(case: Case, layer: MoeLayer, axes: MoeAxes) -> Iterator[MoeAxes]:
    """Plant a fault that the sizes of a test cannot show otherwise."""
    if case.fault == "aux loss twice":
        layer.router.loss_scale.fill_(2.0)
    if case.fault == "aux counts of one rank":
        layer.router._axes = replace(axes, tokens=())
    if case.fault == "etp group along ep":
        wrong = replace(axes, etp=replace(axes.etp, group=axes.ep.group))
        for stage in (layer.preprocess, layer.dispatch, layer.combine):
            stage._axes = wrong
    yield axes


def run_cases(layout: Layout, cases: list[Case]) -> list[Part]:
    """Forward and backward of each case on this rank."""
    axes = make_axes(layout)
    return [run_case(layout, axes, case) for case in cases]


def run_case(layout: Layout, axes: MoeAxes, case: Case) -> Part:
    """One case: the loss is dp times this rank's part of sum(y * cotangent)."""
    mine = layout.tokens(dist.get_rank())
    layer = build_layer(case, axes)
    if case.experts is not None:
        attach(layer.router, RoutingTape([case.experts[mine.flatten()]]))
    task = case.task
    x = task.x.flatten(0, 1)[mine].to(case.dtype).requires_grad_()
    cotangent = task.cotangent.flatten(0, 1)[mine].to(case.dtype)
    valid = None if task.valid is None else task.valid.flatten()[mine]
    with planted(case, layer, axes):
        y = layer(x, valid)
        y.backward(cotangent * layout.dp)
    assert x.grad is not None
    assert y.dtype == case.dtype
    grads, cuts = {}, named_cuts(layer)
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        grads[name] = (parameter.grad.double(), cuts[name])
    router = layer.router
    losses, slots = (router.balance_loss.item(), router.z_loss.item()), router.slots_per_expert
    slots, bias = slots.clone(), []
    if router.expert_bias is not None:
        router.update_bias(BIAS_RATE)
        bias = router.expert_bias.tolist()
    return Part(y.detach().double(), x.grad.double(), grads, *losses, slots, bias)


def join(layout: Layout, parts: list[Part], divisor: float | None = None) -> Whole:
    """Put the ranks' parts together.

    Gradients of experts are summed over their replicas, others over dp, and all divided by dp
    (`divisor` is another, wrong, number for experts). Ranks of tp that have the same tokens, or the
    same replicated parameter, must agree on every bit.
    """
    found: dict[str, torch.Tensor] = {}
    numbers = [layout.tokens(rank) for rank in range(layout.world_size)]
    num_tokens = 1 + int(torch.cat([n.flatten() for n in numbers]).max())
    for name, pieces in (
        ("y", [part.y for part in parts]),
        ("x", [part.x_grad / layout.dp for part in parts]),
    ):
        whole = torch.full((num_tokens, HIDDEN), torch.nan, dtype=torch.float64)
        for tokens, piece in zip(numbers, pieces, strict=True):
            known = whole[tokens]
            assert bool((known.isnan() | (known == piece)).all()), f"ranks differ in {name}"
            whole[tokens] = piece
        assert not whole.isnan().any(), name
        found[name] = whole
    for name, (first, cuts) in parts[0].grads.items():
        total = torch.zeros(whole_shape(first, cuts), dtype=torch.float64)
        for rank, part in enumerate(parts):
            grad, cuts = part.grads[name]
            if not cuts and rank % layout.tp:
                assert torch.equal(grad, parts[rank - rank % layout.tp].grads[name][0]), name
                continue
            piece = torch.zeros_like(total)
            place(grad, piece, cuts)
            total += piece
        expert = name.startswith("experts.")
        found[name] = total / (divisor if expert and divisor else layout.dp)
    slots = sum((part.slots for part in parts), torch.zeros_like(parts[0].slots))
    copies = layout.tp if layout.shares_tokens else 1
    losses = [p.balance for p in parts], [p.z for p in parts]
    return Whole(found, *losses, slots // copies, [p.bias for p in parts])
