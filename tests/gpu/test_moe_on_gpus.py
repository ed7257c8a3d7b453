"""A mixture of 64 experts on a GPU: who waits, which kernels run, what graphs replay."""

import warnings
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from fsdp_core.device import Device, make_deterministic
from fsdp_core.graph.graph import CapturedFunction, GraphMaker
from fsdp_core.model.decoder import MoeLayer
from fsdp_core.model.layers import Mlp
from fsdp_core.model.moe.experts import Experts
from tests.dist.parity_programs import moe_model, single_axes
from tests.dist.rank_pool import RankPool

HIDDEN, FFN, EXPERTS, TOKENS, STEPS = 64, 32, 64, 40, 3


class Held:
    """A layer in bfloat16, its inputs at fixed addresses, and a step of it."""

    def __init__(self, device: Device, delivery: dict[str, Any], *, used: int = EXPERTS) -> None:
        axes = single_axes()
        config = moe_model(
            HIDDEN, EXPERTS, 4, score="sigmoid", aux_loss=0.1, z_loss=0.1, expert_bias=True,
            **delivery,
        )  # fmt: skip
        shared = Mlp(HIDDEN, FFN, axes)
        experts = Experts(EXPERTS, HIDDEN, FFN, axes)
        layer = MoeLayer(config, axes, experts, shared)
        generator = torch.Generator().manual_seed(1)
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
        assert layer.router.expert_bias is not None
        layer.router.expert_bias[used:] = -2.0  # scores are below one: never chosen
        self.layer = layer.to(device.torch_device, torch.bfloat16)
        shape = (1, TOKENS, HIDDEN)
        self.x = torch.zeros(shape, device=device.torch_device, dtype=torch.bfloat16)
        self.x.requires_grad_()
        self.cotangent = torch.zeros_like(self.x)
        self.valid = torch.ones(shape[:2], device=device.torch_device, dtype=torch.bool)
        self.fill(0)

    def fill(self, step: int) -> None:
        """Other tokens in every step; what is no token is no number."""
        generator = torch.Generator().manual_seed(100 + step)
        valid = torch.rand(self.valid.shape, generator=generator) > 0.2
        x = torch.randn(self.x.shape, generator=generator)
        x[~valid] = torch.nan
        self.x.data.copy_(x)
        self.cotangent.copy_(torch.randn(self.x.shape, generator=generator))
        self.valid.copy_(valid)

    def step(self) -> tuple[torch.Tensor, ...]:
        """Output, gradients of x and of every weight, and the bias after its move."""
        y = self.layer(self.x, self.valid)
        wanted = [self.x, *self.layer.parameters()]
        grads = torch.autograd.grad(y, wanted, self.cotangent)
        router = self.layer.router
        router.update_bias(0.01)
        assert router.expert_bias is not None
        return (y.detach(), *grads, router.expert_bias)


def waits(device: Device, delivery: dict[str, Any]) -> int:
    """How often a step waits for the device."""
    held = Held(device, delivery)
    held.step()  # libraries load with their first kernel
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            held.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in seen)


def waits_on_gpu() -> dict[str, int]:
    device = Device("cuda", torch.cuda.current_device())
    return {
        "dropless": waits(device, {}),
        "gathered": waits(device, {"dispatcher": "all_gather"}),
        "padded": waits(device, {"capacity_factor": 1.0}),
        "padded by weight": waits(device, {"capacity_factor": 0.5, "drop": "probs"}),
    }


def replays_and_eager(device: Device, delivery: dict[str, Any]) -> list[bool]:
    """Steps eagerly and as replays of one captured step: for each, whether every bit agrees."""
    eager, graphed = Held(device, delivery), Held(device, delivery)
    if device.is_cuda:
        Held(device, delivery).step()
        torch.cuda.synchronize()
    agreed = []
    with device.on(device.new_stream()):
        captured = CapturedFunction(GraphMaker(device), graphed.step, None)
        for step in range(STEPS):
            eager.fill(step)
            graphed.fill(step)
            pairs = zip(eager.step(), captured(), strict=True)
            agreed.append(all(bool(a.isfinite().all()) and torch.equal(a, b) for a, b in pairs))
        captured.reset()
    return agreed


def replays_on_gpu() -> dict[str, list[bool]]:
    make_deterministic(0)
    device = Device("cuda", torch.cuda.current_device())
    return {
        drop: replays_and_eager(device, {"capacity_factor": 0.5, "drop": drop})
        for drop in ("position", "probs")
    }


def grouped_products(device: Device) -> dict[str, Any]:
    """Grouped products of a dropless step with empty experts, and what comes of it, twice."""
    calls = 0
    functions = cast("Any", F)
    original = functions.grouped_mm

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    results: list[tuple[torch.Tensor, ...]] = []
    names: list[str] = []
    functions.grouped_mm = counting
    try:
        for _ in range(2):
            held = Held(device, {}, used=EXPERTS // 4)
            experts: Any = held.layer.experts
            names = ["y", "x", *(name for name, _ in held.layer.named_parameters())]
            # What the allocator gives next was NaN: a gradient that is not written shows.
            weight = experts.gate.weight
            junk = [torch.full_like(weight, torch.nan) for _ in range(8)]
            del junk
            results.append(held.step())
    finally:
        functions.grouped_mm = original
    grads = dict(zip(names, results[0], strict=False))
    empty = [grads[f"experts.{name}.weight"][EXPERTS // 4 :] for name in ("gate", "up", "down")]
    return {
        "calls": calls / 2,
        "same bits": all(torch.equal(a, b) for a, b in zip(*results, strict=True)),
        "finite": all(bool(t.isfinite().all()) for t in results[0]),
        "empty are zero": not any(bool(t.any()) for t in empty),
        "others are not": all(bool(grads[f"experts.{n}.weight"].any()) for n in ("gate", "down")),
    }


def grouped_on_gpu() -> dict[str, Any]:
    """With the path that is chosen there."""
    make_deterministic(0)
    return grouped_products(Device("cuda", torch.cuda.current_device()))


@pytest.mark.gpu(1)
def test_the_host_waits_once_where_it_must(gpu_ranks: RankPool) -> None:
    """A dropless step reads its sizes once, drop-and-pad never waits, backward included."""
    (found,) = gpu_ranks.run(waits_on_gpu, world_size=1)
    assert found == {"dropless": 1, "gathered": 1, "padded": 0, "padded by weight": 0}


@pytest.mark.gpu(1)
def test_replays_have_eagers_bits(gpu_ranks: RankPool) -> None:
    """Drop-and-pad forward, backward and bias in one CUDA graph, with NaN in padding."""
    (found,) = gpu_ranks.run(replays_on_gpu, world_size=1)
    assert found == {drop: [True] * STEPS for drop in ("position", "probs")}


@pytest.mark.gpu(1)
def test_grouped_products_do_not_count_experts(gpu_ranks: RankPool) -> None:
    """A bfloat16 step is nine grouped products; gradients of empty experts are zero, bits stay."""
    (found,) = gpu_ranks.run(grouped_on_gpu, world_size=1)
    assert found == {
        "calls": 9, "same bits": True, "finite": True, "empty are zero": True,
        "others are not": True,
    }  # fmt: skip
