"""What makes graphs, and functions as graphs: of a whole step, or of a part that autograd joins.

    CapturedFunction    one graph of a function that runs forward and backward itself
    GraphedCallable     a forward graph and a backward graph, joined to autograd

Of callables that share a memory pool the captures must be in the order in which they run: memory
that a forward saved is used again as soon as its backward is captured.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from fsdp_core.device import Device
from fsdp_core.dispatch import opens_itself
from fsdp_core.graph.capture_session import Undo, tensor_hooks_off
from fsdp_core.graph.device_graphs import CudaGraph, HostGraph, MemoryPool
from fsdp_core.graph.recorder import CaptureRefused, Ledger, Recording, Resolver

T = TypeVar("T")
Tensors = tuple[torch.Tensor, ...]
_LEAF = "torch::autograd::AccumulateGrad"


class Spec(NamedTuple):
    """What memory a tensor takes."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Spec":
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
    `generators`: that captured work draws from, beside the device's default one; none on the CPU.
    `holds_compiled`: see `HostGraph`.
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
        """Zeros like `specs`, the same memory for everyone who asks for the same. For what is
        written before a replay or in it and is read up right after it.
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

    def new(self) -> CudaGraph | HostGraph:
        if self._memory_pool is not None:
            return CudaGraph(self.device, self._memory_pool, self.generators)
        return HostGraph(self.device, holds_compiled=self._holds_compiled)


class CapturedFunction:
    """One graph of `function`, which takes its inputs from static tensors. `resolve` names every
    tensor that the graph may use; None leaves the ledger out.
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
        """Replay and return the captured result, which each replay overwrites. `StaleAddress` if
        something that the graph uses has moved.
        """
        if self.ledger is not None:
            self.ledger.check()
        self.graph.replay()
        self.replays += 1
        return self.result

    def reset(self) -> None:
        self.graph.reset()
        self._function = self.result = None


@dataclass(slots=True, weakref_slot=True, eq=False)
class Pending:
    """A forward that awaits its backward, which autograd's node holds; `after` follows eagerly."""

    after: Callable[[], None] | None = None
    is_done: bool = False


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What is captured: a function of tensors.

    name: as errors and ledgers show it, `layers.3.attn`.
    function: takes tensors by position and returns a tensor or a tuple of tensors.
    samples: like the inputs to come, values included; those that require grad get one.
    parameters: those that get gradients, in the order in which autograd is to bring them.
    state: what the function changes and no operator of torch shows.
    modules: that the function calls, for makers that look into them.
    relied: what it uses beside its parameters and no operator shows, for ledgers.
    resolve: names every tensor that the graphs may use; None leaves the ledgers out.
    on_replay: called at each launch.
    """

    name: str
    function: Callable[..., torch.Tensor | Tensors]
    samples: Tensors
    parameters: tuple[nn.Parameter, ...] = ()
    state: Sequence[torch.Tensor] = ()
    modules: tuple[nn.Module, ...] = ()
    relied: Callable[[], Iterable[torch.Tensor]] = tuple
    resolve: Resolver | None = None
    on_replay: Callable[[], None] = lambda: None

    def ledger(
        self,
        recording: Recording,
        partner: Recording | None = None,
        own: Resolver | None = None,
    ) -> Iterator[Ledger]:
        """The ledger of a graph, if there are names; parameters are where the graph reads them."""
        if self.resolve is not None:
            # Kernels of libraries read weights past torch's dispatcher.
            relied = (*self.parameters, *self.relied())
            yield Ledger(recording, self.resolve, partner, own=own, relied=relied, within=self.name)


class Replayed:
    """What all graphs of a segment have in common, whoever captured them: counts and checks.
    `captures` and `replays` count graphs and launches, of the forward and of the backward; `inputs`
    are static: a replay copies into them.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.captures, self.replays = [0, 0], [0, 0]
        self.ledgers: list[Ledger] = []
        self.inputs = tuple(
            s.detach().clone().requires_grad_(s.requires_grad) for s in segment.samples
        )
        self._pending: weakref.ref[Pending] | None = None

    @property
    def name(self) -> str:
        return self.segment.name

    @property
    def is_waiting(self) -> bool:
        """Whether the last forward still awaits its backward."""
        last = self._pending() if self._pending is not None else None
        return last is not None and not last.is_done

    def _require_captured(self) -> None:
        if not self.captures[0]:
            raise RuntimeError(f"Expected a captured forward of {self.name}, got an empty graph.")

    def _check(self, tensors: Tensors) -> None:
        """Refuse what must not be replayed: see `GraphedCallable.__call__`."""
        self._require_captured()
        if len(tensors) != len(self.inputs):
            raise ValueError(
                f"Expected {len(self.inputs)} inputs of {self.name}, got {len(tensors)}."
            )
        for number, (x, sample) in enumerate(zip(tensors, self.inputs, strict=True)):
            if (x.shape, x.dtype, x.device) != (sample.shape, sample.dtype, sample.device):
                raise ValueError(
                    f"Expected the captured input {number} of {self.name}, {_kind(sample)}, got "
                    f"{_kind(x)}."
                )
            if x.requires_grad and not sample.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"Expected input {number} of {self.name} without a gradient, as captured, got "
                    "one that requires grad. Detach it, or capture with such a sample."
                )
        if self.is_waiting:
            raise RuntimeError(
                f"Expected {self.name} to be free, got one whose forward still awaits its "
                "backward. Capture it for each microbatch between forward and backward."
            )

    def _require_first_backward(self, pending: Pending) -> None:
        if pending.is_done:
            raise RuntimeError(
                f"Expected one backward of {self.name} for each forward, got a second: its graphs "
                "give up what the forward saved. Run it without graphs to keep it."
            )

    def _count(self, direction: int) -> None:
        self.replays[direction] += 1
        self.segment.on_replay()

    def _end_backward(self, pending: Pending) -> None:
        self._count(1)
        pending.is_done = True
        if pending.after is not None:
            pending.after()


class GraphedCallable(Replayed):
    """The forward and backward graphs of a segment, with the tensors that they read and write."""

    def __init__(self, maker: GraphMaker, segment: Segment) -> None:
        super().__init__(segment)
        self._maker = maker
        # Parameters that get a gradient; until the backward is captured, those that want one.
        self._trained = tuple(p for p in segment.parameters if p.requires_grad)
        # Inputs that get a gradient; until then, those that want one.
        self._connected = tuple(s.requires_grad for s in segment.samples)
        self._forward, self._backward = maker.new(), maker.new()
        self._stream: Any = None
        self._warmed: list[Spec | None] = []
        self._returns_tuple = False
        self._differentiable: tuple[bool, ...] = ()
        self._outputs: Tensors = ()
        self._grad_outputs: Tensors = ()
        self._grads: tuple[torch.Tensor | None, ...] = ()
        self._versions: tuple[int, ...] = ()

    # ---- capture

    def warm_up(self, iterations: int = 2) -> None:
        """Run forward and backward eagerly on the samples, on the stream of the captures to come.
        Generators, the segment's `state`, and what operators write of earlier memory are put back.
        """
        self._stream = self._maker.device.current_stream()
        with tensor_hooks_off(self.segment.parameters), self._undo() as undo, undo.watching():
            for _ in range(iterations):
                self._warmed = self._run_eagerly()

    def _undo(self) -> Undo:
        return Undo(self._maker.device, self._maker.generators, self.segment.state)

    def _run(self) -> Tensors:
        """The function on the static inputs, its outputs as a tuple."""
        result = self.segment.function(*self.inputs)
        self._returns_tuple = isinstance(result, tuple)
        outputs = result if isinstance(result, tuple) else (result,)
        for number, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor):
                raise ValueError(
                    f"Expected tensors out of {self.name}, got {type(output).__name__} as output "
                    f"{number}."
                )
        return outputs

    def _surface(self) -> Tensors:
        return (*(x for x in self.inputs if x.requires_grad), *self._trained)

    def _run_eagerly(self) -> list[Spec | None]:
        """Forward and backward without graphs: what the gradients are like."""
        outputs = tuple(output for output in self._run() if output.requires_grad)
        if not outputs or not self._surface():
            return []
        ones = tuple(map(torch.ones_like, outputs))
        grads = torch.autograd.grad(outputs, self._surface(), ones, allow_unused=True)
        return [None if grad is None else Spec.of(grad) for grad in grads]

    def capture_forward(self) -> None:
        """Capture the forward. `CaptureRefused` if it cannot be, `RuntimeError` if it has been or
        is on another stream than the warm-up.
        """
        self._require_stream()
        if self.captures[0]:
            raise RuntimeError(f"Expected {self.name} to be empty, got a captured one.")
        with tensor_hooks_off(self.segment.parameters):
            with self._undo():
                self._outputs = self._forward.capture(self._run)
                self._differentiable = tuple(output.requires_grad for output in self._outputs)
                self._require_known_leaves()
                self._require_unchanged_inputs()
            self.captures[0] = 1
            self._enter(self._forward.recording)  # while all is where the graph reads it

    def capture_backward(self) -> None:
        """Capture the backward of the captured forward; nothing if none is needed. Raises likewise.
        Gradients like those of the warm-up leave the graph through memory that all graphs of the
        maker share; others have memory of their own.
        """
        self._require_stream()
        self._require_captured()
        outputs = tuple(output for output in self._outputs if output.requires_grad)
        surface = self._surface()
        if not outputs or not surface:
            self._outputs = tuple(output.detach() for output in self._outputs)
            return
        with tensor_hooks_off(self.segment.parameters):
            with self._undo():
                self._capture_backward(outputs, surface)
            self.captures[1] = 1
            self._enter(self._backward.recording, self._forward.recording)

    def _capture_backward(self, outputs: Tensors, surface: Tensors) -> None:
        self._grad_outputs = self._maker.shared(
            "gradients of outputs", [Spec.of(torch.empty_like(output)) for output in outputs]
        )
        dense = [spec for spec in self._warmed if spec is not None and spec.is_dense]
        shared = self._maker.shared("gradients", dense)

        def backward() -> list[torch.Tensor | None]:
            found = torch.autograd.grad(outputs, surface, self._grad_outputs, allow_unused=True)
            return [*_moved_out(found, shared)]

        grads = self._backward.capture(backward)
        # The autograd graph has done its work; the storages it saved belong to the graphs now.
        self._outputs = tuple(output.detach() for output in self._outputs)
        self._keep_connected(grads)

    def _keep_connected(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Let autograd see only what gets a gradient: the rest is not waited for, as in eager."""
        remaining = iter(grads)
        of_inputs = tuple(next(remaining) if wanted else None for wanted in self._connected)
        of_parameters = tuple(remaining)
        self._connected = tuple(grad is not None for grad in of_inputs)
        self._trained = tuple(
            p for p, grad in zip(self._trained, of_parameters, strict=True) if grad is not None
        )
        self._grads = (*of_inputs, *(grad for grad in of_parameters if grad is not None))

    def _require_stream(self) -> None:
        """Libraries and autograd tie what they set up in a warm-up to its stream."""
        device = self._maker.device
        if device.is_cuda and self._stream not in (None, device.current_stream()):
            raise RuntimeError(
                f"Expected the capture of {self.name} on the stream of its warm-up, got another: "
                "enter that stream around both."
            )

    def _require_unchanged_inputs(self) -> None:
        inputs = {x.untyped_storage().data_ptr(): i for i, x in enumerate(self.inputs)}
        for entry in self._forward.recording.external():
            if entry.written and entry.nbytes and entry.address in inputs:
                raise CaptureRefused(
                    f"cannot capture {self.name}: it changes its input {inputs[entry.address]} in "
                    "place, and a replay would change a copy. Change a clone of it."
                )

    def _require_known_leaves(self) -> None:
        """Another tensor would never get its gradient."""
        known = set(map(id, self._surface()))
        nodes = [output.grad_fn for output in self._outputs if output.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            leaf = getattr(node, "variable", None) if node.name() == _LEAF else None
            if leaf is not None and id(leaf) not in known:
                raise CaptureRefused(
                    f"cannot capture {self.name}: it computes with a tensor {_kind(leaf)} that "
                    "needs a gradient and is no input and none of its parameters. Pass it as one, "
                    "or detach it."
                )
            before = {each for each, _ in node.next_functions if each is not None} - seen
            seen |= before
            nodes += before

    def _enter(self, recording: Recording, partner: Recording | None = None) -> None:
        self.ledgers += self.segment.ledger(recording, partner, self.named_tensors)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The static tensors by name, for ledgers."""
        found = {f"{self.name} input {i}": x.data for i, x in enumerate(self.inputs)}
        grads = enumerate(self._grad_outputs)
        found |= {f"{self.name} output gradient {i}": grad for i, grad in grads}
        own = enumerate(self._grads)
        return found | {f"{self.name} gradient {i}": g for i, g in own if g is not None}

    # ---- replay

    def __call__(
        self, *tensors: torch.Tensor, after: Callable[[], None] | None = None
    ) -> torch.Tensor | Tensors:
        """Replay forward now and, when autograd asks, backward. `after` is called when the backward
        has been replayed, before autograd goes on. `ValueError` for inputs unlike the samples,
        `RuntimeError` if the last forward still awaits its backward, `StaleAddress` if something
        that the graph uses has moved.
        """
        self._check(tensors)
        inputs = (
            x if keep else x.detach() for x, keep in zip(tensors, self._connected, strict=True)
        )
        results: Tensors = _Replay.apply(
            self, Pending(after), len(tensors), *inputs, *self._trained
        )
        return results if self._returns_tuple else results[0]

    def replay_forward(self, tensors: Tensors, pending: Pending) -> Tensors:
        """Copy the inputs in, replay, and return aliases of the static outputs."""
        if self.ledgers:
            self.ledgers[0].check()
        own = {static.untyped_storage().data_ptr() for static in self.inputs}
        # An output that is an input comes back as an alias of what is about to be overwritten.
        separate = [x.clone() if _lies_in(x, own) else x for x in tensors]
        for static, x in zip(self.inputs, separate, strict=True):
            static.detach().copy_(x)
        self._forward.replay()
        self._count(0)
        self._pending = weakref.ref(pending)
        self._versions = tuple(output._version for output in self._outputs)
        return tuple(output.detach() for output in self._outputs)

    def replay_backward(
        self, grads: Sequence[torch.Tensor | None], pending: Pending
    ) -> tuple[torch.Tensor | None, ...]:
        """Copy the outputs' gradients in, replay, and return clones of the gradients."""
        self._require_captured()
        self._require_first_backward(pending)
        for number, (output, version) in enumerate(zip(self._outputs, self._versions, strict=True)):
            if output._version != version:
                raise RuntimeError(
                    f"Expected output {number} of {self.name} unchanged until its backward, got "
                    "one that was changed in place. Use an operation out of place."
                )
        if self.ledgers:
            self.ledgers[-1].check()
        wanted = [grad for grad, d in zip(grads, self._differentiable, strict=True) if d]
        for number, (static, grad) in enumerate(zip(self._grad_outputs, wanted, strict=True)):
            if grad is None:
                raise RuntimeError(
                    f"Expected a gradient of each differentiable output of {self.name}, got none "
                    f"of number {number}. Detach in the function what nothing goes on with."
                )
            static.copy_(grad)
        self._backward.replay()
        self._end_backward(pending)
        return tuple(None if grad is None else grad.clone() for grad in self._grads)

    def reset(self) -> None:
        """Drop the graphs and the static tensors; a second time does nothing."""
        self._forward.reset()
        self._backward.reset()
        self.captures, self.ledgers = [0, 0], []
        self.inputs = self._outputs = self._grad_outputs = self._grads = ()
        self._versions = ()


class _Replay(torch.autograd.Function):
    """Replays forward, and backward where autograd gets to it."""

    @staticmethod
    def forward(
        ctx: Any, graph: GraphedCallable, pending: Pending, num_inputs: int, *tensors: torch.Tensor
    ) -> Tensors:
        ctx.graph, ctx.pending = graph, pending
        ctx.set_materialize_grads(False)
        outputs = graph.replay_forward(tensors[:num_inputs], pending)
        ctx.mark_non_differentiable(
            *(out for out, d in zip(outputs, graph._differentiable, strict=True) if not d)
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, *ctx.graph.replay_backward(grads, ctx.pending))


def _moved_out(
    grads: Sequence[torch.Tensor | None], shared: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor | None]:
    """The gradients, each copied to the first place that is like it and free."""
    free = list(shared)
    for grad in grads:
        fits = () if grad is None else (p for p in free if Spec.of(p) == Spec.of(grad))
        place = next(iter(fits), None)
        if grad is None or place is None:
            yield grad
        else:
            free = [each for each in free if each is not place]
            yield place.copy_(grad)


def _lies_in(x: torch.Tensor, storages: set[int]) -> bool:
    # A wrapper (a pending collective's result, say) has no storage, and what it holds is its own.
    return not opens_itself(type(x)) and x.untyped_storage().data_ptr() in storages


def _kind(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"
