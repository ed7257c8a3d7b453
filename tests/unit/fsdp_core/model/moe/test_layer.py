"""The layer in one process: stages, host reads, and what it refuses."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fsdp_core.model.moe.axes import MoeAxes
from fsdp_core.model.moe.layer import MoeLayer
from fsdp_core.model.moe.preprocess import Delivery
from fsdp_core.model.moe.routing import RouterRule
from fsdp_core.model.moe.shared import SharedExperts

EXPERTS, HIDDEN, FFN = 4, 8, 12
READS = {"tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"}


class HostReads(TorchFunctionMode):
    """Counts what waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def layer(axes: MoeAxes, delivery: Delivery, *, shared: bool = True, **changes: Any) -> MoeLayer:
    """Random float64 weights, the same at each call."""
    rule = RouterRule(**{"num_experts": EXPERTS, "top_k": 2, "aux_coeff": 0.1, **changes})
    always = SharedExperts(HIDDEN, FFN, axes.tp, sequence_parallel=False) if shared else None
    made = MoeLayer(HIDDEN, FFN, rule, axes, delivery=delivery, shared=always).double()
    generator = torch.Generator().manual_seed(8)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def tokens() -> torch.Tensor:
    """[2, 3, HIDDEN], wants a gradient."""
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


def test_stages_make_the_layer(alone: MoeAxes) -> None:
    """Router stage, preprocess and the rest are the forward pass; gradients reach the router."""
    made, x = layer(alone, Delivery()), tokens()
    routed = made.router_stage(x)
    plan = made.preprocess(routed.experts, routed.probs)
    y = made.experts_stage(x, routed, plan)
    assert torch.equal(y, made(x))
    assert routed.probs.requires_grad
    assert not any(tensor.requires_grad for tensor in plan)
    assert routed.shared is not None
    assert routed.shared.shape == x.shape


def test_a_token_without_experts_has_the_shared_output(alone: MoeAxes) -> None:
    """Tokens that are not valid get the shared experts' output alone, or zero without them."""
    valid = torch.tensor([[True, False, True], [False, True, True]])
    made, x = layer(alone, Delivery()), tokens()
    mats = [getattr(made.shared, name).weight for name in ("gate", "up", "down")]
    shared = F.linear(F.silu(F.linear(x, mats[0])) * F.linear(x, mats[1]), mats[2])
    y = made(x, valid)
    assert torch.equal(y[~valid], shared[~valid])
    assert (y[valid] != shared[valid]).any(-1).all()
    bare = layer(alone, Delivery(), shared=False)
    assert not bare(x, valid)[~valid].any()


@pytest.mark.parametrize("factor", [None, 0.5, 1.0])
def test_recomputation_changes_nothing(alone: MoeAxes, factor: float | None) -> None:
    """Under recompute gradients are the same bits, and the load is counted once."""
    grads = []
    for recompute in (False, True):
        made = layer(alone, Delivery(capacity_factor=factor), expert_bias=True)
        x = tokens()
        y = checkpoint(made, x, use_reentrant=False) if recompute else made(x)
        y.square().sum().backward()
        found = [x.grad, *(p.grad for p in made.parameters()), made.router.slots_per_expert]
        assert all(grad is not None for grad in found)
        grads.append(found)
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_sizes_that_do_not_divide_are_refused(alone: MoeAxes) -> None:
    """Experts over ep."""
    axes = replace(alone, ep=replace(alone.ep, size=3))
    with pytest.raises(ValueError, match="divisible by ep=3, got 4"):
        layer(axes, Delivery())
