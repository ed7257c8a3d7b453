"""Runs the stages of one rank by a pipeline schedule.

    microbatch i     first stage   stage(tokens, microbatch=slot, **keywords) -> activation
                     inner stages  stage(activation, microbatch=slot, **keywords) -> activation
                     last stage    stage(activation, microbatch=slot, **keywords) -> scalar loss

An activation is a tensor of the agreed shape. Graphs are kept by microbatch slot, so a stage is
always given the one that it is in. Kept between forward and backward of a microbatch are what
autograd saved, the received activation (the leaf whose gradient goes back), and the output's place
in the autograd graph; the output itself is freed once it is sent, unless autograd saved it.

**Bits.** Every stage takes the microbatches in their order, forward and backward, and gradients are
added up in that order, so losses and gradients have the bits of a loop over microbatches in one
process, whatever pp and chunks are. Random numbers are drawn in the order of a rank's own actions.

What crosses between pipeline stages: tensors of an agreed shape, posted early, waited for late.

    post    an exchange: every send and receive of it in one batch (`batch_isend_irecv`)
    take    waits for one received activation or gradient and hands it out
    finish  waits for what is still being sent

A tensor that is sent is held until it is gone: on the CPU until the next exchange, which waits for
it; on CUDA until the next exchange that finds it done. Messages carry no header: their order, which
all ranks take from one program, makes each meet its receive. That they run the same, and expect the
same shape, is compared once, before the first message.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.pipeline_schedule import (
    Action,
    Exchange,
    Schedule,
    Step,
    Transfer,
    make_schedule,
    programs,
    slots_needed,
)


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
    """Sends and receives of one rank over the pipeline axis, for one pass. Stage s is on rank s %
    size of the axis; `spec` is what crosses every boundary, either way. Every method raises
    `TransferFailed` where a neighbour is gone, or does not take part in time.
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
    """Meet both neighbours once, in one batch that is the same on every rank; collective. NCCL
    connects two ranks at their first message, in an exchange that takes both to have the same sends
    and receives in their batch, as batches of a schedule have not.
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


@dataclass(frozen=True)
class Microbatch:
    """Input of the first stage, and further arguments of every stage of this rank."""

    tokens: torch.Tensor | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _Pass:
    """One pass; `live`: (chunk, microbatch) to input and output of a forward before its backward.
    `outbox` is what the next exchange sends, or the next stage takes where all are on one rank.
    """

    microbatches: Sequence[Microbatch]
    schedule: Schedule
    transfers: Transfers
    losses: torch.Tensor
    live: dict[tuple[int, int], tuple[torch.Tensor, GradientEdge | torch.Tensor]] = field(
        default_factory=dict
    )
    outbox: dict[Transfer, torch.Tensor] = field(default_factory=dict)


class Pipeline:
    """One rank of a pipeline.

    stages: this rank's chunks in order: with pp ranks, stages rank, rank + pp, ...
    activation: what each stage but the last gives to the next.
    num_slots: microbatch i is in slot i % num_slots.
    copy_sent: send copies. For stages that return memory which their next call overwrites, as
        graphs do: a send may be under way by then.
    """

    def __init__(
        self, stages: Sequence[nn.Module], axis: Axis, activation: TensorSpec, device: torch.device,
        *, num_slots: int, copy_sent: bool = False,
    ) -> None:  # fmt: skip
        assert stages, "a rank has at least one stage"
        self.stages, self.axis, self.device = list(stages), axis, device
        self.activation, self.num_slots, self.copy_sent = activation, num_slots, copy_sent
        self._plans: dict[tuple[int, bool], tuple[Schedule, tuple[Step, ...]]] = {}
        self._failure: str | None = None

    def forward_backward(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Forward and backward of all microbatches; gradients are added to the parameters' `grad`.

        Backward begins with a loss over the number of microbatches. Returns float32 [microbatches],
        each one's loss as the last stage returned it; on every rank.

        Raises ValueError: a number of microbatches that the schedule or its slots cannot take; a
            stage that returned something else than agreed; ranks that differ in what they run.
        Raises TransferFailed: another stage failed or hangs; the group's timeout bounds the wait.
        Raises RuntimeError: an earlier pass failed, so messages of it may be under way.
        """
        try:
            return self._run(microbatches, is_training=True)
        finally:
            for stage in self.stages:
                set_last_backward(stage, is_last=True)

    def forward_only(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Losses without gradients; else as `forward_backward`."""
        with torch.no_grad():
            return self._run(microbatches, is_training=False)

    def _run(self, microbatches: Sequence[Microbatch], *, is_training: bool) -> torch.Tensor:
        if self._failure is not None:
            raise RuntimeError(
                "Expected every pass so far to end, but one failed and its messages may be under "
                f"way: make new process groups and a new Pipeline. The failure: {self._failure}"
            )
        number = len(microbatches)
        schedule, program = self._plan(number, is_training=is_training)
        transfers = Transfers(self.axis, self.activation, self.device)
        losses = torch.zeros(number, dtype=torch.float32, device=self.device)
        state = _Pass(microbatches, schedule, transfers, losses)
        try:
            for step in program:
                self._step(state, step)
            transfers.finish()
            if self.axis.size > 1:
                broadcast_from_last(self.axis, losses)
        except BaseException as error:
            if self.axis.size > 1:  # alone nobody sends anything
                self._failure = f"{type(error).__name__}: {error}"
            raise
        return losses

    def _plan(self, number: int, *, is_training: bool) -> tuple[Schedule, tuple[Step, ...]]:
        """Schedule and program of such a pass; the first time ranks compare theirs."""
        key = (number, is_training)
        if key in self._plans:
            return self._plans[key]
        axis, chunks = self.axis, len(self.stages)
        if axis.size > 1:
            facts = {
                "chunks": str(chunks),
                "microbatches": str(number),
                "kind of pass": "training" if is_training else "forward only",
                "activation": str(self.activation),
            }
            compare_facts(axis, facts)
            if not self._plans:
                open_links(axis, self.device)
        schedule = make_schedule(axis.size, chunks, number, is_training=is_training)
        if self.num_slots < (needed := slots_needed(schedule)):
            raise ValueError(f"Expected num_slots >= {needed} for {number} microbatches over "
                             f"{axis.size} ranks, got {self.num_slots}.")  # fmt: skip
        self._plans[key] = schedule, programs(schedule)[axis.rank]
        return self._plans[key]

    def _step(self, state: _Pass, step: Step) -> None:
        if isinstance(step, Exchange):
            state.transfers.post(step, state.outbox)
            return
        stage = state.schedule.stage_of(self.axis.rank, step.chunk)
        try:
            if step.is_forward:
                self._forward(state, step, stage)
            else:
                self._backward(state, step, stage)
        except Exception as error:
            error.add_note(f"in the {step}, stage {stage} of {state.schedule.num_stages}")
            raise

    def _forward(self, state: _Pass, action: Action, stage: int) -> None:
        i, is_training = action.microbatch, state.schedule.is_training
        batch = state.microbatches[i]
        if stage == 0:
            if (x := batch.tokens) is None:
                raise ValueError("Expected tokens on the first rank of the pipeline, got None.")
        else:  # a leaf of a new autograd graph
            x = self._take(state, Transfer(stage - 1, stage, i)).requires_grad_(is_training)
        output = self.stages[action.chunk](x, microbatch=i % self.num_slots, **batch.keywords)
        kept: GradientEdge | torch.Tensor
        if stage == state.schedule.num_stages - 1:
            is_tensor = isinstance(output, torch.Tensor)
            if not is_tensor or output.dim() or not output.is_floating_point():
                raise ValueError(f"Expected a scalar loss, got {_shown(output)}.")
            state.losses[i].copy_(output.detach())
            kept = self._loss(state, i, output) if is_training else output
        else:
            self._check_activation(stage, output, is_training=is_training)
            kept = get_gradient_edge(output) if is_training else output
            self._give(state, Transfer(stage, stage + 1, i), output)
        if is_training:
            state.live[action.chunk, i] = x, kept

    def _backward(self, state: _Pass, action: Action, stage: int) -> None:
        i = action.microbatch
        x, output = state.live.pop((action.chunk, i))
        is_last = i == state.schedule.microbatches - 1
        set_last_backward(self.stages[action.chunk], is_last=is_last)
        if isinstance(output, torch.Tensor):
            torch.autograd.backward(output)
        else:
            torch.autograd.backward([output], [self._take(state, Transfer(stage + 1, stage, i))])
        if stage > 0:
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            self._give(state, Transfer(stage, stage - 1, i), grad)

    def _loss(self, state: _Pass, i: int, value: torch.Tensor) -> torch.Tensor:
        """What the backward of microbatch i begins with."""
        del i
        return value * (1.0 / len(state.microbatches))

    def _give(self, state: _Pass, transfer: Transfer, tensor: torch.Tensor) -> None:
        own = tensor.detach()
        state.outbox[transfer] = own.clone() if self.copy_sent else own.contiguous()

    def _take(self, state: _Pass, transfer: Transfer) -> torch.Tensor:
        if self.axis.size == 1:
            return state.outbox.pop(transfer)
        return state.transfers.take(transfer)

    def _check_activation(self, stage: int, x: Any, *, is_training: bool) -> None:
        gradient = {True: " with gradient", False: " without gradient"}
        expected = f"{self.activation}{gradient[is_training]}"
        got = _shown(x)
        if isinstance(x, torch.Tensor):
            got += gradient[x.requires_grad]
        if got != expected:
            raise ValueError(f"Expected the output of stage {stage} to be {expected}, got {got}.")


def _shown(x: Any) -> str:
    is_tensor = isinstance(x, torch.Tensor)
    return str(TensorSpec(tuple(x.shape), x.dtype)) if is_tensor else type(x).__name__


def set_last_backward(stage: nn.Module, *, is_last: bool) -> None:
    """Tell outermost sharded modules whether the next backward is the last of the step."""
    setter = getattr(stage, "set_is_last_backward", None)
    if setter is not None:
        setter(is_last)
        return
    for child in stage.children():
        set_last_backward(child, is_last=is_last)
