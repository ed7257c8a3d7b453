"""Steps on a GPU have times of their own."""

import time

import pytest
import torch

from fsdp_core.device import Device
from harness.worker.observe import StepClock


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
