"""What the ranks of pipeline tests run."""

import functools
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_core.fsdp import fully_shard
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.pipeline import Pipeline, PipelineOptions
from fsdp_core.parallel.pipeline_p2p import TensorSpec
from fsdp_core.parallel.pipeline_schedule import split_layers
from tests.dist import fsdp_sides
from tests.dist.pipeline_models import (
    HIDDEN,
    LAYERS,
    ROWS,
    SEQ,
    Stage,
    Watch,
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
    graphs: int
    outputs: int


def world_axis() -> Axis:
    """All ranks as one pipeline."""
    group = dist.group.WORLD
    assert group is not None
    return Axis("pp", dist.get_world_size(), dist.get_rank(), group)


def make_stages(axis: Axis, chunks: int = 1) -> list[Stage]:
    """This rank's chunks of the model."""
    last = axis.size * chunks - 1
    parts = split_layers(LAYERS, axis.size, chunks)[axis.rank]
    numbers = range(axis.rank, axis.size * chunks, axis.size)
    stages = [
        Stage(layers, is_first=number == 0, is_last=number == last)
        for number, layers in zip(numbers, parts, strict=True)
    ]
    watch_anew(stages)
    return stages


def watch_anew(stages: list[Stage]) -> None:
    """Count from here on, over all stages of the rank."""
    watch = Watch()
    for stage in stages:
        stage.slots, stage.watch = [], watch


def one_process(number: int) -> tuple[bytes, dict[str, bytes]]:
    """The reference: bits of the losses and gradients of a loop over microbatches.

    On a rank, since the bits of a matrix product depend on the number of threads.
    """
    model = whole()
    losses = loop(model, batches(number))
    return raw(losses), {name: raw(grad) for name, grad in gradients([model])}


def train(chunks: int, counts: list[int], num_slots: int | None = None) -> list[Seen]:
    """Training passes of some numbers of microbatches, each from fresh gradients."""
    axis = world_axis()
    stages = make_stages(axis, chunks)
    pipeline = Pipeline(stages, axis, SPEC, CPU, options=PipelineOptions(num_slots=num_slots))
    found = []
    for number in counts:
        losses = pipeline.forward_backward(batches(number))
        found.append(
            Seen(
                None if losses is None else raw(losses),
                {name: raw(grad) for name, grad in gradients(stages)},
                [stage.slots for stage in stages],
                pipeline.peak_live,
                stages[0].watch.peak_graphs,
                stages[0].watch.peak_outputs,
            )
        )
        for stage in stages:
            stage.zero_grad()
        watch_anew(stages)
    return found


def two_parts(number: int, sync: str) -> dict[str, bytes]:
    """Gradients of two data-parallel halves, summed and halved once or after every microbatch."""
    models = [whole(), whole()]
    parts = [batches(number, part) for part in range(2)]
    total: dict[str, torch.Tensor] = {}
    for i in range(number if sync == "every" else 1):
        for model, part in zip(models, parts, strict=True):
            model.zero_grad()
            chosen = [part[i]] if sync == "every" else part
            loop(model, [replace(batch, weight=1.0 / number) for batch in chosen])
        grads = [dict(gradients([model])) for model in models]
        for name, grad in grads[0].items():
            mean = (grad + grads[1][name]) * 0.5
            total[name] = total[name] + mean if name in total else mean
    return {name: raw(grad) for name, grad in total.items()}


def train_sharded(
    chunks: int, number: int, sync: str, options: dict[str, Any]
) -> tuple[dict[str, bytes], int, int]:
    """2 x 2 ranks: gradients of a pass, number of sharded groups and of reductions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_coordinate() or (0, 0)
    axis = Axis("pp", 2, pp, mesh.get_group("pp"))
    stages = make_stages(axis, chunks)
    reductions: list[Any] = []
    groups = 0
    for stage in stages:
        for block in stage.layers.values():
            fully_shard(block, mesh=mesh["dp"], **options)
        schedule = fully_shard(stage, mesh=mesh["dp"], **options).fsdp_schedule
        groups += sum(len(unit.groups) for unit in schedule.units)
        reduce = schedule.start_reduce
        schedule.start_reduce = functools.partial(_counted, reductions, reduce)
    pipeline = sharded_pipeline(stages, axis, sync)
    for _ in range(2):  # the second pass by what the first has recorded
        for stage in stages:
            stage.zero_grad()
        reductions.clear()
        pipeline.forward_backward(batches(number, part=dp))
    return whole_gradients(stages, mesh["dp"]), groups, len(reductions)


def sharded_pipeline(stages: list[Stage], axis: Axis, sync: str) -> Pipeline:
    """A pipeline that reduces `sync`."""
    return Pipeline(
        stages, axis, SPEC, CPU, options=PipelineOptions(gradient_sync=cast("Any", sync))
    )


def train_sharded_by_torch(chunks: int, number: int, sync: str) -> dict[str, bytes]:
    """The same with torch's own `fully_shard`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_coordinate() or (0, 0)
    axis = Axis("pp", 2, pp, mesh.get_group("pp"))
    stages = make_stages(axis, chunks)
    for stage in stages:
        for block in stage.layers.values():
            torch_fully_shard(block, mesh=mesh["dp"])
        torch_fully_shard(stage, mesh=mesh["dp"])
    sharded_pipeline(stages, axis, sync).forward_backward(batches(number, part=dp))
    return whole_gradients(stages, mesh["dp"])


def whole_gradients(stages: list[Stage], mesh: DeviceMesh) -> dict[str, bytes]:
    """Gradients of all stages of a rank, put together over its data-parallel mesh."""
    grads = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    return {
        name: raw(grad) for name, grad in fsdp_sides.whole(grads, mesh).items() if grad is not None
    }


def _counted(calls: list[Any], function: Any, *args: Any, **kwargs: Any) -> None:
    calls.append(args)
    function(*args, **kwargs)
