"""Segments: functions of tensors whose forward and backward are captured, joined to autograd.

A `GraphedSegment` holds a pair of graphs a slot. A slot is one microbatch between its forward and
its backward: what the forward saved lives in the graphs' memory until the backward has read it.

    forward    inputs are copied into the slot's own tensors, one launch, outputs are aliases of the
               slot's: valid until the slot is replayed again
    backward   gradients of the outputs are copied in, one launch, gradients are returned as clones

Gradients are clones because autograd keeps what it is given: as a parameter's `grad`, as the result
of `torch.autograd.grad`, in a hook. An alias would be overwritten by the next replay.

The order of captures is the caller's. Of segments that share a memory pool it must be the order in
which they run: memory that a forward saved is used again as soon as its backward is captured.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_core.graph.capture import GraphMaker
from fsdp_core.graph.hooks import tensor_hooks_off
from fsdp_core.graph.ledger import Ledger, Resolver
from fsdp_core.graph.recorder import CaptureRefused, Recording
from fsdp_core.graph.undo import Undo

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Something to capture: a function of tensors.

    Attributes:
        name: as errors and ledgers show it, `layers.3.attn`.
        function: takes tensors by position and returns a tensor or a tuple of tensors; whatever
            else it needs is bound.
        samples: like the inputs to come, values included, as warming up computes with them;
            `requires_grad` says which get a gradient.
        parameters: those that get gradients, in the order in which autograd is to bring them.
        state: persistent tensors that the function changes by means that torch does not see (a
            library's own kernels). What torch's operators change is found without being named.
    """

    name: str
    function: Callable[..., torch.Tensor | Tensors]
    samples: Tensors
    parameters: tuple[nn.Parameter, ...]
    state: Tensors = ()


class _Pending:
    """A forward that awaits its backward; autograd's node holds it, the slot only looks at it."""

    __slots__ = ("__weakref__", "is_done")

    def __init__(self) -> None:
        self.is_done = False


class GraphedSegment:
    """Forward and backward graphs of one segment, one pair a slot.

    Args:
        num_slots: microbatches that may be between forward and backward at a time.
        resolve: names every tensor that the graphs may use; None leaves the ledgers out.
        on_replay: told the number of launches of each replay.
        on_phase: told before and after each forward and backward of a warm-up or capture, outside
            of it, which phase of `hooks.PHASES` begins: gathers and releases parameters.

    Attributes:
        ledgers: those of all captured graphs.
        num_graphs: captured graphs.
    """

    def __init__(
        self,
        maker: GraphMaker,
        segment: Segment,
        *,
        num_slots: int = 1,
        resolve: Resolver | None = None,
        on_replay: Callable[[int], None] = lambda launches: None,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"Expected at least one slot of {segment.name}, got {num_slots}.")
        self.segment = segment
        self.ledgers: list[Ledger] = []
        self.num_graphs = 0
        self._maker, self._resolve = maker, resolve
        self._on_replay, self._on_phase = on_replay, on_phase
        self._slots = [_Slot(self, number) for number in range(num_slots)]
        self._stream: Any = None

    # ---- capture

    def warm_up(self, iterations: int = 2) -> None:
        """Run forward and backward eagerly on the first slot's inputs, leaving no trace.

        Generators, the segment's `state`, and every tensor that was there before and that an
        operator writes, are put back. Captures must be made on the same stream.
        """
        with self.undo() as undo:
            for _ in range(iterations):
                self.run_forward(0, undo)
                self.run_backward(0, undo)

    def undo(self) -> Undo:
        """Puts back what running or capturing this segment changes."""
        return Undo(self._maker.device, self._maker.generators, self.segment.state)

    def run_forward(self, slot: int, undo: Undo) -> None:
        """Run the forward eagerly on the slot's inputs, its outputs kept for `run_backward`."""
        self._stream = self._maker.device.current_stream()
        with self._between("forward_pre_hooks", "forward_hooks"), undo.watching():
            self._slot(slot).run_forward()

    def run_backward(self, slot: int, undo: Undo) -> None:
        """Run the backward of `run_forward`."""
        with self._between("backward_pre_hooks", "backward_hooks"), undo.watching():
            self._slot(slot).run_backward()

    def capture_forward(self, slot: int) -> None:
        """Capture the forward pass of a slot.

        Raises:
            CaptureRefused: something in the function cannot be captured.
            RuntimeError: another stream than that of the warm-up, or a slot captured already.
        """
        self._require_stream()
        with self._between("forward_pre_hooks", "forward_hooks"), self.undo():
            recording = self._slot(slot).capture_forward()
        self._enter(recording, None, slot)

    def capture_backward(self, slot: int) -> None:
        """Capture the backward pass of a slot's captured forward; nothing if none is needed.

        Raises:
            CaptureRefused: something in the backward cannot be captured.
            RuntimeError: the forward is not captured, or another stream than that of the warm-up.
        """
        self._require_stream()
        with self._between("backward_pre_hooks", "backward_hooks"), self.undo():
            recordings = self._slot(slot).capture_backward()
        if recordings is not None:
            self._enter(*recordings, slot)

    @contextlib.contextmanager
    def _between(self, before: str, after: str) -> Iterator[None]:
        """Between two phases, the hooks of gradients off."""
        self._on_phase(before)
        try:
            with tensor_hooks_off(self.segment.parameters):
                yield
        finally:
            # Also after a failure: what was gathered is released.
            self._on_phase(after)

    def _require_stream(self) -> None:
        """Libraries and autograd tie what they set up in a warm-up to its stream."""
        device = self._maker.device
        if device.is_cuda and self._stream not in (None, device.current_stream()):
            raise RuntimeError(
                f"Expected the capture of {self.segment.name} on the stream of its warm-up, got "
                "another: enter that stream around both."
            )

    def _enter(self, recording: Recording, partner: Recording | None, slot: int) -> None:
        self.num_graphs += 1
        if self._resolve is not None:
            ledger = Ledger(
                recording, self._resolve, partner, own=self._slots[slot].named_tensors,
                # Kernels of libraries read weights past torch's dispatcher.
                relied=self.segment.parameters, within=self.segment.name,
            )  # fmt: skip
            self.ledgers.append(ledger)
            self._slots[slot].ledgers.append(ledger)

    def _slot(self, number: int) -> "_Slot":
        if not 0 <= number < len(self._slots):
            raise ValueError(
                f"Expected a slot of {self.segment.name} below {len(self._slots)}, got {number}."
            )
        return self._slots[number]

    # ---- replay

    def __call__(self, *tensors: torch.Tensor, slot: int = 0) -> torch.Tensor | Tensors:
        """Replay forward now and, when autograd asks, backward.

        Raises:
            ValueError: inputs that differ from the samples in number, shape, dtype or device, or
                that want a gradient where the sample does not.
            RuntimeError: the slot's last forward still awaits its backward.
            StaleAddress: something that the graph reads or writes has moved.
        """
        chosen = self._slot(slot)
        chosen.check(tensors)
        pending = _Pending()
        results: Tensors = _Replay.apply(
            chosen, pending, len(tensors), *chosen.connected(tensors), *chosen.trained
        )
        return results if chosen.returns_tuple else results[0]

    def launched(self) -> None:
        """Tell the owner of one launch."""
        self._on_replay(1)

    @property
    def maker(self) -> GraphMaker:
        """What makes the graphs."""
        return self._maker

    def reset(self) -> None:
        """Drop the graphs and their memory."""
        for slot in self._slots:
            slot.reset()
        self.ledgers, self.num_graphs = [], 0


class _Slot:
    """The graphs of one slot and the tensors that they read and write.

    Attributes:
        trained: parameters that get a gradient; until the backward is captured, those that want
            one.
        returns_tuple: whether the function returns a tuple.
        differentiable: for each output, whether it gets a gradient.
    """

    def __init__(self, owner: GraphedSegment, number: int) -> None:
        segment = owner.segment
        self._owner, self._number, self._name = owner, number, segment.name
        self._function = segment.function
        self.trained = tuple(p for p in segment.parameters if p.requires_grad)
        self._inputs = tuple(
            s.detach().clone().requires_grad_(s.requires_grad) for s in segment.samples
        )
        self._wanted = tuple(s.requires_grad for s in segment.samples)
        self._connected = self._wanted
        self._forward, self._backward = owner.maker.new(), owner.maker.new()
        self._is_captured = False
        self.returns_tuple = False
        self.differentiable: tuple[bool, ...] = ()
        self.ledgers: list[Ledger] = []
        self._outputs: Tensors = ()
        self._grad_outputs: Tensors = ()
        self._grads: tuple[torch.Tensor | None, ...] = ()
        self._pending: weakref.ref[_Pending] | None = None

    # ---- capture

    def _run(self) -> Tensors:
        """The function on the slot's inputs, its outputs as a tuple."""
        result = self._function(*self._inputs)
        self.returns_tuple = isinstance(result, tuple)
        outputs = result if isinstance(result, tuple) else (result,)
        for number, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor):
                raise ValueError(
                    f"Expected tensors out of {self._name}, got {type(output).__name__} as output "
                    f"{number}."
                )
        return outputs

    def _surface(self) -> Tensors:
        """What gets a gradient."""
        return (*(x for x in self._inputs if x.requires_grad), *self.trained)

    def run_forward(self) -> None:
        """The forward without a graph."""
        self._outputs = self._run()

    def run_backward(self) -> None:
        """The backward of `run_forward` without a graph."""
        outputs = tuple(output for output in self._outputs if output.requires_grad)
        self._outputs = ()
        if outputs and self._surface():
            ones = tuple(map(torch.ones_like, outputs))
            torch.autograd.grad(outputs, self._surface(), ones, allow_unused=True)

    def capture_forward(self) -> Recording:
        """Capture the forward; its recording."""
        if self._is_captured:
            raise RuntimeError(
                f"Expected slot {self._number} of {self._name} to be empty, got a captured one."
            )
        self._outputs = self._forward.capture(self._run)
        self.differentiable = tuple(output.requires_grad for output in self._outputs)
        recording = self._forward.recording
        inputs = {x.untyped_storage().data_ptr(): i for i, x in enumerate(self._inputs)}
        for entry in recording.external():
            if entry.written and entry.nbytes and entry.address in inputs:
                raise CaptureRefused(
                    f"cannot capture {self._name}: it changes its input {inputs[entry.address]} in "
                    "place, and a replay would change a copy. Change a clone of it."
                )
        self._is_captured = True
        return recording

    def capture_backward(self) -> tuple[Recording, Recording] | None:
        """Capture the backward; its recording and the forward's, or None if there is nothing."""
        self._require_captured()
        outputs = tuple(output for output in self._outputs if output.requires_grad)
        surface = self._surface()
        if not outputs or not surface:
            self._outputs = tuple(output.detach() for output in self._outputs)
            return None
        self._grad_outputs = tuple(torch.zeros_like(output) for output in outputs)
        grads = self._backward.capture(
            lambda: torch.autograd.grad(outputs, surface, self._grad_outputs, allow_unused=True)
        )
        # The autograd graph has done its work; the storages it saved belong to the graphs now.
        self._outputs = tuple(output.detach() for output in self._outputs)
        self._keep_connected(grads)
        return self._backward.recording, self._forward.recording

    def _keep_connected(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Let autograd see only what gets a gradient: the rest is not waited for, as in eager."""
        remaining = iter(grads)
        of_inputs = tuple(next(remaining) if wanted else None for wanted in self._wanted)
        of_parameters = tuple(remaining)
        self._connected = tuple(grad is not None for grad in of_inputs)
        self.trained = tuple(
            p for p, grad in zip(self.trained, of_parameters, strict=True) if grad is not None
        )
        self._grads = (*of_inputs, *(grad for grad in of_parameters if grad is not None))

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The slot's own tensors by name, for ledgers."""
        start, grads = f"{self._name} slot {self._number}", enumerate(self._grad_outputs)
        found = {f"{start} input {i}": x.data for i, x in enumerate(self._inputs)}
        return found | {f"{start} output gradient {i}": grad for i, grad in grads}

    def _require_captured(self) -> None:
        if not self._is_captured:
            raise RuntimeError(
                f"Expected a captured forward of {self._name} in slot {self._number}, got an empty "
                "graph."
            )

    # ---- replay

    def check(self, tensors: Tensors) -> None:
        """Refuse inputs that the graphs do not fit, and a slot that is in use."""
        self._require_captured()
        if len(tensors) != len(self._inputs):
            raise ValueError(
                f"Expected {len(self._inputs)} inputs of {self._name}, got {len(tensors)}."
            )
        for number, (x, static) in enumerate(zip(tensors, self._inputs, strict=True)):
            if (x.shape, x.dtype, x.device) != (static.shape, static.dtype, static.device):
                raise ValueError(
                    f"Expected the captured input {number} of {self._name}, {_kind(static)}, got "
                    f"{_kind(x)}."
                )
            if x.requires_grad and not static.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"Expected input {number} of {self._name} without a gradient, as captured, got "
                    "one that requires grad. Detach it, or capture with such a sample."
                )
        last = self._pending() if self._pending is not None else None
        if last is not None and not last.is_done:
            raise RuntimeError(
                f"Expected slot {self._number} of {self._name} to be free, got one whose forward "
                "still awaits its backward: a replay would overwrite what it saved. Capture as "
                "many slots as there are microbatches between forward and backward."
            )

    def connected(self, tensors: Tensors) -> Tensors:
        """The inputs, those cut from autograd that get no gradient."""
        return tuple(
            x if keep else x.detach() for x, keep in zip(tensors, self._connected, strict=True)
        )

    def replay_forward(self, tensors: Tensors, pending: _Pending) -> Tensors:
        """Copy the inputs in, replay, and return aliases of the static outputs."""
        if self.ledgers:
            self.ledgers[0].check()
        for static, x in zip(self._inputs, tensors, strict=True):
            _copy_in(static.detach(), x)
        self._forward.replay()
        self._owner.launched()
        self._pending = weakref.ref(pending)
        return tuple(output.detach() for output in self._outputs)

    def replay_backward(
        self, grads: Sequence[torch.Tensor | None], pending: _Pending
    ) -> tuple[torch.Tensor | None, ...]:
        """Copy the outputs' gradients in, replay, and return clones of the gradients."""
        if pending.is_done:
            raise RuntimeError(
                f"Expected one backward of {self._name} for each forward, got a second: its graphs "
                "give up what the forward saved. Run it without graphs to keep it."
            )
        if self.ledgers:
            self.ledgers[-1].check()
        wanted = [grad for grad, d in zip(grads, self.differentiable, strict=True) if d]
        for number, (static, grad) in enumerate(zip(self._grad_outputs, wanted, strict=True)):
            if grad is None:
                raise RuntimeError(
                    f"Expected a gradient of each differentiable output of {self._name}, got none "
                    f"of the one numbered {number}: the graph computes with all. Detach in the "
                    "function what nothing goes on with."
                )
            _copy_in(static, grad)
        self._backward.replay()
        self._owner.launched()
        pending.is_done = True
        return tuple(None if grad is None else grad.clone() for grad in self._grads)

    def reset(self) -> None:
        """Drop the graphs and the static tensors."""
        self._forward.reset()
        self._backward.reset()
        self._is_captured = False
        self.ledgers = []
        self._inputs = self._outputs = self._grad_outputs = self._grads = ()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, slot: _Slot, pending: _Pending, num_inputs: int, *tensors: torch.Tensor
    ) -> Tensors:
        ctx.slot, ctx.pending = slot, pending
        ctx.set_materialize_grads(False)
        outputs = slot.replay_forward(tensors[:num_inputs], pending)
        ctx.mark_non_differentiable(
            *(out for out, d in zip(outputs, slot.differentiable, strict=True) if not d)
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, *ctx.slot.replay_backward(grads, ctx.pending))


def _copy_in(static: torch.Tensor, x: torch.Tensor) -> None:
    if x.data_ptr() != static.data_ptr() or x.stride() != static.stride():
        static.copy_(x)


def _kind(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"
