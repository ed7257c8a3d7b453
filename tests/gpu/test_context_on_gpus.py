"""Context parallelism on GPUs: the attention of one process, and graphs bit for bit."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_core.device import Device, make_deterministic
from fsdp_core.graph.graph import GraphMaker
from fsdp_core.model.batch import Capacity, Document, PackedBatch, pack
from fsdp_core.model.cp_attention import FlashKernel, TorchKernel, kernel_for
from fsdp_core.parallel.context import ContextPlan, DynamicContext, dense_plan
from fsdp_core.parallel.mesh import Axis
from tests.dist.rank_pool import RankPool
from tests.dist.test_context_parallel import (
    RESULTS,
    Errors,
    Inputs,
    Shape,
    attention_with_bounds,
    compare,
    copy_contents,
    draw,
    largest,
    run_attention,
    world_axis,
    zigzag,
)

SHAPES = {"gqa": Shape(8, 2, 64, 64), "mla": Shape(4, 4, 192, 128), "odd": Shape(4, 2, 20, 12)}
LENGTH, BATCH, SLOTS = 512, 2, 6
DOCUMENTS = (130, 1, 77, 200)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def device_here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def reference(inputs: Inputs, shape: Shape, batch: int, rows: slice, joins: int) -> Any:
    """One sequence alone, with what FlashAttention may round in half precision."""
    q, k, v, grad = (t[batch, rows].double() for t in inputs)
    dtype = inputs[0].dtype
    return attention_with_bounds(
        q, k, v, grad, scale=shape.width**-0.5, joins=joins, dtype=dtype, kernel_dtype=dtype
    )


def dense_errors(shape: Shape, dtype: torch.dtype, axis: Axis) -> Errors:
    """Worst errors of a batch of whole sequences."""
    inputs = draw(shape, BATCH, LENGTH, dtype)
    rows = zigzag(LENGTH, axis)
    plan = dense_plan(LENGTH, axis.size, axis.rank, device_here())
    q, k, v, grad = (t[:, rows].to(device_here()) for t in inputs)
    got = {n: t.cpu() for n, t in run_attention((q, k, v, grad), plan, axis).items()}
    found = []
    for b in range(BATCH):
        expected = reference(inputs, shape, b, slice(None), 2 * axis.size)
        one = {name: t[b] for name, t in got.items()}
        found.append(compare(one, expected, list(range(len(rows))), rows))
    return largest(found)


def packed(size: int) -> PackedBatch:
    """Documents whose tokens do not matter here."""
    multiple = 2 * size
    documents = [Document(torch.arange(n), torch.arange(n)) for n in DOCUMENTS]
    return pack(documents, Capacity(tokens=LENGTH, slots=SLOTS, multiple=multiple))


def packed_errors(shape: Shape, dtype: torch.dtype, axis: Axis) -> Errors:
    """Worst errors over packed sequences, each against itself alone; NaN in rows of padding."""
    batch = packed(axis.size)
    plan = batch.to(device_here()).plan(axis.size, axis.rank)
    inputs = draw(shape, 1, LENGTH, dtype)
    starts = batch.padded_offsets.tolist()
    real = {starts[d] + i: (d, i) for d, n in enumerate(DOCUMENTS) for i in range(n)}
    padding = [row for row in range(LENGTH) if row not in real]
    for tensor in inputs:
        tensor[:, padding] = torch.nan
    rows = plan.rows.tolist()
    q, k, v, grad = (t[:, rows].to(device_here()) for t in inputs)
    got = {n: t[0].cpu() for n, t in run_attention((q, k, v, grad), plan, axis).items()}
    found = []
    for d, length in enumerate(DOCUMENTS):
        inside = slice(starts[d], starts[d] + length)
        expected = reference(inputs, shape, 0, inside, 2 * axis.size)
        mine = [i for i, row in enumerate(rows) if row in real and real[row][0] == d]
        found.append(compare(got, expected, mine, [real[rows[i]][1] for i in mine]))
    blank = [i for i, row in enumerate(rows) if row not in real]
    assert not any(got[name][blank].any() for name in RESULTS), "padding is not zero"
    return largest(found)


def all_errors() -> dict[str, Errors]:
    """Worst errors of every shape and dtype, dense and packed; and which kernel ran."""
    make_deterministic(0)
    axis = world_axis()
    found = {}
    for name, shape in SHAPES.items():
        for label, dtype in DTYPES.items():
            probe = torch.empty(1, shape.width, dtype=dtype, device=device_here())
            kind = type(kernel_for(probe, probe))
            assert kind is (FlashKernel if label == "bf16" else TorchKernel)
            found[f"{name} {label}"] = dense_errors(shape, dtype, axis)
            found[f"{name} {label} packed"] = packed_errors(shape, dtype, axis)
    return found


def graphs_and_eager(order: tuple[int, ...]) -> int:
    """A CUDA graph for each context size, given new inputs and offsets; replays with eager's bits.

    Returns how many replays agreed.
    """
    make_deterministic(0)
    device, world = device_here(), dist.get_world_size()
    sizes = [size for size in (1, 2, 4, 8) if size <= world]
    dynamic = DynamicContext([list(range(world))], sizes)
    shape = SHAPES["mla"]
    local = LENGTH // max(sizes)

    def contents(seed: int, size: int) -> tuple[PackedBatch, Inputs]:
        lengths = [max(1, size * local // (3 + seed % 2)), 2, 5]
        documents = [Document(torch.arange(n), torch.arange(n)) for n in lengths]
        capacity = Capacity(tokens=local * size, slots=SLOTS, multiple=2 * size)
        q, k, v, grad = (
            t.to(device)
            for t in draw(shape, 1, local, torch.bfloat16, 100 * seed + dist.get_rank())
        )
        return pack(documents, capacity).to(device), (q, k, v, grad)

    def run(batch: PackedBatch, inputs: Inputs, size: int) -> list[torch.Tensor]:
        rank = dynamic.layout(size).cp_rank
        plan: ContextPlan = batch.plan(size, rank)
        return list(run_attention(inputs, plan, dynamic.axis(size)).values())

    maker, agreed = GraphMaker(Device("cuda", torch.cuda.current_device())), 0
    static = {size: contents(0, size) for size in sizes}
    graphs, results = {}, {}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for size in reversed(sizes):
            run(*static[size], size)  # communicators start outside of the capture
            torch.cuda.synchronize()
            graphs[size] = maker.new()
            body = functools.partial(run, *static[size], size)
            results[size] = graphs[size].capture(body)
        for seed, size in enumerate(order):
            batch, inputs = contents(seed + 1, size)
            eager = run(batch, inputs, size)
            copy_contents(static[size][0], batch)
            for kept, new in zip(static[size][1], inputs, strict=True):
                kept.copy_(new)
            graphs[size].replay()
            for ours, theirs in zip(results[size], eager, strict=True):
                assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16)), size
            agreed += 1
    torch.cuda.synchronize()
    return agreed


@pytest.mark.gpu(1)
def test_one_gpu_is_attention(gpu_ranks: RankPool) -> None:
    """On one GPU both kernels are off by rounding alone, dense and packed."""
    (cases,) = gpu_ranks.run(all_errors, world_size=1)
    assert {case: e for case, e in cases.items() if max(e.values()) > 1.0} == {}


@pytest.mark.gpu(4)
@pytest.mark.parametrize("size", [2, 4])
def test_gpus_are_as_one_process(gpu_ranks: RankPool, size: int) -> None:
    """Over NCCL too."""
    for cases in gpu_ranks.run(all_errors, world_size=size):
        assert {case: e for case, e in cases.items() if max(e.values()) > 1.0} == {}


@pytest.mark.gpu(4)
def test_graphs_of_all_sizes_replay_in_any_order(gpu_ranks: RankPool) -> None:
    """A CUDA graph for each context size, given new inputs and offsets, has eager's bits."""
    order = (4, 1, 2, 2, 4, 1, 4)
    found = gpu_ranks.run(graphs_and_eager, order, world_size=4)
    assert found == [len(order)] * 4
