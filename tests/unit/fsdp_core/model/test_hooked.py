"""Hooks of modules that a fused kernel computes for: as torch would run them, or refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fsdp_core.model.moe.experts import call_with_module_hooks

Log = list[tuple[Any, ...]]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False)

    def kernel(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return scale * x @ self.first.weight.T @ self.second.weight.T

    def fused(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = call_with_module_hooks(
            (self.first, self.second), self.kernel, x, **kwargs
        )
        return made


@pytest.fixture
def pair() -> Pair:
    return Pair()


X = torch.linspace(-1, 1, 6).view(2, 3)


def noting(log: Log, *what: Any, returns: Callable[..., Any] | None = None) -> Any:
    def hook(module: nn.Module, *told: Any) -> Any:
        log.append((*what, *told))
        return returns(*told) if returns else None

    return hook


def test_hooks_run_in_order_with_their_signatures(pair: Pair) -> None:
    """Pre-hooks of all modules, then the kernel, then hooks of all, each told what it asked for."""
    log: Log = []
    for name, module in (("first", pair.first), ("second", pair.second)):
        module.register_forward_pre_hook(noting(log, name, "pre"))
        module.register_forward_pre_hook(noting(log, name, "pre kw"), with_kwargs=True)
        module.register_forward_pre_hook(noting(log, name, "early"), prepend=True)
        module.register_forward_hook(noting(log, name, "post"))
        module.register_forward_hook(noting(log, name, "post kw"), with_kwargs=True)
    out = pair.fused(X, scale=2.0)
    kwargs = {"scale": 2.0}
    before = [("early", (X,)), ("pre", (X,)), ("pre kw", (X,), kwargs)]
    after = [("post", (X,), out), ("post kw", (X,), kwargs, out)]
    names = ("first", "second")
    assert log == [(n, *e) for n in names for e in before] + [(n, *e) for n in names for e in after]


def test_hooks_for_all_modules_run_first(pair: Pair) -> None:
    """Hooks that torch keeps for every module see the modules that are not called, too."""
    log: Log = []
    pair.first.register_forward_pre_hook(noting(log, "own pre"))
    pair.first.register_forward_hook(noting(log, "own post"))
    handles = [
        register_module_forward_pre_hook(noting(log, "all pre")),
        register_module_forward_hook(noting(log, "all post"), with_kwargs=True),
    ]
    try:
        out = pair.fused(X)
    finally:
        for handle in handles:
            handle.remove()
    assert [entry[0] for entry in log] == [
        "all pre", "own pre", "all pre", "all post", "own post", "all post",
    ]  # fmt: skip
    assert log[3] == ("all post", (X,), {}, out)


def test_hooks_are_read_at_each_call(pair: Pair) -> None:
    """Hooks that go and come back, as around a capture, are those of the call that is made."""
    log: Log = []
    handle = pair.second.register_forward_pre_hook(noting(log, "a"))
    pair.fused(X)
    handle.remove()
    pair.fused(X)
    assert [entry[0] for entry in log] == ["a"]
    pair.second.register_forward_pre_hook(noting(log, "b"), with_kwargs=True)
    held = dict(pair.second._forward_pre_hooks)
    pair.second._forward_pre_hooks.clear()
    pair.fused(X)
    pair.second._forward_pre_hooks.update(held)
    pair.fused(X)
    assert log[1:] == [("b", (X,), {})]


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_same_inputs_may_come_back(pair: Pair, with_kwargs: bool) -> None:
    """A pre-hook may return the inputs that it was given, in other tuples, or a bare one."""

    def same(module: nn.Module, args: Any, *kwargs: Any) -> Any:
        return ((*args,), dict(*kwargs)) if kwargs else (*args,)

    pair.first.register_forward_pre_hook(same, with_kwargs=with_kwargs)
    if not with_kwargs:
        pair.first.register_forward_pre_hook(lambda module, args: args[0])
    assert torch.equal(pair.fused(X, scale=2.0), pair.kernel(X, scale=2.0))


@pytest.mark.parametrize(
    ("hook", "with_kwargs"),
    [
        (lambda m, a: (a[0] * 2,), False),
        (lambda m, a: (a[0].clone(),), False),
        (lambda m, a: a[0].double(), False),
        (lambda m, a: (), False),
        (lambda m, a, k: (a, {"scale": 3.0}), True),
        (lambda m, a, k: (a, {}), True),
        (lambda m, a, k: ((a[0].clone(),), k), True),
    ],
)
def test_other_inputs_are_refused(pair: Pair, hook: Any, with_kwargs: bool) -> None:
    """A pre-hook that replaces inputs would be ignored: it is named, with what to do."""
    pair.second.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
    with pytest.raises(ValueError, match=r"pre-hooks of Linear to leave its inputs .* unfused"):
        pair.fused(X, scale=2.0)


def test_views_go_on_as_the_output(pair: Pair) -> None:
    """Whoever marks where backward begins returns a view; later hooks and the caller get it."""
    log: Log = []

    def mark(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        marked = out.view_as(out)
        marked.register_hook(lambda grad: log.append(("backward", module is pair.first)))
        return marked

    pair.first.register_forward_hook(mark)
    pair.second.register_forward_hook(mark)
    pair.second.register_forward_hook(noting(log, "seen"))
    out = pair.fused(X.clone().requires_grad_())
    assert log[0][-1] is out
    out.sum().backward()
    assert log[1:] == [("backward", False), ("backward", True)]
    assert pair.first.weight.grad is not None


def test_the_last_module_may_change_the_output(pair: Pair) -> None:
    """The last module's output is the kernel's, so its hooks may return another."""
    pair.second.register_forward_hook(lambda m, a, out: out * 3)
    assert torch.equal(pair.fused(X), pair.kernel(X) * 3)


@pytest.mark.parametrize(
    "change", [lambda out: out * 1, lambda out: out.T, lambda out: out.clone(), lambda out: [out]]
)
def test_an_inner_output_cannot_change(pair: Pair, change: Any) -> None:
    """An inner module has no output of its own here; a hook that returns one is named."""
    pair.first.register_forward_hook(lambda m, a, out: change(out))
    with pytest.raises(ValueError, match=r"forward hooks of Linear .* the same memory"):
        pair.fused(X)


KINDS = ("forward", "forward_pre", "full_backward", "full_backward_pre")


@pytest.mark.parametrize("register", KINDS)
def test_hooks_that_would_be_bypassed_are_refused(pair: Pair, register: str) -> None:
    """Backward hooks, and any hooks of modules inside."""
    if "backward" in register:
        getattr(pair.first, f"register_{register}_hook")(lambda *told: None)
        with pytest.raises(ValueError, match="no backward hooks on Linear"):
            pair.fused(X)
    inner = nn.Linear(3, 3)
    getattr(inner, f"register_{register}_hook")(lambda *told: None)
    with pytest.raises(ValueError, match="no hooks inside of Sequential"):
        call_with_module_hooks((nn.Sequential(inner),), lambda x: x, X)


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    yield
    assert not nn.modules.module._global_forward_hooks
