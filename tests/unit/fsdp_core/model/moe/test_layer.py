"""The layer in one process: stages, host reads, and what it refuses."""

import copy
import threading
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fsdp_core.model.decoder import MoeLayer
from fsdp_core.model.layers import Mlp
from fsdp_core.model.moe.dispatcher import Delivery, MoeAxes
from fsdp_core.model.moe.experts import Experts, GroupedLinear
from fsdp_core.model.moe.router import RouterRule
from fsdp_core.parallel.tensor_parallel import named_cuts
from tests.support.operators import Seeing

EXPERTS, HIDDEN, FFN = 4, 8, 12
READS = {"tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"}


class HostReads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def layer(axes: MoeAxes, delivery: Delivery, **changes: Any) -> MoeLayer:
    rule = RouterRule(**{"num_experts": EXPERTS, "top_k": 2, "aux_coeff": 0.1, **changes})
    # An `Mlp` asks the same of them as of `Axes`.
    always = Mlp(HIDDEN, FFN, cast("Any", axes))
    experts = Experts(EXPERTS, HIDDEN, FFN, axes)
    made = MoeLayer(HIDDEN, rule, axes, delivery=delivery, experts=experts, shared=always).double()
    generator = torch.Generator().manual_seed(8)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(2, 3, HIDDEN, generator=generator).double().requires_grad_()


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_dropless_reads_the_host_once(alone: MoeAxes, dispatcher: str) -> None:
    """Forward and backward of a dropless layer wait for the device at one place."""
    made, x = layer(alone, Delivery(dispatcher=dispatcher)), tokens()
    with HostReads() as reads:
        made(x).sum().backward()
    assert reads.seen == {"tolist": 1}


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_drop_and_pad_never_reads_the_host(alone: MoeAxes, dispatcher: str) -> None:
    """With a capacity nothing waits for the device."""
    made = layer(alone, Delivery(dispatcher=dispatcher, capacity_factor=1.0), expert_bias=True)
    valid = torch.tensor([[True, True, False], [True, True, True]])
    with HostReads() as reads:
        made(tokens(), valid).sum().backward()
        made.router.update_bias(0.1)
    assert not reads.seen


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("factor", [None, 1.0])
def test_operators_do_not_count_experts(
    alone: MoeAxes, monkeypatch: pytest.MonkeyPatch, dispatcher: str, factor: float | None
) -> None:
    """With 64 experts, most of them empty, a step is as many operators as with 8."""
    monkeypatch.setattr(GroupedLinear, "_is_grouped", lambda layer, rows: True)
    numbers = Counter[int]()
    for experts in (8, 64):
        rule = RouterRule(num_experts=experts, top_k=2, aux_coeff=0.1)
        delivery = Delivery(dispatcher=dispatcher, capacity_factor=factor)
        inner = Experts(experts, HIDDEN, FFN - 4, alone)
        made = MoeLayer(HIDDEN, rule, alone, delivery=delivery, experts=inner)
        for parameter in made.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(8))
        with Seeing(lambda *_, experts=experts: numbers.update([experts])):
            made(tokens().float()).sum().backward()
    assert numbers[8] == numbers[64] > 0


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("factor", [None, 0.5])
def test_no_tokens_at_all(alone: MoeAxes, dispatcher: str, factor: float | None) -> None:
    """Nothing goes in, nothing comes out, and every gradient is zero."""
    made = layer(alone, Delivery(dispatcher=dispatcher, capacity_factor=factor))
    y = made(tokens()[:, :0])
    assert y.shape == (2, 0, HIDDEN)
    y.sum().backward()
    for parameter in made.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_a_copy_is_a_layer_of_its_own(alone: MoeAxes) -> None:
    """Process groups, which nothing can copy, are shared; weights, cuts and buffers are not."""
    group: Any = threading.Lock()
    axes = replace(
        alone, ep=replace(alone.ep, group=group), etp=replace(alone.etp, group=group),
        tp=replace(alone.tp, group=group), tokens=(replace(alone.tokens[0], group=group),),
    )  # fmt: skip
    made = layer(axes, Delivery(), expert_bias=True)
    copied, x = copy.deepcopy(made), tokens()
    assert torch.equal(made(x), copied(x))
    assert named_cuts(made) == named_cuts(copied)
    for mine, other in zip(made.parameters(), copied.parameters(), strict=True):
        mine.data.zero_()
        assert other.any()
