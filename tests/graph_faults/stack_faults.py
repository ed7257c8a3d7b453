"""Faults in programs over the interface of graphs, each a context manager over its parts."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from fsdp_core.graph import capture_session
from fsdp_core.graph.hooks import ExtractedHooks
from tests.graph_faults import stack
from tests.graph_faults.programs import WARMUP, Moments, Planting
from tests.graph_faults.stack import StackProgram, blocks_of

CAPTURED = WARMUP + 1


# ---- hooks


@contextlib.contextmanager
def hooks_left_on(moments: Moments) -> Iterator[None]:
    """F01: nothing takes hooks off or refuses them: they act inside of warm-up and capture."""
    del moments
    with mock.patch.object(stack, "hooks_off", return_value=contextlib.nullcontext(None)):
        yield


class _Ramp:
    """A forward hook that scales a layer's output by more each time it is called.

    Counted in a tensor, which graphs hold, or in Python, which they do not.
    """

    def __init__(self, device: torch.device, *, on_device: bool, marked: bool) -> None:
        self.calls: Any = torch.zeros((), device=device) if on_device else 0
        self._cuda_graph_capturable = marked

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """The output, scaled."""
        self.calls += 1
        scaled: torch.Tensor = output * (1 + self.calls / 64)
        return scaled


def _ramped(*, on_device: bool, marked: bool) -> Planting:
    def hook(program: StackProgram) -> None:
        for block in blocks_of(program):
            ramp = _Ramp(program.device.torch_device, on_device=on_device, marked=marked)
            block.up.register_forward_hook(ramp)

    @contextlib.contextmanager
    def plant(moments: Moments) -> Iterator[None]:
        moments.before(0, hook)
        yield

    return plant


ramp_on_device = _ramped(on_device=True, marked=True)
"""A right program: hooks of inner layers that are nothing but work on tensors."""
ramp_in_python = _ramped(on_device=False, marked=True)
"""F02: hooks of inner layers that are said to be so, and count in Python."""
ramp_in_python_refused = _ramped(on_device=False, marked=False)
"""The same without the lie."""


@contextlib.contextmanager
def inner_units_left_alone(moments: Moments) -> Iterator[None]:
    """F02: hooks of units inside act at capture, and at no replay."""
    moments.before(WARMUP, lambda program: setattr(program, "gathers_inner", False))
    yield


@contextlib.contextmanager
def hooks_lost(moments: Moments) -> Iterator[None]:
    """F03: what is put back is what was emptied for the capture."""
    del moments

    def polluted(hooks: ExtractedHooks) -> None:
        for _, _, original, _ in hooks._taken:
            original.clear()
        restore(hooks)

    restore = ExtractedHooks.restore
    with mock.patch.object(ExtractedHooks, "restore", polluted):
        yield


@contextlib.contextmanager
def hooks_doubled(moments: Moments) -> Iterator[None]:
    """F03: hooks are put back beside those that are there."""
    del moments

    def doubled(hooks: ExtractedHooks) -> None:
        taken = list(hooks._taken)
        restore(hooks)
        for owner, attribute, original, _ in taken:
            twice = OrderedDict(original)
            twice.update({number + 10**6: hook for number, hook in original.items()})
            setattr(owner, attribute, twice)

    restore = ExtractedHooks.restore
    with mock.patch.object(ExtractedHooks, "restore", doubled):
        yield


@contextlib.contextmanager
def kernel_bypasses_hooks(moments: Moments) -> Iterator[None]:
    """F05: the kernel reads weights of layers whose hooks nobody runs."""

    def bypass(program: StackProgram) -> None:
        for block in program.model.blocks:
            block.bypasses = True

    moments.before(WARMUP, bypass)
    yield


# ---- objects


@contextlib.contextmanager
def gradients_dereferenced(moments: Moments) -> Iterator[None]:
    """F18: gradients are set to None between replays, which write into them."""
    step = StackProgram.step

    def stepped(program: StackProgram, index: int) -> None:
        if program._whole:
            for parameter in program.model.parameters():
                parameter.grad = None
        step(program, index)

    with mock.patch.object(StackProgram, "step", stepped):
        yield


def one_graph(number: int) -> Planting:
    """F13: every microbatch is replayed from the graph of one, with its flags and decisions."""

    @contextlib.contextmanager
    def plant(moments: Moments) -> Iterator[None]:
        chosen = [number] * stack.MICROBATCHES
        moments.before(WARMUP, lambda program: setattr(program, "chosen", chosen))
        yield

    return plant


# ---- state


@contextlib.contextmanager
def capture_refused(moments: Moments) -> Iterator[None]:
    """A right program whose capture fails, and which trains on eagerly."""
    moments.before(WARMUP, lambda program: setattr(program, "refuses", True))
    yield


@contextlib.contextmanager
def capture_leaves_wreck(moments: Moments) -> Iterator[None]:
    """F47: the same, and nothing that the capture changed is put back."""
    moments.before(WARMUP, lambda program: setattr(program, "refuses", True))

    kept = []

    def put_nothing_back(functions: list[Any]) -> None:
        # Kept: what is off a module comes back when nobody holds it any more.
        kept.extend(functions)
        functions.clear()

    with mock.patch.object(capture_session, "_call", put_nothing_back):
        yield
