"""Transfers where a batch has one work for all its messages, and is asked instead of waited for.

That is how NCCL and CUDA behave; gloo, in the tests over ranks, answers a work a message.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.pipeline_p2p import TensorSpec, TransferFailed, Transfers
from fsdp_core.parallel.pipeline_schedule import Exchange, Transfer

SPECS = (TensorSpec((2,), torch.float32), TensorSpec((3,), torch.float32))
TO_NEXT, FROM_NEXT = Transfer(0, 1, 0), Transfer(1, 0, 0)


@dataclass
class Work:
    """A work that says what it is told to, and counts waits."""

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
    """A group in place of torch's."""
    group = Group()
    monkeypatch.setattr(dist, "batch_isend_irecv", group.batch)
    monkeypatch.setattr(
        dist, "P2POp", lambda op, tensor, group, group_peer: (op, tensor, group_peer)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return group


def transfers(group: Group, device: str) -> Transfers:
    """Rank 0 of two."""
    axis = Axis("pp", 2, 0, cast("dist.ProcessGroup", group))
    return Transfers(axis, {0: SPECS}, torch.device(device))


def outbox() -> dict[Transfer, tuple[torch.Tensor, ...]]:
    """An activation to send."""
    return {TO_NEXT: (torch.ones(2), torch.ones(3))}


def test_one_work_for_a_batch(group: Group) -> None:
    """Whoever takes anything of the batch waits for the whole; all messages go out together."""
    ours, box = transfers(group, "cpu"), outbox()
    ours.post(Exchange((TO_NEXT, FROM_NEXT)), box)
    (operations,) = group.batches
    kinds = [(operation, peer) for operation, _, peer in operations]
    assert kinds == [(dist.isend, 1)] * 2 + [(dist.irecv, 1)] * 2
    assert box == {}
    assert group.works[0].waits == 0
    received = ours.take(FROM_NEXT)
    assert [tensor.shape for tensor in received] == [(2,), (3,)]
    assert received[1] is operations[3][1]
    assert group.works[0].waits == 1
    ours.finish()
    assert group.works[0].waits == 2


def held(ours: Transfers) -> int:
    """Messages whose tensors are held for sending."""
    return len(ours._sent)


def test_on_cuda_sends_are_asked_before_they_are_waited_for(group: Group) -> None:
    """What is not done yet is kept, what is done is let go, and only the end waits for more."""
    ours = transfers(group, "cuda")
    for microbatch in range(3):
        message = Transfer(0, 1, microbatch)
        ours.post(Exchange((message,)), {message: (torch.ones(2), torch.ones(3))})
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
    ours.post(Exchange((Transfer(0, 1, 1),)), {Transfer(0, 1, 1): (torch.ones(2), torch.ones(3))})
    assert [work.waits for work in group.works] == [1, 0]
    assert held(ours) == 1


def test_tensors_without_gradient_get_none_back(group: Group) -> None:
    """A gradient has a message for each tensor that needs one; an exchange of none is no batch."""
    axis = Axis("pp", 2, 0, cast("dist.ProcessGroup", group))
    no_grad = tuple(TensorSpec(s.shape, s.dtype, requires_grad=False) for s in SPECS)
    for specs, count in (((SPECS[0], no_grad[1]), 1), (no_grad, 0)):
        ours = Transfers(axis, {0: specs}, torch.device("cpu"))
        ours.post(Exchange((FROM_NEXT,)), {})
        assert len(ours.take(FROM_NEXT)) == count
    assert [len(batch) for batch in group.batches] == [1]


def test_what_is_waited_for_is_named(group: Group) -> None:
    """The group's words come with ours: which tensor, from or to whom."""
    ours = transfers(group, "cpu")
    ours.post(Exchange((TO_NEXT, FROM_NEXT)), outbox())
    group.works[0].error = "Timed out"
    with pytest.raises(TransferFailed, match=r"stage 1 to send the gradient .* says: Timed out"):
        ours.take(FROM_NEXT)
    with pytest.raises(TransferFailed, match=r"stage 1 to take the activation .* says: Timed out"):
        ours.finish()
