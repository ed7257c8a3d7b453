"""What crosses between pipeline stages: tensors of agreed shapes, posted early and waited for late.

    post    an exchange: every send and receive of it in one batch (`batch_isend_irecv`)
    take    waits for one received activation or gradient and hands it out
    finish  waits for what is still being sent

A tensor that is sent is held until it is gone: on the CPU until the next exchange, which waits for
it; on CUDA until the next exchange that finds it done, which asks and does not wait. Messages carry
no header. What makes each one meet its receive is their order, which all ranks take from one
program; that they do, and that they expect the same shapes, is compared once, before the first
message, and links to both neighbours are opened then.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.pipeline_schedule import Exchange, Transfer


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype, and whether a gradient comes back, of one tensor between two stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True

    def __str__(self) -> str:
        return describe(self.shape, self.dtype, requires_grad=self.requires_grad)


Boundaries = Mapping[int, tuple[TensorSpec, ...]]
"""What each stage but the last gives to the next, by the number of the stage."""


class TransferFailed(RuntimeError):
    """A neighbour's tensor did not come, or it did not take ours; the message says which."""


def describe(shape: Sequence[int], dtype: torch.dtype, *, requires_grad: bool) -> str:
    """A tensor in words, for messages."""
    kind = str(dtype).removeprefix("torch.")
    return f"{kind} {list(shape)} {'with' if requires_grad else 'without'} gradient"


def check_tensors(
    what: str, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec], *, is_training: bool
) -> None:
    """Compare tensors with what was agreed.

    Raises:
        ValueError: another number of tensors, or another shape, dtype, or need of a gradient.
    """
    got = [describe(t.shape, t.dtype, requires_grad=t.requires_grad) for t in tensors]
    expected = [
        describe(s.shape, s.dtype, requires_grad=s.requires_grad and is_training) for s in specs
    ]
    if got != expected:
        raise ValueError(f"Expected {what} to be {', '.join(expected)}, got {', '.join(got)}.")


@dataclass
class _Posted:
    """One transfer under way; the tensors live as long as this does."""

    transfer: Transfer
    tensors: tuple[torch.Tensor, ...]
    works: list[Any]


class Transfers:
    """Sends and receives of one rank over the pipeline axis, for one pass.

    Args:
        axis: the pipeline axis; stage s is on its rank s % size.
        boundaries: what is agreed to cross.
        device: where tensors are received.
    """

    def __init__(self, axis: Axis, boundaries: Boundaries, device: torch.device) -> None:
        self._axis, self._boundaries, self._device = axis, boundaries, device
        self._sent: list[_Posted] = []
        self._incoming: dict[Transfer, _Posted] = {}

    def post(self, exchange: Exchange, outbox: dict[Transfer, tuple[torch.Tensor, ...]]) -> None:
        """Begin all sends and receives of `exchange`; what is sent is taken out of `outbox`.

        Raises:
            TransferFailed: a neighbour is gone, or did not take what was sent before.
        """
        self._let_go()
        posted = [self._prepare(transfer, outbox) for transfer in exchange.transfers]
        operations = [self._operations(each) for each in posted]
        flat = [operation for each in operations for operation in each]
        if not flat:
            return
        with _naming(self._axis, self._expected(exchange.transfers[0])):
            works = dist.batch_isend_irecv(flat)
        # NCCL answers with one work for the whole batch, gloo with one for each operation.
        is_whole, start = len(works) < len(flat), 0
        for each, own in zip(posted, operations, strict=True):
            each.works = works if is_whole else works[start : start + len(own)]
            start += len(own)

    def take(self, transfer: Transfer) -> tuple[torch.Tensor, ...]:
        """What was received; waits for it.

        Raises:
            TransferFailed: it did not come within the timeout of the group.
        """
        posted = self._incoming.pop(transfer)
        self._wait(posted)
        return posted.tensors

    def finish(self) -> None:
        """Wait until everything is sent.

        Raises:
            TransferFailed: a neighbour did not take it within the timeout of the group.
        """
        assert not self._incoming, f"received and not used: {list(self._incoming)}"
        while self._sent:
            self._wait(self._sent.pop())

    def _prepare(
        self, transfer: Transfer, outbox: dict[Transfer, tuple[torch.Tensor, ...]]
    ) -> _Posted:
        if transfer.source % self._axis.size == self._axis.rank:
            posted = _Posted(transfer, outbox.pop(transfer), [])
            self._sent.append(posted)
            return posted
        specs = self._boundaries[min(transfer.source, transfer.target)]
        empty = tuple(
            torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            for spec in specs
            if transfer.is_activation or spec.requires_grad
        )
        posted = self._incoming[transfer] = _Posted(transfer, empty, [])
        return posted

    def _operations(self, posted: _Posted) -> list[dist.P2POp]:
        axis, transfer = self._axis, posted.transfer
        is_ours = transfer.source % axis.size == axis.rank
        peer = (transfer.target if is_ours else transfer.source) % axis.size
        operation = dist.isend if is_ours else dist.irecv
        return [
            dist.P2POp(operation, tensor, group=axis.group, group_peer=peer)
            for tensor in posted.tensors
        ]

    def _let_go(self) -> None:
        """Release what is sent: what is known to be, or what is waited for where nobody can ask.

        That is on the CPU, where a send ends when the neighbour takes it, and inside a capture. The
        programs allow waits this early: they run where each exchange blocks as a whole.
        """
        if self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            under_way = []
            for posted in self._sent:
                if all(work.is_completed() for work in posted.works):
                    self._wait(posted)  # at once: NCCL calls a work that failed completed, too
                else:
                    under_way.append(posted)
            self._sent = under_way
            return
        while self._sent:
            self._wait(self._sent.pop(0))

    def _wait(self, posted: _Posted) -> None:
        with _naming(self._axis, self._expected(posted.transfer)):
            for work in posted.works:
                work.wait()

    def _expected(self, transfer: Transfer) -> str:
        is_ours = transfer.source % self._axis.size == self._axis.rank
        peer = transfer.target if is_ours else transfer.source
        return f"stage {peer} to {'take' if is_ours else 'send'} the {transfer}"


def open_links(axis: Axis, device: torch.device) -> None:
    """Meet both neighbours once, in one batch that is the same on every rank; collective.

    NCCL connects two ranks at their first message, in an exchange that takes both to have the same
    sends and receives in their batch. The batches of a schedule differ: one rank sends and
    receives where its neighbour only receives. Connected before, they may.

    Raises:
        TransferFailed: a neighbour did not take part within the timeout of the group.
    """
    if axis.size == 1:
        return
    neighbours = sorted({(axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size})
    operations = [
        dist.P2POp(operation, torch.zeros(1, device=device), group=axis.group, group_peer=peer)
        for peer in neighbours
        for operation in (dist.isend, dist.irecv)
    ]
    with _naming(axis, f"both neighbours on {axis.name} to open links"):
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def swap(axis: Axis, tensor: torch.Tensor, peer: int) -> torch.Tensor:
    """The tensor that rank `peer` of the axis gives for ours; both call it, shapes are equal.

    Raises:
        TransferFailed: the peer did not take part within the timeout of the group.
    """
    other = torch.empty_like(tensor)
    if tensor.numel():
        ours = dist.P2POp(dist.isend, tensor, group=axis.group, group_peer=peer)
        theirs = dist.P2POp(dist.irecv, other, group=axis.group, group_peer=peer)
        with _naming(axis, f"rank {peer} of {axis.name} to swap a tensor of {list(tensor.shape)}"):
            for work in dist.batch_isend_irecv([ours, theirs]):
                work.wait()
    return other


def broadcast_from_last(axis: Axis, tensor: torch.Tensor) -> None:
    """Give every rank of the axis the last one's tensor, in place.

    Raises:
        TransferFailed: a rank did not take part within the timeout of the group.
    """
    with _naming(axis, f"all ranks of {axis.name} to take part in a broadcast from the last"):
        source = dist.get_global_rank(axis.group, axis.size - 1)
        dist.broadcast(tensor, source, group=axis.group)


@contextlib.contextmanager
def _naming(axis: Axis, expected: str) -> Iterator[None]:
    """Say what was expected of whom, where a group only says that it timed out or lost a peer."""
    try:
        yield
    except RuntimeError as error:
        if axis.size == 1:
            raise  # there is no peer
        raise TransferFailed(
            f"Expected {expected}, but it did not: it failed, hangs, or runs another program; "
            f"look at its rank first. The group says: {error}"
        ) from error


def compare_facts(axis: Axis, facts: Mapping[str, str]) -> list[dict[str, str]]:
    """The facts of all ranks of the axis; collective. Those named `own ...` may differ.

    Raises:
        ValueError: ranks differ in a fact; on every rank, with what each has.
        TransferFailed: a rank did not take part within the timeout of the group.
    """
    gathered: list[Any] = [None] * axis.size
    with _naming(axis, f"all ranks of {axis.name} to compare what they run"):
        dist.all_gather_object(gathered, dict(facts), group=axis.group)
    for name in facts:
        values = [their.get(name) for their in gathered]
        if not name.startswith("own ") and len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ValueError(f"Expected equal {name} on all ranks of {axis.name}, got {listed}.")
    return gathered
