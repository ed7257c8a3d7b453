"""Hooks around captures: taken off a subtree in two phases, run at capture time, put back whole.

A graph holds no Python, so a hook inside of what is captured acts at capture and never again. What
must run around warm-up and capture says so by attributes of the hook:

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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def run_hooks(hooks: CaptureHooks, phase: str, module: nn.Module) -> None:
    """Run the hooks of a phase in their order, with the module; they must return None."""
    for hook in hooks[phase].values():
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
    return {
        phase: dict(enumerate(handlers[::-1] if phase in _CLOSING else handlers))
        for phase, handlers in found.items()
    }


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
