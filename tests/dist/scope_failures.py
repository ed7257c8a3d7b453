"""Captures of the trainer that fail, and what is left of graphs that are dropped."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from fsdp_core.device import Device
from fsdp_core.graph.capture_session import CaptureAborted
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer
from tests.dist.scope_programs import STEPS, Scoped, act

Seen = list[Any]


def _trainer(scoped: Scoped, device: Device) -> Trainer:
    return Trainer(scoped.config, build_axes(scoped.run.parallel, device), device)


def whole_step(trainer: Trainer, index: int) -> Any:
    """A step that is never captured."""
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
