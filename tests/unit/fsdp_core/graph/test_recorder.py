"""What no graph can hold is refused: the operator, the place in the caller's file, the reason."""

import inspect
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from fsdp_core.device import Device
from fsdp_core.graph.capture_session import (
    PHASES,
    ExtractedHooks,
    Undo,
    run_hooks,
    tensor_hooks_off,
)
from fsdp_core.graph.device_graphs import HostGraph
from fsdp_core.graph.recorder import CaptureRefused, Recorder

HERE = Path(__file__).name
X = torch.arange(1.0, 7.0)
MASK = torch.tensor([True, False] * 3)
OWN_GENERATOR = torch.Generator().manual_seed(1)
HOST_READ = "depends on tensor data (.item(), bool(), if)"
PYTHON_READ = "reads tensor data in Python"
SHAPE = "the shape of its result depends on tensor data"
BAKED = "bakes a Python value into the graph"
STORAGE = "changes the storage"


def branch() -> torch.Tensor:
    if X.sum() > 3:
        return X + 1
    return X - 1


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that torch calls CSR a beta feature
    SPARSE = torch.eye(6).to_sparse_csr()
REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "item": (lambda: X.sum().item(), "aten._local_scalar_dense", HOST_READ),
    "bool": (lambda: bool(X[0] > 0), "aten._local_scalar_dense", HOST_READ),
    "int": (lambda: int(X[0]), "aten._local_scalar_dense", HOST_READ),
    "float": (lambda: float(X[0]), "aten._local_scalar_dense", HOST_READ),
    "index": (lambda: [0, 1, 2][X.long()[0]], "aten._local_scalar_dense", HOST_READ),
    "format": (lambda: f"{X.sum():.2f}", "aten._local_scalar_dense", HOST_READ),
    "contains": (lambda: 3.0 in X, "aten._local_scalar_dense", HOST_READ),
    "if": (branch, "aten._local_scalar_dense", HOST_READ),
    "tolist": (lambda: X.tolist(), "Tensor.tolist()", PYTHON_READ),
    "numpy": (lambda: X.numpy(), "Tensor.numpy()", PYTHON_READ),
    "asarray": (lambda: np.asarray(X), "Tensor.__array__()", PYTHON_READ),
    "dlpack": (lambda: np.from_dlpack(X), "Tensor.__dlpack__()", PYTHON_READ),
    "nonzero": (lambda: X.nonzero(), "aten.nonzero", SHAPE),
    "mask": (lambda: X[MASK], "aten.index.Tensor", SHAPE),
    "masked_select": (lambda: X.masked_select(MASK), "aten.masked_select", SHAPE),
    "unique": (lambda: X.unique(), "aten._unique2", SHAPE),
    "equal": (lambda: torch.equal(X, X), "aten.equal", HOST_READ),
    "allclose": (lambda: torch.allclose(X, X), "aten.allclose", HOST_READ),
    "tensor": (lambda: X + torch.tensor(3.0), "aten.lift_fresh", BAKED),
    "from_numpy": (lambda: X + torch.from_numpy(np.ones(6, np.float32)), "aten.lift_fresh", BAKED),
    "resize_": (lambda: X.clone().resize_(3), "aten.resize_", STORAGE),
    "set_": (lambda: X.clone().set_(X.untyped_storage()), "aten.set_", STORAGE),
    "make_sparse": (lambda: X.to_sparse(), "aten._to_sparse", "torch.sparse_coo"),
    "use_sparse": (lambda: X.view(1, 6) @ SPARSE, "aten.", "torch.sparse_csr"),
    "generator": (lambda: torch.rand(3, generator=OWN_GENERATOR), "aten.rand", "generator of its"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """Each is a `CaptureRefused` that names the operator, this file and line, and the reason."""
    function, operator, reason = REFUSED[name]
    with pytest.raises(CaptureRefused) as caught:
        HostGraph(Device("cpu")).capture(function)
    message = str(caught.value)
    assert operator in message
    assert reason in message
    lines, start = inspect.getsourcelines(function)
    place = message.split(f" at {HERE}:")[1].split(":")[0]
    assert start <= int(place) < start + len(lines)
    assert "\n" not in message


def test_from_numpy_that_no_operator_shows() -> None:
    """A tensor that was made in the capture by no operator is refused where it is read."""

    def function() -> torch.Tensor:
        hidden = torch.frombuffer(bytearray(24), dtype=torch.float32)
        return X + hidden

    with pytest.raises(CaptureRefused, match=r"aten\.add.*made during the capture by no operator"):
        HostGraph(Device("cpu")).capture(function)


@pytest.mark.parametrize(
    ("name", "function"),
    {
        "integer index": lambda: X[torch.zeros(2, dtype=torch.int64)],
        "where": lambda: torch.where(X > 3, X, -X),
        "masked_fill": lambda: X.masked_fill(MASK, math.inf),
        "full": lambda: X + torch.full((), 3.0),
        "python scalar": lambda: (X + 3.0) * 2,
        "arange": lambda: X + torch.arange(6),
        "default generator": lambda: torch.rand(3, generator=torch.default_generator),
        "shape": lambda: X * X.shape[0],
    }.items(),
)
def test_not_refused(name: str, function: Callable[[], torch.Tensor]) -> None:
    """What a replay reproduces is captured: no refusal beyond need."""
    del name
    state = torch.get_rng_state()
    expected = function()
    torch.set_rng_state(state)
    graph = HostGraph(Device("cpu"))
    result = graph.capture(function)
    result.fill_(-1)
    graph.replay()
    assert torch.equal(result, expected)


def test_listing_storages_only() -> None:
    """Without operators kept, the recorder lists storages and refuses nothing."""
    x, y = torch.ones(4), torch.ones(4)
    with Recorder(keep_operations=False) as recorder:
        z = x + 1
        y.add_(z)
        z.sum().item()
    external = recorder.recording.external()
    assert [(e.address, e.nbytes, e.written) for e in external] == [
        (x.data_ptr(), 16, False),
        (y.data_ptr(), 16, True),
    ]
    internal = next(e for e in recorder.recording.storages if e.internal)
    assert internal.address == z.data_ptr()
    assert "aten.add" in internal.made_by


def test_a_pool_buffer_filled_inside_is_internal() -> None:
    """A storage that gets its memory inside the capture belongs to the graph."""
    device = Device("cpu")
    pooled = torch.empty(64)
    device.resize_storage(pooled.untyped_storage(), 0)
    graph = HostGraph(device)

    def function() -> torch.Tensor:
        device.resize_storage(pooled.untyped_storage(), 256)
        pooled.copy_(X.repeat(11)[:64])
        result = pooled * 2
        device.resize_storage(pooled.untyped_storage(), 0)
        return result

    result = graph.capture(function)
    assert [e.address for e in graph.recording.external()] == [X.data_ptr()]
    result.zero_()
    graph.replay()
    assert torch.equal(result, X.repeat(11)[:64] * 2)
    assert pooled.untyped_storage().nbytes() == 0


def test_generators_draw_what_they_would_have_drawn() -> None:
    """Those that are named and the device's own are put back; others are nobody's business."""
    named, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    expected = [torch.rand(3), torch.rand(3, generator=other)]
    torch.manual_seed(torch.initial_seed())
    default = torch.random.get_rng_state()
    with Undo(Device("cpu"), [named]):
        torch.rand(5)
        torch.rand(5, generator=named)
    assert torch.equal(torch.random.get_rng_state(), default)
    assert torch.equal(torch.rand(3, generator=named), expected[1])


def test_what_was_written_unseen_is_put_back_where_it_is_named() -> None:
    """Tensors that an operator writes are found; a write that none shows is, if it is named."""
    seen, named, unnamed = (torch.zeros(4) for _ in range(3))
    with Undo(Device("cpu"), [], [named]) as undo:
        with undo.watching():
            seen.add_(1)
        for tensor in (named, unnamed):
            tensor.numpy()[:] = 1
    assert [tensor.sum().item() for tensor in (seen, named, unnamed)] == [0.0, 0.0, 4.0]


# --- hooks come off a subtree, run at capture time by their marks, and go back as they were -------


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
