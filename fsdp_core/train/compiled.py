"""torch.compile for parts of a model, eager or captured: what it compiled when, and why again.

A graph holds compiled code as it was at the capture. The compiler checks its guards at each call; a
replay calls nothing, so the guards of what was captured are kept and checked before each replay. A
warm-up or capture that makes the compiler compile once more is refused: the graph would hold other
code than eager steps run. Parts are compiled in place of their Python:

    attn, mlp, layer, experts    the module's `forward`: hooks, FSDP's too, run around it
    moe_router                   the branch's `front`; its `forward` is the front and its rest
    moe_preprocess               with it
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_map_only

from fsdp_core.config import ConfigError, TrainConfig
from fsdp_core.graph.recorder import CaptureRefused, HostReadGuard, Recorder
from fsdp_core.model.batch import Part
from fsdp_core.model.decoder import Crossing, DecoderStage, Layer, MlpBranch, MoeBranch

MOST_VARIANTS = 8
"""Of one function's code; the compiler would go on without compiling, as another program."""


@dataclass(frozen=True)
class Compilation:
    """Code that was compiled, in the call of `part`; `code` is `decoder.py:66 forward`, `reason`
    why it was compiled again, and `late` whether graphs had been captured.
    """

    part: str
    code: str
    reason: str
    late: bool

    def __str__(self) -> str:
        return f"{self.part} ({self.code})" + (f": {self.reason}" if self.reason else "")


class StaleGuards(RuntimeError):
    """A graph was about to replay compiled code of `part` that no longer fits the program around
    it.
    """

    def __init__(self, part: str, reason: str) -> None:
        self.part = part
        super().__init__(
            f"{part}: {reason} was true when its compiled code was captured and is "
            "not any more, so a replay would go on with an old constant. Make it a tensor, or "
            "capture again."
        )


class HeldGuards:
    """The guards of compiled code that a graph captured, and what it was called with."""

    def __init__(self, part: str, entry: Any, values: dict[str, Any]) -> None:
        self._part, self._entry, self._values = part, entry, values

    def check(self) -> None:
        """Check them as the compiler does at a call; no device work. `StaleGuards` if not."""
        guards = self._entry.guard_manager
        if not guards.check(self._values):
            said = guards.check_verbose(self._values).verbose_code_parts
            raise StaleGuards(self._part, _brief(said[0]) if said else "a guard")


class Compiler:
    """Compiles parts of one model, from its construction to `close`.

    backend: `aot_eager` or `inductor`; empty: there is nothing to compile.
    compilations: in the order in which they happened.
    has_graphs: whether there are graphs of compiled code; for their owner to say.
    part: that is called now.
    held: guards of what the capture that is under way holds.
    """

    def __init__(self, backend: str = "") -> None:
        self.backend, self.has_graphs = backend, False
        self.compilations: list[Compilation] = []
        self.part = ""
        self._parts: dict[str, tuple[str, ...]] = {}
        self._settled: str | None = None
        self.held: list[HeldGuards] | None = None
        self._options = contextlib.ExitStack()
        if backend:
            # Forget what other models left: its variants count, and its guards cost.
            torch._dynamo.reset()
            self._options.callback(torch._dynamo.reset)
            options = {"fail_on_recompile_limit_hit": True, "recompile_limit": MOST_VARIANTS}
            self._options.enter_context(torch._dynamo.config.patch(options))

    def close(self) -> None:
        """Drop all compiled code; parts that are called again are compiled again."""
        self._options.close()
        self.compilations.clear()

    def compile(
        self, name: str, function: Callable[..., Any], parts: tuple[str, ...] = ()
    ) -> "CompiledPart":
        """The function, compiled at its first call; `parts` are what of a configuration's `compile`
        it is.
        """
        self._parts[name] = parts
        return CompiledPart(self, name, function)

    @property
    def parts(self) -> set[str]:
        return {part for made in self.compilations for part in self._parts[made.part]}

    def written_unseen(self, modules: Iterable[nn.Module]) -> tuple[torch.Tensor, ...]:
        """Buffers that kernels which are no operators may write."""
        if self.backend != "inductor":
            return ()
        return tuple(dict.fromkeys(b for module in modules for b in module.buffers()))

    # ---- what is going on

    @contextlib.contextmanager
    def settled(self, during: str) -> Iterator[None]:
        """Nothing is compiled again inside: `during` says what it would spoil."""
        before, self._settled = self._settled, during
        try:
            yield
        finally:
            self._settled = before

    @contextlib.contextmanager
    def captured(self) -> Iterator[list[HeldGuards]]:
        """A capture: gives the guards of what is captured inside."""
        before, self.held = self.held, []
        try:
            with self.settled("the capture"):
                yield self.held
        finally:
            self.held = before

    def make(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph, as torch.compile asks its backend to; `CaptureRefused` if nothing may
        be.
        """
        found = Compilation(self.part, _code(graph), _reason(), self.has_graphs)
        if self._settled is not None:
            why = found.reason or "it was not compiled before"
            raise CaptureRefused(
                f"cannot capture {found.part}: {self._settled} makes torch.compile compile "
                f"{found.code} anew, so that the graph would hold other code than eager steps run: "
                f"{why}"
            )
        self.compilations.append(found)
        if self.backend == "inductor":
            return _shown(_inductor(graph, examples))
        return _shown(torch._dynamo.lookup_backend(self.backend)(graph, list(examples)))


class CompiledPart:
    """A compiled function of a part of a model, a bound method; call it as the function."""

    def __init__(self, compiler: Compiler, name: str, function: Callable[..., Any]) -> None:
        self.name, self._compiler = name, compiler
        self.function: Any = function
        # Shapes are constants: another one is another program, compiled for itself.
        self._compiled = torch.compile(function, backend=compiler.make, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiler, values = self._compiler, self._values(args, kwargs)
        outer, compiler.part = compiler.part, self.name
        try:
            with _reads_unguarded():
                result = self._compiled(*args, **kwargs)
            if compiler.held is not None:
                compiler.held.append(self._guards(values))
        except RuntimeError as error:
            # The compiler wraps what its backend raises.
            refused = getattr(error, "inner_exception", None)
            if isinstance(refused, CaptureRefused):
                raise refused from None
            raise
        finally:
            compiler.part = outer
        return result

    def _values(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        code: Any = self.function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return dict(zip(names, (self.function.__self__, *args), strict=False)) | kwargs

    def _guards(self, values: dict[str, Any]) -> HeldGuards:
        """Those of the code that a call with `values` has just run."""
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list

        # The call's own tensors are not kept, only what the guards look at.
        with _disable_current_modes():
            values = tree_map_only(torch.Tensor, _hollow, values)
        entries = _debug_get_cache_entry_list(self.function.__code__)
        with _reads_unguarded():
            for entry in entries:
                if entry.guard_manager.check(values):
                    return HeldGuards(self.name, entry, values)
        raise CaptureRefused(
            f"cannot capture {self.name}: none of the {len(entries)} variants that torch.compile "
            "made fits the call that was captured"
        )


# ---- who looks on


def _recorders() -> list[Recorder]:
    """Recorders that look on, innermost last."""
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)]


@contextlib.contextmanager
def _reads_unguarded() -> Iterator[None]:
    """No `HostReadGuard` inside: the compiler would trace into it, and compile for it."""
    with contextlib.ExitStack() as stack:
        if isinstance(_get_current_function_mode(), HostReadGuard):
            stack.enter_context(_pop_mode_temporarily())
        yield


# ---- backends


def _inductor(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx

    def inner(module: Any, inputs: Sequence[Any], **options: Any) -> Any:
        code: Any = compile_fx.compile_fx_inner(module, inputs, **options)
        # A graph without operators is no kernels.
        if getattr(code, "current_callable", None) is not None:
            code.current_callable = _recorded(code.current_callable, code.mutated_input_idxs)
        return code

    # Out of a cache of whole functions they would come without what records them.
    with functorch_config.patch(enable_autograd_cache=False):
        made: Any = compile_fx.compile_fx(
            graph, list(examples), inner_compile=inner,
            # No CUDA graphs of its own, whatever the environment says; no processes of each rank's.
            config_patches={"triton.cudagraphs": False, "compile_threads": 1},
        )  # fmt: skip
    return made


@dataclass(frozen=True)
class _Kernels:
    """A graph of inductor's kernels in the place of an operator."""

    function: Callable[[list[Any]], Any]
    namespace: str = "inductor"

    def __call__(self, *args: Any) -> Any:
        """Past torch's dispatcher or not: nobody is to see operators of theirs."""
        with _disable_current_modes():
            return self.function(list(args))


def _recorded(
    function: Callable[[list[Any]], Any], writes: Iterable[int]
) -> Callable[[list[Any]], Any]:
    """The kernels, as a call to recorders that keep operators (on the CPU)."""
    kernels, written = _Kernels(function), frozenset(writes)

    def run(inputs: list[Any]) -> Any:
        keeping = next((r for r in _recorders() if r.keeps_operations), None)
        if keeping is None:
            return function(inputs)
        args = tuple(inputs)
        inputs.clear()  # as torch asks of such functions
        return keeping.record_call(kernels, args, written)

    return run


def _shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Shows recorders what a compiled function is given; kernels of its own are no operators."""

    def run(*args: Any) -> Any:
        for recorder in _recorders():
            recorder.uses([arg for arg in args if isinstance(arg, torch.Tensor)])
        return function(*args)

    return run


# ---- what torch knows


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    """Like it, to guards, without its memory."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    like = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    like.untyped_storage().resize_(0)
    return like.requires_grad_(tensor.requires_grad)


def _code(graph: torch.fx.GraphModule) -> str:
    """Where the code that a graph was traced from begins: `decoder.py:69 forward`."""
    for node in graph.graph.nodes:
        stack = node.meta.get("stack_trace") or ""
        found = re.search(r'File "(?:[^"]*/)?([^"/]+)", line (\d+), in (\w+)', stack)
        if found:
            return f"{found[1]}:{found[2]} {found[3]}"
    return "code"


def _reason() -> str:
    """Why the compiler is at work again; empty if it is for the first time."""
    from torch._dynamo.utils import get_metrics_context

    return _brief(str(get_metrics_context()._metrics.get("recompile_reason") or ""))


def _brief(reason: str) -> str:
    """One line, without the place in the code and the number of the variant."""
    line = reason.strip().partition("\n")[0].partition("  # ")[0].strip()
    number, found, rest = line.partition(": ")
    return rest.strip() if found and number.replace("/", "").isdigit() else line


def compile_parts(config: TrainConfig, stages: Sequence[DecoderStage]) -> Compiler:
    """Put compiled parts in place of those that `config.compile` names, after taps are. Returns
    their compiler, to be closed after the graphs that hold its code. `ConfigError` if taps watch
    modules inside of compiled parts.
    """
    compiler = Compiler(config.compile_backend if config.compile else "")
    for stage in stages:
        for number, layer in stage.numbered_layers.items():
            _compile_layer(compiler, f"layers.{number}", layer, config.compile)
    return compiler


def _compile_layer(compiler: Compiler, name: str, layer: Layer, parts: Sequence[str]) -> None:
    for part, path, module in _whole_modules(layer):
        if part in parts:
            where = f"{name}{path}"
            _require_unwatched(where, *(inner for inner in module.modules() if inner is not module))
            module.forward = compiler.compile(where, module.forward, (part,))
    branch = layer.mlp
    if isinstance(branch, MoeBranch) and "moe_router" in parts:
        _compile_front(compiler, f"{name}.mlp", branch, plans="moe_preprocess" in parts)


def _whole_modules(layer: Layer) -> Iterator[tuple[str, str, nn.Module]]:
    """Parts that are all of a module's forward: the part, the path in the layer, the module."""
    yield "layer", "", layer
    yield "attn", ".attn", layer.attn
    if isinstance(layer.mlp, MlpBranch):
        yield "mlp", ".mlp", layer.mlp
    else:
        yield "experts", ".mlp.moe.experts", layer.mlp.moe.experts


def _compile_front(compiler: Compiler, name: str, branch: MoeBranch, *, plans: bool) -> None:
    moe = branch.moe
    inside = [branch.norm, moe.router, moe.preprocess, *([moe.shared] if moe.shared else [])]
    _require_unwatched(name, moe, *(each for module in inside for each in module.modules()))
    what = "router and preprocess" if plans else "router"
    parts = ("moe_router", "moe_preprocess") if plans else ("moe_router",)
    front = compiler.compile(f"{name} {what}", branch.front, parts)

    def forward(x: torch.Tensor, part: Part) -> torch.Tensor:
        crossing: Crossing = front(x, part, plans=plans)
        return branch.rest(crossing)

    taken: Any = branch
    taken.front, taken.forward = front, forward


def _require_unwatched(name: str, *modules: nn.Module) -> None:
    """Taps count calls and digest in the middle of what would be one compiled function."""
    if any("_call_impl" in vars(module) for module in modules):
        raise ConfigError(
            "taps",
            expected=f"none inside of {name}, which is compiled: tap the module itself, or compile "
            "less",
            got="some",
        )
