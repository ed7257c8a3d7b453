"""Graphed modules made by TransformerEngine's `make_graphed_callables`, behind our interface.

What is added around it, because it does not do it itself:

    a failed capture    leaves it capturing for ever, its wrappers on the modules' classes, hooks on
                        inner modules, gradients lost, garbage collection off, and torch in the
                        capture and on its stream: all undone
    state               what torch's operators write in warm-ups is put back (fp8 state it puts back
                        itself, after a failure we do)
    random streams      are registered with its graphs
    replays             check inputs, refuse a slot that awaits its backward and a moved parameter,
                        and return gradients of inputs as clones, as it does those of parameters

It moves scales of fp8 itself, after replays and at the end of the autocast that they are in
(graph.py: `Graphed.backward`, `new_fwd`), so replays must be inside of one; that is checked.
"""

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_core.graph.callables import GraphedModule, check_request, parameters_of
from fsdp_core.graph.capture_order import CapturePlan, Order
from fsdp_core.graph.capture_session import Undo
from fsdp_core.graph.cuda_graph import end_refused
from fsdp_core.graph.graph import GraphMaker
from fsdp_core.graph.hooks import PHASES, CaptureHooks, run_hooks, tensor_hooks_off
from fsdp_core.graph.ledger import Ledger, Resolver
from fsdp_core.graph.recorder import Recording
from fsdp_core.graph.slot import Tensors
from fsdp_core.graph.te_replays import Library, Precision, Replays

_OPTIONS = ("enabled", "recipe", "amax_reduction_group")


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
    options: Mapping[str, Any] | None = None,
    library: Library | None = None,
) -> list[GraphedModule]:
    """As `callables.make_graphed_callables`, by TransformerEngine; CUDA only.

    Args:
        options: passed on: `enabled` and `recipe` for fp8, `amax_reduction_group`.
        library: in place of TransformerEngine.

    Raises:
        ValueError: as there; modules in evaluation mode, no warm-up, or other options.
        RuntimeError: what TransformerEngine raises; nothing is left of the capture.
    """
    plan, hooks = check_request(modules, samples, order, capture_time_hooks)
    options = _supported(modules, num_warmup_iters, options or {})
    trained = parameters_of(modules, parameters)
    names = [f"{number}: {type(module).__name__}" for number, module in enumerate(modules)]
    ledgers: list[Ledger | None] = [None] * len(modules)

    def gathered(number: int) -> None:
        if resolve is not None:
            # Its captures show nothing else: its kernels are no operators of torch.
            ledgers[number] = Ledger(
                Recording(), resolve, relied=trained[number], within=names[number]
            )

    undo = Undo(maker.device, maker.generators)
    te: Any = library or importlib.import_module("transformer_engine.pytorch.graph")
    forwards = _capture(
        te, maker, undo, modules, trained,
        sample_args=tuple(_copies(inputs) for inputs in _nested(plan, samples)),
        num_warmup_iters=num_warmup_iters,
        _order=list(plan.chunks),
        _num_layers_per_chunk=list(plan.sizes),
        capture_time_hooks=_apart(undo, hooks, gathered),
        **options,
    )  # fmt: skip
    return [
        GraphedModule(
            module,
            Replays(
                names[number], [forwards[place] for place in _places(plan, number)],
                samples[number], ledgers[number], on_replay,
                Precision(te, _enabled(options, len(modules))[number]),
            ),
        )
        for number, module in enumerate(modules)
    ]  # fmt: skip


def _enabled(options: Mapping[str, Any], num_modules: int) -> tuple[bool, ...]:
    """Whether fp8 is on, by module."""
    enabled = options.get("enabled", False)
    return enabled if isinstance(enabled, tuple) else (enabled,) * num_modules


def _supported(
    modules: Sequence[nn.Module], num_warmup_iters: int, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The options; what TransformerEngine 2.20 fails at, or does unlike eager code, is refused."""
    if any(not module.training for module in modules):
        # With an order it asks what only backward passes of warm-ups have found out.
        raise ValueError(
            "Expected modules in training mode, got some in evaluation mode: TransformerEngine "
            "captures these without an order only. Capture them with callables."
        )
    if num_warmup_iters < 1:
        raise ValueError(
            f"Expected at least one warm-up, got {num_warmup_iters}: TransformerEngine finds out "
            "in it which gradients there are."
        )
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown:
        # Cached weights need a keyword in each call; aliases of gradients would be overwritten.
        raise ValueError(f"Expected options out of {', '.join(_OPTIONS)}, got {unknown[0]}.")
    if any(_enabled(options, len(modules))) and not options.get("recipe"):
        raise ValueError("Expected a recipe beside enabled fp8, got none.")
    return options


# ---- the capture


def _capture(
    te: Library,
    maker: GraphMaker,
    undo: Undo,
    modules: Sequence[nn.Module],
    parameters: Sequence[tuple[nn.Parameter, ...]],
    **options: Any,
) -> Sequence[Any]:
    """The library's forwards; whatever it leaves behind is put right."""
    flat = [parameter for each in parameters for parameter in each]
    watching, pool = contextlib.ExitStack(), maker.pool
    with (
        undo,
        watching,
        _classes_kept(modules),
        _undone_on_failure(te, modules, options.get("recipe")),
        _gradients_kept(flat),
        tensor_hooks_off(flat),
        _shown(modules, parameters),
        _registered(te, maker.generators),
        _ended(maker, pool),
    ):
        made: Sequence[Any] = te.make_graphed_callables(
            tuple(modules),
            allow_unused_input=True,
            pool=pool,
            pre_warmup_hook=lambda: _begin(watching, undo),
            post_warmup_hook=watching.close,
            **options,
        )
    return made


@contextlib.contextmanager
def _ended(maker: GraphMaker, pool: Any) -> Iterator[None]:
    """On the stream that is current now, and after a failure in no capture."""
    with maker.device.on(maker.device.current_stream()):
        try:
            yield
        except BaseException:
            if maker.device.is_cuda:
                end_refused(maker.device, pool, maker.generators)
            raise


def _begin(watching: contextlib.ExitStack, undo: Undo) -> None:
    watching.enter_context(undo.watching())


def _apart(
    undo: Undo, hooks: Sequence[CaptureHooks], gathered: Callable[[int], None]
) -> list[dict[str, dict[int, Callable[[nn.Module], None]]]]:
    """The hooks of each module as one a phase, what they write no concern of `undo`.

    `gathered` is called after each forward, while parameters are where the graphs read them.
    """

    def of(number: int, phase: str) -> Callable[[nn.Module], None]:
        def hook(module: nn.Module) -> None:
            with undo.paused():
                if phase == "forward_hooks":
                    gathered(number)
                run_hooks(hooks[number], phase, module)

        return hook

    return [{phase: {0: of(number, phase)} for phase in PHASES} for number in range(len(hooks))]


def _nested(plan: CapturePlan, samples: Sequence[Tensors]) -> Iterator[Tensors]:
    """Samples by chunk, microbatch and module, which is how forwards come back, too."""
    start = 0
    for size in plan.sizes:
        for _ in range(plan.num_slots):
            yield from samples[start : start + size]
        start += size


def _places(plan: CapturePlan, module: int) -> list[int]:
    """Where in that nesting a module's slots are."""
    start = 0
    for size in plan.sizes:
        if module < start + size:
            first = start * plan.num_slots + module - start
            return [first + slot * size for slot in range(plan.num_slots)]
        start += size
    raise ValueError(f"Expected a module below {start}, got {module}.")


def _copies(inputs: Tensors) -> Tensors:
    return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)


@contextlib.contextmanager
def _shown(
    modules: Sequence[nn.Module], parameters: Sequence[tuple[nn.Parameter, ...]]
) -> Iterator[None]:
    """The modules show these parameters, whatever they hold at the moment."""
    for module, mine in zip(modules, parameters, strict=True):
        vars(module)["parameters"] = lambda recurse=True, mine=mine: iter(mine)
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["parameters"]


@contextlib.contextmanager
def _gradients_kept(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """The very gradients that were there, if it fails, too."""
    kept = [parameter.grad for parameter in parameters]
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad


@contextlib.contextmanager
def _registered(te: Library, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """The generators are among those that its graphs draw from."""
    states = te.get_all_rng_states()
    mine = {f"fsdp_core stream {i}": generator for i, generator in enumerate(generators)}
    states.update(mine)
    try:
        yield
    finally:
        for name in mine:
            del states[name]


@contextlib.contextmanager
def _classes_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The modules' classes have the call that they had, or none of their own."""
    calls = {type(module): vars(type(module)).get("__call__") for module in modules}
    try:
        yield
    finally:
        for kind, call in calls.items():
            if call is not None:
                setattr(kind, "__call__", call)  # noqa: B010  (a method, to the type checker)
            elif "__call__" in vars(kind):
                del kind.__call__


@contextlib.contextmanager
def _undone_on_failure(te: Library, modules: Sequence[nn.Module], recipe: Any) -> Iterator[None]:
    """After a failure everything that it would have put back itself."""
    inner = [each for module in modules for each in module.modules()]
    hooks = [(each, frozenset(each._forward_hooks)) for each in inner]
    collects = gc.isenabled()
    fp8_tensors = te.save_fp8_tensors(modules, recipe)
    try:
        yield
    except BaseException:
        te.set_capture_end()
        for each, known in hooks:
            for number in set(each._forward_hooks) - known:
                del each._forward_hooks[number]
        te.restore_fp8_tensors(modules, fp8_tensors)
        if collects:
            gc.enable()
        raise
