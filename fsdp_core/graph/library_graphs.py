"""Graphs captured by `make_graphed_callables` of TransformerEngine or torch, used as our own.

    capture_by_te       several callables at once, in one memory pool; hooks gather parameters
                        around each forward and backward of each warm-up and capture
    capture_by_torch    one callable, in a pool of its own, its parameters gathered by the caller

Added around both: the abort that they lack, random streams, checks of inputs, addresses and pending
backwards, and clones of the gradients of inputs. TransformerEngine
2.20 moves scales of fp8 itself, after replays and at the end of the autocast that they are in
(graph.py: `Graphed.backward`, `new_fwd`). Its captures run in the autocast that the function enters
itself.
"""

import contextlib
import importlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from fsdp_core.graph.capture_session import PHASES, CaptureHooks, Undo, run_hooks, tensor_hooks_off
from fsdp_core.graph.device_graphs import end_refused
from fsdp_core.graph.graph import GraphMaker, Pending, Replayed, Segment, Tensors
from fsdp_core.graph.recorder import Recording

WARM_UPS = 2


class _Callee(nn.Module):
    """A segment as the module that libraries ask for."""

    def __init__(self, segment: Segment) -> None:
        super().__init__()
        self.parts, self._segment = nn.ModuleList(segment.modules), segment

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._segment.function(*tensors)

    def parameters(self, *_: Any) -> Iterator[nn.Parameter]:
        return iter(self._segment.parameters)


class LibraryGraph(Replayed):
    """What a library captured of a segment, used as a `GraphedCallable` is. Its ledger has
    parameters and what the segment relies on; graphs show nothing else. `callee` is what the
    library is given, `hooks` run around TransformerEngine's warm-ups and captures, by phase.
    """

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        self.callee = _Callee(segment)
        self.hooks: CaptureHooks = dict.fromkeys(PHASES, ())
        self._replay: Callable[..., Any] = _nothing
        self._reset: Callable[[], None] = _nothing

    def is_gathered(self) -> None:
        self.ledgers = list(self.segment.ledger(Recording()))

    def hold(self, replay: Callable[..., Any], reset: Callable[[], None]) -> None:
        self._replay, self._reset, self.captures = replay, reset, [1, 1]

    def __call__(self, *tensors: torch.Tensor, after: Callable[[], None] | None = None) -> Any:
        self._check(tensors)
        self._check_addresses()
        results = self._replay(*map(_with_cloned_grad, tensors))
        self._count(0)
        flat = results if isinstance(results, tuple) else (results,)
        node = next((result.grad_fn for result in flat if result.grad_fn is not None), None)
        if node is not None:
            pending = Pending(after)
            self._pending = weakref.ref(pending)
            node.register_hook(lambda *_: self._end_backward(pending))
            flat = _Begin.apply(self, pending, *flat)
        return flat if isinstance(results, tuple) else flat[0]

    def begin_backward(self, pending: Pending) -> None:
        """Before the backward's replay, once whoever waits for its start has gathered weights."""
        self._require_first_backward(pending)
        self._check_addresses()

    def _check_addresses(self) -> None:
        for ledger in self.ledgers:
            ledger.check()

    def reset(self) -> None:
        """Drop the graphs; a second time does nothing."""
        self._reset()
        self._replay = self._reset = _nothing
        self.captures, self.ledgers = [0, 0], []


def _nothing(*_: Any) -> None:
    return None


class _Begin(torch.autograd.Function):
    """Outputs as they are; in backward what comes before the library's. A hook of the library's
    node would run before those of the outputs that gather weights.
    """

    @staticmethod
    def forward(ctx: Any, graph: LibraryGraph, pending: Pending, *outputs: torch.Tensor) -> Tensors:
        ctx.graph, ctx.pending = graph, pending
        ctx.set_materialize_grads(False)
        results = tuple(out.detach() for out in outputs)
        pairs = zip(outputs, results, strict=True)
        ctx.mark_non_differentiable(*(result for out, result in pairs if not out.requires_grad))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.graph.begin_backward(ctx.pending)
        return (None, None, *grads)


def _with_cloned_grad(x: torch.Tensor) -> torch.Tensor:
    """The tensor, its gradient a copy of what it gets."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    same = x.view_as(x)
    same.register_hook(torch.clone)
    return same


# ---- TransformerEngine


def te_graphs() -> Any:
    """The module of TransformerEngine that captures."""
    return importlib.import_module("transformer_engine.pytorch.graph")


def capture_by_te(maker: GraphMaker, graphs: Sequence[LibraryGraph], pool: Any) -> None:
    """Capture functions that run one after another; CUDA only. Nothing is left of a failure. Graphs
    in `pool` must not be replayed between a forward and a backward of these.
    """
    if not graphs:
        return
    te, undo = te_graphs(), Undo(maker.device, maker.generators)
    callees = tuple(graph.callee for graph in graphs)
    with undo, contextlib.ExitStack() as watching, _te_undone(te, callees), _registered(te, maker):
        forwards = _captured_whole(
            maker, callees, pool,
            lambda: te.make_graphed_callables(
                callees,
                tuple(graph.inputs for graph in graphs),
                num_warmup_iters=WARM_UPS,
                allow_unused_input=True,
                # One microbatch through one chunk of layers.
                _order=[1, -1],
                _num_layers_per_chunk=[len(graphs)],
                capture_time_hooks=[_capture_time_hooks(graph, undo) for graph in graphs],
                pool=pool,
                pre_warmup_hook=lambda: watching.enter_context(undo.watching()),
                post_warmup_hook=watching.close,
            ),
        )  # fmt: skip
    for graph, forward in zip(graphs, forwards, strict=True):
        graph.hold(forward, forward.reset)


def _capture_time_hooks(
    graph: LibraryGraph, undo: Undo
) -> dict[str, dict[int, Callable[[nn.Module], None]]]:
    """The hooks as one a phase; what they write is no concern of `undo`."""

    def of(phase: str) -> Callable[[nn.Module], None]:
        def hook(module: nn.Module) -> None:
            with undo.paused():
                if phase == "forward_hooks":
                    graph.is_gathered()
                run_hooks(graph.hooks, phase, module)

        return hook

    return {phase: {0: of(phase)} for phase in PHASES}


@contextlib.contextmanager
def _registered(te: Any, maker: GraphMaker) -> Iterator[None]:
    """The maker's generators are among those that TransformerEngine's graphs draw from."""
    states = te.get_all_rng_states()
    mine = {f"fsdp_core stream {i}": generator for i, generator in enumerate(maker.generators)}
    states.update(mine)
    try:
        yield
    finally:
        for name in mine:
            del states[name]


@contextlib.contextmanager
def _te_undone(te: Any, callees: Sequence[_Callee]) -> Iterator[None]:
    """After a failure everything that TransformerEngine would have put back itself."""
    inner = [each for callee in callees for each in callee.modules()]
    hooks = [(each, frozenset(each._forward_hooks)) for each in inner]
    try:
        yield
    except BaseException:
        te.set_capture_end()
        for each, known in hooks:
            for number in set(each._forward_hooks) - known:
                del each._forward_hooks[number]
        raise
    finally:
        _Callee.__call__ = nn.Module.__call__  # type: ignore[method-assign]


# ---- torch


def capture_by_torch(maker: GraphMaker, graph: LibraryGraph) -> None:
    """Capture one function, whose parameters are gathered; CUDA only. A failure leaves nothing."""
    callee, made = graph.callee, list[Any]()
    pool = torch.cuda.graph_pool_handle() if maker.device.is_cuda else None
    with Undo(maker.device, maker.generators) as undo:
        # Once more than torch does: it says nothing of when its warm-ups end, and what is saved in
        # a capture would be saved at each replay.
        with undo.watching(), tensor_hooks_off(callee.parameters()):
            _practise(callee, graph.inputs)
        with _graphs_noted(maker, made):
            _captured_whole(
                maker, [callee], pool,
                lambda: torch.cuda.make_graphed_callables(
                    callee, graph.inputs, num_warmup_iters=WARM_UPS, allow_unused_input=True,
                    pool=pool,
                ),
            )  # fmt: skip
    graph.is_gathered()

    def reset() -> None:
        vars(callee).pop("forward", None)
        for each in made:
            each.reset()
        made.clear()

    graph.hold(callee.forward, reset)


def _practise(callee: _Callee, samples: Tensors) -> None:
    results = callee(*samples)
    flat = results if isinstance(results, tuple) else (results,)
    outputs = [each for each in flat if each.requires_grad]
    surface = [x for x in (*samples, *callee.parameters()) if x.requires_grad]
    torch.autograd.grad(outputs, surface, [*map(torch.ones_like, outputs)], allow_unused=True)


@contextlib.contextmanager
def _graphs_noted(maker: GraphMaker, made: list[Any]) -> Iterator[None]:
    """Graphs that are made inside draw from the maker's generators, and are in `made`."""

    class Noted(torch.cuda.CUDAGraph):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for generator in maker.generators:
                self.register_generator_state(generator)
            made.append(self)

    with mock.patch.object(torch.cuda, "CUDAGraph", Noted):
        yield


# ---- both


def _captured_whole(
    maker: GraphMaker, callees: Sequence[_Callee], pool: Any, capture: Callable[[], Any]
) -> Any:
    """Capture on the stream that is current now, gradients kept; after a failure in no capture."""
    flat = [parameter for callee in callees for parameter in callee.parameters()]
    grads = [parameter.grad for parameter in flat]
    device = maker.device
    try:
        with device.on(device.current_stream()), tensor_hooks_off(flat):
            return capture()
    except BaseException:
        if device.is_cuda:
            end_refused(device, pool, maker.generators)
        raise
    finally:
        for parameter, grad in zip(flat, grads, strict=True):
            parameter.grad = grad
