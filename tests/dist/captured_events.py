"""Streams of the CPU with CUDA's rule of events: those of a capture are of no use outside of it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from fsdp_core.device import Device
from fsdp_core.graph.capture_session import CaptureAborted
from fsdp_core.graph.host_graph import HostGraph
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.stress.races import ClockEvent, Clocks, ClockStream
from fsdp_core.train import Trainer
from tests.dist.scope_failures import whole_step
from tests.dist.scope_programs import STEPS, Scoped, act

_CAPTURES: list[object] = [None]
"""Those under way; None outside of any."""


class Event(ClockEvent):
    """Knows which capture it was recorded in."""

    capture: object = None


class Stream(ClockStream):
    """Refuses events of another capture, as CUDA does."""

    def record_event(self) -> Event:
        """Mark this point."""
        found = super().record_event()
        event = Event(found._clocks, found.clock)
        event.capture = _CAPTURES[-1]
        return event

    def wait_event(self, event: ClockEvent) -> None:
        """Order what follows after the event.

        Raises:
            AssertionError: it was recorded in a capture and this is outside, or the reverse.
        """
        assert isinstance(event, Event)
        assert event.capture is _CAPTURES[-1], "waits for an event of another capture"
        super().wait_event(event)


class StrictClocks(Clocks):
    """Whose streams are such."""

    def new_stream(self, name: str) -> ClockStream:
        """A side stream."""
        made = super().new_stream(name)
        strict = Stream(self, made.number, made.name)
        strict.clock = made.clock
        self.streams[made.number] = strict
        return strict


@contextlib.contextmanager
def strict_events() -> Iterator[None]:
    """Inside, the CPU's streams and its graphs keep to the rule."""
    capture = HostGraph.capture

    def captured(graph: HostGraph, function: Callable[[], Any]) -> Any:
        _CAPTURES.append(graph)
        try:
            return capture(graph, function)
        finally:
            _CAPTURES.pop()

    with (
        Device("cpu").modelling_streams(StrictClocks()),
        mock.patch.object(HostGraph, "capture", captured),
    ):
        yield


def _reads(module: Any, args: Any, output: torch.Tensor) -> None:
    del module, args
    output.sum().item()


def _reads_in_backward(module: Any, args: Any, output: torch.Tensor) -> None:
    del module, args
    if output.requires_grad:
        output.register_hook(lambda grad: grad.sum().item() and None)


HOOKS = {"forward": _reads, "backward": _reads_in_backward}
for _hook in HOOKS.values():
    _hook._cuda_graph_capturable = True  # type: ignore[attr-defined]


def captured(scoped: Scoped) -> list[Any]:
    """What every step shows of a run that captures."""
    device = Device("cpu")
    with strict_events():
        trainer = Trainer(scoped.config, build_axes(scoped.run.parallel, device), device)
        seen = []
        for index in range(STEPS):
            trainer.step(index)
            seen.append(act(trainer, ("shown",)))
        assert trainer.counts.replays
        trainer.close()
    return seen


def refused(scoped: Scoped, where: str) -> tuple[str, list[Any]]:
    """What a capture says that reads on the host, and what the steps show that go on eagerly."""
    device, said = Device("cpu"), ""
    with strict_events():
        trainer = Trainer(scoped.config, build_axes(scoped.run.parallel, device), device)
        seen = [whole_step(trainer, 0)]
        norm = trainer.stages[-1].get_submodule("layers.0.attn.norm")
        handle = norm.register_forward_hook(HOOKS[where])
        try:
            trainer.step(1)
        except CaptureAborted as error:
            said = str(error)
        handle.remove()
        seen += [whole_step(trainer, index) for index in range(1, STEPS)]
        trainer.close()
    return said, seen
