"""What `transformer_engine.pytorch.graph` does around captures, in plain torch over host graphs.

As of version 2.20.2, as far as used:

    _make_graphed_callables   when it runs `capture_time_hooks`; refuses modules with hooks; follows
                              `_order` in warm-ups and in the capture; asks in the capture's
                              backward what the warm-ups' found (`need_bwd_dw_graph`), so that a
                              KeyError meets who has had none
    _run_warmup_backward      drops parameters without a gradient
    Graphed.backward          returns parameters' gradients as clones, inputs' as they lie
    make_graphed_callables    the flag, the wrapper on classes and the hooks on inner modules, which
                              a failure leaves
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdp_core.device import Device
from fsdp_core.graph.host_graph import HostGraph

_KINDS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


class TeGraphStandIn:
    """Stands for the module; `is_capturing` is what its flag would be."""

    def __init__(self) -> None:
        self.is_capturing = False
        self.states: dict[str, Any] = {}
        self.registered: list[str] = []
        self.restored_fp8 = 0
        self.FP8GlobalStateManager = self
        self.is_fp8 = False

    def is_fp8_enabled(self) -> bool:
        """Of `FP8GlobalStateManager`: whether an autocast is entered."""
        return self.is_fp8

    def get_all_rng_states(self) -> dict[str, Any]:
        """The dictionary itself."""
        return self.states

    def save_fp8_tensors(self, modules: Sequence[nn.Module], recipe: Any) -> Any:
        """Nothing to save."""
        del modules, recipe

    def restore_fp8_tensors(self, modules: Sequence[nn.Module], fp8_tensors: Any) -> None:
        """Count."""
        del modules, fp8_tensors
        self.restored_fp8 += 1

    def set_capture_end(self) -> None:
        """Lower the flag."""
        self.is_capturing = False

    def make_graphed_callables(
        self, modules: tuple[nn.Module, ...], sample_args: tuple[Any, ...], **options: Any
    ) -> tuple[Any, ...]:
        """Warm up, capture, and hand back a forward a slot."""
        self.is_capturing = True
        self.registered = sorted(self.states)
        original = {type(module): type(module).__call__ for module in modules}
        for kind, call in original.items():
            wrapped: Any = lambda self, *args, call=call: call(self, *args)  # noqa: E731
            setattr(kind, "__call__", wrapped)  # noqa: B010
        made = _Capture(modules, sample_args, options).run()
        for kind, call in original.items():
            setattr(kind, "__call__", call)  # noqa: B010
        self.is_capturing = False
        return made


class _Capture:
    def __init__(
        self, modules: tuple[nn.Module, ...], samples: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        for module in modules:
            if any(getattr(module, f"_{kind}") for kind in _KINDS):
                raise RuntimeError("Modules must not have hooks")
        self.modules, self.samples, self.options = modules, samples, options
        self.sizes = options["_num_layers_per_chunk"]
        order = options["_order"]
        self.microbatches = len(order) // len(self.sizes) // 2
        self.hooks = options["capture_time_hooks"]
        self.outputs: dict[int, Any] = {}
        self.forwards: dict[int, _Forward] = {}
        self.need_bwd_dw_graph: dict[int, bool] = {}

    def run(self) -> tuple[Any, ...]:
        self.options["pre_warmup_hook"]()
        for _ in range(self.options["num_warmup_iters"]):
            self.follow(self.warm_forward, self.warm_backward)
        self.options["post_warmup_hook"]()
        self.follow(self.capture_forward, self.capture_backward)
        return tuple(self.forwards[index] for index in range(len(self.samples)))

    def follow(self, forward: Any, backward: Any) -> None:
        done = {chunk: [0, 0] for chunk in range(len(self.sizes))}
        for number in self.options["_order"]:
            chunk, is_forward = abs(number) - 1, number > 0
            start, size = sum(self.sizes[:chunk]), self.sizes[chunk]
            base = start * self.microbatches + done[chunk][not is_forward] * size
            layers = range(size) if is_forward else reversed(range(size))
            for layer in layers:
                (forward if is_forward else backward)(start + layer, base + layer)
            done[chunk][not is_forward] += 1

    def call_hooks(self, callable_index: int, kind: str) -> None:
        for hook in self.hooks[callable_index].get(kind, {}).values():
            if hook(self.modules[callable_index]) is not None:
                raise RuntimeError("must not return a value")

    def warm_forward(self, module: int, index: int) -> None:
        self.call_hooks(module, "forward_pre_hooks")
        visits = [m.register_forward_hook(lambda *_: None) for m in self.modules[module].modules()]
        self.outputs[index] = self.modules[module](*self.samples[index])
        for visit in visits:
            visit.remove()
        self.call_hooks(module, "forward_hooks")

    def warm_backward(self, module: int, index: int) -> None:
        if not self.modules[0].training:
            return
        self.call_hooks(module, "backward_pre_hooks")
        self.backward(module, index)
        self.call_hooks(module, "backward_hooks")
        self.need_bwd_dw_graph[index] = False

    def surface(self, module: int, index: int) -> list[torch.Tensor]:
        tensors = (*self.samples[index], *self.modules[module].parameters())
        return [tensor for tensor in tensors if tensor.requires_grad]

    def backward(self, module: int, index: int) -> list[torch.Tensor | None]:
        inputs = self.surface(module, index)
        kept = [x.grad for x in inputs]
        for x in inputs:
            x.grad = None
        output = self.outputs[index]
        torch.autograd.backward(output, grad_tensors=torch.ones_like(output))
        found = [x.grad for x in inputs]
        for x, grad in zip(inputs, kept, strict=True):
            x.grad = grad
        return found

    def capture_forward(self, module: int, index: int) -> None:
        self.call_hooks(module, "forward_pre_hooks")
        graph = HostGraph(Device("cpu"))
        self.outputs[index] = graph.capture(lambda: self.modules[module](*self.samples[index]))
        self.call_hooks(module, "forward_hooks")
        self.forwards[index] = _Forward(graph, self.samples[index], self.outputs[index])

    def capture_backward(self, module: int, index: int) -> None:
        assert not self.need_bwd_dw_graph[index]
        self.call_hooks(module, "backward_pre_hooks")
        output, inputs = self.outputs[index], self.surface(module, index)
        static, graph = torch.zeros_like(output), HostGraph(Device("cpu"))

        def backward() -> list[torch.Tensor | None]:
            for x in inputs:
                x.grad = None
            torch.autograd.backward(output, grad_tensors=static)
            return [x.grad for x in inputs]

        kept = [x.grad for x in inputs]
        grads = graph.capture(backward)
        for x, grad in zip(inputs, kept, strict=True):
            x.grad = grad
        self.call_hooks(module, "backward_hooks")
        parameters = list(self.modules[module].parameters())
        self.forwards[index].finish(graph, static, parameters, grads)


class _Forward:
    """The function that replays a slot."""

    def __init__(self, graph: HostGraph, inputs: Any, output: torch.Tensor) -> None:
        self.graph, self.inputs, self.output = graph, inputs, output
        self.parameters: list[nn.Parameter] = []

    def finish(self, graph: HostGraph, static: Any, parameters: Any, grads: Any) -> None:
        self.backward_graph, self.static = graph, static
        self.parameters, self.grads = parameters, iter(grads)
        wanted = [x.requires_grad for x in (*self.inputs, *parameters)]
        self.grads = [next(self.grads) if w else None for w in wanted]
        self.output = self.output.detach()

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Graphed.apply(self, len(tensors), *tensors, *self.parameters)
        return result

    def reset(self) -> None:
        self.graph.reset()


class _Graphed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: _Forward, number: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.owner = owner
        for static, x in zip(owner.inputs, tensors[:number], strict=True):
            static.data.copy_(x)
        owner.graph.replay()
        return owner.output.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        owner = ctx.owner
        owner.static.copy_(grad)
        owner.backward_graph.replay()
        number = len(owner.inputs)
        # Gradients of inputs alias its buffers, those of parameters are clones.
        clones = [g if g is None or i < number else g.clone() for i, g in enumerate(owner.grads)]
        return (None, None, *(None if g is None else g.detach() for g in clones))
