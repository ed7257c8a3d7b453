"""Captures by libraries that fail, and what they leave."""

import gc
from typing import Any

import torch
from torch import nn

from fsdp_core.graph import library_graphs
from fsdp_core.graph.capture_session import CaptureAborted
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer
from tests.dist.library_graphs_stand_in import stood_in
from tests.dist.scope_programs import STEPS, WARMUP, Scoped, act
from tests.dist.train_layout_programs import DEVICE

FAILING_CALL = {
    "te": {"warm-up": 1, "capture": 3, "backward": 0},
    "torch": {"warm-up": 2, "capture": 4, "backward": 0},
}
"""Of the last layer's attention: for torch's maker it runs once before."""


def _fail(*_: object) -> None:
    raise ZeroDivisionError("told to")


class Failing:
    """A module's forward that fails at one call; 0: in the backward of its first."""

    def __init__(self, plain: Any, call: int) -> None:
        self.plain, self.left = plain, call

    def __call__(self, x: torch.Tensor, *args: Any) -> Any:
        """The forward."""
        self.left -= 1
        if self.left == 0:
            _fail()
        out = self.plain(x, *args)
        if self.left == -1 and out.requires_grad:
            out.register_hook(_fail)
        return out


def traces(trainer: Trainer) -> list[Any]:
    """What a capture could leave on modules."""
    found: list[Any] = [gc.isenabled(), library_graphs._Callee.__call__ is nn.Module.__call__]
    for stage in trainer.stages:
        for name, module in stage.named_modules():
            found.append((name, "forward" in vars(module), len(module._forward_hooks)))
            found += [p.grad is None for p in module.parameters(recurse=False)]
    return found


def fail_and_try_again(scoped: Scoped, where: str) -> tuple[str, list[Any], list[Any]]:
    """The error, what of the first attempt is left, and the bits of all steps."""
    trainer = Trainer(scoped.config, build_axes(scoped.run.parallel, DEVICE), DEVICE)
    with stood_in() as te:
        bits = [act(trainer, ("step", index)) for index in range(WARMUP)]
        attention: Any = trainer.stages[-1].get_submodule("layers.1.attn.attention")
        before, text = traces(trainer), ""
        attention.forward = Failing(attention.forward, FAILING_CALL[scoped.capture_by][where])
        try:
            trainer.step(WARMUP)
        except CaptureAborted as error:
            text = str(error)
        del attention.forward
        after = [*traces(trainer), te.is_capturing]
        left = [pair for pair in zip([*before, False], after, strict=True) if pair[0] != pair[1]]
        bits += [act(trainer, ("step", index)) for index in range(WARMUP, STEPS)]
        assert trainer.counts.captured
    trainer.close()
    return text, left, bits
