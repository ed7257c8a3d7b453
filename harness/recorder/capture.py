"""Graphs of a program that is to run with a GPU and without: torch.cuda's own, or of the host.

    from harness.recorder.capture import CUDAGraph, graph, make_graphed_callables

    captured = CUDAGraph()
    with graph(captured):
        loss = step()
    captured.replay()

Names, arguments and meaning are those of `torch.cuda`, and where torch sees a GPU so are the
objects. Elsewhere a capture records operators of the CPU, has no effect, and a replay runs them on
the same storages (`fsdp_core.graph.device_graphs`), outside of the harness as well.
"""

import contextlib
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

_capturing: "HostGraph | None" = None


def is_capturing() -> bool:
    """Whether a host graph is being captured; of CUDA graphs torch knows."""
    return _capturing is not None


class HostGraph:
    """What `torch.cuda.CUDAGraph` is on a GPU, over operators of the CPU; arguments are unused.

    What no replay can do again (`Tensor.item`, shapes that depend on data) ends the capture with
    `fsdp_core.graph.recorder.CaptureRefused`, a `RuntimeError` that names it and its place.
    """

    def __init__(self) -> None:
        from fsdp_core.device import Device
        from fsdp_core.graph import device_graphs  # here: who captures nothing need not import it

        self._graph = device_graphs.HostGraph(Device("cpu"))
        self._capture: AbstractContextManager[None] | None = None
        self._is_captured = False
        self.failed: BaseException | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Record operators of this thread (`RuntimeError`: another capture, or not reset)."""
        global _capturing
        del pool, capture_error_mode
        if _capturing is not None or self._is_captured:
            raise RuntimeError("Expected one capture at a time, into a graph that holds none.")
        self._graph.reset()
        self._capture = self._graph.capturing()
        self._capture.__enter__()
        _capturing = self

    def capture_end(self) -> None:
        """Stop to record (`RuntimeError`: no capture, or none to replay); raises `failed`."""
        global _capturing
        capture, self._capture = self._capture, None
        error, self.failed = self.failed, None
        if capture is None:
            raise RuntimeError("Expected capture_begin before capture_end.")
        _capturing = None
        capture.__exit__(type(error) if error else None, error, None)
        if error is not None:
            raise error
        self._is_captured = True

    def replay(self) -> None:
        """Run what was recorded (`RuntimeError`: nothing; or a storage has moved or shrunk)."""
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()
        self._is_captured = False

    def pool(self) -> tuple[int, int]:
        """A token, as other graphs may be captured with; host graphs share no memory."""
        return (0, 0)

    def scratch(self) -> Iterator[tuple[int, int]]:
        arena = self._graph.arena
        if arena is not None and arena.numel():
            yield arena.data_ptr(), arena.data_ptr() + arena.numel()


@contextlib.contextmanager
def _host_capture(captured: HostGraph) -> Iterator[None]:
    """What `torch.cuda.graph` is to a `CUDAGraph`."""
    captured.capture_begin()
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - raised below, once the capture has ended
        captured.failed = error
    captured.capture_end()


class _Torch:
    """torch, with a `cuda` whose graphs are the host's and whose streams are the one of the CPU."""

    cuda = types.SimpleNamespace(
        CUDAGraph=HostGraph,
        graph=lambda captured, **_: _host_capture(captured),
        Stream=lambda: None,
        stream=contextlib.nullcontext,
        synchronize=lambda: None,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def CUDAGraph() -> Any:  # noqa: N802 - torch's name
    """A new `torch.cuda.CUDAGraph` where torch sees a GPU, else a `HostGraph`."""
    return torch.cuda.CUDAGraph() if torch.cuda.is_available() else HostGraph()


def graph(cuda_graph: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """Capture what runs inside, as `torch.cuda.graph` does; after an error nothing is changed."""
    if isinstance(cuda_graph, HostGraph):
        return _host_capture(cuda_graph)
    return torch.cuda.graph(cuda_graph, *args, **kwargs)


def make_graphed_callables(callables: Any, sample_args: Any, **kwargs: Any) -> Any:
    """Graphed versions of functions and modules: `torch.cuda.make_graphed_callables`.

    Where torch sees no GPU it is torch's function all the same, over host graphs: static inputs,
    outputs and gradients are what they are on a GPU.
    """
    ours = function = torch.cuda.make_graphed_callables
    if not torch.cuda.is_available():
        names = {**function.__globals__, "torch": _Torch(), "graph_pool_handle": lambda: (0, 0)}
        ours = types.FunctionType(function.__code__, names, argdefs=function.__defaults__)
    return ours(callables, sample_args, **kwargs)
