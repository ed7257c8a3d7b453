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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fsdp_core.graph.capture_session import Undo
from fsdp_core.graph.graph import GraphMaker, Spec
from fsdp_core.graph.hooks import tensor_hooks_off
from fsdp_core.graph.ledger import Ledger, Resolver
from fsdp_core.graph.recorder import Recording
from fsdp_core.graph.slot import Pending, Replay, Segment, Slot, Tensors

__all__ = ["GraphedSegment", "Segment", "Tensors"]


class GraphedSegment:
    """Forward and backward graphs of one segment, one pair a slot.

    Args:
        num_slots: microbatches that may be between forward and backward at a time.
        resolve: names every tensor that the graphs may use; None leaves the ledgers out.
        on_replay: told the number of launches of each replay.
        on_phase: told before and after each forward and backward of a warm-up or capture, outside
            of it, which phase of `hooks.PHASES` begins: gathers and releases parameters.
        relied: what the function uses beside its parameters and no operator of torch shows, as it
            is when a graph has been captured; for ledgers.

    Attributes:
        ledgers: those of all captured graphs.
        captures: captured graphs, forward and backward.
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
        relied: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"Expected at least one slot of {segment.name}, got {num_slots}.")
        self.segment = segment
        self.ledgers: list[Ledger] = []
        self.captures = [0, 0]
        self._maker, self._resolve = maker, resolve
        self._on_phase, self._relied = on_phase, relied
        self._slots = [Slot(maker, segment, number, on_replay) for number in range(num_slots)]
        self._stream: Any = None
        self._warmed: list[Spec | None] = []

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
            self._warmed = self._slot(slot).run_backward()

    def capture_forward(self, slot: int) -> None:
        """Capture the forward pass of a slot.

        Raises:
            CaptureRefused: something in the function cannot be captured.
            RuntimeError: another stream than that of the warm-up, or a slot captured already.
        """
        self._require_stream()
        with self._between("forward_pre_hooks", "forward_hooks"):
            with self.undo():
                recording = self._slot(slot).capture_forward()
            self._enter(recording, None, slot)  # while everything is where the graph reads it

    def capture_backward(self, slot: int) -> None:
        """Capture the backward pass of a slot's captured forward; nothing if none is needed.

        Raises:
            CaptureRefused: something in the backward cannot be captured.
            RuntimeError: the forward is not captured, or another stream than that of the warm-up.
        """
        self._require_stream()
        with self._between("backward_pre_hooks", "backward_hooks"):
            with self.undo():
                recordings = self._slot(slot).capture_backward(self._warmed)
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
        self.captures[partner is not None] += 1
        if self._resolve is not None:
            ledger = Ledger(
                recording, self._resolve, partner, own=self._slots[slot].named_tensors,
                # Kernels of libraries read weights past torch's dispatcher.
                relied=(*self.segment.parameters, *self._relied()), within=self.segment.name,
            )  # fmt: skip
            self.ledgers.append(ledger)
            self._slots[slot].ledgers.append(ledger)

    def _slot(self, number: int) -> Slot:
        if not 0 <= number < len(self._slots):
            raise ValueError(
                f"Expected a slot of {self.segment.name} below {len(self._slots)}, got {number}."
            )
        return self._slots[number]

    # ---- replay

    @property
    def num_graphs(self) -> int:
        """Captured graphs."""
        return sum(self.captures)

    @property
    def replays(self) -> tuple[int, int]:
        """Launches of forward and of backward graphs, of all slots."""
        forward, backward = zip(*(slot.replays for slot in self._slots), strict=True)
        return sum(forward), sum(backward)

    @property
    def is_waiting(self) -> bool:
        """Whether a slot's last forward still awaits its backward."""
        return any(slot.is_waiting for slot in self._slots)

    def __call__(
        self, *tensors: torch.Tensor, slot: int = 0, after: Callable[[], None] | None = None
    ) -> torch.Tensor | Tensors:
        """Replay forward now and, when autograd asks, backward.

        Args:
            after: called when the backward has been replayed, on its stream, before autograd goes
                on: for what follows it once a step, and no graph may hold.

        Raises:
            ValueError: inputs that differ from the samples in number, shape, dtype or device, or
                that want a gradient where the sample does not.
            RuntimeError: the slot's last forward still awaits its backward.
            StaleAddress: something that the graph reads or writes has moved.
        """
        chosen = self._slot(slot)
        chosen.check(tensors)
        pending = Pending(after)
        results: Tensors = Replay.apply(
            chosen, pending, len(tensors), *chosen.connected(tensors), *chosen.trained
        )
        return results if chosen.returns_tuple else results[0]

    def reset(self) -> None:
        """Drop the graphs and their memory."""
        for slot in self._slots:
            slot.reset()
        self.ledgers, self.captures = [], [0, 0]
