"""A program that rounds at random: a sample of how far rounding takes it.

    first training forward, or the first step that the script tells   the mode begins
    what the recorder does                                            as usual, outside of the mode
    the program ends                                                  was it still in force?

Each rank has a seed of its own. A mode of torch's dispatcher sees operators of its thread and of
its backward passes. It keeps torch.compile out, so that compiled parts run eagerly; what was
compiled before it began, and what a CUDA graph replays, would not round at random: such a run is
not judged.
"""

import contextlib
import sys
import threading
from typing import Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from harness.recorder.capture import HostGraph
from harness.recorder.session import Session

RANKS = 1 << 20
"""Seeds of a run's ranks are next to each other, those of runs further away."""


class CannotRound(RuntimeError):
    """The program does not round at random all the time."""

    deltazero_what = "unsupported"


class Rounding:
    """The mode of one rank's process. One of a run that rounds as usual does nothing."""

    def __init__(self, session: Session) -> None:
        """Take the run's seed.

        Raises:
            CannotRound: the mode cannot be imported here.
        """
        self._mode: Any = None
        self._thread: threading.Thread | None = None
        self._num_compiled = _num_compiled()
        if not session.rounding:
            return
        try:
            from fsdp_core.rounding import RandomRounding
        except ImportError as error:
            message = f"a run that rounds at random needs fsdp_core.rounding: {error}"
            raise CannotRound(message) from error
        self._mode = RandomRounding(session.rounding * RANKS + session.rank)

    def begin(self) -> None:
        """Round at random from now on."""
        if self._mode is not None and self._thread is None:
            self._thread = threading.current_thread()
            self._mode.__enter__()

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """Inside operators round as usual."""
        has_begun = self._thread is not None
        return _disable_current_modes() if has_begun else contextlib.nullcontext()

    def end(self) -> None:
        """Round as usual again.

        Raises:
            CannotRound: the program did not round at random all the time.
        """
        # A run that never began has no step: it is no sample.
        if self._mode is None or self._thread is None:
            return
        if threading.current_thread() is self._thread:
            if self._mode not in _get_current_dispatch_mode_stack():
                raise CannotRound("another dispatch mode of the program ended random rounding")
            if _get_current_dispatch_mode_stack()[-1] is self._mode:
                self._mode.__exit__(None, None, None)
        self._mode = None
        if _num_compiled() > self._num_compiled:
            raise CannotRound("what torch.compile made before training does not round at random")

    def refuse_captures(self) -> None:
        """See that the program captures no graph, whose replays would round as usual."""

        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            raise CannotRound(
                "replays of a graph do not round at random: expected an eager reference"
            )

        for kind in (torch.cuda.CUDAGraph, HostGraph):
            setattr(kind, "capture_begin", capture_begin)  # noqa: B010 - not its type


def _num_compiled() -> int:
    """Graphs that torch.compile has made in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"].get("unique_graphs", 0))
