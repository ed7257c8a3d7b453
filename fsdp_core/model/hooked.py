"""Kernels that compute what several modules would, without calling them: their hooks must run.

    unfused    A(x): pre-hooks A, forward, hooks A      B(y): pre-hooks B, forward, hooks B
    fused      pre-hooks A, pre-hooks B      fused(x)      hooks A, hooks B

A fused kernel reads the weights of A and B. FSDP gathers them in the modules' forward pre-hooks,
and marks in their forward hooks where the backward pass begins, so that it gathers and reduces
there: without the hooks the kernel reads what is left of the weights, and gradients go nowhere. So
here pre-hooks run before the kernel and hooks on what it returns. The dicts of hooks are read at
each call: whoever captures graphs takes hooks away and puts them back.

What a hook is told in place of the module's own input and output is the kernel's. A hook that only
looks, gathers, releases or marks does what it did; one that would change an intermediate, which the
kernel does not have, is refused.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_flatten

T = TypeVar("T")
Hook = Callable[..., Any]

_INNER_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip
_BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")


def run_fused(
    modules: Sequence[nn.Module], fused: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """`fused(*args, **kwargs)` between the forward pre-hooks and the forward hooks of `modules`.

    Hooks run module after module, each module's in torch's order: those registered for all modules
    first, then its own as they lie in its dicts now; `with_kwargs` decides what they are told, and
    those with `always_call` run also if something raises.

    Args:
        modules: what `fused` takes the place of, in the order in which they would run. The last
            one's output is that of `fused`.
        fused: reads the modules' parameters when it is called, not before.

    Returns:
        What `fused` returned, or what hooks made of it: those of the last module may return
        anything, those of the others the same memory as a new tensor, as whoever marks where
        backward begins does.

    Raises:
        ValueError: no module, or one twice; hooks that a fused kernel cannot serve: a backward hook
            on a module, any hook on a module inside of it, a pre-hook that returns other inputs,
            a hook that returns another output of a module whose output there is none of.
    """
    _check(modules)
    reached: list[tuple[nn.Module, set[int]]] = []
    try:
        for module in modules:
            reached.append((module, set()))
            _before(module, args, kwargs)
        output: Any = fused(*args, **kwargs)
        for module, called in reached:
            is_last = module is modules[-1]
            output = _after(module, (args, kwargs), output, called, is_last=is_last)
    except Exception:
        for module, called in reached:
            _after_error(module, (args, kwargs), called)
        raise
    result: T = output
    return result


# ---- before


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    own = module._forward_pre_hooks_with_kwargs
    for number, hook in (
        *torch_module._global_forward_pre_hooks.items(),
        *module._forward_pre_hooks.items(),
    ):
        if number in own:
            returned = hook(module, args, kwargs)
            if returned is None:
                continue
            if not (isinstance(returned, tuple) and len(returned) == 2):
                raise ValueError(
                    f"Expected None or a pair of arguments and keywords from a forward pre-hook of "
                    f"{_name(module)}, got {type(returned).__name__}."
                )
            unchanged = _same(returned, (args, kwargs))
        else:
            returned = hook(module, args)
            if returned is None:
                continue
            unchanged = _same(returned if isinstance(returned, tuple) else (returned,), args)
        if not unchanged:
            raise ValueError(
                f"Expected forward pre-hooks of {_name(module)} to leave its inputs as they are, "
                "as a fused kernel computes for it, got others. If it is FSDP that casts them, "
                "give the kernel inputs in the compute dtype, or MixedPrecisionPolicy("
                "cast_forward_inputs=False); else run the modules unfused."
            )


def _same(returned: Any, given: Any) -> bool:
    """Whether two trees have the very same tensors, and equal other leaves."""
    (leaves, spec), (expected, expected_spec) = tree_flatten(returned), tree_flatten(given)
    return spec == expected_spec and all(map(_same_leaf, leaves, expected))


def _same_leaf(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(one == other)


# ---- after


def _after(
    module: nn.Module, inputs: tuple[Any, Any], output: Any, called: set[int], *, is_last: bool
) -> Any:
    for number, hook in _forward_hooks(module):
        called.add(number)
        returned = _call(module, number, hook, inputs, output)
        if returned is None or returned is output:
            continue
        if not is_last and not _same_memory(returned, output):
            raise ValueError(
                f"Expected forward hooks of {_name(module)} to return None or the same memory, as "
                "a fused kernel computes its output and the next module's in one, got another "
                "output. Run the modules unfused."
            )
        output = returned
    return output


def _after_error(module: nn.Module, inputs: tuple[Any, Any], called: set[int]) -> None:
    """Hooks with `always_call` that have not run, as torch calls them; their errors are told."""
    everywhere = torch_module._global_forward_hooks_always_called
    for number, hook in _forward_hooks(module):
        always = number in everywhere or number in module._forward_hooks_always_called
        if not always or number in called:
            continue
        try:
            _call(module, number, hook, inputs, None)
        except Exception as error:  # noqa: BLE001  (the first error is the one to raise)
            warnings.warn(
                f"A forward hook of {_name(module)} with always_call=True raised {error!r} while "
                "another error was on its way.",
                stacklevel=3,
            )


def _forward_hooks(module: nn.Module) -> Iterator[tuple[int, Hook]]:
    yield from tuple(torch_module._global_forward_hooks.items())
    yield from tuple(module._forward_hooks.items())


def _call(module: nn.Module, number: int, hook: Hook, inputs: tuple[Any, Any], output: Any) -> Any:
    args, kwargs = inputs
    everywhere = torch_module._global_forward_hooks_with_kwargs
    if number in everywhere or number in module._forward_hooks_with_kwargs:
        return hook(module, args, kwargs, output)
    return hook(module, args, output)


def _same_memory(returned: Any, output: Any) -> bool:
    (leaves, spec), (expected, expected_spec) = tree_flatten(returned), tree_flatten(output)
    return spec == expected_spec and all(map(_is_view, leaves, expected))


def _is_view(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other
    alike = (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    return alike and one.data_ptr() == other.data_ptr()


# ---- what cannot be served


def _check(modules: Sequence[nn.Module]) -> None:
    if not modules or len(set(modules)) != len(modules):
        raise ValueError(f"Expected modules, each once, got {len(modules)} with one twice or none.")
    for module in modules:
        for kind in _BACKWARD_HOOKS:
            if getattr(module, kind):
                raise ValueError(
                    f"Expected no backward hooks on {_name(module)}, whose own inputs and outputs "
                    "a fused kernel does not have, got some. Run the modules unfused, or hook the "
                    "module around them."
                )
        for inner in module.modules():
            if inner is not module and any(getattr(inner, kind) for kind in _INNER_HOOKS):
                raise ValueError(
                    f"Expected no hooks inside of {_name(module)}, which a fused kernel computes "
                    f"for, got some on {_name(inner)}. Hook the module itself, or give the inner "
                    "one to run_fused as well."
                )


def _name(module: nn.Module) -> str:
    return type(module).__name__
