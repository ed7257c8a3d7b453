"""Contracts of harness.worker.observe."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.worker import observe
from harness.worker.observe import StepClock


class FakeEvent:
    """An event that remembers when its stream was told to mark it."""

    made = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        type(self).made += 1
        self.at_ms = -1.0

    def record(self, stream: Any) -> None:
        self.at_ms = stream.now_ms

    def elapsed_time(self, later: "FakeEvent") -> float:
        assert later.at_ms >= self.at_ms >= 0
        return later.at_ms - self.at_ms


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_each_step_has_the_time_since_the_end_of_the_one_before(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every step its own, not a mean of the flush; none is lost between two flushes."""
    stream, FakeEvent.made = SimpleNamespace(now_ms=0.0), 0
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    clock_of_host = SimpleNamespace(perf_counter=lambda: stream.now_ms / 1e3)
    monkeypatch.setattr(observe, "time", clock_of_host)
    device: Any = SimpleNamespace(is_cuda=kind == "cuda")
    clock = StepClock(device, stream, 3)
    for lengths in ((5.0, 1.0, 2.0), (7.0,), (1.0, 1.0, 4.0), (2.0, 3.0, 9.0)):
        for length in lengths:
            stream.now_ms += length
            clock.tick()
        assert clock.drain() == pytest.approx([length / 1e3 for length in lengths])
    assert FakeEvent.made == (4 if kind == "cuda" else 0)
