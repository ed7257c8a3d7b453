"""What makes graphs, and the simplest use of one: of a function that runs forward and backward.

Parts of a step that autograd joins are captured by `fsdp_core.graph.graphed_callable`.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from fsdp_core.device import Device
from fsdp_core.graph.cuda_graph import CudaGraph, MemoryPool
from fsdp_core.graph.host_graph import HostGraph
from fsdp_core.graph.ledger import Ledger, Resolver
from fsdp_core.graph.recorder import Recording

T = TypeVar("T")


class Graph(Protocol):
    """Recorded device work that can be run again without the program."""

    recording: Recording

    def capture(self, function: Callable[[], T]) -> T:
        """Record `function` without any effect on its inputs."""

    def replay(self) -> None:
        """Run the recorded work."""

    def reset(self) -> None:
        """Release what the graph holds."""


class Spec(NamedTuple):
    """What memory a tensor takes."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Spec":
        """That of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    @property
    def is_dense(self) -> bool:
        """Whether every element has a place of its own and there is none between them."""
        dims = sorted((st, sz) for sz, st in zip(self.shape, self.stride, strict=True) if sz != 1)
        expected = 1
        for stride, size in dims:
            if stride != expected:
                return False
            expected *= size
        return True


class GraphMaker:
    """Makes graphs for one device; CUDA graphs of one maker share a private memory pool.

    Args:
        generators: that captured work draws from, beside the device's default one. On the CPU there
            are none: streams of random numbers take turns with the default generator there.
        holds_compiled: see `HostGraph`.
    """

    def __init__(
        self,
        device: Device,
        generators: Sequence[torch.Generator] = (),
        *,
        holds_compiled: bool = False,
    ) -> None:
        self.device, self.generators = device, tuple(generators)
        self._holds_compiled = holds_compiled
        self._memory_pool = MemoryPool() if device.is_cuda else None
        self._shared: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()

    def shared(self, purpose: str, specs: Sequence[Spec]) -> tuple[torch.Tensor, ...]:
        """Zeros like `specs`, the same memory for everyone who asks for the same.

        For what is written before a replay or in it and is read up right after it: graphs that run
        one after another can all have it in one place.
        """
        used: Counter[Spec] = Counter()
        found = []
        for spec in specs:
            key = (purpose, spec, used[spec])
            used[spec] += 1
            tensor = self._shared.get(key)
            if tensor is None:
                tensor = torch.empty_strided(
                    spec.shape, spec.stride, dtype=spec.dtype, device=self.device.torch_device
                ).zero_()
                self._shared[key] = tensor
            found.append(tensor)
        return tuple(found)

    @property
    def pool(self) -> Any:
        """The memory pool's id as torch knows it, for graphs that others make; None on the CPU."""
        return None if self._memory_pool is None else self._memory_pool.id

    def new(self) -> Graph:
        """An empty graph."""
        if self._memory_pool is not None:
            return CudaGraph(self.device, self._memory_pool, self.generators)
        return HostGraph(self.device, holds_compiled=self._holds_compiled)


class CapturedFunction:
    """One graph of `function`, which takes its inputs from static tensors.

    Args:
        resolve: names every tensor that the graph may use; None leaves the ledger out.

    Attributes:
        replays: launches.
    """

    def __init__(
        self, maker: GraphMaker, function: Callable[[], T], resolve: Resolver | None
    ) -> None:
        self.graph, self.replays = maker.new(), 0
        # The function's own references (model, inputs) must live as long as the graph: a graph
        # holds addresses, and over freed memory it faults or reads what came after.
        self._function: Callable[[], Any] | None = function
        self.result: Any = self.graph.capture(function)
        self.ledger = Ledger(self.graph.recording, resolve) if resolve else None

    def __call__(self) -> Any:
        """Replay and return the captured result; its tensors are overwritten by each replay.

        Raises:
            StaleAddress: something that the graph reads or writes has moved.
        """
        if self.ledger is not None:
            self.ledger.check()
        self.graph.replay()
        self.replays += 1
        return self.result

    def reset(self) -> None:
        """Drop the graph."""
        self.graph.reset()
        self._function = self.result = None
