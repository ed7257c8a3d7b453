"""What is hooked in torch so that a program is recorded without a line changed.

    Optimizer.__init__             names of parameters, before an engine replaces them
    Module.__call__                the first one in training, which records the initial state; taps
    torch.autograd.backward        losses of microbatches
    Optimizer.step, before, after  gradients; weights, optimizer state, buffers, random states
    clip_grad_norm_                the gradient norm; taps of gradients before they are clipped
    GradScaler.scale, step         losses before they are scaled; steps that it skips
    random, numpy.random           whether the program has seeded them
    CUDAGraph, ProcessGroup        `harness.recorder.graphs`, `harness.recorder.collectives`

Inside of a capture nothing is observed: what the capture holds is observed after each replay.
"""

import contextlib
import gc
import inspect
import pickle
import random
import re
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from fsdp_core.graph.digest import Digester, empty_rows
from harness.recorder import Recorder
from harness.recorder.capture import HostGraph, is_capturing
from harness.recorder.collectives import Notes
from harness.recorder.graphs import GraphCounter, GraphInfo, GraphWatch
from harness.recorder.observer import OVERFLOW, UNSCALED, Observer, guarded
from harness.recorder.session import Session, begin, patch
from harness.recorder.state import cuda_is_used, freeze, gradient, parameters, plain, tracked

if TYPE_CHECKING:
    from harness.recorder.operators import Operators

SUMMARY_EVENT = "cuda_graphs"
TAPS_EVENT = "taps"
"""Names the patterns that the script itself asks for, as `harness.checks.taps` reads them."""
_SCALES = "_harness_scales"
_TRIALS = (
    ("torch.distributed.pipelining.stage", "PipelineStage",
     ("_shape_inference", "_forward_metadata_inference", "_backward_metadata_inference")),
    ("torch.distributed.checkpoint.state_dict", "", ("_init_optim_state",)),
)  # fmt: skip
"""Functions of torch, by version, that train nothing: a pipeline tries its stages on memory that
nobody has written, to learn shapes; loading steps by zero, to make an optimizer's state."""
MOST_STATES = 256
"""Of random generators, that a program that never seeds may take and restore."""
_active: Observer | None = None


def install(session: Session) -> None:
    """Hook torch in this process; what happens from now on is recorded."""
    global _active
    observer = _active = Observer(session)
    patch("freeze", freeze, gc)
    for hook in (_hook_seeds, _hook_optimizers, _hook_forward, _hook_losses, _hook_norms,
                 _hook_scaler):  # fmt: skip
        hook(observer)

    def replayed(info: GraphInfo) -> None:
        # A replay that holds an optimizer's step is a step.
        if info.optimizer_steps and session.is_mine:
            observer.replayed(info.index)

    stress = tuple(session.config.get("stress", ()))
    watched = GraphCounter if session.is_job else GraphWatch
    watch = watched(observer.event, observer.named, stress, replayed=replayed)
    observer.capturing = watch.capturing
    watch.install()
    rounding = _round_at_random(observer) if session.rounding else None
    operators = None if session.operators is None else _operators(session.operators, observer)
    if dist.is_available() and session.world_size > 1 and not session.is_job:
        session.leaving = Notes(observer).install()

    def finish() -> Mapping[str, Any]:
        with observer.aside():
            graphs = watch.summary()
            if graphs["graphs"]:
                observer.event(SUMMARY_EVENT, graphs)
            if operators is not None:
                observer.event("operators", operators.detail())
            facts = observer.finish()
        if rounding is not None:
            rounding.end()
        return {**facts, "replays": sum(each["replays"] for each in graphs["graphs"])}

    session.left, session.finish, session.under_way = observer.left, finish, observer.under_way
    session.at_work = lambda error: _at_work(error, observer)
    taps = Taps(observer)
    observer.add_taps, observer.clipping, observer.calls = taps.add, taps.clipping, taps.numbers
    observer.add_taps(session.config.get("taps", ()))
    if operators is not None:
        taps.show(operators)


def _operators(wanted: Any, observer: Observer) -> "Operators":
    from harness.recorder.operators import Operators

    return Operators(wanted, lambda name, tensor: observer.keep(name, [tensor]))


def _round_at_random(observer: Observer) -> Any:
    from harness.recorder.rounding import Rounding, refuse

    rounding = Rounding(observer.session.rounding, observer.session.rank)
    observer.aside = rounding.aside
    observer.most_passes = 1  # else torch.compile, kept off by the mode, would compile the recorder
    for kind in (torch.cuda.CUDAGraph, HostGraph):
        patch("capture_begin", refuse, kind)
    for name in ("begin", "enter"):
        # What the first backward pass or a script's first step begins is begun by then.
        patch(name, rounding.begins, observer)
    return rounding


def _at_work(error: BaseException, observer: Observer) -> dict[str, str]:
    """The innermost module where an error was raised, and the phase, of an `ErrorRecord`."""
    gradients = [
        inspect.unwrap(each).__code__ for each in (torch.autograd.backward, torch.autograd.grad)
    ]
    module, phase = "", ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module, phase = observer.names.of_module(owner) or module, phase or "forward"
        elif isinstance(owner, Optimizer):
            phase = phase or "optimizer"
        elif frame.f_code in gradients:
            phase = "backward"  # which may compute a forward pass again
    return {"module": module, "phase": phase}


# --- what a script says itself -----------------------------------------------------------------


def recorder_for_script(model: Any, optimizer: Any, taps: tuple[str, ...]) -> Recorder:
    """What a script's own lines speak to (`ValueError`: one of `taps` is no pattern)."""
    if _active is None:
        begin(trains=True)
    if _active is None or not _active.session.is_mine:
        return Recorder()
    if taps:
        _active.add_taps(taps)
        _active.event(TAPS_EVENT, {"patterns": list(taps)})
    optimizers = _each(optimizer)
    if _active.session.is_job and not optimizers:  # made before there was a hook
        optimizers = tracked(Optimizer)
    _active.given(_each(model), optimizers)
    return _active


def _each(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


# --- hooks -------------------------------------------------------------------------------------


def _is_quiet(observer: Observer) -> bool:
    """Whether nothing may be observed now: in another process, a capture, a compiler's trace, or a
    transform of `torch.func`, whose tensors have no memory."""
    # First: a compiler's trace of a module's hooks ends here, and its graph has no break.
    if torch.compiler.is_compiling() or not observer.session.is_mine or observer.is_outside:
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return is_capturing() or (cuda_is_used() and torch.cuda.is_current_stream_capturing())


def _hook_seeds(observer: Observer) -> None:
    """Python's and NumPy's states count once the program has seeded them: else the clock did."""
    # To restore a state that was saved in this process is no seeding: torch.compile does it.
    taken: deque[tuple[str, int]] = deque(maxlen=MOST_STATES)

    def hook(kind: str, owner: Any, get: str, put: str) -> None:
        def key(state: Any) -> tuple[str, int]:
            return kind, hash(pickle.dumps(state))  # a tuple, with an array in it if it is NumPy's

        def take(original: Any, *args: Any, **kwargs: Any) -> Any:
            state = original(*args, **kwargs)
            if kind not in observer.seeded:
                taken.append(key(state))
            return state

        def seed(original: Any, *args: Any, **kwargs: Any) -> Any:
            if kind not in observer.seeded and not (args and key(args[0]) in taken):
                observer.seeded.add(kind)
            return original(*args, **kwargs)

        patch(get, take, owner)
        for name in ("seed", put):
            patch(name, seed, owner)

    hook("python", random, "getstate", "setstate")
    with contextlib.suppress(ImportError):
        import numpy

        hook("numpy", numpy.random, "get_state", "set_state")


def _hook_optimizers(observer: Observer) -> None:
    def made(original: Any, self: Optimizer, *args: Any, **kwargs: Any) -> None:
        _hook_trials(observer)
        original(self, *args, **kwargs)
        if observer.session.is_mine:
            observer.made(self)

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if _is_quiet(observer):
            return None
        closures = [each for each in (*args[1:2], kwargs.get("closure")) if callable(each)]
        if not closures:
            return observer.before(optimizer)

        def closure() -> Any:
            # Its backward passes are inside of the step that uses their gradients.
            result = closures[0]()
            observer.before(optimizer)
            return result

        return args[:1], kwargs | {"closure": closure}

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not _is_quiet(observer):
            observer.after(optimizer)

    patch("__init__", made, Optimizer)
    torch_optimizer.register_optimizer_step_pre_hook(before)
    torch_optimizer.register_optimizer_step_post_hook(after)


def _hook_trials(observer: Observer) -> None:
    """Record nothing inside of the functions of `_TRIALS`, as far as they are imported by now."""

    def trial(original: Any, *args: Any, **kwargs: Any) -> Any:
        observer.is_in_trial = True
        try:
            return original(*args, **kwargs)
        finally:
            observer.is_in_trial = False

    for module, owner, names in _TRIALS:
        place = sys.modules.get(module)
        place = getattr(place, owner, None) if owner else place
        for name in names:
            function = getattr(place, name, None)
            if function is not None and not hasattr(function, "__wrapped__"):
                patch(name, trial, place)


def _hook_forward(observer: Observer) -> None:
    """Buffers and random states are those before step 0 only until its forward pass."""

    def before(module: nn.Module, args: Any) -> None:
        if _is_quiet(observer) or not module.training or not torch.is_grad_enabled():
            return
        if observer.optimizers and observer.names.of_module(module) is not None:
            observer.forward(module)
        if observer.has_stepped:
            handle.remove()

    # A compiled module's wrapper is seen as well, which is what is wanted.
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are glo")
    handle = torch_modules.register_module_forward_pre_hook(before)


def _hook_losses(observer: Observer) -> None:
    depth = [0]  # checkpointing calls it again from inside

    def backward(original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        graph = observer.capturing()
        if depth[0] or (graph is None and _is_quiet(observer)):
            return original(tensors, *args, **kwargs)
        given = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        roots = [root for root in given if isinstance(root, Tensor)]
        if graph is None:
            observer.backward(roots)
        for root in roots:
            observer.loss(root, graph)
        depth[0] += 1
        observer.is_in_backward = True
        try:
            with observer.backward_pass():
                return original(tensors, *args, **kwargs)
        finally:
            depth[0] -= 1
            observer.is_in_backward = bool(depth[0])

    def grad(original: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            observer.has_gradients = True
        return original(*args, **kwargs)

    patch("backward", backward, torch.autograd)
    patch("grad", grad, torch.autograd)


def _hook_norms(observer: Observer) -> None:
    def clip_by_norm(original: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_quiet(observer):
            observer.clipping()
        return norm_of(original, *args, **kwargs)

    def norm_of(original: Any, *args: Any, **kwargs: Any) -> Any:
        norm, graph = original(*args, **kwargs), observer.capturing()
        if graph is not None or not _is_quiet(observer):
            observer.grad_norm(norm, graph)
        return norm

    def clip(original: Any, params: Any, most: float, norm: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_quiet(observer):
            observer.clipping()
            observer.grad_norm(norm)
        original(params, most, norm, *args, **kwargs)

    patch("clip_grad_norm_", clip_by_norm, nn.utils, nn.utils.clip_grad)
    patch("get_total_norm", norm_of, nn.utils, nn.utils.clip_grad)
    # For programs that call it: clip_grad_norm_ has its own name for it.
    patch("clip_grads_with_norm_", clip, nn.utils)


def _hook_scaler(observer: Observer) -> None:
    def step(original: Any, self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        taken = observer.num_taken
        result = original(self, optimizer, *args, **kwargs)
        # The optimizer's own hooks have counted the step if it was taken.
        if observer.num_taken == taken and not _is_quiet(observer):
            observer.skipped(OVERFLOW)
        return result

    def made(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        hook_scale(type(self))

    def hook_scale(kind: Any) -> None:
        # Where its class has it: FSDP's scaler scales by itself, and is imported later.
        owner: Any = next(each for each in kind.__mro__ if "scale" in vars(each))
        if not hasattr(owner.scale, _SCALES):
            patch("scale", scale, owner)
            setattr(owner.scale, _SCALES, True)

    def scale(original: Any, self: Any, outputs: Any) -> Any:
        """Results know their losses: an infinite one is right where its loss is not."""
        scaled = original(self, outputs)
        if not torch.compiler.is_compiling():
            single = isinstance(outputs, Tensor)
            many = [each if isinstance(each, list | tuple) else () for each in (outputs, scaled)]
            for loss, result in [(outputs, scaled)] if single else zip(*many, strict=False):
                are_tensors = isinstance(loss, Tensor) and isinstance(result, Tensor)
                if are_tensors and loss.numel() == 1 and result is not loss:
                    setattr(result, UNSCALED, loss.detach())
        return scaled

    patch("step", step, torch.amp.GradScaler)
    patch("__init__", made, torch.amp.GradScaler)
    if observer.session.is_job:  # whose scalers may be there already
        for kind in (torch.amp.GradScaler, *torch.amp.GradScaler.__subclasses__()):
            hook_scale(kind)


# --- taps --------------------------------------------------------------------------------------

INPUT, OUTPUT, GRADIENT = "input", "output", "gradient"
UNCLIPPED = "unclipped"
"""Of a parameter's gradient, as clipping begins."""
ROOT = "(root)"
"""Name of a module that is part of no other, where it is the only one."""
MOST_PLANS = 1024
_FOLD = 0x01000193
"""Odd, so that what was folded stays in all bits; as in `fsdp_core.train.taps`."""
_PATTERN = re.compile(r"([\w*]+(?:\.[\w*]+)*)(?::(input|output|gradient))?")
"""As `fsdp_core.config.tap_pattern`, which takes more files than a script's environment has."""


class Taps:
    """Digests the calls of the modules that patterns mean: `layers.*.attn:output`.

        input      tensors in the arguments of a call, together
        output     tensors in what it returns, together
        gradient   of its first output that gets one; those of its parameters before clipping

    Calls without gradients and calls that a backward pass makes again, as checkpointing does, are
    passed over. The two passes of a reentrant checkpoint, of torch's own, are seen as one call.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer, self.session = observer, observer.session
        self.aside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        self._kinds: dict[str, frozenset[str]] = {}
        self._digests: dict[tuple[Any, ...], tuple[Digester, Tensor, Tensor]] = {}
        self._calls: dict[str, int] = {}
        self._step: object = None
        self._passes: list[
            bool
        ] = []  # of reentrant checkpoints: whether it is the first of the two

    def add(self, patterns: Iterable[str]) -> None:
        """Digest what these mean, too (`ValueError`: no pattern); the first hook all modules."""
        added = [_pattern(text) for text in patterns]
        if added and not self._patterns:
            torch_modules.register_module_forward_pre_hook(self._before)
            torch_modules.register_module_forward_hook(self._after)
            self._hook_checkpoints()
        self._patterns += added
        self._kinds.clear()

    def show(self, operators: "Operators") -> None:
        observer = self._observer

        def before(module: nn.Module, args: Any) -> None:
            name, _ = self._asked(module)
            is_due = observer.number_of_calls == operators.step and not observer.is_in_backward
            if is_due and name == operators.module:
                operators.enter(module, args)
                left.append(module)

        def after(module: nn.Module, args: Any, result: Any) -> None:
            if left and left[-1] is module:
                left.pop()
                operators.leave()

        left: list[nn.Module] = []
        torch_modules.register_module_forward_pre_hook(before)
        torch_modules.register_module_forward_hook(after, always_call=True)
        # What the recorder does is not the program's.
        observer.aside = self.aside = _disable_current_modes

        def backward_pass() -> contextlib.AbstractContextManager[Any]:
            is_due = operators.is_backward and observer.number_of_calls == operators.step
            return operators if is_due else contextlib.nullcontext()

        observer.backward_pass = backward_pass

    def _before(self, module: nn.Module, args: Any) -> None:
        name, kinds = self._asked(module)
        if INPUT in kinds:
            self._digest(self._row(name, INPUT), _tensors(args))

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        name, kinds = self._asked(module)
        if OUTPUT in kinds:
            self._digest(self._row(name, OUTPUT), _tensors(result))
        if GRADIENT in kinds:
            # The row is the call's, in the order of the forward passes.
            wants = Tensor.is_floating_point if self._is_first else lambda each: each.requires_grad
            if (first := next(filter(wants, _tensors(result)), None)) is not None:
                row = self._row(name, GRADIENT)
                if not self._is_first:
                    first.register_hook(lambda gradient: self._digest(row, [gradient]))

    @property
    def _is_first(self) -> bool:
        return bool(self._passes) and self._passes[-1]

    def _hook_checkpoints(self) -> None:
        apply, forward = vars(torch.autograd.Function)["apply"], CheckpointFunction.forward
        backward = CheckpointFunction.backward
        with_gradients = [False]  # inside of `forward` nobody can tell

        def applied(cls: Any, *args: Any) -> Any:
            with_gradients[0] = torch.is_grad_enabled()
            return apply.__get__(None, cls)(*args)

        def first(ctx: Any, *args: Any) -> Any:
            if not with_gradients[0]:  # an evaluation, or part of another's first pass
                return forward(ctx, *args)
            ctx._harness_calls = dict(self.numbers())
            with self._passing(self._calls, is_first=True):
                return forward(ctx, *args)

        def second(ctx: Any, *gradients: Any) -> Any:
            if (calls := getattr(ctx, "_harness_calls", None)) is None:
                return backward(ctx, *gradients)
            with self._passing(dict(calls), is_first=False):
                return backward(ctx, *gradients)

        CheckpointFunction.apply = classmethod(applied)  # type: ignore[assignment]
        CheckpointFunction.forward = staticmethod(first)  # type: ignore[method-assign]
        CheckpointFunction.backward = staticmethod(second)  # type: ignore[method-assign]

    @contextlib.contextmanager
    def _passing(self, calls: dict[str, int], *, is_first: bool) -> Iterator[None]:
        """Inside, calls are numbered on from `calls`."""
        outside, self._calls = self.numbers(), calls
        self._passes.append(is_first)
        try:
            yield
        finally:
            self._passes.pop()
            self._calls = outside

    def _asked(self, module: nn.Module) -> tuple[str, frozenset[str]]:
        observer = self._observer
        is_again = observer.is_in_backward and not self._passes
        if is_again or _is_quiet(observer) or not (self._is_first or torch.is_grad_enabled()):
            return "", frozenset()
        if not observer.taps_are_due:
            return "", frozenset()
        if (name := observer.names.of_module(module)) is None:
            return "", frozenset()
        name = name or ROOT
        kinds = self._kinds_of(name)
        return name, kinds & {GRADIENT} if observer.is_in_backward else kinds

    def _kinds_of(self, name: str) -> frozenset[str]:
        if name not in self._kinds:
            meant = (kind for pattern, kind in self._patterns if pattern.fullmatch(name))
            self._kinds[name] = frozenset(meant)
        return self._kinds[name]

    @guarded
    def clipping(self) -> None:
        """Gradients are about to be clipped: afterwards one wrong one is in all of them."""
        observer = self._observer
        if not self._patterns or not observer.taps_are_due:
            return
        for param in {id(p): p for each in observer.optimizers for p in parameters(each)}.values():
            name, held = observer.names.of(param), gradient(param)
            if held is not None and GRADIENT in self._kinds_of(name.rpartition(".")[0] or ROOT):
                self._digest(self._row(name, UNCLIPPED), [held])

    def numbers(self) -> dict[str, int]:
        """The number of the last call in this step, by tap."""
        step = self._observer.step_of_calls()
        if step is not self._step:
            self._step, self._calls = step, {}
        return self._calls

    def _row(self, name: str, kind: str) -> str:
        calls, tap = self.numbers(), f"{name}:{kind}"
        calls[tap] = calls.get(tap, -1) + 1
        return f"{tap}[{calls[tap]}]"

    @guarded
    def _digest(self, row: str, tensors: Sequence[Tensor]) -> None:
        held = [each for tensor in tensors for _, each in plain("", tensor)]
        if len({each.device for each in held}) != 1 or _is_quiet(self._observer):
            return
        kind = tuple((each.shape, each.dtype, each.device) for each in held)
        if kind not in self._digests:
            if len(self._digests) >= MOST_PLANS:
                self._digests.clear()  # shapes that change from call to call
            self._digests[kind] = _planned(held)
        digester, rows, weights = self._digests[kind]
        digester(held, rows)
        self._observer.tap(row, (rows * weights).sum(0, dtype=torch.int32), held)


def _planned(tensors: Sequence[Tensor]) -> tuple[Digester, Tensor, Tensor]:
    """A digester, its rows, and by what each row is multiplied as they become one."""
    device, number = tensors[0].device, len(tensors)
    factors = [pow(_FOLD, number - 1 - place, 1 << 32) for place in range(number)]
    weights = torch.tensor(factors).to(torch.int32).to(device)[:, None]
    return Digester(tensors), empty_rows(number, device), weights


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _pattern(text: str) -> tuple[re.Pattern[str], str]:
    if (parts := _PATTERN.fullmatch(text)) is None:
        expected = "a module's dotted name, * and ** in it, and :input, :output or :gradient"
        raise ValueError(f"taps: expected {expected}, got {text!r}")
    levels = (re.escape(part).replace(r"\*", "[^.]*") for part in parts[1].split("**"))
    return re.compile(".*".join(levels)), parts[2] or OUTPUT
