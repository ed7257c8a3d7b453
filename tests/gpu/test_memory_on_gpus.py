"""Memory of a GPU has owners too, and steps on it have times of their own."""

import time

import pytest
import torch

from fsdp_core.config import TrainConfig, model_from_preset
from fsdp_core.device import Device
from harness.worker.observe import StepClock
from tests.dist.rank_pool import RankPool
from tests.memory_table.programs import measure

MIB = 1 << 20


@pytest.mark.gpu(1)
@pytest.mark.parametrize("graph", [(), ("full_iteration",)])
def test_a_peak_of_cuda_is_explained(gpu_ranks: RankPool, graph: tuple[str, ...]) -> None:
    """To 1 % or 16 MiB, by the allocator's own history; what is at rest lies in its blocks."""
    model = model_from_preset("dense_small", {"layers": 4, "hidden": 512, "ffn": 2048, "seq": 512})
    config = TrainConfig(model=model, graph=graph, microbatches=2)
    (found,) = gpu_ranks.run(measure, config.to_dict(), "cuda", 5, world_size=1)
    owners, peak = found["owners"], found["peak_bytes"]
    assert sum(owners.values()) == peak
    # What tests before this one left in a warm rank is told apart, and nobody's here.
    before = dict(found["largest_rest"]).get("before the trace", 0)
    assert abs(owners["rest"] - before) <= max(0.01 * peak, 16 * MIB), found["largest_rest"]
    for owner in ("parameters", "gradients", "optimizer"):
        # An allocator gives out whole blocks of 512 bytes, and up to 1 MiB with a large one.
        assert 0 <= owners[owner] - found["at_rest"][owner] < 0.05 * peak
    assert owners["activations"] > 0
    assert (found["graph_pool_bytes"] > 0) == bool(graph)


@pytest.mark.gpu(1)
def test_steps_are_timed_where_they_run() -> None:
    """The host issues at once; each step has the time that the device took for it."""
    device = Device("cuda")
    stream = device.new_stream()
    clock = StepClock(device, stream, 3)
    matrix = torch.randn(4096, 4096, device="cuda")
    device.synchronize()
    began = time.perf_counter()
    with device.on(stream):
        for repeats in (40, 1, 40):
            for _ in range(repeats):
                matrix @ matrix
            clock.tick()
    issued = time.perf_counter() - began
    device.synchronize()
    first, second, third = clock.drain()
    assert first + second + third > issued
    assert third > 5 * second > 0
