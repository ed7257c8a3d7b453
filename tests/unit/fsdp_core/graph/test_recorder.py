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

from fsdp_core.device import Device
from fsdp_core.graph.capture_session import Undo
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
