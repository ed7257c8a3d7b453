"""Layers that are computed again in backward: the same bits, from what they were given alone."""

from typing import Any, cast

import pytest
import torch
from torch import nn

from fsdp_core.config import ModelConfig, model_from_preset
from fsdp_core.model.batch import dense_part
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.weights import init_weights
from fsdp_core.parallel.mesh import Axes, Axis
from fsdp_core.parallel.rng import RandomStreams

CPU = torch.device("cpu")


def build(config: ModelConfig, recompute: str) -> DecoderStage:
    """The whole model on one process."""
    nobody = cast("Any", None)
    names = ("tp", "cp", "pp", "dp", "dp_outer", "ep", "etp", "edp")
    one = {name: Axis(name, 1, 0, nobody) for name in names}
    axes = Axes(**one, dense_mesh=nobody, expert_mesh=nobody, sequence_parallel=False)
    streams = RandomStreams(0, (axes.pp, axes.dp_outer, axes.dp, axes.cp, axes.tp), CPU)
    model = DecoderStage(config, axes, LayerFactory(), streams, recompute=recompute)
    init_weights([model], 3, layers=config.layers, init_std=0.15)
    return model


def train(model: DecoderStage) -> tuple[list[torch.Tensor], int]:
    """Loss, gradients and random states of two passes; and bytes that the last one kept."""
    ids = torch.randint(250, (2, 17), generator=torch.Generator().manual_seed(1))
    local, kept, found = dense_part(ids[:, :-1], ids[:, 1:], model.axes.cp), [0], []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[0] += 0 if isinstance(tensor, nn.Parameter) else tensor.nbytes
        return tensor

    for _ in range(2):
        kept[0] = 0
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(local.tokens, local.part)
        loss.backward()
        found.append(loss.detach())
    grads = [cast("torch.Tensor", p.grad) for p in model.parameters()]
    counts = [router.slots_per_expert for router in model.routers.values()]
    return [*found, *grads, *counts], kept[0]


@pytest.mark.parametrize("preset", ["dense_tiny_dropout", "moe_tiny"])
def test_the_bits_are_those_of_kept_activations(preset: str) -> None:
    """Dropout draws the same numbers again, loads are counted once, and less is kept."""
    config = model_from_preset(preset)
    found, kept = train(build(config, "none"))
    for recompute, most in (("attn", 0.9), ("full", 0.5)):
        again, bytes_kept = train(build(config, recompute))
        assert all(map(torch.equal, again, found))
        assert bytes_kept < most * kept, recompute


@pytest.mark.parametrize(
    ("recompute", "calls"), [("none", (1, 1)), ("attn", (2, 1)), ("full", (2, 2))]
)
def test_what_is_computed_again(recompute: str, calls: tuple[int, int]) -> None:
    """Attention alone, or the whole layer; nothing without gradients."""
    model = build(model_from_preset("dense_tiny"), recompute)
    layer, seen = model.numbered_layers["1"], {"attn": 0, "mlp": 0}
    for name, module in (("attn", layer.attn.norm), ("mlp", layer.mlp.norm)):
        module.register_forward_hook(lambda *_, name=name: seen.update({name: seen[name] + 1}))
    ids = torch.zeros(1, 9, dtype=torch.int64)
    local = dense_part(ids[:, :-1], ids[:, 1:], model.axes.cp)
    model(local.tokens, local.part).backward()
    assert (seen["attn"], seen["mlp"]) == calls
    with torch.no_grad():
        model(local.tokens, local.part)
    assert (seen["attn"], seen["mlp"]) == (calls[0] + 1, calls[1] + 1)
