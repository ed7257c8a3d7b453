"""Graphed modules: the interface, and our own way to make them; TransformerEngine's is beside it.

    with hooks_off(modules) as hooks:
        graphed = make_graphed_callables(maker, modules, samples, capture_time_hooks=hooks)
    graphed[0].install()          the module replays when it is called
    graphed[0].remove()           and runs eagerly again

`capture_time_hooks` run around every forward and backward of every warm-up and capture, outside of
the graphs, and never around a replay: the module's own hooks do that, which are back by then.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_core.graph.capture_order import CapturePlan, Order, Step, plan_capture
from fsdp_core.graph.capture_session import Undo
from fsdp_core.graph.graph import GraphMaker
from fsdp_core.graph.hooks import CaptureHooks, canonical_hooks, require_no_hooks, run_hooks
from fsdp_core.graph.ledger import Resolver
from fsdp_core.graph.segment import GraphedSegment, Segment, Tensors


class Replays(Protocol):
    """What is captured of a module."""

    def __call__(self, *tensors: torch.Tensor, slot: int = 0) -> torch.Tensor | Tensors:
        """Replay forward now and backward when autograd asks."""

    def reset(self) -> None:
        """Drop the graphs."""


class GraphedModule:
    """A module whose forward can be replayed.

    Args:
        replays: of the mode, training or evaluation, that the module is in now.

    Attributes:
        module: runs eagerly in the other mode.
    """

    def __init__(self, module: nn.Module, replays: Replays) -> None:
        self.module, self._replays = module, replays
        self._training = module.training
        self._forward: Callable[..., Any] = module.forward
        self._before: Callable[..., Any] | None = None
        self._is_installed = False

    def __call__(self, *tensors: torch.Tensor, slot: int = 0) -> Any:
        """The module's forward, replayed in the captured mode and eager in the other.

        Raises:
            ValueError: inputs unlike the samples.
            RuntimeError: the slot is in use, or the graphs are reset.
        """
        if self.module.training != self._training:
            return self._forward(*tensors)
        return self._replays(*tensors, slot=slot)

    def install(self, slot: Callable[[], int] = lambda: 0) -> None:
        """Make the module replay when it is called, its hooks around it.

        Args:
            slot: says which one a call is for.
        """
        if self._is_installed:
            raise RuntimeError(f"Expected {type(self.module).__name__} to run eagerly so far.")

        def forward(*tensors: torch.Tensor) -> Any:
            return self(*tensors, slot=slot())

        self._before = vars(self.module).get("forward")  # a compiled part has its own
        # The compiler would trace into the replay, and find nothing to compile.
        self.module.forward = torch.compiler.disable(forward)
        self._is_installed = True

    def remove(self) -> None:
        """Make the module run eagerly again; nothing if it does."""
        if self._is_installed:
            if self._before is None:
                del self.module.forward
            else:
                self.module.forward = self._before
            self._is_installed = False

    def reset(self) -> None:
        """Remove and drop the graphs."""
        self.remove()
        self._replays.reset()


def make_graphed_callables(
    maker: GraphMaker,
    modules: Sequence[nn.Module],
    samples: Sequence[Tensors],
    *,
    parameters: Sequence[Sequence[nn.Parameter]] | None = None,
    order: Order | None = None,
    num_warmup_iters: int = 2,
    capture_time_hooks: Sequence[CaptureHooks | None] | None = None,
    resolve: Resolver | None = None,
    on_replay: Callable[[int], None] = lambda launches: None,
) -> list[GraphedModule]:
    """Capture modules of tensors, in training mode forward and backward, else forward alone.

    Warm-ups and captures leave no trace but the graphs; if one fails there are no graphs.

    Args:
        samples: one tuple a module, like its inputs; `requires_grad` says which get gradients.
        parameters: of each module, as its forward has them: a sharded module shows others at rest.
            None: what the modules show now.
        order: of microbatches and chunks of modules; None: one microbatch.
        num_warmup_iters: how often the whole order is run eagerly first.
        capture_time_hooks: an entry a module, from `hooks.hooks_off` or by hand.
        resolve: names tensors for ledgers; None: no ledgers.
        on_replay: told the number of launches of each replay.

    Raises:
        ValueError: modules with hooks, in different modes, whose kernels add to gradients or that
            keep delayed scales of fp8, other numbers of samples or hooks than modules, or an order
            that does not fit.
        CaptureRefused: something in a module cannot be captured.
    """
    plan, hooks = check_request(modules, samples, order, capture_time_hooks)
    trained = parameters_of(modules, parameters)
    segments: list[GraphedSegment] = []
    try:
        for number, (module, inputs) in enumerate(zip(modules, samples, strict=True)):
            segment = Segment(
                name=f"{number}: {type(module).__name__}", function=module, samples=inputs,
                parameters=tuple(trained[number]),
            )  # fmt: skip

            def on_phase(phase: str, number: int = number, module: nn.Module = module) -> None:
                run_hooks(hooks[number], phase, module)

            graphed = GraphedSegment(
                maker, segment, num_slots=plan.num_slots, resolve=resolve, on_replay=on_replay,
                on_phase=on_phase,
            )  # fmt: skip
            segments.append(graphed)
        _run(maker, modules, segments, _steps(plan, modules), num_warmup_iters)
    except BaseException:
        for graphed in segments:
            graphed.reset()
        raise
    return [GraphedModule(m, graphed) for m, graphed in zip(modules, segments, strict=True)]


def check_request(
    modules: Sequence[nn.Module],
    samples: Sequence[Tensors],
    order: Order | None,
    capture_time_hooks: Sequence[CaptureHooks | None] | None,
) -> tuple[CapturePlan, list[CaptureHooks]]:
    """What both ways to capture ask of their arguments: the plan and an entry of hooks a module.

    Raises:
        ValueError: see `make_graphed_callables`.
    """
    plan = plan_capture(len(modules), order)
    if len(samples) != len(modules):
        raise ValueError(f"Expected samples of {len(modules)} modules, got {len(samples)}.")
    if len(set(map(id, modules))) != len(modules):
        raise ValueError("Expected modules, each once, got one twice.")
    if len({module.training for module in modules}) > 1:
        raise ValueError(
            "Expected modules all in training or all in evaluation mode, got some of each."
        )
    for module in modules:
        require_no_hooks(module)
        _require_own_gradients(module)
    return plan, canonical_hooks(len(modules), capture_time_hooks)


def _require_own_gradients(module: nn.Module) -> None:
    """Refuse kernels that add to `main_grad`, and say in Python that they have."""
    for path, inner in module.named_modules():
        if getattr(inner, "fuse_wgrad_accumulation", False):
            raise ValueError(
                f"Expected {path or type(module).__name__} without fuse_wgrad_accumulation, got it "
                "set: a replay would return a gradient without values, and nobody says that the "
                "values are in main_grad. Leave it off, or capture whole steps."
            )


def _require_no_delayed_scales(module: nn.Module) -> None:
    """Refuse modules of TransformerEngine that warm-ups have shown to keep such scales."""
    for path, inner in module.named_modules():
        meta = getattr(inner, "fp8_meta", None) or {}
        if getattr(inner, "fp8", False) and hasattr(meta.get("scaling_fwd"), "amax_history"):
            raise ValueError(
                f"Expected {path or type(module).__name__} without delayed scaling of fp8, got it: "
                "scales move once a pass, over all modules, in no graph of one. Capture it with "
                "te_callables, or by another recipe."
            )


def parameters_of(
    modules: Sequence[nn.Module], parameters: Sequence[Sequence[nn.Parameter]] | None
) -> list[tuple[nn.Parameter, ...]]:
    """Those of each module, given or shown.

    Raises:
        ValueError: parameters of another number of modules.
    """
    if parameters is None:
        return [tuple(module.parameters()) for module in modules]
    if len(parameters) != len(modules):
        raise ValueError(f"Expected parameters of {len(modules)} modules, got {len(parameters)}.")
    return [tuple(each) for each in parameters]


def _steps(plan: CapturePlan, modules: Sequence[nn.Module]) -> list[Step]:
    """Without backwards in evaluation mode."""
    return [step for step in plan.steps if step.is_forward or modules[step.module].training]


def _run(
    maker: GraphMaker,
    modules: Sequence[nn.Module],
    segments: Sequence[GraphedSegment],
    steps: Sequence[Step],
    iterations: int,
) -> None:
    """Warm all up in order, then capture all in order."""
    with Undo(maker.device, maker.generators) as undo:
        for _ in range(iterations):
            for step in steps:
                segment = segments[step.module]
                if step.is_forward:
                    segment.run_forward(step.slot, undo)
                else:
                    segment.run_backward(step.slot, undo)
    for module in modules:
        _require_no_delayed_scales(module)
    for step in steps:
        segment = segments[step.module]
        if step.is_forward:
            segment.capture_forward(step.slot)
        else:
            segment.capture_backward(step.slot)
