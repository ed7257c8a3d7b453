"""One capture on all ranks, or on none: a handshake before and after, and a way back.

    with CaptureSession(device, "attn", generators=..., state=...) as session:
        session.at_end(hooks.restore)           however it ends
        session.on_abort(graphed.reset)         if any rank gave up
        for graphed in ...:
            with unit_gathered():               collectives: every rank, whatever happened before
                session.attempt(lambda: graphed.capture_forward(0))

`CaptureAborted`: every rank got to the end, and can go on eagerly. `CaptureLost`: a rank failed in
a function that communicates, left a note in the store, and ends; so must the others.

Hooks are taken off in two phases, run at capture time, and put back whole. A graph holds no Python,
so a hook inside of what is captured acts at capture and never again. What must run around warm-up
and capture says so by attributes of the hook:

    _cuda_graph_handler                in the hook's own phase, in place of it
    _cuda_graph_backward_pre_handler   before the backward, for a forward hook
    _cuda_graph_backward_handler       after the backward, likewise
    _cuda_graph_capturable = True      it is nothing but work on tensors: captured with the rest

The phases are those of TransformerEngine's `capture_time_hooks`: before and after each forward and
backward of a warm-up, and around the graphs of a capture. At a replay

    a hook of the outer module             runs around the replay, marked or not
    a marked hook of an inner module       does not run, or is in the graph if it is capturable
    any other of an inner module           refused at the capture: no replay would run it
    a hook of every module (global)        refused
"""

import contextlib
import gc
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.modules import module as torch_module

from fsdp_core.device import Device, RngStates
from fsdp_core.graph.recorder import OverCompiled, collector_off

CaptureHook = Callable[[nn.Module], None]
CaptureHooks = Mapping[str, Sequence[CaptureHook]]
"""Phase -> hooks, each a function of the captured module that returns nothing."""

PHASES = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")

_SIDES = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_backward_pre_hooks": (),
    "_backward_hooks": (),
}
"""Dictionaries of hooks, and beside each those that say how its hooks are called."""

CLOSING = ("forward_hooks", "backward_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_PRE, _POST = "_cuda_graph_backward_pre_handler", "_cuda_graph_backward_handler"
_OWN, _CAPTURABLE = "_cuda_graph_handler", "_cuda_graph_capturable"


def run_hooks(hooks: CaptureHooks, phase: str, module: nn.Module) -> None:
    """Run the hooks of a phase in their order, with the module; they must return None."""
    for hook in hooks[phase]:
        # A hook of somebody else may return what its type says it does not.
        returned: object = hook(module)
        if returned is not None:
            raise RuntimeError(
                f"Expected capture-time {phase} to return None, got {type(returned).__name__}: "
                "inputs and outputs of a graph cannot be replaced."
            )


@contextlib.contextmanager
def tensor_hooks_off(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """No hooks on the gradients of `parameters` inside. Autograd runs them wherever such a gradient
    comes out: in a captured backward, and again around each replay of it.
    """
    taken = [
        (parameter, attribute, hooks)
        for parameter in parameters
        for attribute in _OF_PARAMETERS
        if (hooks := getattr(parameter, attribute, None))
    ]
    for parameter, attribute, _ in taken:
        # Not None: of the second kind torch keeps those that it has.
        setattr(parameter, attribute, OrderedDict())
    try:
        yield
    finally:
        for parameter, attribute, hooks in taken:
            hooks.update(getattr(parameter, attribute) or {})  # registered meanwhile
            setattr(parameter, attribute, hooks)


class ExtractedHooks:
    """The hooks of a module's subtree, taken off until `restore`; `capture_hooks` are by phase.
    `ValueError` for a hook of an inner module, or of every module, that no replay would run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        # Owner, attribute, the dictionary that was there, and the numbers that were in it.
        self._taken: list[tuple[nn.Module, str, OrderedDict[int, Any], frozenset[int]]] = []
        self.capture_hooks = _routed(module)
        for inner in module.modules():
            for attribute, sides in _SIDES.items():
                self._take_off(inner, (attribute, *sides), keep_capturable=inner is not module)
        self._tensor_hooks = contextlib.ExitStack()
        self._tensor_hooks.enter_context(tensor_hooks_off(module.parameters()))

    def _take_off(self, owner: nn.Module, names: Sequence[str], *, keep_capturable: bool) -> None:
        hooks = getattr(owner, names[0])
        if not hooks:
            return
        kept = {n for n, hook in hooks.items() if keep_capturable and _is_capturable(hook)}
        for name in names:
            original = getattr(owner, name)
            self._taken.append((owner, name, original, frozenset(original)))
            setattr(owner, name, OrderedDict((n, v) for n, v in original.items() if n in kept))

    def restore(self) -> None:
        """Put back the very dictionaries, so that handles still work; a second call does nothing.
        `RuntimeError` if hooks were registered meanwhile, whose handles cannot remove them; they
        stay.
        """
        self._tensor_hooks.close()
        taken, self._taken, added = self._taken, [], []
        for owner, name, original, numbers in taken:
            new = {n: value for n, value in getattr(owner, name).items() if n not in numbers}
            original.update(new)
            setattr(owner, name, original)
            if new:
                added.append(f"{type(owner).__name__}.{name}")
        if added:
            raise RuntimeError(
                f"Expected no new hooks while hooks are taken off {self._name}, got some in "
                f"{', '.join(added)}: register them before a capture or after it."
            )

    def __enter__(self) -> "ExtractedHooks":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def own_capture_hooks(module: nn.Module) -> CaptureHooks:
    """What the module's own hooks do at capture time, by phase; those of inner modules are left."""
    hooks = ((phase, h) for phase in PHASES for h in getattr(module, f"_{phase}").values())
    return _by_phase([route for phase, hook in hooks for route in _routes(hook, phase, module)])


def _routed(module: nn.Module) -> CaptureHooks:
    """Handlers of every marked hook of the subtree, by phase."""
    for name in ("forward_pre", "forward", "backward_pre", "backward"):
        if getattr(torch_module, f"_global_{name}_hooks"):
            raise ValueError(
                f"Expected no {name} hooks of every module, got some: they would act at a capture "
                "and at no replay. Remove them, or run without graphs."
            )
    found: list[tuple[str, CaptureHook]] = []
    for path, inner in module.named_modules():
        for phase in PHASES:
            for hook in getattr(inner, f"_{phase}").values():
                routes = list(_routes(hook, phase, inner))
                found += routes
                if path and not routes and not _is_capturable(hook):
                    raise ValueError(
                        f"Expected no {phase} of {path}, which is inside of what is captured, got "
                        f"{getattr(hook, '__qualname__', type(hook).__name__)}: no replay would "
                        "run it. Remove it, hook the captured module instead, or mark it "
                        f"{_CAPTURABLE} if it only computes on tensors."
                    )
    return _by_phase(found)


def _by_phase(routes: Sequence[tuple[str, CaptureHook]]) -> CaptureHooks:
    """Outer modules open first and close last."""
    found = {phase: [handler for to, handler in routes if to == phase] for phase in PHASES}
    return {phase: hooks[::-1] if phase in CLOSING else hooks for phase, hooks in found.items()}


def _routes(hook: Any, phase: str, module: nn.Module) -> Iterator[tuple[str, CaptureHook]]:
    """Phases that a hook of a module has something to do in, with what it does to that module."""
    marks = {_OWN: phase}
    if phase == "forward_hooks":
        marks |= {_PRE: "backward_pre_hooks", _POST: "backward_hooks"}
    for mark, target in marks.items():
        handler = getattr(hook, mark, None)
        if handler is not None:
            yield target, lambda _, handler=handler: handler(module)  # type: ignore[misc]


def _is_capturable(hook: Any) -> bool:
    return bool(getattr(hook, _CAPTURABLE, False))


# ---- one capture on all ranks

_NOTE_CHARS = 1000
_MOST_NAMED = 8
_POLL_S = 0.02
PATIENCE = timedelta(seconds=10)
"""How long a rank that failed waits for the others, unless told otherwise."""


class CaptureAborted(RuntimeError):
    """A capture was given up on every rank; nothing of it is left. `refusals`: why, by rank of the
    default process group.
    """

    def __init__(self, what: str, refusals: dict[int, str]) -> None:
        self.refusals = refusals
        reasons = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(refusals.items()))
        super().__init__(f"the capture of {what} was given up on every rank: {reasons}")


class CaptureLost(RuntimeError):
    """A capture failed, and not all ranks can be met again: every process of the run has to end.
    `refusals`: as far as they are known; the first rank that failed is the first one here.
    """

    def __init__(self, what: str, refusals: dict[int, str], then: str) -> None:
        self.refusals = refusals
        reasons = "; ".join(f"rank {rank}: {why}" for rank, why in refusals.items())
        super().__init__(f"the capture of {what} failed: {reasons or 'on another rank'}; {then}")


class CaptureSession:
    """A capture that all ranks of the default process group make together.

    what: is captured; the same on every rank.
    generators, state: put back at the end, whatever was drawn and written: see `Undo`.
    refusal: why this rank cannot take part; then no rank does.
    communicates: the functions that are captured issue collectives; a failed `attempt` raises.
    patience: how long a rank that failed waits for the others to get to the end.
    """

    def __init__(
        self,
        device: Device,
        what: str,
        *,
        generators: Sequence[torch.Generator] = (),
        state: Sequence[torch.Tensor] = (),
        refusal: str | None = None,
        communicates: bool = False,
        patience: timedelta = PATIENCE,
    ) -> None:
        self._device, self._what, self._refusal = device, what, refusal
        self._communicates, self._patience = communicates, patience
        self._generators, self._state = tuple(generators), tuple(state)
        self._failure: Exception | None = None
        self._at_end: list[Callable[[], None]] = []
        self._on_abort: list[Callable[[], None]] = []
        self._collector_off = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Meet the other ranks; `CaptureAborted` if one refuses or captures something else."""
        # Graphs that are garbage already go now.
        gc.collect()
        refusal, cause = self._refusal, None
        if refusal is None:
            try:
                # Before the handshake: a rank that has no memory for it refuses with a word.
                undo = Undo(self._device, self._generators, self._state)
                self._at_end.insert(0, undo.put_back)
            except Exception as error:  # noqa: BLE001  (the others must hear of any)
                refusal, cause = _in_words(error), error
        refusals = exchange_refusals(self._what, refusal)
        if refusals:
            raise CaptureAborted(self._what, refusals) from cause
        self._notes = _Notes()
        self._collector_off.enter_context(collector_off())
        return self

    def at_end(self, function: Callable[[], None]) -> None:
        """Call it when the session ends, however it does; the last one first."""
        self._at_end.append(function)

    def on_abort(self, function: Callable[[], None]) -> None:
        """Call it if the capture is given up, here or on another rank; the last one first."""
        self._on_abort.append(function)

    def attempt(self, function: Callable[[], None]) -> None:
        """Call it unless something failed before; what it raises fails the session at its end, and
        is raised here, too, where functions communicate.
        """
        if self._failure is not None:
            return
        try:
            function()
        except Exception as error:
            self._fail(error)
            if self._communicates:
                raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Keep the captures if all ranks have them, else undo them and raise `CaptureAborted`, or
        `CaptureLost` if a rank does not get here.
        """
        with self._collector_off:
            ended = _call(self._at_end)
            # The first failure is the cause; what the body raised then may follow from it.
            failure = (error if isinstance(error, Exception) else None) or ended
            if self._failure is None and failure is not None:
                self._fail(failure)
            if error is not None and not isinstance(error, Exception):
                _call(self._on_abort)
                return  # interrupted: no time to talk
            self._settle()

    def _fail(self, error: Exception) -> None:
        """Remember this rank's first failure, for those, too, who may not meet it at the end."""
        self._failure = error
        self._notes.failed(_in_words(error))

    def _settle(self) -> None:
        failure, notes = self._failure, self._notes
        refusal = None if failure is None else _in_words(failure)
        try:
            notes.arrive()
            missing = () if failure is None else notes.missing(self._patience)
            if missing or notes.someone_left():
                notes.leave()
                raise self._lost(missing, "")
            refusals = exchange_refusals(self._what, refusal)
        except CaptureLost as lost:
            _call(self._on_abort)
            raise lost from failure
        except Exception as lost:  # noqa: BLE001  (the own failure matters more)
            _call(self._on_abort)
            raise self._lost((), str(lost)) from failure or lost
        if refusals:
            also = _call(self._on_abort)
            if also is not None:
                refusals[_rank()] = f"{refusals.get(_rank(), 'captured')}, and undoing: {also}"
            raise CaptureAborted(self._what, refusals) from failure

    def _lost(self, missing: Sequence[int], said: str) -> CaptureLost:
        refusals = self._notes.refusals()
        if not refusals and self._failure is not None:
            refusals = {_rank(): _in_words(self._failure)}
        then = f"rank {_rank()} got no word of the others: {said}"
        if missing:
            named = ", ".join(str(rank) for rank in missing[:_MOST_NAMED])
            more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
            then = f"without rank {named}{more} at its end, this process has to end"
        elif not said:
            then = "another rank has left"
        return CaptureLost(self._what, refusals, then)


def _call(functions: list[Callable[[], None]]) -> Exception | None:
    """Call all, last first, whatever any of them does; the first error."""
    first: Exception | None = None
    while functions:
        try:
            functions.pop()()
        except Exception as error:  # noqa: BLE001  (all have to run)
            first = first or error
    return first


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def exchange_refusals(what: str, refusal: str | None) -> dict[int, str]:
    """Every rank's refusal by its rank in the default process group; empty if none refuses. A
    collective, which the host waits for. Ranks that name another `what` than rank 0 refuse.
    """
    if not dist.is_initialized():
        return {} if refusal is None else {0: refusal}
    world: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(world, (what, refusal))
    found, first = {}, world[0][0]
    for rank, (captured, reason) in enumerate(world):
        if reason is not None:
            found[rank] = reason
        elif captured != first:
            found[rank] = f"captures {captured}, where rank 0 captures {first}"
    return found


class _Notes:
    """What ranks leave in the store of one capture, where they cannot meet in a collective."""

    def __init__(self) -> None:
        alone = not dist.is_initialized()
        self._store: Any = dist.HashStore() if alone else distributed_c10d._get_default_store()
        self._rank, self._world_size = _rank(), 1 if alone else dist.get_world_size()
        number = self._store.add(f"captures of rank {self._rank}", 1)
        self._prefix = f"capture {number}: "

    def failed(self, refusal: str) -> None:
        with contextlib.suppress(RuntimeError):
            number = self._store.add(self._prefix + "failures", 1)
            note = f"{self._rank} {refusal[:_NOTE_CHARS]}"
            self._store.set(f"{self._prefix}failure {number}", note)

    def refusals(self) -> dict[int, str]:
        """Why ranks failed, the first one first; empty if the store is gone, too."""
        found: dict[int, str] = {}
        with contextlib.suppress(RuntimeError):
            for number in range(1, self._store.add(self._prefix + "failures", 0) + 1):
                key = f"{self._prefix}failure {number}"
                if self._store.check([key]):
                    rank, _, refusal = self._store.get(key).decode(errors="replace").partition(" ")
                    found.setdefault(int(rank), refusal)
        return found

    def arrive(self) -> None:
        """This rank is at the end of its capture, well or not."""
        self._store.set(f"{self._prefix}rank {self._rank}", "")
        self._store.add(self._prefix + "arrived", 1)

    def missing(self, patience: timedelta) -> tuple[int, ...]:
        """Ranks that are not at the end after `patience`, or once another rank has left."""
        until_s = time.monotonic() + patience.total_seconds()
        while self._store.add(self._prefix + "arrived", 0) < self._world_size:
            if time.monotonic() > until_s or self.someone_left():
                keys = {rank: f"{self._prefix}rank {rank}" for rank in range(self._world_size)}
                return tuple(rank for rank, key in keys.items() if not self._store.check([key]))
            time.sleep(_POLL_S)
        return ()

    def leave(self) -> None:
        """This rank waits for nobody any more."""
        self._store.set(self._prefix + "left", "")

    def someone_left(self) -> bool:
        """Whether a rank waits for nobody any more: no collective of all ranks will end."""
        return bool(self._store.check([self._prefix + "left"]))


class _Writes(OverCompiled):
    """Sees operators, unless paused."""

    is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Undo:
    """What persistent tensors and generators held when it was made, or when they were written.
    `generators`: in addition to the device's default ones. `state`: tensors that kernels may write
    which no operator shows.
    """

    def __init__(
        self,
        device: Device,
        generators: Sequence[torch.Generator],
        state: Sequence[torch.Tensor] = (),
    ) -> None:
        self._device, self._rng_states = device, RngStates(device, generators)
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # One for all that is watched: what was made in a forward is no trace of its backward's.
        self._recorder = _Writes(
            keep_operations=False,
            before_write=lambda number, tensor: self._save(tensor),
            on_host=not device.is_cuda,
        )
        for tensor in state:
            self._save(tensor)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Save every tensor from before that an operator inside writes, before it does."""
        with self._device.watching_storages(self._recorder), self._recorder:
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Not watching inside: what gathers parameters writes where others will write next."""
        kept, self._recorder.is_paused = self._recorder.is_paused, True
        try:
            yield
        finally:
            self._recorder.is_paused = kept

    def _save(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._saved and storage.nbytes():
            # All of the storage as bytes, without a version that autograd counts.
            empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
            live = empty.set_(storage, 0, (storage.nbytes(),), (1,))
            self._saved[storage._cdata] = (live, live.clone())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Give every saved tensor its old bytes, in place, and every generator its old state."""
        for live, saved in self._saved.values():
            # What was given back or grown meanwhile belongs to somebody else's bookkeeping.
            if live.untyped_storage().nbytes() == saved.numel():
                live.copy_(saved)
        self._rng_states.put_back()
