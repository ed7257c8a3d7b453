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


def pre(change: Any) -> Any:
    return lambda pair: pair[1].register_forward_pre_hook(lambda m, args: change(*args))


def post(number: int, change: Any) -> Any:
    return lambda pair: pair[number].register_forward_hook(lambda m, args, out: change(out))


def test_what_hooks_mark_is_the_output(pair: list[nn.Module]) -> None:
    """Whoever marks where backward begins returns a view: of each module, it is in the graph."""
    log: list[str] = []

    def mark(name: str, out: torch.Tensor) -> torch.Tensor:
        marked = out.view_as(out)
        marked.register_hook(lambda grad: log.append(name))
        return marked

    for name, module in zip(("first", "second"), pair, strict=True):
        module.register_forward_hook(lambda m, args, out, name=name: mark(name, out))
    call_as_forward_of(pair, double, X.clone().requires_grad_()).sum().backward()
    assert log == ["first", "second"]


def with_name(pair: list[nn.Module]) -> None:
    pair[1].register_forward_pre_hook(lambda m, a, k: (a, {"scale": 3.0}), with_kwargs=True)


@pytest.mark.parametrize(
    ("hook", "factor"),
    [(pre(lambda x: x), 2), (post(0, lambda x: x.view_as(x)), 2), (post(1, lambda x: x * 3), 6)],
)  # fmt: skip
def test_hooks_may_mark_tensors_and_change_the_last_output(
    pair: list[nn.Module], hook: Any, factor: int
) -> None:
    hook(pair)
    assert torch.equal(call_as_forward_of(pair, double, X), factor * X)


@pytest.mark.parametrize(
    "hook",
    [
        pre(lambda x: x + 1),
        pre(lambda x: x.clone()),
        pre(lambda x: x.double()),
        pre(lambda x: x.detach()),
        pre(lambda x: x.detach().requires_grad_()),
        pre(lambda x: ()),
        with_name,
        post(0, lambda out: out * 3),
        post(0, lambda out: out.T),
        post(0, lambda out: out.detach()),
        post(0, lambda out: out.detach().requires_grad_()),
        post(0, lambda out: [out]),
        lambda pair: pair[0].register_full_backward_hook(lambda *told: None),
        lambda pair: pair[1].register_full_backward_pre_hook(lambda *told: None),
    ],
)
def test_hooks_that_a_kernel_cannot_serve_are_refused(pair: list[nn.Module], hook: Any) -> None:
    """What they give would be given to another computation, or to none: a silent difference."""
    hook(pair)
    with pytest.raises(ValueError, match="Expected of Linear"):
        call_as_forward_of(pair, double, X.clone().requires_grad_())


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_inside_of_a_module_are_refused(kind: str) -> None:
    inner = nn.Linear(3, 3)
    getattr(inner, f"register_{kind}_hook")(lambda *told: None)
    with pytest.raises(ValueError, match=r"Expected of Sequential.* the Linear inside"):
        call_as_forward_of([nn.Sequential(inner)], double, X)


def test_a_call_leaves_the_modules_as_they_were(pair: list[nn.Module]) -> None:
    """Also one that raises: the modules have their own forward again."""
    due = [module(X) for module in pair]

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        call_as_forward_of(pair, broken, X)
    assert all(torch.equal(module(X), each) for module, each in zip(pair, due, strict=True))
