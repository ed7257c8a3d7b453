"""Hooks come off a subtree, run at capture time by their marks, and go back as they were."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from fsdp_core.graph.capture_session import PHASES, ExtractedHooks, run_hooks, tensor_hooks_off

DICTIONARIES = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_pre_hooks",
    "_backward_hooks",
)  # fmt: skip


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * scale
        return out


def marked(hook: Callable[..., Any], **marks: Any) -> Callable[..., Any]:
    for name, value in marks.items():
        setattr(hook, f"_cuda_graph_{name}", value)
    return hook


def hooked(log: list[str]) -> tuple[Outer, list[Any]]:
    """An outer module with hooks of every kind, which log themselves, and their handles."""
    module = Outer()

    def kwargs_hook(m: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        log.append("pre with kwargs")
        return args, {**kwargs, "scale": 2.0}

    def always(*_: Any) -> None:
        log.append("always")

    return module, [
        module.register_forward_pre_hook(lambda *_: log.append("pre")),
        module.register_forward_pre_hook(kwargs_hook, with_kwargs=True, prepend=True),
        module.register_forward_hook(lambda *_: log.append("post")),
        module.register_forward_hook(
            lambda m, a, k, out: log.append(f"post with {k}"), with_kwargs=True, prepend=True
        ),
        module.register_forward_hook(always, always_call=True),
        module.register_full_backward_pre_hook(lambda *_: log.append("backward pre")),
        module.register_full_backward_hook(lambda *_: log.append("backward")),
        module.inner.weight.register_hook(lambda grad: log.append("tensor")),
        module.inner.weight.register_post_accumulate_grad_hook(lambda p: log.append("grad")),
    ]


def run(module: nn.Module) -> torch.Tensor:
    out: torch.Tensor = module(torch.ones(2, 4, requires_grad=True))
    out.sum().backward()
    return out.detach()


def test_hooks_go_back_as_they_were() -> None:
    """Off, no hook runs; back, all run in their order with their flags, and handles remove them."""
    log: list[str] = []
    module, handles = hooked(log)
    expected_out = run(module)
    expected = log.copy()
    assert len(set(expected)) == len(handles)
    dictionaries = [getattr(module, name) for name in DICTIONARIES]
    log.clear()
    with ExtractedHooks(module):
        assert not any(getattr(module, name) for name in DICTIONARIES)
        plain = run(module)
        assert log == []
        assert not torch.equal(plain, expected_out), "the hook with keywords changes the output"
    assert all(
        getattr(module, name) is kept
        for name, kept in zip(DICTIONARIES, dictionaries, strict=True)
    )  # fmt: skip
    assert torch.equal(run(module), expected_out)
    assert log == expected
    for handle in handles:
        handle.remove()
    log.clear()
    run(module)
    assert log == []
    assert not any(getattr(module, name) for name in DICTIONARIES)


def test_a_hook_removed_meanwhile_stays_removed() -> None:
    """A handle that removes its hook while hooks are off is obeyed."""
    log: list[str] = []
    module, handles = hooked(log)
    with ExtractedHooks(module):
        handles[0].remove()
        handles[3].remove()
    run(module)
    assert "pre" not in log
    assert not any("post with" in entry for entry in log)
    assert "post" in log


def test_a_hook_registered_meanwhile_is_kept_and_told() -> None:
    """Nothing is lost, but it is an error: its handle would remove nothing."""
    log: list[str] = []
    module, handles = hooked(log)
    extracted = ExtractedHooks(module)
    module.inner.register_forward_hook(lambda *_: log.append("inner"))  # it had none
    module.register_forward_hook(lambda *_: log.append("new"))
    with pytest.raises(RuntimeError, match=r"no new hooks while .* got some in Outer"):
        extracted.restore()
    run(module)
    assert "new" in log
    assert len(set(log)) == len(handles) + 2
    extracted.restore()  # a second time: nothing


# ---- routing


def fsdp_like(log: list[str]) -> Outer:
    """Hooks as of sharding: forward hooks that arrange something for the backward."""
    module = Outer()

    def say(what: str) -> Callable[[nn.Module], None]:
        return lambda m: log.append(f"{what} {type(m).__name__}")

    for each in (module, module.inner):
        each.register_forward_pre_hook(
            marked(lambda *_: log.append("hook itself"), handler=say("gather"))
        )
        each.register_forward_hook(
            marked(
                lambda *_: log.append("wrapper itself"),
                handler=say("release"),
                backward_pre_handler=say("gather again"),
                backward_handler=say("reduce"),
            )
        )
    return module


def test_marked_hooks_are_routed() -> None:
    """Handlers run in their phases with their own module, outer first to open and last to close."""
    log: list[str] = []
    module = fsdp_like(log)
    with ExtractedHooks(module) as extracted:
        for phase in PHASES:
            run_hooks(extracted.capture_hooks, phase, module)
        run(module)
    assert log == [
        "gather Outer", "gather Linear", "release Linear", "release Outer",
        "gather again Outer", "gather again Linear", "reduce Linear", "reduce Outer",
    ]  # fmt: skip


def test_a_wrapper_alone_is_withheld() -> None:
    """A forward hook that only stands for backward work does not run as a forward hook."""
    log: list[str] = []
    module = Outer()
    module.register_forward_hook(
        marked(lambda *_: log.append("wrapper"), backward_handler=lambda m: log.append("inner"))
    )
    with ExtractedHooks(module) as extracted:
        counts = [len(extracted.capture_hooks[phase]) for phase in PHASES]
        assert counts == [0, 0, 0, 1]
        run_hooks(extracted.capture_hooks, "backward_hooks", module)
    assert log == ["inner"]


def test_a_hook_inside_that_no_replay_would_run_is_refused() -> None:
    """An unmarked hook of an inner module is an error that names both; nothing is taken off."""
    log: list[str] = []
    module, _ = hooked(log)

    def counts_calls(*_: Any) -> None:
        log.append("inner")

    module.inner.register_forward_hook(counts_calls)
    with pytest.raises(ValueError, match=r"no forward_hooks of inner.*counts_calls"):
        ExtractedHooks(module)
    run(module)
    assert {"inner", "pre", "post", "grad"} <= set(log)


def test_a_capturable_hook_inside_stays() -> None:
    """A hook that says that it only computes on tensors runs on while others are off."""
    module = Outer()
    plain = run(module)
    triple = marked(lambda m, args, out: out * 3, capturable=True)
    handle = module.inner.register_forward_hook(triple)
    expected = run(module)
    with ExtractedHooks(module):
        assert torch.equal(run(module), expected)
    assert torch.equal(run(module), expected)
    with ExtractedHooks(module):
        handle.remove()
    assert torch.equal(run(module), plain)


def test_hooks_of_all_modules_are_refused() -> None:
    """A global hook acts at a capture and never at a replay."""
    handle = torch_module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(ValueError, match="no forward hooks of every module"):
            ExtractedHooks(Outer())
    finally:
        handle.remove()
    ExtractedHooks(Outer()).restore()


# ---- tensors


def test_hooks_of_gradients_come_off_and_go_back() -> None:
    """Inside neither kind of hook runs, also after an error both do again."""
    log: list[str] = []
    weight = nn.Parameter(torch.ones(2))
    handle = weight.register_hook(lambda grad: grad * 2)
    weight.register_post_accumulate_grad_hook(lambda p: log.append("grad"))

    def fail() -> None:
        with tensor_hooks_off([weight]):
            weight.sum().backward()
            assert log == []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]
    weight.sum().backward()
    assert (weight.grad.tolist(), log) == ([3, 3], ["grad"])
    handle.remove()
    weight.sum().backward()
    assert weight.grad.tolist() == [4, 4]
