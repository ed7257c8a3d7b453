"""Checkpoints of decoders on layouts, for warm ranks: known values by the names of global tensors.

Every rank knows what its part of each weight and of each state should be, whatever layout saved it:
the part of a tensor that is drawn from the tensor's name. So no rank has to ask another.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from fsdp_core import checkpoint
from fsdp_core.config import model_from_preset
from fsdp_core.device import Device
from fsdp_core.fsdp.row_sharded import RowSharded
from fsdp_core.model.decoder import DecoderStage, make_stages
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.sharding import shard_stage
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.parallel.param_sharding import Cut, named_cuts, take
from tests.dist.parity_batches import Batch
from tests.dist.parity_programs import (
    Layout,
    Problem,
    sharding_of,
    streams_of,
    whole_model,
)

STATES = ("exp_avg", "exp_avg_sq")
Stages = list[DecoderStage]


def problem(layers: int = 4) -> Problem:
    """Latent attention, a dense layer, then layers of experts with a bias each."""
    config = model_from_preset("mla_moe_tiny", {"layers": layers})
    return Problem(config, Batch(config.vocab_size, config.seq, 2))


def build(what: Problem, layout: Layout | None) -> tuple[Stages, torch.optim.Optimizer]:
    """The stages that this rank has, sharded, or the whole model as it is, and an optimizer."""
    if layout is None:
        stages = [whole_model(what)]
    else:
        axes = build_axes(layout.parallel, Device("cpu"))
        streams, chunks = streams_of(axes), layout.parallel.pp_chunks
        stages = make_stages(what.model, axes, LayerFactory(), streams, chunks=chunks)
        for stage in stages:
            for parameter in stage.parameters():
                torch.nn.init.zeros_(parameter)
            shard_stage(stage, axes, sharding_of(layout, torch.float32))
    return stages, adamw(stages)


def adamw(stages: Stages) -> torch.optim.Optimizer:
    """Matrices and all else in two groups, with states for all that has rows here."""
    trained = [p for stage in stages for p in stage.parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    made = torch.optim.AdamW(groups)
    for parameter in trained:
        if local(parameter).numel():
            made.state[parameter] = {
                "step": torch.zeros(()),
                **{key: torch.zeros_like(parameter.detach()) for key in STATES},
            }
    return made


def local(tensor: Any) -> torch.Tensor:
    """This rank's rows: the very memory."""
    plain = tensor.detach()
    rows: torch.Tensor = plain.to_local() if isinstance(plain, RowSharded) else plain
    return rows


def known(name: str, tensor: Any, cuts: tuple[Cut, ...], seed: int) -> torch.Tensor:
    """This rank's part of the values that the name of a global tensor draws."""
    shape = list(tensor.shape)
    for cut in cuts:
        shape[cut.dim] *= cut.axis_size
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    part = take(torch.rand(shape, generator=generator).to(tensor.dtype), cuts)
    return tensor.row_spec.own_rows(part) if isinstance(tensor, RowSharded) else part


def parts(
    stages: Stages, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Any, tuple[Cut, ...]]]:
    """Weights, buffers and states by global names, with their cuts."""
    for stage in stages:
        cuts = named_cuts(stage)
        for name, parameter in stage.named_parameters():
            yield name, parameter, cuts[name]
            for key, state in optimizer.state.get(parameter, {}).items():
                yield f"{name}.{key}", state, cuts[name] if state.dim() else ()
        saved = stage.state_dict().keys()
        for name, buffer in stage.named_buffers():
            if name in saved:
                yield name, buffer, ()


def fill(stages: Stages, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Give everything known values."""
    for name, tensor, cuts in parts(stages, optimizer):
        local(tensor).copy_(known(name, tensor, cuts, seed))


def wrong(stages: Stages, optimizer: torch.optim.Optimizer, seed: int) -> list[str]:
    """Names of what has not the known bits."""
    return [
        name
        for name, tensor, cuts in parts(stages, optimizer)
        if not torch.equal(local(tensor), known(name, tensor, cuts, seed))
    ]


def fill_and_save(folder: str, seed: int, what: Problem, layout: Layout | None) -> None:
    """Known values, saved as step 5."""
    stages, optimizer = build(what, layout)
    fill(stages, optimizer, seed)
    model = stages if layout is not None else stages[0]
    checkpoint.save(folder, 5, model, optimizer, {"seed": seed})


def load_each(
    sources: list[tuple[str, int]], what: Problem, layout: Layout | None
) -> list[tuple[list[str], int]]:
    """Of each folder and seed: what of it is wrong in this layout, and how much was compared."""
    stages, optimizer = build(what, layout)
    model = stages if layout is not None else stages[0]
    found = []
    for folder, seed in sources:
        loaded = checkpoint.load(folder, model, optimizer)
        assert (loaded.step, loaded.extra) == (5, {"seed": seed})
        compared = len(list(parts(stages, optimizer)))
        found.append((wrong(stages, optimizer, seed), compared))
    return found


def drift_and_save(folder: str, what: Problem, layout: Layout) -> None:
    """A replicated norm that has other values on the second rank of tp."""
    stages, optimizer = build(what, layout)
    fill(stages, optimizer, 1)
    axes = stages[0].axes
    norm: Any = next(iter(stages[0].numbered_layers.values())).attn.norm
    if axes.tp.rank and not axes.pp.rank:
        local(norm.weight).mul_(1.001)
    checkpoint.save(folder, 5, stages, optimizer)


def load_part(folder: str, what: Problem, layout: Layout, leave_out: str) -> None:
    """Load into stages of which one layer is missing."""
    stages, _ = build(what, layout)
    for stage in stages:
        if leave_out in stage.numbered_layers:
            del stage.layers[leave_out]
    checkpoint.load(folder, stages)
