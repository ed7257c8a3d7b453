"""Hooks of modules that a fused kernel computes for: run by torch, around the kernel."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_core.model.moe.experts import call_as_forward_of

X = torch.linspace(-1, 1, 6).view(2, 3)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.fixture
def pair() -> list[nn.Module]:
    return [nn.Linear(3, 3), nn.Linear(3, 3)]


def test_hooks_run_around_the_kernel(pair: list[nn.Module]) -> None:
    """Pre-hooks of all modules, the kernel, hooks of all, each told what it asked for."""
    log: list[tuple[Any, ...]] = []
    for name, module in zip(("first", "second"), pair, strict=True):
        module.register_forward_pre_hook(lambda m, a, n=name: log.append((n, "pre", a)))
        module.register_forward_hook(
            lambda m, a, k, out, n=name: log.append((n, "post", a, k, out)), with_kwargs=True
        )
    out = call_as_forward_of(pair, double, X)
    assert torch.equal(out, X * 2)
    before = [(name, "pre", (X,)) for name in ("first", "second")]
    assert log == [*before, *((name, "post", (X,), {}, out) for name in ("second", "first"))]


def test_hooks_may_change_inputs_and_output(pair: list[nn.Module]) -> None:
    """What a pre-hook returns is what the kernel gets, and hooks' outputs go on."""
    pair[1].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    pair[0].register_forward_hook(lambda m, args, out: out * 3)
    assert torch.equal(call_as_forward_of(pair, double, X), (X + 1) * 2 * 3)


def test_backward_hooks_see_the_kernels_gradients(pair: list[nn.Module]) -> None:
    """Those of torch's own kind, too."""
    seen: list[Any] = []
    pair[0].register_full_backward_hook(lambda m, ins, outs: seen.append((ins, outs)))
    x = X.clone().requires_grad_()
    call_as_forward_of(pair, double, x).sum().backward()
    (((given,), (asked,)),) = seen
    assert torch.equal(given, torch.full_like(X, 2.0))
    assert torch.equal(asked, torch.ones_like(X))


def test_a_call_leaves_the_modules_as_they_were(pair: list[nn.Module]) -> None:
    """Also one that raises: the modules have their own forward again."""
    due = [module(X) for module in pair]

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        call_as_forward_of(pair, broken, X)
    assert all(torch.equal(module(X), each) for module, each in zip(pair, due, strict=True))
