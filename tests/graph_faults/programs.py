"""Programs that faults are planted in, and what of a run of one can be compared.

    a program   steps, and after each what a user or the harness could look at
    a leg       the program in one way: eager or graphed, with the fault or without, stressed or not

Every program captures in step `WARMUP`. Ranks agree after each step on whether one was stopped, so
that no rank waits for another that will not come.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from fsdp_core.device import Device

STEPS, WARMUP = 6, 2
"""Two eager steps, then one that captures, then three that only replay."""

Bits = tuple[int, ...]
Digests = dict[str, Bits]


class Program(Protocol):
    """A training on one rank; `close` before its process group is destroyed."""

    device: Device

    def step(self, index: int) -> None:
        """Run a step."""

    def loss(self) -> torch.Tensor:
        """That of the last step: a float32 scalar."""

    def digests(self) -> Digests:
        """Of gradients, weights, moments and random states after the last step."""

    def weights(self) -> list[torch.Tensor]:
        """This rank's weights, as a checkpoint would hold them."""

    def close(self) -> None:
        """Drop graphs and wait."""


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One way of running a program.

    Attributes:
        planted: with the fault.
        stress: names of stressors.
    """

    graphed: bool = True
    planted: bool = False
    ledger: bool = False
    stress: tuple[str, ...] = ()


class Moments:
    """What is done to a program while it runs, by the step before which it is done."""

    def __init__(self) -> None:
        self._actions: list[tuple[int, Callable[[Program], None]]] = []

    def before(self, step: int, action: Callable[..., None]) -> None:
        """Call `action(program)` before that step."""
        self._actions.append((step, action))

    def reached(self, step: int, program: Program) -> None:
        """Do what is to be done before that step."""
        for at, action in self._actions:
            if at == step:
                action(program)


Planting = Callable[[Moments], contextlib.AbstractContextManager[object]]
"""A fault: patches what it has to inside the context, and says what is done before which step."""


@dataclass
class Shown:
    """What one rank saw of a run.

    Attributes:
        losses: bits of each step's.
        stopped_at: step that raised on some rank, or -1.
        said: what was raised here, or "".
        weights: hash of the bytes of the last.
    """

    losses: list[int] = field(default_factory=list)
    digests: list[Digests] = field(default_factory=list)
    weights: str = ""
    stopped_at: int = -1
    said: str = ""


def run_leg(
    make: Callable[[Leg, Device], Program], leg: Leg, planting: Planting, device: Device
) -> Shown:
    """All steps of a leg on this rank, as far as it comes."""
    shown, moments = Shown(), Moments()
    with planting(moments), contextlib.ExitStack() as stack:
        program: Program | None = None
        for step in range(STEPS):
            error = ""
            try:
                if program is None:
                    program = make(leg, device)
                    stack.callback(program.close)
                moments.reached(step, program)
                # Steps have a stream of their own; what is done, and looked at, between them not.
                device.synchronize()
                program.step(step)
                device.synchronize()
                shown.losses.append(int(program.loss().view(torch.int32).item()))
                shown.digests.append(program.digests())
            except Exception as raised:  # noqa: BLE001  (the answer)
                error = f"{type(raised).__name__}: {raised}"
            if _anywhere(bool(error)):
                shown.stopped_at, shown.said = step, error
                return shown
        assert program is not None
        shown.weights = hash_of(program.weights())
    return shown


def _anywhere(stopped: bool) -> bool:
    found: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(found, stopped)
    return any(found)


def hash_of(tensors: list[torch.Tensor]) -> str:
    """Of the bytes of tensors, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def make_device(kind: str) -> Device:
    """This rank's device."""
    return Device(kind, int(os.environ.get("LOCAL_RANK", "0")) if kind == "cuda" else 0)


@contextlib.contextmanager
def nothing(moments: Moments) -> Iterator[None]:
    """No fault."""
    del moments
    yield
