"""What a step of a rank launched, counted by name: so that two nights can be compared in it.

    operators   in the first step, which no graph replays yet: what torch dispatches, by overload,
                collectives among them
    kernels     on CUDA, in the last step: what the device ran, replays of graphs included

Both are counts, so two runs that chose other kernels differ by name, and none of it is a time. The
first costs some microseconds an operator; the second starts CUDA's profiler. Where parts are
compiled, operators are not counted: a mode of the dispatcher would keep the compiler out.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_core.train import Trainer
from harness.records import EventRecord

EVENT = "launched"


class _Operators(TorchDispatchMode):
    """Counts what is dispatched inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Launched:
    """Counts of one rank. `wanted` is false where the run was not asked for them."""

    def __init__(self, trainer: Trainer, *, wanted: bool) -> None:
        self._trainer, self._wanted = trainer, wanted
        self.counts: dict[str, dict[str, int]] = {}

    @contextlib.contextmanager
    def counting(self, step: int) -> Iterator[None]:
        """Count what `step` launches, if it is one that is looked at."""
        trainer = self._trainer
        if self._wanted and step == 0 and not trainer.config.compile:
            with (operators := _Operators()):
                yield
            self.counts["operators"] = dict(sorted(operators.counts.items()))
        elif self._wanted and trainer.device.is_cuda and step == trainer.config.steps - 1:
            trainer.device.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                yield
                trainer.device.synchronize()
            names = Counter(
                event.name
                for event in profiled.events()
                if event.device_type == torch.autograd.DeviceType.CUDA
            )
            self.counts["kernels"] = dict(sorted(names.items()))
        else:
            yield

    def event(self, rank: int, step: int) -> EventRecord:
        """The counts, to be written at the end of a run."""
        return EventRecord(name=EVENT, rank=rank, step=step, detail=dict(self.counts))
