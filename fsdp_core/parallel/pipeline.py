"""Runs the stages of one rank by a pipeline schedule.

    microbatch i     first stage   stage(tokens, microbatch=slot, **keywords) -> activation
                     inner stages  stage(activation, microbatch=slot, **keywords) -> activation
                     last stage    stage(activation, microbatch=slot, **keywords) -> scalar loss

An activation is a tensor, or a tuple of tensors, of the shapes that were agreed. Graphs are kept by
microbatch slot, so a stage is always told which one it is in.

What is kept between forward and backward of a microbatch: what autograd saved, the received
activation (the leaf whose gradient goes back), and of the output only its place in the autograd
graph. The output itself is freed once it is sent, unless autograd saved it. On top come at most the
tensors that are being sent or were received ahead of their use: those of one exchange.

**Bits.** Every stage takes the microbatches in their order, forward and backward, and gradients are
added up in that order, so losses and gradients have the bits of a loop over microbatches in one
process, whatever pp and chunks are, with three exceptions:

- *Tied weights*: one process adds head and embedding of each microbatch; here each end adds over
  microbatches, and the two sums are added last. Equal bits with one microbatch.
- *Sharded stages*: with `gradient_sync="last"` each rank adds over microbatches, and then ranks are
  summed; with "every" it is the other way round.
- *Random numbers* (dropout) are drawn by each rank in the order of its own actions. Who wants those
  of one process seeds by layer and microbatch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.pipeline_p2p import (
    Boundaries,
    TensorSpec,
    Transfers,
    broadcast_from_last,
    check_tensors,
    compare_facts,
    open_links,
)
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
from fsdp_core.parallel.tied_weights import TiedWeights

GradientSync = Literal["last", "every"]


@runtime_checkable
class Sharded(Protocol):
    """What FSDP modules have, ours and torch's."""

    def set_is_last_backward(self, is_last_backward: bool) -> None: ...  # noqa: FBT001
    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None: ...  # noqa: FBT001


def sharded_roots(stage: nn.Module) -> Iterator[Sharded]:
    """The outermost sharded modules of a stage."""
    if isinstance(stage, Sharded):
        yield stage
        return
    for child in stage.children():
        yield from sharded_roots(child)


def announce_backward(stage: nn.Module, sync: GradientSync, *, is_last: bool) -> None:
    """Tell a stage's sharded modules whether its next backward is the last before the optimizer.

    With "last" only that one communicates gradients; until then they are kept at full size.
    """
    for module in sharded_roots(stage):
        module.set_is_last_backward(is_last)
        if sync == "last":
            module.set_requires_gradient_sync(is_last)


Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Microbatch:
    """One microbatch as a rank sees it.

    Attributes:
        tokens: input of the first stage; other ranks may leave it out.
        keywords: further arguments of every stage of this rank.
        weight: what the loss is multiplied by before backward; None: 1 / number of microbatches.
    """

    tokens: torch.Tensor | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    weight: float | torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a pipeline runs.

    Attributes:
        gradient_sync: when sharded stages reduce gradients: "last", once, after the last
            microbatch's backward, with full-size gradients kept until then; or "every" backward.
        num_slots: microbatch i is in slot i % num_slots; None: a slot a microbatch.
        copy_sent: send copies. For stages that return memory which their next call overwrites, as
            graphs do: a send may be under way by then.
    """

    gradient_sync: GradientSync = "last"
    num_slots: int | None = None
    copy_sent: bool = False

    def __post_init__(self) -> None:
        if self.gradient_sync not in ("last", "every"):
            raise ValueError(f"Expected gradient_sync last or every, got {self.gradient_sync!r}.")
        if self.num_slots is not None and self.num_slots < 1:
            raise ValueError(f"Expected num_slots >= 1, got {self.num_slots}.")


@dataclass
class _Live:
    """A forward pass that waits for its backward."""

    inputs: Tensors
    outputs: list[GradientEdge] | torch.Tensor


@dataclass
class _Pass:
    """One pass of all microbatches."""

    microbatches: Sequence[Microbatch]
    schedule: Schedule
    transfers: Transfers
    losses: torch.Tensor
    live: dict[tuple[int, int], _Live] = field(default_factory=dict)
    outbox: dict[Transfer, Tensors] = field(default_factory=dict)
    local: dict[Transfer, Tensors] = field(default_factory=dict)
    peak_live: int = 0


class Pipeline:
    """One rank of a pipeline.

    Args:
        stages: this rank's chunks in order: with pp ranks, stages rank, rank + pp, ...
        axis: the pipeline axis.
        boundaries: what one stage gives the next: a spec, several, or a mapping from the number of
            the giving stage to its specs.
        device: of the stages.
        tied: the parameter of this rank's first stage, or last, or both, which is the same weight
            in the model; gradients are summed over both ends. Wrap its module as a unit of its own
            on both if stages are sharded, so that ranks hold the same rows.
        options: see there.

    Attributes:
        peak_live: forward passes that waited for their backward at most, in the last pass.

    Raises:
        ValueError: no stages, boundaries missing, or tied weights where there is no end.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        axis: Axis,
        boundaries: TensorSpec | Sequence[TensorSpec] | Boundaries,
        device: torch.device,
        *,
        tied: Sequence[nn.Parameter] = (),
        options: PipelineOptions | None = None,
    ) -> None:
        if not stages:
            raise ValueError("Expected at least one stage on each rank, got none.")
        self.stages, self.axis, self.device = list(stages), axis, device
        self.options = options or PipelineOptions()
        self.boundaries = _by_stage(boundaries, axis.size * len(stages))
        self._tied = TiedWeights(axis, tied)
        self.peak_live = 0
        self._plans: dict[tuple[int, bool, bool], tuple[Schedule, tuple[Step, ...]]] = {}
        self._num_trained: int | None = None
        self._is_frozen = False
        self._failure: str | None = None

    # ---- passes

    def forward_backward(
        self, microbatches: Sequence[Microbatch], *, broadcast_loss: bool = False
    ) -> torch.Tensor | None:
        """Forward and backward of all microbatches; gradients are added to the parameters' `grad`.

        Returns:
            float32 [microbatches], each one's loss without its weight: on the last rank, with
            `broadcast_loss` on all; None elsewhere.

        Raises:
            ValueError: a number of microbatches that the schedule or its slots cannot take; a stage
                that returned something else than agreed; ranks that differ in what they run.
            TransferFailed: another stage failed or hangs; the group's timeout bounds the wait.
            RuntimeError: an earlier pass failed, so messages of it may be under way.
        """
        return self._run(microbatches, is_training=True, broadcast_loss=broadcast_loss)

    def forward_only(
        self, microbatches: Sequence[Microbatch], *, broadcast_loss: bool = False
    ) -> torch.Tensor | None:
        """Losses without gradients; else as `forward_backward`."""
        with torch.no_grad():
            return self._run(microbatches, is_training=False, broadcast_loss=broadcast_loss)

    def freeze_slots(self) -> None:
        """Stages have captured graphs: from now on each training pass must be like the last.

        Graphs that share memory may be replayed in the order of their capture only, and that order
        depends on the number of microbatches.

        Raises:
            RuntimeError: there was no training pass yet.
        """
        if self._num_trained is None:
            raise RuntimeError("Expected a training pass before slots are frozen, got none.")
        self._is_frozen = True

    def _run(
        self, microbatches: Sequence[Microbatch], *, is_training: bool, broadcast_loss: bool
    ) -> torch.Tensor | None:
        number = len(microbatches)
        self._check_slots(number, is_training=is_training)
        schedule, program = self._plan(number, is_training=is_training, tells_loss=broadcast_loss)
        transfers = Transfers(self.axis, self.boundaries, self.device)
        losses = torch.zeros(number, dtype=torch.float32, device=self.device)
        state = _Pass(microbatches, schedule, transfers, losses)
        try:
            for step in program:
                self._step(state, step)
            transfers.finish()
            if is_training:
                self._tied.sum_gradients()
                self._num_trained = number
            if broadcast_loss:
                broadcast_from_last(self.axis, losses)
        except BaseException as error:
            if self.axis.size > 1:  # alone nobody sends anything
                self._failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.peak_live = state.peak_live
            if is_training:
                for stage in self.stages:
                    announce_backward(stage, self.options.gradient_sync, is_last=True)
        is_last = self.axis.rank == self.axis.size - 1
        return losses if is_last or broadcast_loss else None

    def _check_slots(self, number: int, *, is_training: bool) -> None:
        if self._failure is not None:
            raise RuntimeError(
                "Expected every pass so far to end, but one failed and its messages may be under "
                f"way: make new process groups and a new Pipeline. The failure: {self._failure}"
            )
        if not self._is_frozen:
            return
        if is_training and number != self._num_trained:
            raise ValueError(
                f"Expected {self._num_trained} microbatches, as when slots were frozen, got "
                f"{number}: graphs are replayed in the order of their capture."
            )
        if self.options.num_slots is None and number > cast("int", self._num_trained):
            raise ValueError(f"Expected at most {self._num_trained} microbatches, got {number}.")

    def _plan(
        self, number: int, *, is_training: bool, tells_loss: bool
    ) -> tuple[Schedule, tuple[Step, ...]]:
        """Schedule and program of such a pass; the first time ranks compare theirs."""
        key = (number, is_training, tells_loss)
        if key in self._plans:
            return self._plans[key]
        kind = "training" if is_training else "forward only"
        self._compare(number, f"{kind}, loss {'to all' if tells_loss else 'on the last rank'}")
        if not self._plans:
            open_links(self.axis, self.device)
        axis, slots = self.axis, self.options.num_slots
        schedule = make_schedule(axis.size, len(self.stages), number, is_training=is_training)
        needed = max(slots_needed(schedule, rank) for rank in range(axis.size))
        if slots is not None and slots < needed:
            raise ValueError(
                f"Expected num_slots >= {needed} for {number} microbatches over {axis.size} ranks, "
                f"got {slots}: a slot would be taken again before its backward."
            )
        self._plans[key] = schedule, programs(schedule)[axis.rank]
        return self._plans[key]

    def _compare(self, number: int, kind: str) -> None:
        facts = {
            "chunks": str(len(self.stages)),
            "microbatches": str(number),
            "kind of pass": kind,
            "own tied weights": self._tied.describe(),
        }
        for stage, specs in sorted(self.boundaries.items()):
            facts[f"output of stage {stage}"] = ", ".join(map(str, specs))
        gathered = compare_facts(self.axis, facts)
        self._tied.check([their["own tied weights"] for their in gathered])

    # ---- steps

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
        i, schedule = action.microbatch, state.schedule
        batch = state.microbatches[i]
        inputs = self._inputs(state, stage, i)
        slot = i if self.options.num_slots is None else i % self.options.num_slots
        x = inputs[0] if len(inputs) == 1 else inputs
        output = self.stages[action.chunk](x, microbatch=slot, **batch.keywords)
        leaves = tuple(x for x in inputs if x.requires_grad)
        kept: list[GradientEdge] | torch.Tensor
        if stage == schedule.num_stages - 1:
            kept = self._loss(state, i, output)
        else:
            made = output if isinstance(output, tuple) else (output,)
            what = f"the output of stage {stage}"
            check_tensors(what, made, self.boundaries[stage], is_training=schedule.is_training)
            kept = [get_gradient_edge(tensor) for tensor in made if tensor.requires_grad]
            self._give(state, Transfer(stage, stage + 1, i), made)
        if schedule.is_training:
            state.live[action.chunk, i] = _Live(leaves, kept)
            state.peak_live = max(state.peak_live, len(state.live))

    def _inputs(self, state: _Pass, stage: int, i: int) -> Tensors:
        """Tokens, or the activation as leaves of a new autograd graph."""
        if stage == 0:
            tokens = state.microbatches[i].tokens
            if tokens is None:
                raise ValueError("Expected tokens on the first rank of the pipeline, got None.")
            return (tokens,)
        received = self._get(state, Transfer(stage - 1, stage, i))
        for tensor, spec in zip(received, self.boundaries[stage - 1], strict=True):
            tensor.requires_grad_(spec.requires_grad and state.schedule.is_training)
        return received

    def _loss(self, state: _Pass, i: int, loss: torch.Tensor) -> torch.Tensor:
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.is_floating_point():
            raise ValueError(f"Expected a scalar loss of the last stage, got {_kind(loss)}.")
        state.losses[i].copy_(loss.detach())
        if not state.schedule.is_training:
            return loss
        weight = state.microbatches[i].weight
        return loss * (1.0 / len(state.microbatches) if weight is None else weight)

    def _backward(self, state: _Pass, action: Action, stage: int) -> None:
        i, schedule = action.microbatch, state.schedule
        live = state.live.pop((action.chunk, i))
        is_last = i == schedule.microbatches - 1
        announce_backward(self.stages[action.chunk], self.options.gradient_sync, is_last=is_last)
        if isinstance(live.outputs, torch.Tensor):
            torch.autograd.backward(live.outputs)
        else:
            grads = self._get(state, Transfer(stage + 1, stage, i))
            if live.outputs:
                torch.autograd.backward(live.outputs, grads)
        if stage > 0:
            made = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in live.inputs)
            self._give(state, Transfer(stage, stage - 1, i), made)

    # ---- tensors between stages

    def _give(self, state: _Pass, transfer: Transfer, tensors: Tensors) -> None:
        copy = self.options.copy_sent
        own = tuple(t.detach().clone() if copy else t.detach().contiguous() for t in tensors)
        (state.local if self.axis.size == 1 else state.outbox)[transfer] = own

    def _get(self, state: _Pass, transfer: Transfer) -> Tensors:
        if self.axis.size == 1:
            return state.local.pop(transfer)
        return state.transfers.take(transfer)


def _by_stage(
    boundaries: TensorSpec | Sequence[TensorSpec] | Boundaries, num_stages: int
) -> dict[int, tuple[TensorSpec, ...]]:
    givers = range(num_stages - 1)
    if isinstance(boundaries, Mapping):
        if missing := set(givers) - set(boundaries):
            raise ValueError(f"Expected specs of what stages {list(givers)} give, got none of "
                             f"{sorted(missing)}.")  # fmt: skip
        return {stage: tuple(boundaries[stage]) for stage in givers}
    specs = (boundaries,) if isinstance(boundaries, TensorSpec) else tuple(boundaries)
    return dict.fromkeys(givers, specs)


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {value.dtype}"
    return type(value).__name__
