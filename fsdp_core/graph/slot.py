"""A slot of a captured segment: two graphs, the tensors they read and write, and whose turn it is.

For `fsdp_core.graph.segment`, which says what segments and slots are.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_core.dispatch import opens_itself
from fsdp_core.graph.graph import GraphMaker, Spec
from fsdp_core.graph.ledger import Ledger
from fsdp_core.graph.recorder import CaptureRefused, Recording

Tensors = tuple[torch.Tensor, ...]
_LEAF = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Something to capture: a function of tensors.

    Attributes:
        name: as errors and ledgers show it, `layers.3.attn`.
        function: takes tensors by position and returns a tensor or a tuple of tensors; whatever
            else it needs is bound.
        samples: like the inputs to come, values included, as warming up computes with them;
            `requires_grad` says which get a gradient.
        parameters: those that get gradients, in the order in which autograd is to bring them.
        state: persistent tensors that the function changes by means that torch does not see (a
            library's own kernels). What torch's operators change is found without being named.
    """

    name: str
    function: Callable[..., torch.Tensor | Tensors]
    samples: Tensors
    parameters: tuple[nn.Parameter, ...]
    state: Tensors = ()


class Pending:
    """A forward that awaits its backward; autograd's node holds it, the slot only looks at it.

    Attributes:
        is_done: the backward ran.
        after: what is done once it has been replayed, eagerly.
    """

    __slots__ = ("__weakref__", "after", "is_done")

    def __init__(self, after: Callable[[], None] | None = None) -> None:
        self.is_done = False
        self.after = after


class Slot:
    """The graphs of one slot and the tensors that they read and write.

    Attributes:
        trained: parameters that get a gradient; until the backward is captured, those that want
            one.
        returns_tuple: whether the function returns a tuple.
        differentiable: for each output, whether it gets a gradient.
        replays: launches of the forward graph, and of the backward one.
    """

    def __init__(
        self,
        maker: GraphMaker,
        segment: Segment,
        number: int,
        on_replay: Callable[[int], None],
    ) -> None:
        self._number, self._name, self._on_replay = number, segment.name, on_replay
        self._maker = maker
        self._function = segment.function
        self.trained = tuple(p for p in segment.parameters if p.requires_grad)
        self._inputs = tuple(
            s.detach().clone().requires_grad_(s.requires_grad) for s in segment.samples
        )
        self._wanted = tuple(s.requires_grad for s in segment.samples)
        self._connected = self._wanted
        self._forward, self._backward = maker.new(), maker.new()
        self._is_captured = False
        self.replays = [0, 0]
        self.returns_tuple = False
        self.differentiable: tuple[bool, ...] = ()
        self.ledgers: list[Ledger] = []
        self._outputs: Tensors = ()
        self._grad_outputs: Tensors = ()
        self._grads: tuple[torch.Tensor | None, ...] = ()
        self._pending: weakref.ref[Pending] | None = None
        self._versions: tuple[int, ...] = ()

    # ---- capture

    def _run(self) -> Tensors:
        """The function on the slot's inputs, its outputs as a tuple."""
        result = self._function(*self._inputs)
        self.returns_tuple = isinstance(result, tuple)
        outputs = result if isinstance(result, tuple) else (result,)
        for number, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor):
                raise ValueError(
                    f"Expected tensors out of {self._name}, got {type(output).__name__} as output "
                    f"{number}."
                )
        return outputs

    def _surface(self) -> Tensors:
        """What gets a gradient."""
        return (*(x for x in self._inputs if x.requires_grad), *self.trained)

    def run_forward(self) -> None:
        """The forward without a graph."""
        self._outputs = self._run()

    def run_backward(self) -> list[Spec | None]:
        """The backward of `run_forward` without a graph: what its gradients are like."""
        outputs = tuple(output for output in self._outputs if output.requires_grad)
        self._outputs = ()
        if not outputs or not self._surface():
            return []
        ones = tuple(map(torch.ones_like, outputs))
        grads = torch.autograd.grad(outputs, self._surface(), ones, allow_unused=True)
        return [None if grad is None else Spec.of(grad) for grad in grads]

    def capture_forward(self) -> Recording:
        """Capture the forward; its recording."""
        if self._is_captured:
            raise RuntimeError(
                f"Expected slot {self._number} of {self._name} to be empty, got a captured one."
            )
        self._outputs = self._forward.capture(self._run)
        self.differentiable = tuple(output.requires_grad for output in self._outputs)
        self._require_known_leaves()
        recording = self._forward.recording
        inputs = {x.untyped_storage().data_ptr(): i for i, x in enumerate(self._inputs)}
        for entry in recording.external():
            if entry.written and entry.nbytes and entry.address in inputs:
                raise CaptureRefused(
                    f"cannot capture {self._name}: it changes its input {inputs[entry.address]} in "
                    "place, and a replay would change a copy. Change a clone of it."
                )
        self._is_captured = True
        return recording

    def _require_known_leaves(self) -> None:
        """Refuse a function whose gradients would go where no replay brings them."""
        known = set(map(id, self._surface()))
        nodes = [output.grad_fn for output in self._outputs if output.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            leaf = getattr(node, "variable", None) if node.name() == _LEAF else None
            if leaf is not None and id(leaf) not in known:
                raise CaptureRefused(
                    f"cannot capture {self._name}: it computes with a tensor {_kind(leaf)} that "
                    "needs a gradient and is no input and none of its parameters. Pass it as one, "
                    "or detach it."
                )
            before = {each for each, _ in node.next_functions if each is not None} - seen
            seen |= before
            nodes += before

    def capture_backward(
        self, warmed: Sequence[Spec | None] = ()
    ) -> tuple[Recording, Recording] | None:
        """Capture the backward; its recording and the forward's, or None if there is nothing.

        Args:
            warmed: what gradients were like in the warm-up, if there was one. Such gradients leave
                the graph through memory that all graphs share; others have memory of their own.
        """
        self._require_captured()
        outputs = tuple(output for output in self._outputs if output.requires_grad)
        surface = self._surface()
        if not outputs or not surface:
            self._outputs = tuple(output.detach() for output in self._outputs)
            return None
        self._grad_outputs = self._maker.shared(
            "gradients of outputs", [Spec.of(torch.empty_like(output)) for output in outputs]
        )
        dense = [spec for spec in warmed if spec is not None and spec.is_dense]
        shared = self._maker.shared("gradients", dense)

        def backward() -> list[torch.Tensor | None]:
            found = torch.autograd.grad(outputs, surface, self._grad_outputs, allow_unused=True)
            return [*_moved_out(found, shared)]

        grads = self._backward.capture(backward)
        # The autograd graph has done its work; the storages it saved belong to the graphs now.
        self._outputs = tuple(output.detach() for output in self._outputs)
        self._keep_connected(grads)
        return self._backward.recording, self._forward.recording

    def _keep_connected(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Let autograd see only what gets a gradient: the rest is not waited for, as in eager."""
        remaining = iter(grads)
        of_inputs = tuple(next(remaining) if wanted else None for wanted in self._wanted)
        of_parameters = tuple(remaining)
        self._connected = tuple(grad is not None for grad in of_inputs)
        self.trained = tuple(
            p for p, grad in zip(self.trained, of_parameters, strict=True) if grad is not None
        )
        self._grads = (*of_inputs, *(grad for grad in of_parameters if grad is not None))

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The slot's own tensors by name, for ledgers."""
        start = f"{self._name} slot {self._number}"
        found = {f"{start} input {i}": x.data for i, x in enumerate(self._inputs)}
        found |= {f"{start} output gradient {i}": g for i, g in enumerate(self._grad_outputs)}
        grads = enumerate(self._grads)
        return found | {f"{start} gradient {i}": grad for i, grad in grads if grad is not None}

    def _require_captured(self) -> None:
        if not self._is_captured:
            raise RuntimeError(
                f"Expected a captured forward of {self._name} in slot {self._number}, got an empty "
                "graph."
            )

    # ---- replay

    @property
    def is_waiting(self) -> bool:
        """Whether the last forward still awaits its backward."""
        last = self._pending() if self._pending is not None else None
        return last is not None and not last.is_done

    def check(self, tensors: Tensors) -> None:
        """Refuse inputs that the graphs do not fit, and a slot that is in use."""
        self._require_captured()
        check_inputs(self._name, self._inputs, tensors)
        if self.is_waiting:
            raise RuntimeError(
                f"Expected slot {self._number} of {self._name} to be free, got one whose forward "
                "still awaits its backward: a replay would overwrite what it saved. Capture as "
                "many slots as there are microbatches between forward and backward."
            )

    def connected(self, tensors: Tensors) -> Tensors:
        """The inputs, those cut from autograd that get no gradient."""
        return tuple(
            x if keep else x.detach() for x, keep in zip(tensors, self._connected, strict=True)
        )

    def replay_forward(self, tensors: Tensors, pending: Pending) -> Tensors:
        """Copy the inputs in, replay, and return aliases of the static outputs."""
        if self.ledgers:
            self.ledgers[0].check()
        own = {static.untyped_storage().data_ptr() for static in self._inputs}
        # An output that is an input comes back as an alias of what is about to be overwritten.
        apart = [x.clone() if _lies_in(x, own) else x for x in tensors]
        for static, x in zip(self._inputs, apart, strict=True):
            static.detach().copy_(x)
        self._forward.replay()
        self.replays[0] += 1
        self._on_replay(1)
        self._pending = weakref.ref(pending)
        self._versions = tuple(output._version for output in self._outputs)
        return tuple(output.detach() for output in self._outputs)

    def replay_backward(
        self, grads: Sequence[torch.Tensor | None], pending: Pending
    ) -> tuple[torch.Tensor | None, ...]:
        """Copy the outputs' gradients in, replay, and return clones of the gradients."""
        self._require_captured()
        if pending.is_done:
            raise RuntimeError(
                f"Expected one backward of {self._name} for each forward, got a second: its graphs "
                "give up what the forward saved. Run it without graphs to keep it."
            )
        for number, (output, version) in enumerate(zip(self._outputs, self._versions, strict=True)):
            if output._version != version:
                raise RuntimeError(
                    f"Expected output {number} of {self._name} unchanged until its backward, which "
                    "may read it, got one that was changed in place. Use an operation out of place."
                )
        if self.ledgers:
            self.ledgers[-1].check()
        wanted = [grad for grad, d in zip(grads, self.differentiable, strict=True) if d]
        for number, (static, grad) in enumerate(zip(self._grad_outputs, wanted, strict=True)):
            if grad is None:
                raise RuntimeError(
                    f"Expected a gradient of each differentiable output of {self._name}, got none "
                    f"of the one numbered {number}: the graph computes with all. Detach in the "
                    "function what nothing goes on with."
                )
            static.copy_(grad)
        self._backward.replay()
        self.replays[1] += 1
        self._on_replay(1)
        pending.is_done = True
        if pending.after is not None:
            pending.after()
        return tuple(None if grad is None else grad.clone() for grad in self._grads)

    def reset(self) -> None:
        """Drop the graphs and the static tensors."""
        self._forward.reset()
        self._backward.reset()
        self._is_captured = False
        self.ledgers = []
        self._inputs = self._outputs = self._grad_outputs = self._grads = ()
        self._versions = ()


class Replay(torch.autograd.Function):
    """Replays a slot forward, and backward where autograd gets to it."""

    @staticmethod
    def forward(
        ctx: Any, slot: Slot, pending: Pending, num_inputs: int, *tensors: torch.Tensor
    ) -> Tensors:
        ctx.slot, ctx.pending = slot, pending
        ctx.set_materialize_grads(False)
        outputs = slot.replay_forward(tensors[:num_inputs], pending)
        ctx.mark_non_differentiable(
            *(out for out, d in zip(outputs, slot.differentiable, strict=True) if not d)
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, *ctx.slot.replay_backward(grads, ctx.pending))


def _moved_out(
    grads: Sequence[torch.Tensor | None], shared: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor | None]:
    """The gradients, each copied to the first place that is like it and free."""
    free = list(shared)
    for grad in grads:
        place = None
        if grad is not None:
            fits = (i for i, each in enumerate(free) if Spec.of(each) == Spec.of(grad))
            found = next(fits, None)
            place = None if found is None else free.pop(found)
        if grad is None or place is None:
            yield grad
        else:
            yield place.copy_(grad)


def check_inputs(name: str, samples: Tensors, tensors: Tensors) -> None:
    """Refuse inputs that were not captured.

    Raises:
        ValueError: they differ from the samples in number, shape, dtype or device, or one wants a
            gradient where its sample does not.
    """
    if len(tensors) != len(samples):
        raise ValueError(f"Expected {len(samples)} inputs of {name}, got {len(tensors)}.")
    for number, (x, sample) in enumerate(zip(tensors, samples, strict=True)):
        if (x.shape, x.dtype, x.device) != (sample.shape, sample.dtype, sample.device):
            raise ValueError(
                f"Expected the captured input {number} of {name}, {_kind(sample)}, got {_kind(x)}."
            )
        if x.requires_grad and not sample.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"Expected input {number} of {name} without a gradient, as captured, got one that "
                "requires grad. Detach it, or capture with such a sample."
            )


def _lies_in(x: torch.Tensor, storages: set[int]) -> bool:
    # A wrapper (a pending collective's result, say) has no storage, and what it holds is its own.
    return not opens_itself(type(x)) and x.untyped_storage().data_ptr() in storages


def _kind(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"
