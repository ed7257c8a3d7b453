"""Captures of the trainer that are refused or fail, and what is left when graphs are dropped."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_core.device import Device
from fsdp_core.graph.capture_session import CaptureAborted
from fsdp_core.graph.device_graphs import HostGraph
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.stress.races import ClockEvent, Clocks, ClockStream
from fsdp_core.train import Trainer
from tests.dist.rank_pool import RankPool
from tests.dist.scope_programs import CAPACITY, MIXED, STEPS, Scoped, act
from tests.dist.train_layout_programs import Run

Seen = list[Any]


def _trainer(scoped: Scoped, device: Device) -> Trainer:
    return Trainer(scoped.config, build_axes(scoped.run.parallel, device), device)


def whole_step(trainer: Trainer, index: int) -> Any:
    with mock.patch.object(trainer, "_is_capture_due", return_value=False):
        trainer.step(index)
    return act(trainer, ("shown",))


def never_captured(scoped: Scoped) -> Seen:
    """What a run shows whose steps are all eager."""
    trainer = _trainer(scoped, Device("cpu"))
    return [whole_step(trainer, index) for index in range(STEPS)]


def _look(module: Any, args: Any, output: Any) -> None:
    del module, args, output


def _read(module: Any, args: Any, output: Any) -> None:
    del module, args
    output.sum().item()


_read._cuda_graph_capturable = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def hooked(trainer: Trainer, module: str, hook: str) -> Iterator[None]:
    """A hook on a module of the last layer, on the last rank alone."""
    handle = None
    if dist.get_rank() == dist.get_world_size() - 1:
        held = trainer.stages[-1].get_submodule(module)
        if hook == "backward":
            handle = held.register_full_backward_hook(_look)
        else:
            handle = held.register_forward_hook(_read if hook == "reads" else _look)
    yield
    if handle is not None:
        handle.remove()


def fail_and_go_on(scoped: Scoped, module: str, hook: str) -> tuple[str, str, Seen, Seen]:
    """A capture that fails on the last rank.

    Returns:
        The error and its cause; what the trainer shows that goes on eagerly; and one that captures
        again once nothing is in the way.
    """
    texts: list[tuple[str, str]] = []
    shown: list[Seen] = []
    for retries in (False, True):
        trainer = _trainer(scoped, Device("cpu"))
        seen = [whole_step(trainer, 0)]
        with hooked(trainer, module, hook):
            try:
                trainer.step(1)
            except CaptureAborted as error:
                texts.append((str(error), type(error.__cause__).__name__))
        assert trainer.counts.captured == 0
        for index in range(1, STEPS):
            if retries:
                trainer.step(index)
            seen.append(act(trainer, ("shown",)) if retries else whole_step(trainer, index))
        assert bool(trainer.counts.replays) == retries
        trainer.close()
        shown.append(seen)
    assert texts[0] == texts[1]
    (text, cause), (eager, again) = texts[0], shown
    return text, cause, eager, again


def memory_left(scoped: Scoped) -> tuple[int, int, int]:
    """Live bytes after `close` of an eager and a graphed run, and before it of the latter."""
    found = []
    for run in (Scoped(scoped.run), scoped):
        device = Device("cpu")
        with device.counting_memory():
            trainer = _trainer(run, device)
            for index in range(STEPS):
                trainer.step(index)
            gc.collect()
            before = device.live_bytes()
            trainer.close()
            gc.collect()
            found.append((before, device.live_bytes()))
            modules = [module for stage in trainer.stages for module in stage.modules()]
            assert not any("forward" in vars(module) for module in modules)
            del trainer
    (_, eager), (graphed, left) = found
    return eager, left, graphed


_CAPTURES: list[object] = [None]
"""Those under way; None outside of any."""


class Event(ClockEvent):
    """Knows which capture it was recorded in."""

    capture: object = None


class Stream(ClockStream):
    """Refuses events of another capture, as CUDA does."""

    def record_event(self) -> Event:
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


RUN = Run({"dp": 2, "ep": 2}, "moe_tiny", MIXED | CAPACITY)
ROUTER, LAYER = ("attn", "mlp", "moe_router"), ("layer",)


@pytest.mark.parametrize(
    ("scope", "module", "hook", "said"),
    [
        (
            LAYER,
            "layers.1.attn.attention",
            "forward",
            "Expected no forward_hooks of attn.attention",
        ),
        (ROUTER, "layers.1.mlp.moe.router", "forward", "Expected no forward_hooks of "),
        (ROUTER, "layers.1.mlp.moe", "forward", "Expected no hooks of the MoeLayer of layers.1."),
        (ROUTER, "layers.1.mlp.moe", "backward", "Expected no hooks of the MoeLayer of layers.1."),
        (("attn",), "layers.1.attn.norm", "reads", "cannot capture aten._local_scalar_dense"),
    ],
    ids=["inside", "part", "bypassed", "bypassed in backward", "reads data"],
)
def test_all_ranks_capture_or_none(
    warm_ranks: RankPool, scope: tuple[str, ...], module: str, hook: str, said: str
) -> None:
    """Where one rank cannot, all say why, go on with eager's bits, and may try again."""
    scoped = Scoped(RUN, scope)
    expected = warm_ranks.run(never_captured, Scoped(RUN), world_size=2)
    ranks = warm_ranks.run(fail_and_go_on, scoped, module, hook, world_size=2)
    for rank, bits in zip(ranks, expected, strict=True):
        text, cause, eager, again = rank
        assert "was given up on every rank: rank 1: " in text
        assert said in text
        assert cause == (
            "CaptureRefused" if hook == "reads" and (text, cause) == ranks[1][:2] else "NoneType"
        )
        assert eager == bits
        assert again == bits


def test_a_whole_step_is_captured_after_a_refusal(warm_ranks: RankPool) -> None:
    """What stopped in the middle of a pass is no hindrance to steps after it."""
    run = replace(RUN, degrees={"dp": 1})
    (expected,) = warm_ranks.run(never_captured, Scoped(run), world_size=1)
    scoped = Scoped(run, ("full_iteration",))
    ((text, _, eager, again),) = warm_ranks.run(
        fail_and_go_on, scoped, "layers.1.attn.norm", "reads", world_size=1
    )
    assert "cannot capture aten._local_scalar_dense" in text
    assert eager == expected
    assert again == expected


@pytest.mark.parametrize("scope", [("attn", "moe"), ("full_iteration",)])
def test_events_stay_on_their_side_of_a_capture(
    warm_ranks: RankPool, scope: tuple[str, ...]
) -> None:
    """None that was recorded in a capture is waited for outside, nor the reverse."""
    expected = warm_ranks.run(never_captured, Scoped(RUN), world_size=2)
    assert warm_ranks.run(captured, Scoped(RUN, scope), world_size=2) == expected


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_events_of_a_refused_capture_are_forgotten(warm_ranks: RankPool, where: str) -> None:
    """Nobody waits for what was gathered ahead, or was being reduced, when it was refused."""
    run = replace(RUN, degrees={"dp": 1})
    expected = warm_ranks.run(never_captured, Scoped(run), world_size=1)
    scoped = Scoped(run, ("full_iteration",))
    ((said, seen),) = warm_ranks.run(refused, scoped, where, world_size=1)
    assert "cannot capture aten._local_scalar_dense" in said
    assert [seen] == expected


def test_nothing_is_left_of_graphs(warm_ranks: RankPool) -> None:
    """After `close` a trainer holds what one without graphs holds, to the byte."""
    for scope in (ROUTER, LAYER, ("full_iteration",)):
        for eager, left, graphed in warm_ranks.run(memory_left, Scoped(RUN, scope), world_size=2):
            assert graphed > eager + 2**16
            assert left == eager, scope
