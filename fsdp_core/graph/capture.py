"""Graphs of training code over either maker: whole functions, and modules with their backward.

    CapturedFunction   one graph of a function that runs forward and backward itself
    CapturedModule     two graphs of a module, joined to autograd: forward, and backward

Both check the address ledger before each replay. What a captured module needs around its capture
(parameters gathered at stable addresses, side streams idle) is the caller's business.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from fsdp_core.device import Device
from fsdp_core.graph.cuda import CudaGraph, MemoryPool
from fsdp_core.graph.host import HostGraph
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
    """

    def __init__(self, device: Device, generators: Sequence[torch.Generator] = ()) -> None:
        self.device, self.generators = device, tuple(generators)
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
        return HostGraph(self.device)


class CapturedFunction:
    """One graph of `function`, which takes its inputs from static tensors.

    Args:
        resolve: names every tensor that the graph may use; None leaves the ledger out.
    """

    def __init__(
        self, maker: GraphMaker, function: Callable[[], T], resolve: Resolver | None
    ) -> None:
        self.graph = maker.new()
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
        return self.result

    def reset(self) -> None:
        """Drop the graph."""
        self.graph.reset()
        self._function = self.result = None


class CapturedModule:
    """Forward and backward graphs of a module of one tensor argument plus constants.

    The module's input shape, its parameters' addresses and its training mode are fixed at capture.
    One microbatch may be between forward and backward at a time: the graphs have one set of saved
    activations. Of several modules that share a memory pool, capture all forwards in the order of
    the model and then all backwards in the reverse order: memory that a forward saved is reused as
    soon as its backward is captured.

    Args:
        sample: like the inputs to come; its values are not used.
        constants: further arguments, the same at each call; tensors in them stay where they are.
        parameters: those that get a gradient, in the order in which autograd gets them.
        resolve: names every tensor that the graphs may use; None leaves the ledger out.
    """

    def __init__(
        self,
        maker: GraphMaker,
        module: nn.Module,
        sample: torch.Tensor,
        constants: Sequence[Any],
        parameters: Sequence[nn.Parameter],
        *,
        resolve: Resolver | None,
    ) -> None:
        self._device, self._resolve = maker.device, resolve
        original = module.forward
        self._function = lambda x: original(x, *constants)
        self._parameters = tuple(parameters)
        self._input = torch.zeros_like(sample).requires_grad_(sample.requires_grad)
        self._surface = ((self._input,) if sample.requires_grad else ()) + self._parameters
        self._forward, self._backward = maker.new(), maker.new()
        self.ledgers: list[Ledger] = []
        self._output: torch.Tensor
        self._grad_output: torch.Tensor
        self._grads: tuple[torch.Tensor | None, ...] = ()

    def warm_up(self, iterations: int = 2) -> None:
        """Run forward and backward eagerly on the static input, leaving the generators alone."""
        states = self._device.rng_states()
        for _ in range(iterations):
            output = self._function(self._input)
            torch.autograd.grad(output, self._surface, torch.ones_like(output))
            del output
        self._device.set_rng_states(states)

    def capture_forward(self) -> None:
        """Capture the forward pass."""
        self._output = self._forward.capture(lambda: self._function(self._input))
        self._grad_output = torch.zeros_like(self._output)
        self._enter(self._forward.recording, None)

    def capture_backward(self) -> None:
        """Capture the backward pass of the captured forward."""
        grads = self._backward.capture(
            lambda: torch.autograd.grad(self._output, self._surface, self._grad_output)
        )
        self._grads = grads if self._input.requires_grad else (None, *grads)
        # The autograd graph has done its work; the storages it saved belong to the graphs now.
        self._output = self._output.detach()
        self._enter(self._backward.recording, self._forward.recording)

    def _enter(self, recording: Recording, partner: Recording | None) -> None:
        if self._resolve is not None:
            self.ledgers.append(Ledger(recording, self._resolve, partner))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Replay forward now and, when autograd asks, backward."""
        if x.shape != self._input.shape or x.dtype != self._input.dtype:
            raise ValueError(
                f"Expected the captured input {tuple(self._input.shape)} {self._input.dtype}, "
                f"got {tuple(x.shape)} {x.dtype}."
            )
        result: torch.Tensor = _Replay.apply(self, x, *self._parameters)
        return result

    def replay_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Copy the input in, replay, and return an alias of the static output."""
        if self.ledgers:
            self.ledgers[0].check()
        if x.data_ptr() != self._input.data_ptr():
            self._input.data.copy_(x)
        self._forward.replay()
        return self._output.detach()

    def replay_backward(self, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Copy the output's gradient in, replay, and return the static gradients.

        They are the very tensors, held here too: autograd copies what it cannot have to itself.
        Given an alias of its own, it would keep that as a parameter's `grad`, and the next replay
        would overwrite what was to be added to.
        """
        if self.ledgers:
            self.ledgers[1].check()
        if grad.data_ptr() != self._grad_output.data_ptr():
            self._grad_output.copy_(grad)
        self._backward.replay()
        return self._grads

    def reset(self) -> None:
        """Drop both graphs."""
        self._forward.reset()
        self._backward.reset()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, captured: CapturedModule, x: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        del parameters
        ctx.captured = captured
        return captured.replay_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.captured.replay_backward(grad))
