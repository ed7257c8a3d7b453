"""Padding of packs in the whole decoder: zero in every layer, and nothing else knows of it."""

import math
from typing import Any, cast

import pytest
import torch

from fsdp_core.config import model_from_preset
from fsdp_core.model.batch import Capacity, Document, pack, packed_part
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.weights import init_weights
from fsdp_core.parallel.mesh import Axes, Axis
from fsdp_core.parallel.rng import RandomStreams

PAD = 0
"""The token that padding has; no document here has it."""
LENGTHS = (5, 1, 8)


def build(preset: str, padding: float) -> DecoderStage:
    """The whole model on one process, the embedding of the padding token all `padding`."""
    config = model_from_preset(preset, {})
    nobody = cast("Any", None)
    names = ("tp", "cp", "pp", "dp", "dp_outer", "ep", "etp", "edp")
    one = {name: Axis(name, 1, 0, nobody) for name in names}
    axes = Axes(**one, dense_mesh=nobody, expert_mesh=nobody, sequence_parallel=False)
    streams = RandomStreams(0, (axes.pp, axes.dp_outer, axes.dp, axes.cp, axes.tp),
                            torch.device("cpu"))  # fmt: skip
    model = DecoderStage(config, axes, LayerFactory(), streams)
    init_weights([model], 3, layers=config.layers, init_std=0.15)
    with torch.no_grad():
        assert model.embedding is not None
        cast("Any", model.embedding).weight[PAD] = padding
    return model


def step(model: DecoderStage, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of a pack of `tokens`, with its gradients, and what each layer makes of padding."""
    documents = [Document(torch.arange(n) + 1, torch.arange(n) + 2) for n in LENGTHS]
    batch = pack(documents, Capacity(tokens=tokens, slots=5, multiple=4))
    local = packed_part(batch, model.axes.cp, 1.0 / sum(LENGTHS))
    assert local.part.plan.valid is not None
    padding, made = ~local.part.plan.valid, list[torch.Tensor]()
    for layer in model.numbered_layers.values():
        layer.register_forward_hook(lambda _, args, out: made.append(out.detach()[:, padding]))
    loss = model(local.tokens, local.part)
    loss.backward()
    return loss.detach(), made


@pytest.mark.parametrize("preset", ["dense_tiny", "moe_tiny", "mla_moe_tiny"])
@pytest.mark.parametrize("tokens", [20, 32])
def test_what_padding_holds_is_nowhere(preset: str, tokens: int) -> None:
    """With NaN in it, between documents and in the tail, loss and gradients have the same bits."""
    sides = [build(preset, padding) for padding in (1.0, math.nan)]
    (loss, _), (other, made) = (step(model, tokens) for model in sides)
    assert torch.equal(loss, other)
    assert len(made) == len(sides[1].numbered_layers)
    for rows in made:
        assert rows.numel()
        assert not rows.any()
    for (name, ours), theirs in zip(
        sides[0].named_parameters(), sides[1].parameters(), strict=True
    ):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name
        assert ours.grad.isfinite().all()
