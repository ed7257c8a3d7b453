"""Transfers where a batch has one work for all its messages, and is asked instead of waited for.

That is how NCCL and CUDA behave; gloo, in the tests over ranks, answers a work a message.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.pipeline import TensorSpec, TransferFailed, Transfers
from fsdp_core.parallel.pipeline_schedule import Exchange, Transfer

SPEC = TensorSpec((2,), torch.float32)
TO_NEXT, FROM_NEXT = Transfer(0, 1, 0), Transfer(1, 0, 0)


@dataclass
class Work:
    waits: int = 0
    done: bool = False
    error: str = ""

    def wait(self) -> None:
        self.waits += 1
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.done


@dataclass
class Group:
    """Stands for a process group: keeps the batches that were posted."""

    batches: list[list[Any]] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)

    def batch(self, operations: list[Any]) -> list[Work]:
        self.batches.append(operations)
        self.works.append(Work())
        return self.works[-1:]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group()
    monkeypatch.setattr(dist, "batch_isend_irecv", group.batch)
    monkeypatch.setattr(
        dist, "P2POp", lambda op, tensor, group, group_peer: (op, tensor, group_peer)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return group


def transfers(group: Group, device: str) -> Transfers:
    axis = Axis("pp", 2, 0, cast("dist.ProcessGroup", group))
    return Transfers(axis, SPEC, torch.device(device))


def outbox(microbatch: int = 0) -> dict[Transfer, torch.Tensor]:
    return {Transfer(0, 1, microbatch): torch.ones(2)}


def test_one_work_for_a_batch(group: Group) -> None:
    """Whoever takes anything of the batch waits for the whole; all messages go out together."""
    ours, box = transfers(group, "cpu"), outbox()
    ours.post(Exchange((TO_NEXT, FROM_NEXT)), box)
    (operations,) = group.batches
    kinds = [(operation, peer) for operation, _, peer in operations]
    assert kinds == [(dist.isend, 1), (dist.irecv, 1)]
    assert box == {}
    assert group.works[0].waits == 0
    assert ours.take(FROM_NEXT) is operations[1][1]
    assert group.works[0].waits == 1
    ours.finish()
    assert group.works[0].waits == 2


def held(ours: Transfers) -> int:
    return len(ours._sent)


def test_on_cuda_sends_are_asked_before_they_are_waited_for(group: Group) -> None:
    """What is not done yet is kept, what is done is let go, and only the end waits for more."""
    ours = transfers(group, "cuda")
    for microbatch in range(3):
        ours.post(Exchange((Transfer(0, 1, microbatch),)), outbox(microbatch))
        assert held(ours) == (microbatch + 1 if microbatch < 2 else 2)
        group.works[0].done = microbatch >= 1
    assert [work.waits for work in group.works] == [1, 0, 0]
    ours.finish()
    assert [work.waits for work in group.works] == [1, 1, 1]


def test_on_cuda_a_send_that_failed_is_named(group: Group) -> None:
    """NCCL says of a work that failed that it is completed; its wait says that it failed."""
    ours = transfers(group, "cuda")
    ours.post(Exchange((TO_NEXT,)), outbox())
    group.works[0].done, group.works[0].error = True, "NCCL error"
    with pytest.raises(TransferFailed, match=r"stage 1 to take the activation .* says: NCCL error"):
        ours.post(Exchange((FROM_NEXT,)), {})


def test_a_capture_waits(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of a capture must not be asked; waiting for them is part of the graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    ours = transfers(group, "cuda")
    ours.post(Exchange((TO_NEXT,)), outbox())
    ours.post(Exchange((Transfer(0, 1, 1),)), outbox(1))
    assert [work.waits for work in group.works] == [1, 0]
    assert held(ours) == 1


def test_what_is_waited_for_is_named(group: Group) -> None:
    """The group's words come with ours: which tensor, from or to whom."""
    ours = transfers(group, "cpu")
    ours.post(Exchange((TO_NEXT, FROM_NEXT)), outbox())
    group.works[0].error = "Timed out"
    with pytest.raises(TransferFailed, match=r"stage 1 to send the gradient .* says: Timed out"):
        ours.take(FROM_NEXT)
    with pytest.raises(TransferFailed, match=r"stage 1 to take the activation .* says: Timed out"):
        ours.finish()
