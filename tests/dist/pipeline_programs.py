"""What the ranks of pipeline tests run."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core.parallel.axes import Axis
from fsdp_core.parallel.pipeline import Pipeline, PipelineOptions
from fsdp_core.parallel.pipeline_split import split_layers
from fsdp_core.parallel.stage_transfer import TensorSpec
from tests.dist.pipeline_models import (
    HIDDEN,
    LAYERS,
    ROWS,
    SEQ,
    Stage,
    batches,
    gradients,
    loop,
    raw,
    whole,
)

CPU = torch.device("cpu")
SPEC = TensorSpec((ROWS, SEQ, HIDDEN), torch.float32)


@dataclass
class Seen:
    """What one rank saw: bits of losses and gradients, and counts."""

    losses: bytes | None
    grads: dict[str, bytes]
    slots: list[list[int]]
    peak_live: int


def world_axis() -> Axis:
    """All ranks as one pipeline."""
    group = dist.group.WORLD
    assert group is not None
    return Axis("pp", dist.get_world_size(), dist.get_rank(), group)


def make_stages(axis: Axis, chunks: int) -> list[Stage]:
    """This rank's chunks of the model."""
    last = axis.size * chunks - 1
    parts = split_layers(LAYERS, axis.size, chunks)[axis.rank]
    numbers = range(axis.rank, axis.size * chunks, axis.size)
    return [
        Stage(layers, is_first=number == 0, is_last=number == last)
        for number, layers in zip(numbers, parts, strict=True)
    ]


def one_process(number: int) -> tuple[bytes, dict[str, bytes]]:
    """The reference: bits of the losses and gradients of a loop over microbatches.

    On a rank, since the bits of a matrix product depend on the number of threads.
    """
    model = whole()
    losses = loop(model, batches(number))
    return raw(losses), {name: raw(grad) for name, grad in gradients([model])}


def train(chunks: int, counts: list[int], broadcast: bool = False, **options: Any) -> list[Seen]:
    """Training passes of some numbers of microbatches, each from fresh gradients."""
    axis = world_axis()
    stages = make_stages(axis, chunks)
    pipeline = Pipeline(stages, axis, SPEC, CPU, options=PipelineOptions(**options))
    found = []
    for number in counts:
        losses = pipeline.forward_backward(batches(number), broadcast_loss=broadcast)
        found.append(
            Seen(
                None if losses is None else raw(losses),
                {name: raw(grad) for name, grad in gradients(stages)},
                [stage.slots for stage in stages],
                pipeline.peak_live,
            )
        )
        for stage in stages:
            stage.zero_grad()
            stage.slots = []
    return found
