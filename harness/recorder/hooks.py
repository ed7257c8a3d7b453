"""What is hooked in torch so that a program is recorded without a line changed.

    Optimizer.__init__             names of parameters, before an engine replaces them
    Module.__call__                the first one in training, which records the initial state
    torch.autograd.backward        losses of microbatches
    Optimizer.step, before, after  gradients; weights, optimizer state, buffers, random states
    clip_grad_norm_                the gradient norm
    GradScaler.scale, step         losses before they are scaled; steps that it skips

A run that is to round at random does so from the first training forward pass on
(`harness.recorder.rounding`); observing it does not.

Inside of a capture nothing is observed: what the capture holds is observed after each replay.
"""

import contextlib
import functools
import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from harness.recorder.capture import is_capturing
from harness.recorder.collectives import Notes
from harness.recorder.graphs import GraphInfo, GraphWatch
from harness.recorder.observer import GROUPS, UNSCALED, Observer
from harness.recorder.rounding import Rounding
from harness.recorder.session import Session, begin
from harness.recorder.state import Named, cuda_is_used, plain
from harness.recorder.taps import Keeper, Taps, module_of

SUMMARY_EVENT = "cuda_graphs"
HOOKED = ("made", "begin", "backward", "before", "after", "loss", "norm", "replayed", "skip")
LINES = ("enter", "leave")
TAPS_EVENT = "taps"
"""Names the patterns that the script itself asks for, as `harness.checks.taps` reads them."""
_SCALES = "_harness_scales"
_active: Observer | None = None


def install(session: Session) -> Observer:
    """Hook torch in this process; what happens from now on is recorded."""
    global _active
    observer = _active = Observer(session)
    rounding = Rounding(session)
    for name in (*HOOKED, *(LINES if session.rounding else ())):
        setattr(observer, name, _guarded(getattr(observer, name), session, rounding))
    session.finish, session.under_way = observer.finish, observer.under_way
    _hook_seeds(observer)
    _hook_optimizers(observer)
    _hook_first_forward(observer)
    _hook_autograd(observer)
    _hook_norms(observer)
    _hook_scaler(observer)
    _watch_graphs(observer)
    if session.rounding:
        _round_at_random(observer, rounding)
    if dist.is_available() and session.world_size > 1:
        _note_collectives(observer)
    session.module_at_work = lambda error: module_of(error, observer)
    taps = Taps(observer, lambda: _is_quiet(observer))
    taps.add(session.config.get("taps", ()))
    observer.add_taps = taps.add
    if session.keep is not None:
        keeper = Keeper(observer, session.keep)
        observer.keep, observer.written = keeper.take, keeper.write
    return observer


def _note_collectives(observer: Observer) -> None:
    session, notes = observer.session, Notes(observer, observer.session.folder)
    notes.install()

    def leaving(*, has_failed: bool) -> None:
        # Others may wait for what this rank has not entered.
        notes.settle()
        if has_failed:
            notes.answer(or_last=True)

    session.leaving = leaving


def _round_at_random(observer: Observer, rounding: Rounding) -> None:
    begin, enter, finish = observer.begin, observer.enter, observer.session.finish

    def begins() -> None:
        begin()
        rounding.begin()

    def enters() -> None:
        enter()
        rounding.begin()

    def finishes() -> Mapping[str, Any]:
        with rounding.aside():
            facts = finish()
        rounding.end()
        return facts

    rounding.refuse_captures()
    # What the first backward pass or a script's first step begins is begun by then.
    observer.begin, observer.enter = begins, enters  # type: ignore[method-assign]
    observer.session.finish = finishes


def _guarded(
    method: Callable[..., None], session: Session, rounding: Rounding
) -> Callable[..., None]:
    """A mistake of the recorder must not end somebody's program, nor be taken for the program's."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            with rounding.aside():
                method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is
            session.broken(error)

    return call


def recorder_for_script(
    model: Any, optimizer: Any, taps: tuple[str, ...]
) -> "ScriptRecorder | None":
    """The recorder that a script's own lines speak to; None in a process that does not record.

    Raises:
        ValueError: one of `taps` is no pattern.
    """
    if _active is None:
        begin(trains=True)
    if _active is None or not _active.session.is_mine:
        return None
    if taps:
        _active.add_taps(taps)
        _active.event(TAPS_EVENT, {"patterns": list(taps)})
    return ScriptRecorder(_active, _each(model), _each(optimizer))


def _each(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]


class ScriptRecorder:
    """See `harness.recorder.Recorder`."""

    def __init__(self, observer: Observer, models: list[nn.Module], optimizers: list[Any]) -> None:
        self._observer, self._own = observer, dict[str, Mapping[str, Any]]()
        observer.names.scan([p for each in models for p in each.parameters()], roots=models)
        for each in optimizers:
            observer.add(each)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """See `Recorder.step`."""
        self._observer.enter()
        yield
        self._observer.leave()

    def microbatch(self, loss: Any) -> None:
        """See `Recorder.microbatch`."""
        self._observer.loss(loss, is_told=True)

    def grad_norm(self, norm: Any) -> None:
        """See `Recorder.grad_norm`."""
        self._observer.norm(norm)

    def state(self, group: str, tensors: Mapping[str, Any]) -> None:
        """See `Recorder.state`."""
        if group in GROUPS:
            raise ValueError(f"Expected a group of the script's own, got {group!r}.")
        self._own[group] = tensors

        def gather() -> Named:
            held = self._own[group].items()
            return [each for name, tensor in held for each in plain(name, tensor)]

        self._observer.own[group] = gather

    def skipped(self, why: str) -> None:
        """See `Recorder.skipped`."""
        self._observer.skip(why)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside nothing is recorded; for whoever measures what recording costs."""
    observer = _active
    if observer is not None:
        observer.close()
        observer.is_paused = True
    yield
    if observer is not None:
        observer.is_paused = False


def _is_quiet(observer: Observer) -> bool:
    """Whether nothing may be observed now: in another process, a capture, or a compiler's trace."""
    # First: a compiler's trace of a module's hooks ends here, and its graph has no break.
    if torch.compiler.is_compiling() or not observer.session.is_mine:
        return True
    if observer.is_paused or observer.is_outside:
        return True
    return is_capturing() or (cuda_is_used() and torch.cuda.is_current_stream_capturing())


def _hook_seeds(observer: Observer) -> None:
    """Python and NumPy seed from the clock: their states count once the program has seeded them.

    To put back what was taken in this process seeds nothing: torch.compile does so as it compiles.
    """
    taken: set[tuple[str, int]] = set()

    def taking(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def get(*args: Any, **kwargs: Any) -> Any:
            state = original(*args, **kwargs)
            taken.add((name, _hash_of_state(state)))
            return state

        return get

    def seeding(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def seed(*args: Any, **kwargs: Any) -> Any:
            if not args or (name, _hash_of_state(args[0])) not in taken:
                observer.seeded.add(name)
            return original(*args, **kwargs)

        return seed

    owners: list[tuple[str, Any, str, str]] = [("python", random, "getstate", "setstate")]
    with contextlib.suppress(ImportError):
        import numpy

        owners.append(("numpy", numpy.random, "get_state", "set_state"))
    for name, owner, get, put in owners:
        setattr(owner, get, taking(getattr(owner, get), name))
        for function in ("seed", put):
            setattr(owner, function, seeding(getattr(owner, function), name))


def _hash_of_state(state: Any) -> int:
    """Of a generator, whether its numbers are a tuple or an array."""
    return hash(pickle.dumps(state))


def _hook_optimizers(observer: Observer) -> None:
    original = Optimizer.__init__

    @functools.wraps(original)
    def made(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if observer.session.is_mine:
            observer.made(self)

    Optimizer.__init__ = made  # type: ignore[method-assign]

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

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _hook_first_forward(observer: Observer) -> None:
    """Buffers and random states are those before step 0 only until its forward pass."""

    def before(module: nn.Module, args: Any) -> None:
        if _is_quiet(observer) or not module.training or not torch.is_grad_enabled():
            return
        if observer.optimizers and observer.names.of_module(module) is not None:
            observer.begin()
        if observer.has_begun:
            handle.remove()

    # A compiled module's wrapper is seen as well, which is what is wanted.
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are glo")
    handle = register_module_forward_pre_hook(before)


def _hook_autograd(observer: Observer) -> None:
    original = torch.autograd.backward
    depth = [0]  # checkpointing calls it again from inside

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        graph = observer.capturing()
        if depth[0] or (graph is None and _is_quiet(observer)):
            return original(tensors, *args, **kwargs)
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        if graph is None:
            observer.backward()
        for root in roots:
            if isinstance(root, Tensor):
                observer.loss(root, graph)
        depth[0] += 1
        observer.is_in_backward = True
        try:
            return original(tensors, *args, **kwargs)
        finally:
            depth[0] -= 1
            observer.is_in_backward = bool(depth[0])

    torch.autograd.backward = backward


def _watch_graphs(observer: Observer) -> None:
    """Watch the program's graphs; a replay that holds an optimizer's step is a step."""
    session = observer.session
    stress = tuple(session.config.get("stress", ()))
    watch = GraphWatch(observer.event, observer.named, stress)
    observer.capturing = watch.capturing

    def replayed(info: GraphInfo) -> None:
        if info.optimizer_steps and not observer.is_paused and session.is_mine:
            observer.replayed(info.index)

    watch.on_replayed.append(replayed)
    watch.install()

    def finish() -> Mapping[str, Any]:
        graphs = watch.summary()
        if graphs["graphs"]:
            observer.event(SUMMARY_EVENT, graphs)
        facts = observer.finish()
        return {**facts, "replays": sum(each["replays"] for each in graphs["graphs"])}

    session.finish = finish


def _hook_norms(observer: Observer) -> None:
    def observed(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def norm_of(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
            norm = original(tensors, *args, **kwargs)
            graph = observer.capturing()
            if graph is not None or not _is_quiet(observer):
                observer.norm(norm, graph)
            return norm

        return norm_of

    for name in ("clip_grad_norm_", "get_total_norm"):
        original = getattr(nn.utils, name)
        _replace(original, observed(original), (nn.utils, nn.utils.clip_grad))
    clip_with = nn.utils.clip_grads_with_norm_

    @functools.wraps(clip_with)
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        if not _is_quiet(observer):
            observer.norm(total_norm)
        clip_with(parameters, max_norm, total_norm, *args, **kwargs)

    # For programs that call it: clip_grad_norm_ has its own name for it.
    _replace(clip_with, clip_grads_with_norm_, (nn.utils,))


def _hook_scaler(observer: Observer) -> None:
    original = torch.amp.GradScaler.step

    @functools.wraps(original)
    def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        taken = observer.num_taken
        result = original(self, optimizer, *args, **kwargs)
        # The optimizer's own hooks have counted the step if it was taken.
        if observer.num_taken == taken and not _is_quiet(observer):
            observer.skip("GradScaler found a gradient that is not finite")
        return result

    torch.amp.GradScaler.step = step  # type: ignore[method-assign]
    made = torch.amp.GradScaler.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        # Where its class has it: FSDP's scaler scales by itself, and is imported later.
        owner: Any = next(each for each in type(self).__mro__ if "scale" in vars(each))
        if not hasattr(owner.scale, _SCALES):
            owner.scale = _scaling(owner.scale)

    torch.amp.GradScaler.__init__ = init  # type: ignore[method-assign]


def _scaling(original: Callable[..., Any]) -> Callable[..., Any]:
    """`scale`, whose results know their losses: an infinite one is right where its loss is not."""

    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if not torch.compiler.is_compiling():
            single = isinstance(outputs, Tensor)
            many = [each if isinstance(each, list | tuple) else () for each in (outputs, scaled)]
            for loss, result in [(outputs, scaled)] if single else zip(*many, strict=False):
                are_tensors = isinstance(loss, Tensor) and isinstance(result, Tensor)
                if are_tensors and loss.numel() == 1 and result is not loss:
                    setattr(result, UNSCALED, loss.detach())
        return scaled

    setattr(scale, _SCALES, True)
    return scale


def _replace(original: Callable[..., Any], ours: Callable[..., Any], places: Iterable[Any]) -> None:
    for place in places:
        for name, value in list(vars(place).items()):
            if value is original:
                setattr(place, name, ours)
