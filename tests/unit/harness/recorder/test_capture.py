"""Graphs behind torch.cuda's names where there is no GPU, and what the recorder sees of them."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from harness.recorder.capture import (
    CUDAGraph,
    HostGraph,
    graph,
    is_capturing,
    make_graphed_callables,
)
from harness.recorder.graphs import GraphWatch
from tests.unit.harness.recorder.recorded import all_digests, digests, losses, recorded

STEPS, WARM_UP = 5, 2


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Scaled(nn.Module):
    """Two layers with dropout, over inputs times a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4))
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x * self.scale)


def train(*, graphed: bool) -> Scaled:
    """Two eager steps, then steps that are replays, or eager as well."""
    torch.manual_seed(0)
    model, static = Scaled(), torch.zeros(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True, capturable=True)

    def step() -> None:
        optimizer.zero_grad()
        model(static).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    captured = None
    for number in range(STEPS):
        static.copy_(torch.full((3, 4), 1.0 + number))
        if graphed and number == WARM_UP:
            captured = CUDAGraph()
            with graph(captured):
                step()
        if captured is None:
            step()
        else:
            captured.replay()
    return model


class Watched:
    """What a watch reports while it is installed."""

    def __init__(self, named: Callable[[], Any] = lambda: (), stress: tuple[str, ...] = ()) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.watch = GraphWatch(lambda *event: self.events.append(event), named, stress)

    def __enter__(self) -> "Watched":
        self.watch.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.uninstall()

    @property
    def graphs(self) -> list[dict[str, Any]]:
        return self.watch.summary()["graphs"]  # type: ignore[no-any-return]

    @property
    def findings(self) -> list[str]:
        return [name for name, _ in self.events if name != "graph_captured"]


def captured_of(function: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of a function, and what the function returned in the capture."""
    captured = CUDAGraph()
    with graph(captured):
        result = function()
    return captured, result


def bits(tensors: Any) -> list[list[int]]:
    return [t.detach().flatten().view(torch.int32).tolist() for t in tensors]


# ---- the recorder


def test_replays_are_steps_with_eagers_records(tmp_path: Path) -> None:
    """Gradients, weights, optimizer, buffers, random states, losses and norm of each replay."""
    eager = recorded(lambda: train(graphed=False), tmp_path / "eager")
    found = recorded(lambda: train(graphed=True), tmp_path / "graphed")
    assert len(found.steps) == STEPS
    assert all_digests(found) == all_digests(eager)
    assert digests(found, "grads", STEPS - 1) != digests(found, "grads", STEPS - 2)
    assert list(map(losses, found.steps)) == list(map(losses, eager.steps))
    assert [s.grad_norm for s in found.steps] == [s.grad_norm for s in eager.steps]
    assert None not in losses(found.steps[-1])
    assert found.end is not None
    assert found.end.replays == STEPS - WARM_UP
    (summary,) = [event.detail for event in found.events if event.name == "cuda_graphs"]
    (of_graph,) = summary["graphs"]
    assert of_graph["maker"] == "harness.recorder.capture.graph"
    assert "test_capture.py:" in of_graph["place"]
    assert (of_graph["captures"], of_graph["optimizer_steps"]) == (1, 1)


def test_a_stale_buffer_ends_the_run(tmp_path: Path) -> None:
    """The error record has its kind and the name."""

    def program() -> None:
        model = train(graphed=False)
        captured, _ = captured_of(lambda: model(torch.ones(3, 4)))
        captured.replay()
        model.scale = model.scale.clone()
        captured.replay()

    records = recorded(program, tmp_path, code=1)
    assert records.error is not None
    assert (records.error.what, records.error.type) == ("stale_address", "StaleGraphAddress")
    assert records.error.message.startswith("scale: captured at ")


# ---- the watch


@pytest.mark.parametrize("stress", [(), ("poison", "scramble")])
def test_a_right_program_keeps_its_bits(stress: tuple[str, ...]) -> None:
    """Under stressors as well; nothing is found."""
    eager = train(graphed=False)
    with Watched(stress=stress) as watched:
        found = train(graphed=True)
    assert bits(found.parameters()) == bits(eager.parameters())
    assert watched.findings == []
    assert [each["replays"] for each in watched.graphs] == [STEPS - WARM_UP]


@pytest.mark.parametrize("returned", [True, False])
def test_poison_shows_what_a_graph_never_writes(returned: bool) -> None:
    """In results of the capture, and in memory that only replays use."""
    x, total = torch.ones(64), torch.zeros(())

    def half_written() -> Tensor | None:
        y = x.new_empty(128)
        y[:64].copy_(x)
        z = y * 2
        total.copy_(z.sum())
        return z if returned else None

    with Watched(stress=("poison",)):
        captured, result = captured_of(half_written)
        captured.replay()
    assert total.isnan()
    assert result is None or not result[:64].isnan().any()


@pytest.mark.parametrize("clone", [True, False])
def test_callables_accumulate_as_they_do_on_a_gpu(clone: bool) -> None:
    """pytorch #181723: gradients in static buffers are found, clones have eager's bits."""
    inputs = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    model, eager = nn.Linear(4, 4), nn.Linear(4, 4)
    eager.load_state_dict(model.state_dict())
    with Watched(model.named_parameters) as watched:
        function = make_graphed_callables(model, (torch.zeros(2, 4),))
        if clone:
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: gradient.clone())
        for x in inputs:
            function(x).square().sum().backward()
            eager(x).square().sum().backward()
    same = bits(p.grad for p in model.parameters()) == bits(p.grad for p in eager.parameters())
    assert same == clone
    assert watched.findings == ([] if clone else ["static_gradient"] * 2)
    makers = {each["maker"]: each["replays"] for each in watched.graphs}
    assert makers == {
        "torch.cuda.make_graphed_callables forward 0": 3,
        "torch.cuda.make_graphed_callables backward 0": 3,
    }


# ---- the graph itself


def test_a_capture_has_no_effect() -> None:
    """Neither on tensors nor on random states; what it made gets values at each replay."""
    x = torch.zeros(3)
    state = torch.get_rng_state()
    captured, drawn = captured_of(lambda: torch.rand_like(x.add_(1)))
    assert torch.equal(x, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), state)
    captured.replay()
    assert torch.equal(x, torch.ones(3))
    torch.set_rng_state(state)
    assert torch.equal(drawn, torch.rand(3))


def reads_on_the_host(x: Tensor) -> None:
    x.sum().item()


def fails(x: Tensor) -> None:
    x.add_(1)
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [(reads_on_the_host, RuntimeError, "cannot capture aten._local_scalar_dense.* at .*test_capt"),
     (fails, KeyError, "lost")],
)  # fmt: skip
def test_a_capture_that_fails(
    body: Callable[[Tensor], None], error: type[Exception], says: str
) -> None:
    """Its own error is raised, nothing is left changed, and the graph can be captured again."""
    x, captured = torch.zeros(3), CUDAGraph()
    with Watched() as watched:
        with pytest.raises(error, match=says), graph(captured):
            body(x)
        assert torch.equal(x, torch.zeros(3))
        assert not is_capturing()
        assert gc.isenabled()
        assert _get_current_dispatch_mode_stack() == []
        with pytest.raises(RuntimeError, match="Expected a captured graph"):
            captured.replay()
        with graph(captured):
            assert is_capturing()
            x.add_(1)
        captured.replay()
    assert torch.equal(x, torch.ones(3))
    assert [each["captures"] for each in watched.graphs] == [1]


def test_one_capture_at_a_time_and_into_an_empty_graph() -> None:
    """As torch refuses it; a graph that was reset is empty."""
    x = torch.zeros(3)
    captured, _ = captured_of(lambda: x.add_(1))
    with pytest.raises(RuntimeError, match="that holds none"):
        captured.capture_begin()
    captured.reset()
    with graph(captured, pool=captured.pool()):
        with pytest.raises(RuntimeError, match="one capture at a time"):
            HostGraph().capture_begin()
        x.add_(2)
    captured.replay()
    assert torch.equal(x, torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="capture_begin before"):
        captured.capture_end()


def test_a_capture_that_is_refused_at_its_end_leaves_no_trace() -> None:
    """What it used may go before the graph is captured again."""
    x, y, captured = torch.zeros(12), torch.zeros(3), CUDAGraph()
    with pytest.raises(RuntimeError, match="the capture by no operator"), graph(captured):
        x.add_(torch.frombuffer(bytearray(48), dtype=torch.float32))
    x.untyped_storage().resize_(0)
    with graph(captured):
        y.add_(1)
    captured.replay()
    assert torch.equal(y, torch.ones(3))
