"""What crosses between pipeline stages: tensors of an agreed shape, posted early, waited for late.

    post    an exchange: every send and receive of it in one batch (`batch_isend_irecv`)
    take    waits for one received activation or gradient and hands it out
    finish  waits for what is still being sent

A tensor that is sent is held until it is gone: on the CPU until the next exchange, which waits for
it; on CUDA until the next exchange that finds it done. Messages carry no header: their order, which
all ranks take from one program, makes each meet its receive. That they run the same, and expect the
same shape, is compared once, before the first message.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.pipeline_schedule import Exchange, Transfer


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of what one stage gives the next; its gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class TransferFailed(RuntimeError):
    """A neighbour's tensor did not come, or it did not take ours; the message says which."""


@dataclass
class _Posted:
    transfer: Transfer
    tensor: torch.Tensor
    works: list[Any]


class Transfers:
    """Sends and receives of one rank over the pipeline axis, for one pass.

    Stage s is on rank s % size of the axis; `spec` is what crosses every boundary, either way.
    Every method raises `TransferFailed` where a neighbour is gone, or does not take part in time.
    """

    def __init__(self, axis: Axis, spec: TensorSpec, device: torch.device) -> None:
        self._axis, self._spec, self._device = axis, spec, device
        self._sent: list[_Posted] = []
        self._incoming: dict[Transfer, _Posted] = {}

    def post(self, exchange: Exchange, outbox: dict[Transfer, torch.Tensor]) -> None:
        """Begin all sends and receives of `exchange`; what is sent is taken out of `outbox`."""
        self._let_go()
        posted, operations = [], []
        for transfer in exchange.transfers:
            if self._is_ours(transfer):
                each = _Posted(transfer, outbox.pop(transfer), [])
                self._sent.append(each)
            else:
                memory = torch.empty(self._spec.shape, dtype=self._spec.dtype, device=self._device)
                each = self._incoming[transfer] = _Posted(transfer, memory, [])
            operation = dist.isend if self._is_ours(transfer) else dist.irecv
            peer = self._peer(transfer) % self._axis.size
            posted.append(each)
            operations.append(
                dist.P2POp(operation, each.tensor, group=self._axis.group, group_peer=peer)
            )
        with self._naming(exchange.transfers[0]):
            works = dist.batch_isend_irecv(operations)
        # NCCL answers with one work for the whole batch, gloo with one for each operation.
        for i, each in enumerate(posted):
            each.works = [works[i]] if len(works) == len(posted) else works

    def take(self, transfer: Transfer) -> torch.Tensor:
        """What was received; waits for it."""
        posted = self._incoming.pop(transfer)
        self._wait(posted)
        return posted.tensor

    def finish(self) -> None:
        """Wait until everything is sent."""
        assert not self._incoming, f"received and not used: {list(self._incoming)}"
        while self._sent:
            self._wait(self._sent.pop())

    def _let_go(self) -> None:
        """Release what is sent: what is known to be, or what is waited for where nobody can ask.

        That is on the CPU, where a send ends when the neighbour takes it, and inside a capture.
        """
        asks = self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        under_way = []
        for posted in self._sent:
            if asks and not all(work.is_completed() for work in posted.works):
                under_way.append(posted)
            else:
                self._wait(posted)  # at once if done: NCCL calls a failed work completed, too
        self._sent = under_way

    def _wait(self, posted: _Posted) -> None:
        with self._naming(posted.transfer):
            for work in posted.works:
                work.wait()

    def _is_ours(self, transfer: Transfer) -> bool:
        return transfer.source % self._axis.size == self._axis.rank

    def _peer(self, transfer: Transfer) -> int:
        return transfer.target if self._is_ours(transfer) else transfer.source

    def _naming(self, transfer: Transfer) -> contextlib.AbstractContextManager[None]:
        verb = "take" if self._is_ours(transfer) else "send"
        return _naming(f"stage {self._peer(transfer)} to {verb} the {transfer}")


def compare_facts(axis: Axis, facts: Mapping[str, str]) -> None:
    """Compare what all ranks of the axis run (`ValueError`: it differs); collective."""
    gathered: list[Any] = [None] * axis.size
    with _naming(f"all ranks of {axis.name} to compare what they run"):
        dist.all_gather_object(gathered, dict(facts), group=axis.group)
    for name in facts:
        values = [their[name] for their in gathered]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ValueError(f"Expected equal {name} on all ranks of {axis.name}, got {listed}.")


def open_links(axis: Axis, device: torch.device) -> None:
    """Meet both neighbours once, in one batch that is the same on every rank; collective.

    NCCL connects two ranks at their first message, in an exchange that takes both to have the same
    sends and receives in their batch, as batches of a schedule have not.
    """
    neighbours = sorted({(axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size})
    operations = [
        dist.P2POp(operation, torch.zeros(1, device=device), group=axis.group, group_peer=peer)
        for peer in neighbours
        for operation in (dist.isend, dist.irecv)
    ]
    with _naming(f"both neighbours on {axis.name} to open links"):
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def broadcast_from_last(axis: Axis, tensor: torch.Tensor) -> None:
    """Give every rank of the axis the last one's tensor, in place."""
    with _naming(f"all ranks of {axis.name} to take part in a broadcast from the last"):
        source = dist.get_global_rank(axis.group, axis.size - 1)
        dist.broadcast(tensor, source, group=axis.group)


@contextlib.contextmanager
def _naming(expected: str) -> Iterator[None]:
    """Say what was expected of whom, where a group only says that it timed out or lost a peer."""
    try:
        yield
    except RuntimeError as error:
        raise TransferFailed(
            f"Expected {expected}, but it did not: it failed, hangs, or runs another program; "
            f"look at its rank first. The group says: {error}"
        ) from error
