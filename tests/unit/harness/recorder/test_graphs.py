"""The watch of CUDA graphs, over a class of graphs that run their body again on the CPU."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from harness.recorder.capture import HostGraph, make_graphed_callables
from harness.recorder.graphs import GraphInfo, GraphWatch, StaleGraphAddress, Uncounted


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Graph:
    """Stands for a CUDA graph: a replay calls `body`."""

    body: Callable[[], Any] = staticmethod(lambda: None)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None:
        self.body()

    def reset(self) -> None: ...


class Watched:
    """A watch with what it has reported."""

    def __init__(self, model: nn.Module | None = None, stress: tuple[str, ...] = ()) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        named = model.named_parameters if model is not None else lambda: ()
        self.watch = GraphWatch(
            lambda name, detail: self.events.append((name, detail)),
            named,
            stress,
            (Graph, HostGraph),
        )

    def findings(self) -> list[str]:
        return [name for name, _ in self.events if name != "graph_captured"]

    def only(self, finding: str) -> dict[str, Any]:
        (detail,) = [detail for name, detail in self.events if name == finding]
        return detail


class Scale(nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@contextlib.contextmanager
def watching(model: nn.Module | None = None, stress: tuple[str, ...] = ()) -> Iterator[Watched]:
    watched = Watched(model, stress)
    watched.watch.install()
    try:
        yield watched
    finally:
        watched.watch.uninstall()


def captured(body: Callable[[], Any]) -> tuple[Graph, Any]:
    """A graph of `body`, and what the capture returned."""
    graph = Graph()
    graph.capture_begin()
    try:
        result = body()
    finally:
        graph.capture_end()
    return graph, result


def test_replays_are_counted_and_named() -> None:
    """The summary says of each graph where, by whom, how often and over how many storages."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    seen: list[GraphInfo] = []
    with watching(model) as watched:
        watched.watch.on_replayed.append(seen.append)
        graph, _ = captured(lambda: model(x))
        graph.replay()
        graph.replay()
    (found,) = watched.watch.summary()["graphs"]
    place = found.pop("place")
    assert place.partition(":")[0].endswith("test_graphs.py")
    assert found == {
        "index": 0, "maker": "unknown", "captures": 1, "replays": 2,
        "externals": 3, "optimizer_steps": 0,
    }  # fmt: skip
    assert [info.index for info in seen] == [0, 0]
    assert watched.findings() == []


def test_an_uninstalled_watch_leaves_the_class_as_it_was() -> None:
    """The methods are the class's own again, and what was captured still replays."""
    before = dict(vars(Graph))
    with watching() as watched:
        watched.watch.install()  # the second does nothing
        graph, _ = captured(lambda: torch.ones(2))
        assert dict(vars(Graph)) != before
    assert dict(vars(Graph)) == before
    graph.replay()
    assert watched.watch.summary()["graphs"][0]["replays"] == 0


def test_a_graph_dies_when_the_program_drops_it() -> None:
    """No reference leads back to it: the garbage collector need not run."""
    model = nn.Linear(4, 4).requires_grad_(False)
    gc.disable()
    try:
        with watching(stress=("poison",)):
            graph, _ = captured(lambda: model(torch.ones(2, 4)))
            reference = weakref.ref(graph)
            del graph
            assert reference() is None
    finally:
        gc.enable()


def test_it_installs_without_a_gpu() -> None:
    """The real class is patched and put back."""
    before = {name: getattr(torch.cuda.CUDAGraph, name) for name in ("capture_begin", "replay")}
    watch = GraphWatch(lambda name, detail: None)
    watch.install()
    watch.uninstall()
    assert before == {name: getattr(torch.cuda.CUDAGraph, name) for name in before}


def freed(model: nn.Linear) -> None:
    del model.weight


def replaced_data(model: nn.Linear) -> None:
    model.weight.data = torch.zeros(4, 4)


def replaced_parameter(model: nn.Linear) -> None:
    model.keep = model.weight.detach()  # the memory stays, the parameter is another
    model.weight = nn.Parameter(torch.zeros(4, 4))


def resized(model: nn.Linear) -> None:
    model.weight.untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [freed, replaced_data, replaced_parameter, resized])
def test_a_parameter_that_moved_is_named(change: Callable[[nn.Linear], None]) -> None:
    """The replay is refused before it runs."""
    model, x, ran = nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4), []
    with watching(model) as watched:
        graph, _ = captured(lambda: model(x))
        graph.body = lambda: ran.append(1)
        graph.replay()
        change(model)
        with pytest.raises(StaleGraphAddress, match=r"^weight: ") as caught:
            graph.replay()
    assert caught.value.names == ["weight"]
    assert watched.only("stale_address")["replay"] == 1
    assert ran == [1]


def test_memory_without_a_name_is_told_by_its_first_use() -> None:
    """Size, operator and line of the program."""
    held = [torch.ones(5)]
    with watching() as watched:
        graph, _ = captured(lambda: held[0] + 1)
        held.clear()
        with pytest.raises(StaleGraphAddress):
            graph.replay()
    (said,) = watched.only("stale_address")["tensors"]
    assert said.startswith("storage of 20 bytes (first used by aten.add.Tensor at ")
    assert "test_graphs.py:" in said


def test_memory_that_a_named_tensor_shares_has_its_name() -> None:
    """As parts of one flat buffer have it."""
    model, held = Scale(), [torch.ones(8)]
    model.weight = nn.Parameter(held[0][:4], requires_grad=False)
    with watching(model) as watched:
        graph, _ = captured(lambda: held[0][4:] + 1)
        held.clear()
        del model.weight
        with pytest.raises(StaleGraphAddress):
            graph.replay()
    assert watched.only("stale_address")["tensors"] == ["weight: freed since the capture"]


def test_the_same_name_at_the_same_address_is_no_fault() -> None:
    """What a graph reads is right if the program's tensor lies there."""
    model, x = nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4)
    with watching(model) as watched:
        graph, _ = captured(lambda: model(x))
        model.weight = nn.Parameter(model.weight.detach())
        graph.replay()
        graph.replay()
    assert watched.findings() == []


def views_only(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x.view(5)) + x.new_ones(5)


def makes_and_frees(x: torch.Tensor) -> torch.Tensor:
    del x
    y = torch.ones(5) * 2
    return torch.cat([y, y])


@pytest.mark.parametrize("body", [views_only, makes_and_frees])
def test_what_a_graph_does_not_read_may_be_freed(
    body: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Shapes of an external tensor, and memory of the capture's own."""
    held = [torch.ones(5)]
    with watching() as watched:
        graph, result = captured(lambda: body(held[0]))
        held.clear()
        del result
        graph.replay()
    assert watched.watch.summary()["graphs"][0]["externals"] == 0


def test_a_reset_graph_relies_on_nothing() -> None:
    """Also one that is captured again is told by its last capture."""
    held = [torch.ones(5), torch.ones(3)]
    with watching() as watched:
        graph, _ = captured(lambda: held[0] + 1)
        graph.reset()
        del held[0]
        graph.replay()
        graph.capture_begin()
        held[0].add(1)
        graph.capture_end()
        graph.replay()
        held.clear()
        with pytest.raises(StaleGraphAddress, match="12 bytes"):
            graph.replay()
    assert watched.watch.summary()["graphs"][0]["captures"] == 2


class Raising(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode of the program's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_of_the_program_stay() -> None:
    """After a capture that failed too, and if the program's mode is still on top."""
    with watching():
        with pytest.raises(ZeroDivisionError):
            captured(lambda: 1 // 0)
        assert _get_current_dispatch_mode_stack() == []
        graph, mode = Graph(), Raising()
        graph.capture_begin()
        with mode:
            graph.capture_end()
            assert _get_current_dispatch_mode_stack() == [mode]
        assert _get_current_dispatch_mode_stack() == []


def test_a_capture_that_does_not_begin_leaves_nothing() -> None:
    """No mode, no graph, and the garbage collector as it was."""
    with watching() as watched:
        with pytest.raises(TypeError):
            Graph().capture_begin(unknown=1)  # type: ignore[call-arg]
        assert gc.isenabled()
        assert _get_current_dispatch_mode_stack() == []
    assert watched.watch.summary()["graphs"] == []


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_as_the_program_has_it(is_on: bool) -> None:
    """A capture collects garbage if the program does, and leaves its thresholds as they were."""
    held: list[Any] = []
    seen: list[bool] = []
    phases: list[str] = []

    def body() -> None:
        seen.append(gc.isenabled())
        phases.clear()
        for _ in range(300):
            held.append(torch.ones(1) + 1)
            held.extend([] for _ in range(20))
        seen.append(bool(phases))

    def note(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    (gc.enable if is_on else gc.disable)()
    gc.callbacks.append(note)
    try:
        with watching():
            captured(body)
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert seen == [is_on, is_on]
    assert (gc.get_threshold(), gc.callbacks) == (before, callbacks)


def test_what_the_watch_allocates_is_not_counted() -> None:
    """It brings no collection nearer: the threshold grows with it, and shrinks with one."""
    own, before = Uncounted(), gc.get_threshold()
    own.begin()
    try:
        with own:
            assert not gc.isenabled()
            held = [{number} for number in range(100)]  # sets, as none is kept to be used again
        assert gc.isenabled()
        assert before[0] + len(held) // 2 <= gc.get_threshold()[0] < before[0] + 2 * len(held)
        gc.collect()
        assert gc.get_threshold() == before
    finally:
        own.end()
    assert gc.get_threshold() == before


@pytest.mark.parametrize("inside", [True, False])
def test_optimizer_steps_inside_of_a_capture(inside: bool) -> None:
    """They are counted; those outside are not."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    with watching(model) as watched:
        captured(optimizer.step if inside else lambda: None)
        optimizer.step()
    assert watched.watch.summary()["graphs"][0]["optimizer_steps"] == int(inside)


# ---- gradients


def graphed(model: Scale) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model as `make_graphed_callables` graphs it; gradients that it returns are cloned."""
    function: Any = make_graphed_callables(model, (torch.zeros(4),))
    model.weight.register_hook(lambda gradient: gradient.clone())
    return function  # type: ignore[no-any-return]


def gradient_of(model: Scale) -> torch.Tensor:
    assert model.weight.grad is not None
    return model.weight.grad


def test_a_static_gradient_that_is_dropped_in_time_is_right() -> None:
    """One microbatch a step, and no gradient is left when the next one comes."""
    model = Scale()
    with watching(model) as watched:
        function: Any = make_graphed_callables(model, (torch.zeros(4),))
        for _ in range(3):
            function(torch.ones(4)).sum().backward()
            model.weight.grad = None
    assert watched.findings() == []


@pytest.mark.parametrize("to_none", [True, False])
def test_a_graph_that_accumulates_itself_is_right(to_none: bool) -> None:
    """A full iteration's gradients lie in its memory by design."""
    model = Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model) as watched:

        def step() -> None:
            optimizer.zero_grad(set_to_none=to_none)
            (model.weight * 2).sum().backward()
            optimizer.step()

        graph, _ = captured(step)
        for _ in range(3):
            graph.replay()
    assert watched.findings() == []


def test_a_gradient_that_the_program_puts_there_is_right() -> None:
    """Where no backward runs, a replay may write what is the gradient by then."""
    model = Scale()
    with watching(model) as watched:
        graph, gradient = captured(lambda: torch.ones(4) * 2)
        for _ in range(3):
            graph.replay()
            model.weight.grad = gradient
    assert watched.findings() == []


def test_a_graph_that_accumulates_itself_inside_of_a_backward_is_right() -> None:
    """What its capture put in place is its own, also where autograd runs it."""
    model = Scale()
    with watching(model) as watched:
        graph, _ = captured(lambda: (model.weight * 2).sum().backward())

        class Replays(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, dy: torch.Tensor) -> Any:
                graph.replay()
                return dy

        for _ in range(3):
            Replays.apply(torch.ones(4, requires_grad=True)).sum().backward()
    assert watched.findings() == []


def test_a_backward_after_a_later_forward() -> None:
    """Its activations are those of the later one: the gradient is wrong, and it is reported."""
    model = Scale()
    with watching(model) as watched:
        function = graphed(model)
        first, second = (function(torch.full((4,), float(i))) for i in (1, 5))
        (first.sum() + second.sum()).backward()
    assert not torch.equal(gradient_of(model), torch.full((4,), 6.0))
    assert watched.only("static_activation")["forward"] == 0


def test_forwards_without_a_backward_are_right() -> None:
    """As an evaluation has them; and one backward twice, of two losses."""
    model = Scale()
    with watching(model) as watched:
        function = graphed(model)
        function(torch.ones(4))
        held = []  # so that no two have the same identity
        for _ in range(2):
            y = function(torch.ones(4))
            y.sum().backward(retain_graph=True)
            y.sum().backward()
            held.append(y)
    assert watched.findings() == []


# ---- stressors


def test_poison_is_overwritten_by_a_right_graph() -> None:
    """Results are NaN when the graph runs and not after it; what the program wrote is left."""
    x, kept, seen = torch.ones(4), {}, []

    def body() -> None:
        kept["empty"], kept["buffer"] = torch.empty(4), torch.empty(4).fill_(1.0)
        kept["result"], kept["written"] = x + 1, x + 2

    def again() -> None:
        seen.append({name: bool(t.isnan().all()) for name, t in kept.items()})
        kept["result"].copy_(x + 1)

    with watching(stress=("poison", "scramble")) as watched:
        graph, _ = captured(body)
        kept["empty"].zero_()
        kept["written"].zero_()
        graph.body = again
        graph.replay()
    assert seen == [{"empty": False, "buffer": False, "result": True, "written": False}]
    assert torch.equal(kept["result"], x + 1)
    assert watched.findings() == []


def test_poison_leaves_gradients() -> None:
    """A gradient that a capture made may be accumulated into."""
    model, seen = Scale(), []
    with watching(model, stress=("poison",)):
        graph, _ = captured(lambda: (model.weight * 2).sum().backward())
        graph.body = lambda: seen.append(gradient_of(model).isnan().any())
        graph.replay()
    assert seen == [False]


def test_unknown_stressors_are_refused() -> None:
    with pytest.raises(ValueError, match="got 'jitter'"):
        GraphWatch(lambda name, detail: None, stress=("jitter",))
