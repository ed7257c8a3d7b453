"""Contracts of harness.worker.observe."""

from types import SimpleNamespace
from typing import Any

import torch

from fsdp_core.device import Device
from fsdp_core.graph import digest
from harness.worker.observe import DIGEST_TIMES, digest_time_event


def test_every_group_is_digested_and_nothing_changes(monkeypatch: Any) -> None:
    """The least of several times of all that a step digests; tensors stay as they are."""
    device = Device("cpu")
    tensors = [torch.arange(1000.0), torch.ones(3)]
    before = [tensor.clone() for tensor in tensors]
    digested = {"grads": (["a"], tensors[:1]), "weights": (["a", "b"], tensors)}
    seen: list[int] = []
    whole = digest.Digester.__call__

    def noted(self: Any, given: Any, out: torch.Tensor) -> None:
        whole(self, given, out)
        seen.append(int(out.any(dim=1).sum()))

    monkeypatch.setattr(digest.Digester, "__call__", noted)
    trainer: Any = SimpleNamespace(device=device, stream=device.new_stream(), digested=digested)
    event = digest_time_event(trainer, 3, 17)
    assert (event.name, event.rank, event.step) == ("digest_time", 3, 17)
    assert 0 < event.detail["seconds"] < 60
    assert seen == [1, 2] * DIGEST_TIMES
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)
