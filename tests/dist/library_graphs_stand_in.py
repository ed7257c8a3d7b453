"""`make_graphed_callables` of TransformerEngine 2.20.2 and of torch, over host graphs.

As far as used, of TransformerEngine's graph.py:

    _make_graphed_callables   when it runs `capture_time_hooks`; refuses modules with hooks; all
                              forwards, then all backwards in reverse, in warm-ups and captures
    _run_warmup_backward      drops parameters without a gradient
    Graphed                   marks the first module of fp8, and moves scales after its backward;
                              returns parameters' gradients as clones, inputs' as they lie
    new_fwd                   registers modules of fp8 anew
    make_graphed_callables    the flag, the wrapper on classes and the hooks on inner modules, which
                              a failure leaves

and of torch's graphs.py: warm-ups that nobody hears of, the module's `forward` replaced, gradients
returned as they lie.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from fsdp_core.device import Device
from fsdp_core.graph import library_graphs
from fsdp_core.graph.device_graphs import HostGraph
from tests.dist.te_stand_in import Manager

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Pair:
    """The graphs of one callable; call it to replay."""

    def __init__(self, module: nn.Module, samples: Sequence[torch.Tensor], *, te: bool) -> None:
        if any(getattr(module, kind) for kind in _KINDS):
            raise RuntimeError("Modules must not have hooks")
        self.module, self.samples, self.is_te = module, tuple(samples), te
        self.parameters = list(module.parameters())
        self.outputs: list[torch.Tensor] = []
        self.forward_graph, self.backward_graph = HostGraph(Device("cpu")), HostGraph(Device("cpu"))

    def run(self) -> None:
        result = self.module(*self.samples)
        self.is_tuple = isinstance(result, tuple)
        self.outputs = list(result) if self.is_tuple else [result]

    def _differentiated(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients of what wants one, by `backward`; those that were there come back."""
        leaves = [x for x in (*self.samples, *self.parameters) if x.requires_grad]
        kept = [x.grad for x in leaves]
        for x in leaves:
            x.grad = None
        wanted = [output for output in self.outputs if output.requires_grad]
        torch.autograd.backward(wanted, grad_tensors=list(grads))
        found = [x.grad for x in leaves]
        for x, grad in zip(leaves, kept, strict=True):
            x.grad = grad
        return found

    def warm_backward(self) -> None:
        """The backward; parameters without a gradient are left out from now on."""
        ones = [torch.ones_like(output) for output in self.outputs if output.requires_grad]
        found = self._differentiated(ones)
        of_parameters = found[len(found) - sum(p.requires_grad for p in self.parameters) :]
        named = zip((p for p in self.parameters if p.requires_grad), of_parameters, strict=True)
        self.parameters = [parameter for parameter, grad in named if grad is not None]

    def capture_forward(self) -> None:
        self.forward_graph.capture(self.run)

    def capture_backward(self) -> None:
        self.static = [torch.zeros_like(o) if o.requires_grad else None for o in self.outputs]
        kept = [static for static in self.static if static is not None]
        found = iter(self.backward_graph.capture(lambda: self._differentiated(kept)))
        tensors = (*self.samples, *self.parameters)
        self.grads = [next(found) if x.requires_grad else None for x in tensors]
        self.outputs = [output.detach() for output in self.outputs]

    def _metas(self) -> Iterator[dict[str, Any]]:
        for module in self.module.modules():
            yield getattr(module, "fp8_meta", None) or {}
            yield from (m for m in (getattr(module, "_fp8_metas", None) or {}).values() if m)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self.is_te and Manager.enabled:
            for meta in self._metas():
                Manager.add_fp8_tensors_to_global_buffer(meta)
        results = _Graphed.apply(self, len(tensors), *tensors, *self.parameters)
        return results if self.is_tuple else results[0]

    def reset(self) -> None:
        self.forward_graph.reset()
        self.backward_graph.reset()


class _Graphed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pair: Pair, number: int, *tensors: torch.Tensor) -> Any:
        ctx.pair = pair
        ctx.is_first = pair.is_te and Manager.is_first_fp8_module()
        for static, x in zip(pair.samples, tensors[:number], strict=True):
            static.data.copy_(x)
        pair.forward_graph.replay()
        return tuple(output.detach() for output in pair.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        pair = ctx.pair
        for static, grad in zip(pair.static, grads, strict=True):
            if static is not None:
                static.copy_(grad)
        pair.backward_graph.replay()
        if ctx.is_first and Manager.enabled | bool(Manager.registered):
            Manager.reduce_and_update_fp8_tensors(forward=False)
        number = len(pair.samples)
        found = [
            g if g is None or i < number or not pair.is_te else g.clone()
            for i, g in enumerate(pair.grads)
        ]
        return (None, None, *(None if g is None else g.detach() for g in found))


class TeGraphs:
    """Stands for the module `transformer_engine.pytorch.graph`.

    Attributes:
        is_capturing: what its flag would be.
        registered: names of the generators of its last graphs.
        calls: how many callables each call had.
    """

    def __init__(self) -> None:
        self.is_capturing = False
        self.states: dict[str, Any] = {}
        self.registered: list[str] = []
        self.calls: list[int] = []

    def get_all_rng_states(self) -> dict[str, Any]:
        return self.states

    def set_capture_end(self) -> None:
        self.is_capturing = False

    def make_graphed_callables(
        self, modules: tuple[nn.Module, ...], sample_args: tuple[Any, ...], **options: Any
    ) -> tuple[Pair, ...]:
        """Warm up, capture, and hand back what replays each."""
        assert (options["_order"], options["_num_layers_per_chunk"]) == ([1, -1], [len(modules)])
        assert options["allow_unused_input"]
        self.is_capturing, self.registered = True, sorted(self.states)
        self.calls.append(len(modules))
        calls = {type(module): type(module).__call__ for module in modules}
        for kind, call in calls.items():
            wrapped: Any = lambda self, *args, call=call: call(self, *args)  # noqa: E731
            setattr(kind, "__call__", wrapped)  # noqa: B010
        made = tuple(Pair(*each, te=True) for each in zip(modules, sample_args, strict=True))
        hooks = options["capture_time_hooks"]
        options["pre_warmup_hook"]()
        for _ in range(options["num_warmup_iters"]):
            self._pass(made, hooks, _visited, Pair.warm_backward)
        options["post_warmup_hook"]()
        self._pass(made, hooks, Pair.capture_forward, Pair.capture_backward)
        for kind, call in calls.items():
            setattr(kind, "__call__", call)  # noqa: B010
        self.is_capturing = False
        return made

    @staticmethod
    def _pass(
        made: Sequence[Pair], hooks: Any, forward: Callable[[Pair], None],
        backward: Callable[[Pair], None],
    ) -> None:  # fmt: skip
        each = [*zip(made, hooks, strict=True)]
        for kind, act, pairs in (("forward", forward, each), ("backward", backward, each[::-1])):
            for pair, mine in pairs:
                _call_hooks(pair, mine[f"{kind}_pre_hooks"])
                act(pair)
                _call_hooks(pair, mine[f"{kind}_hooks"])


def _call_hooks(pair: Pair, hooks: dict[int, Any]) -> None:
    for hook in hooks.values():
        if hook(pair.module) is not None:
            raise RuntimeError("must not return a value")


def _visited(pair: Pair) -> None:
    visits = [m.register_forward_hook(lambda *_: None) for m in pair.module.modules()]
    pair.run()
    for visit in visits:
        visit.remove()


def torch_callables(
    module: nn.Module, sample_args: tuple[torch.Tensor, ...], *, num_warmup_iters: int,
    allow_unused_input: bool, pool: Any,
) -> nn.Module:  # fmt: skip
    del pool
    assert allow_unused_input
    pair = Pair(module, sample_args, te=False)
    for _ in range(num_warmup_iters):
        pair.run()
        pair.warm_backward()
    pair.parameters = list(module.parameters())
    pair.capture_forward()
    pair.capture_backward()
    module.forward = pair
    return module


@contextlib.contextmanager
def stood_in() -> Iterator[TeGraphs]:
    """Inside, captures by libraries are those of the stand-ins; gives TransformerEngine's."""
    te = TeGraphs()
    with (
        mock.patch.object(library_graphs, "te_graphs", return_value=te),
        mock.patch.object(torch.cuda, "make_graphed_callables", torch_callables),
    ):
        yield te
