"""Pipelines on GPUs over NCCL: the bits of one GPU, eager, sharded, and as one graph."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.determinism import make_deterministic
from fsdp_core.device import Device
from fsdp_core.fsdp import fully_shard
from fsdp_core.graph.graph import CapturedFunction, GraphMaker
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.pipeline import Microbatch, Pipeline
from tests.dist import fsdp_sides
from tests.dist.pipeline_programs import (
    SPEC,
    Stage,
    batches,
    gradients,
    loop,
    make_stages,
    whole,
    world_axis,
)
from tests.dist.rank_pool import RankPool

Shape = tuple[int, int]
"""Chunks and microbatches."""


def device_here(kind: str) -> Device:
    """This rank's GPU, or the CPU, where the same programs can be tried."""
    return Device(kind, torch.cuda.current_device() if kind == "cuda" else 0)


def on(device: Device, microbatches: list[Microbatch]) -> list[Microbatch]:
    """Microbatches on the device, in memory of their own."""
    place, moved = device.torch_device, []
    for batch in microbatches:
        assert batch.tokens is not None
        targets = batch.keywords["targets"].clone().to(place)
        moved.append(Microbatch(batch.tokens.clone().to(place), {"targets": targets}))
    return moved


def compare_with_one(kind: str, shapes: list[Shape]) -> dict[Shape, list[str]]:
    """Of each shape, names of what differs from one device: `loss`, or a parameter of this rank."""
    make_deterministic(0)  # the embedding's backward else adds with atomics
    device, axis = device_here(kind), world_axis()
    found = {}
    for chunks, number in shapes:
        model = whole().to(device.torch_device)
        losses = loop(model, on(device, batches(number)))
        expected = dict(gradients([model]))
        stages = make_stages(axis, chunks)
        for stage in stages:
            stage.to(device.torch_device)
        pipeline = Pipeline(stages, axis, SPEC, device.torch_device, num_slots=number)
        got = pipeline.forward_backward(on(device, batches(number)))
        wrong = [] if torch.equal(got.cpu(), losses.cpu()) else ["loss"]
        pairs = dict(gradients(stages))
        assert pairs
        wrong += [name for name, grad in pairs.items() if not torch.equal(grad, expected[name])]
        found[chunks, number] = wrong
    return found


def compare_sharded(kind: str, shapes: list[Shape]) -> dict[Shape, list[str]]:
    """The same on 2 x 2 ranks with sharded stages: two halves of one device, averaged."""
    make_deterministic(0)
    device = device_here(kind)
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_coordinate() or (0, 0)
    axis = Axis("pp", 2, pp, mesh.get_group("pp"))
    found = {}
    for chunks, number in shapes:
        expected = averaged(device, number)
        stages = make_stages(axis, chunks)
        for stage in stages:
            shard(stage.to(device.torch_device), mesh["dp"])
        pipeline = Pipeline(stages, axis, SPEC, device.torch_device, num_slots=number)
        pipeline.forward_backward(on(device, batches(number, part=dp)))
        own = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
        wrong = []
        for name, grad in fsdp_sides.whole(own, mesh["dp"]).items():
            if grad is None or not torch.equal(grad.cpu(), expected[name].cpu()):
                wrong.append(name)
        found[chunks, number] = wrong
    return found


def averaged(device: Device, number: int) -> dict[str, torch.Tensor]:
    """Gradients of two halves on one device, averaged after every microbatch."""
    models = [whole().to(device.torch_device) for _ in range(2)]
    parts = [on(device, batches(number, part)) for part in range(2)]
    total: dict[str, torch.Tensor] = {}
    for each in zip(*parts, strict=True):
        for model, batch in zip(models, each, strict=True):
            model.zero_grad()
            loop(model, [batch], number)
        grads = [dict(gradients([model])) for model in models]
        for name, grad in grads[0].items():
            mean = (grad + grads[1][name]) * 0.5
            total[name] = total[name] + mean if name in total else mean
    return total


def shard(stage: Stage, mesh: Any) -> None:
    """Blocks and the rest of a stage as units."""
    for block in stage.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(stage, mesh=mesh)


def compare_captured(kind: str, shapes: list[Shape]) -> dict[Shape, list[str]]:
    """Of each shape, passes whose replay from one graph differs from the eager pass."""
    make_deterministic(0)
    device, axis = device_here(kind), world_axis()
    stream, maker = device.new_stream(), GraphMaker(device)
    found = {}
    for shape in shapes:
        with device.on(stream):
            found[shape] = _compare_captured(device, axis, maker, shape)
    return found


def _compare_captured(device: Device, axis: Axis, maker: GraphMaker, shape: Shape) -> list[str]:
    chunks, number = shape
    stages = make_stages(axis, chunks)
    for stage in stages:
        stage.to(device.torch_device)
    pipeline = Pipeline(stages, axis, SPEC, device.torch_device, num_slots=number)
    static = on(device, batches(number))
    for _ in range(3):  # also opens the communicators, which a capture must not
        pipeline.forward_backward(static)
    grads = [grad for _, grad in gradients(stages)]
    losses = torch.zeros(number, device=device.torch_device)

    def iteration() -> None:
        torch._foreach_zero_(grads)
        losses.copy_(pipeline.forward_backward(static))

    def run(step: Any) -> list[list[torch.Tensor]]:
        seen = []
        for part in range(4):
            for batch, new in zip(static, on(device, batches(number, part)), strict=True):
                assert batch.tokens is not None
                assert new.tokens is not None
                batch.tokens.copy_(new.tokens)
                batch.keywords["targets"].copy_(new.keywords["targets"])
            step()
            device.synchronize()
            seen.append([tensor.cpu().clone() for tensor in (losses, *grads)])
        return seen

    eager = run(iteration)
    dist.barrier()
    graph = CapturedFunction(maker, iteration, None)
    replayed = run(graph)
    graph.reset()
    return [
        f"pass {number}"
        for number, (one, other) in enumerate(zip(eager, replayed, strict=True))
        if not all(map(torch.equal, one, other))
    ]


SHAPES = [(1, 1), (1, 3), (1, 8), (2, 4), (2, 8)]


@pytest.mark.gpu(2)
def test_two_stages_equal_one_gpu(gpu_ranks: RankPool) -> None:
    """Losses and gradients of two ranks have the bits of one GPU."""
    for found in gpu_ranks.run(compare_with_one, "cuda", SHAPES, world_size=2):
        assert found == {shape: [] for shape in SHAPES}


@pytest.mark.gpu(4)
def test_four_stages_equal_one_gpu(gpu_ranks: RankPool) -> None:
    """The same over four, where neighbours are not each other's only partners."""
    for found in gpu_ranks.run(compare_with_one, "cuda", SHAPES, world_size=4):
        assert found == {shape: [] for shape in SHAPES}


@pytest.mark.gpu(4)
def test_sharded_stages_equal_one_gpu(gpu_ranks: RankPool) -> None:
    """Two stages over two data-parallel ranks have the bits of two halves on one GPU."""
    shapes = [(1, 3), (2, 4)]
    for found in gpu_ranks.run(compare_sharded, "cuda", shapes, world_size=4):
        assert found == {shape: [] for shape in shapes}


@pytest.mark.gpu(2)
def test_a_captured_pass_on_gpus(gpu_ranks: RankPool) -> None:
    """A graph of a whole pass, messages included, replays to the bits of eager passes."""
    shapes = [(1, 3), (2, 4)]
    for found in gpu_ranks.run(compare_captured, "cuda", shapes, world_size=2):
        assert found == {shape: [] for shape in shapes}
