"""Hooks around captures: taken off a subtree in two phases, run at capture time, put back whole.

A graph holds device work and no Python, so a hook inside of what is captured acts at capture and
never again. Before a capture hooks are therefore taken off:

    extract    every dictionary of hooks of every module of the subtree, side dictionaries (which
               hooks take keywords, which run always) and the hooks of parameters included
    route      what must run around warm-up and capture goes to one of four phases, as a function of
               the module: a hook says so by attributes of its own,

        _cuda_graph_handler                in the hook's own phase, in place of it
        _cuda_graph_backward_pre_handler   before the backward, for a forward hook that arranges
                                           something for then
        _cuda_graph_backward_handler       after the backward, likewise
        _cuda_graph_capturable = True      it is nothing but work on tensors: it stays where it is
                                           and is captured with the rest (inner modules only)

    A hook that is rerouted is withheld itself. Other hooks of the outer module are withheld too:
    they run around every replay. Other hooks of inner modules would never run again: refused.

What was taken off is put back as the very dictionaries that were there, so handles still remove
what they registered, also if they did so in between. The phases are those of TransformerEngine's
`capture_time_hooks`.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

CaptureHook = Callable[[nn.Module], None]
CaptureHooks = Mapping[str, Mapping[int, CaptureHook]]
"""Phase -> hooks by number, each a function of the captured module that returns nothing."""

PHASES = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")

_SIDES = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_backward_pre_hooks": (),
    "_backward_hooks": (),
}
"""Dictionaries of hooks, and beside each those that say how its hooks are called."""

_CLOSING = ("forward_hooks", "backward_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_PRE, _POST = "_cuda_graph_backward_pre_handler", "_cuda_graph_backward_handler"
_OWN, _CAPTURABLE = "_cuda_graph_handler", "_cuda_graph_capturable"


def canonical_hooks(
    num_callables: int, hooks: Sequence[CaptureHooks | None] | None
) -> list[CaptureHooks]:
    """One entry a callable, every phase in it.

    Raises:
        ValueError: another number of entries than callables, or a key that is no phase.
    """
    given = [None] * num_callables if hooks is None else list(hooks)
    if len(given) != num_callables:
        raise ValueError(
            f"Expected capture_time_hooks of {num_callables} callables, got {len(given)}."
        )
    for entry in given:
        unknown = sorted(set(entry or ()) - set(PHASES))
        if unknown:
            raise ValueError(
                f"Expected capture_time_hooks out of {', '.join(PHASES)}, got {', '.join(unknown)}."
            )
    return [{phase: (entry or {}).get(phase, {}) for phase in PHASES} for entry in given]


def run_hooks(hooks: CaptureHooks, phase: str, module: nn.Module) -> None:
    """Run the hooks of a phase in their order, with the module.

    Raises:
        RuntimeError: a hook returned something, which nothing would use.
    """
    for hook in hooks[phase].values():
        # A hook of somebody else may return what its type says it does not.
        returned: object = hook(module)
        if returned is not None:
            raise RuntimeError(
                f"Expected capture-time {phase} to return None, got {type(returned).__name__}: "
                "inputs and outputs of a graph cannot be replaced."
            )


def require_no_hooks(module: nn.Module) -> None:
    """Refuse a module that a graph would silently rob of a hook.

    Raises:
        ValueError: the module has hooks, or an inner one has some that are not marked capturable.
    """
    for path, inner in module.named_modules():
        for phase in PHASES:
            for hook in getattr(inner, f"_{phase}").values():
                if not path or not _is_capturable(hook):
                    raise ValueError(
                        f"Expected no {phase} of {path or type(module).__name__} at a capture, got "
                        f"{_name(hook)}: take hooks off with hooks_off, and pass what has to run "
                        "around warm-ups and captures as capture_time_hooks."
                    )


@contextlib.contextmanager
def hooks_off(modules: Iterable[nn.Module]) -> Iterator[list[CaptureHooks]]:
    """The hooks of the modules' subtrees off, what they do at capture time as `capture_time_hooks`.

    Raises:
        ValueError: a hook would be lost in a replay.
        RuntimeError: hooks were registered inside.
    """
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ExtractedHooks(module)).capture_hooks for module in modules]


@contextlib.contextmanager
def tensor_hooks_off(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """No hooks on the gradients of `parameters` inside.

    Autograd runs them wherever such a gradient comes out: in a captured backward, and again around
    each replay of it.
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


@dataclass(frozen=True)
class _TakenOff:
    """A dictionary of a module's hooks, and the numbers that were in it."""

    owner: nn.Module
    attribute: str
    original: OrderedDict[int, Any]
    numbers: frozenset[int]


class ExtractedHooks:
    """The hooks of a module's subtree, taken off until `restore`.

    Raises:
        ValueError: a hook of an inner module, or of every module, would be lost in a replay.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._taken: list[_TakenOff] = []
        self._is_restored = False
        self.capture_hooks: CaptureHooks = _routed(module)
        for inner in module.modules():
            for attribute, sides in _SIDES.items():
                self._take_off(inner, attribute, sides, keep_capturable=inner is not module)
        self._tensor_hooks = contextlib.ExitStack()
        self._tensor_hooks.enter_context(tensor_hooks_off(module.parameters()))

    def _take_off(
        self, owner: nn.Module, attribute: str, sides: Sequence[str], *, keep_capturable: bool
    ) -> None:
        originals = {name: getattr(owner, name) for name in (attribute, *sides)}
        hooks = originals[attribute]
        if not hooks:
            return
        kept = {n for n, hook in hooks.items() if keep_capturable and _is_capturable(hook)}
        for name, original in originals.items():
            self._taken.append(_TakenOff(owner, name, original, frozenset(original)))
            remaining = ((n, value) for n, value in original.items() if n in kept)
            setattr(owner, name, OrderedDict(remaining))

    def restore(self) -> None:
        """Put everything back; a second call does nothing.

        Hooks that were registered meanwhile stay, behind those that were there.

        Raises:
            RuntimeError: hooks were registered meanwhile, with handles that cannot remove them any
                more; everything is back nevertheless.
        """
        if self._is_restored:
            return
        self._is_restored = True
        self._tensor_hooks.close()
        added = []
        for taken in self._taken:
            current = getattr(taken.owner, taken.attribute)
            new = {n: value for n, value in current.items() if n not in taken.numbers}
            taken.original.update(new)
            setattr(taken.owner, taken.attribute, taken.original)
            if new:
                added.append(f"{type(taken.owner).__name__}.{taken.attribute}")
        if added:
            raise RuntimeError(
                f"Expected no new hooks while hooks are taken off {type(self._module).__name__}, "
                f"got some in {', '.join(added)}: register them before a capture or after it."
            )

    def __enter__(self) -> "ExtractedHooks":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def _is_capturable(hook: Any) -> bool:
    return bool(getattr(hook, _CAPTURABLE, False))


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
                handlers = list(_handlers(hook, phase))
                found += [(target, _of_inner(handler, inner)) for target, handler in handlers]
                if path and not handlers and not _is_capturable(hook):
                    raise ValueError(
                        f"Expected no {phase} of {path}, which is inside of what is captured, got "
                        f"{_name(hook)}: no replay would run it. Remove it, hook the captured "
                        f"module instead, or mark it {_CAPTURABLE} if it only computes on tensors."
                    )
    return {phase: _in_order(phase, [h for p, h in found if p == phase]) for phase in PHASES}


def own_capture_hooks(module: nn.Module) -> CaptureHooks:
    """What the module's own hooks do at capture time, by phase; those of inner modules are left.

    For the capture of a part of it, around which it stays as it is.
    """
    found = [
        (target, _of_inner(handler, module))
        for phase in PHASES
        for hook in getattr(module, f"_{phase}").values()
        for target, handler in _handlers(hook, phase)
    ]
    return {phase: _in_order(phase, [h for p, h in found if p == phase]) for phase in PHASES}


def _in_order(phase: str, handlers: list[CaptureHook]) -> dict[int, CaptureHook]:
    """Outer modules open first and close last."""
    return dict(enumerate(reversed(handlers) if phase in _CLOSING else handlers))


def _handlers(hook: Any, phase: str) -> Iterator[tuple[str, CaptureHook]]:
    """Phases that a hook has something to do in, with what it does."""
    own = getattr(hook, _OWN, None)
    if own is not None:
        yield phase, own
    if phase == "forward_hooks":
        pre, post = getattr(hook, _PRE, None), getattr(hook, _POST, None)
        if pre is not None:
            yield "backward_pre_hooks", pre
        if post is not None:
            yield "backward_hooks", post


def _of_inner(handler: CaptureHook, inner: nn.Module) -> CaptureHook:
    """The handler, given the module that it was hooked to, whichever is captured."""
    return lambda _: handler(inner)


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))
