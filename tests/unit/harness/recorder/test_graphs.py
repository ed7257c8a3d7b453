"""Graphs of programs: the host's in place of torch.cuda's, the watch of them, and their records.

Most of the watch is tested over a class of graphs whose replay calls a function of the test.
"""

import contextlib
import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
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
from harness.recorder.graphs import METHODS, GraphInfo, GraphWatch, StaleGraphAddress, Uncounted
from tests.support.fake_engine import Patch
from tests.unit.harness.recorder.recorded import all_digests, digests, losses, recorded

STEPS, WARM_UP = 5, 2


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Graph:
    """Stands for a CUDA graph: a replay calls `body`."""

    body: Callable[[], Any] = staticmethod(lambda: None)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None:
        self.body()

    def reset(self) -> None: ...


class Watched(GraphWatch):
    """A watch with what it has reported."""

    def __init__(self, model: nn.Module | None, stress: tuple[str, ...], **about: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        named: Any = model.named_parameters if model is not None else lambda: ()
        report = lambda *event: self.events.append(event)  # noqa: E731
        super().__init__(report, named, stress, (Graph, HostGraph), **about)

    @property
    def findings(self) -> list[str]:
        return [name for name, _ in self.events if name != "graph_captured"]

    def only(self, finding: str) -> dict[str, Any]:
        (detail,) = [detail for name, detail in self.events if name == finding]
        return detail

    def all_of(self, key: str) -> list[Any]:
        """A fact of each graph."""
        return [each[key] for each in self.summary()["graphs"]]


@contextlib.contextmanager
def watching(
    model: nn.Module | None = None, stress: tuple[str, ...] = (), **about: Any
) -> Iterator[Watched]:
    watch = Watched(model, stress, **about)
    with pytest.MonkeyPatch.context() as own:
        for kind, name in itertools.product((Graph, HostGraph), METHODS):
            own.setattr(kind, name, getattr(kind, name))  # put back afterwards
        watch.install()
        yield watch


def captured(body: Callable[[], Any]) -> tuple[Graph, Any]:
    """A graph of `body`, and what the capture returned."""
    made = Graph()
    made.capture_begin()
    try:
        result = body()
    finally:
        made.capture_end()
    return made, result


def captured_on_host(body: Callable[[], Any]) -> tuple[Any, Any]:
    made = CUDAGraph()
    with graph(made):
        result = body()
    return made, result


def bits(tensors: Any) -> list[list[int]]:
    return [t.detach().flatten().view(torch.int32).tolist() for t in tensors]


def test_replays_are_counted_and_named() -> None:
    """Where, by whom, how often, over how many storages, and steps of optimizers in a capture."""
    model, x, seen = nn.Linear(4, 4), torch.ones(2, 4), list[GraphInfo]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    with watching(model, replayed=seen.append) as watched:
        made, _ = captured(lambda: model(x))
        made.replay()
        made.replay()
        captured(optimizer.step)
        optimizer.step()
    found, stepping = watched.summary()["graphs"]
    assert "test_graphs.py:" in found.pop("place")
    assert found == {
        "index": 0, "maker": "unknown", "captures": 1, "replays": 2,
        "externals": 3, "optimizer_steps": 0,
    }  # fmt: skip
    assert (stepping["index"], stepping["optimizer_steps"]) == (1, 1)
    assert [info.index for info in seen] == [0, 0]
    assert watched.findings == []


def test_a_watch_leaves_what_it_found() -> None:
    """A graph dies when the program drops it, and the collector is as it was."""
    collector = gc.get_threshold(), list(gc.callbacks)
    model = nn.Linear(4, 4).requires_grad_(False)
    gc.disable()
    try:
        with watching(stress=("poison",)) as watched:
            made, _ = captured(lambda: torch.ones(2))
            dropped, _ = captured(lambda: model(torch.ones(2, 4)))
            reference = weakref.ref(dropped)
            del dropped
            assert reference() is None
    finally:
        gc.enable()
    assert (gc.get_threshold(), gc.callbacks) == collector
    made.replay()
    assert watched.all_of("replays") == [0, 0]


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


def replaced(model: nn.Linear) -> None:
    model.keep = model.weight.detach()  # the memory stays, the parameter is another
    model.weight = nn.Parameter(torch.zeros(4, 4))


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "freed": lambda model: delattr(model, "weight"),
    "data": lambda model: setattr(model.weight, "data", torch.zeros(4, 4)),
    "replaced": replaced,
    "resized": lambda model: model.weight.untyped_storage().resize_(0),
    "same address": lambda model: setattr(model, "weight", nn.Parameter(model.weight.detach())),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_moved_is_named(change: str) -> None:
    """The replay is refused before it runs; what lies where it lay under that name is right."""
    model, x, ran = nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4), []
    with watching(model) as watched:
        made, _ = captured(lambda: model(x))
        made.body = lambda: ran.append(1)
        made.replay()
        CHANGES[change](model)
        if change == "same address":
            made.replay()
            made.replay()
            assert watched.findings == []
            return
        with pytest.raises(StaleGraphAddress, match=r"^weight: ") as caught:
            made.replay()
    assert caught.value.names == ["weight"]
    assert watched.only("stale_address")["replay"] == 1
    assert ran == [1]


def test_memory_without_a_name_is_told_by_its_first_use() -> None:
    """Size, operator and line; what a named tensor shares, as parts of one buffer, has its name."""
    held, model = [torch.ones(5), torch.ones(8)], nn.Linear(1, 1)
    model.weight = nn.Parameter(held[1][:4], requires_grad=False)
    said = []
    for place in (0, 1):
        with watching(model) as watched:
            made, _ = captured(lambda: held[place][4:] + 1)  # noqa: B023
            held[place] = torch.ones(0)
            if place:
                del model.weight
            with pytest.raises(StaleGraphAddress):
                made.replay()
        said += watched.only("stale_address")["tensors"]
    assert said[0].startswith("storage of 20 bytes (first used by aten.add.Tensor at ")
    assert "test_graphs.py:" in said[0]
    assert said[1:] == ["weight: freed since the capture"]


def test_what_a_graph_does_not_read_may_be_freed() -> None:
    """Shapes of an external tensor, and memory of the capture's own."""
    held = [torch.ones(5)]
    with watching() as watched:
        made, result = captured(
            lambda: torch.cat([held[0].new_ones(5) * 2, torch.zeros_like(held[0].view(5))])
        )
        held.clear()
        del result
        made.replay()
    assert watched.all_of("externals") == [0]


def test_a_reset_graph_relies_on_nothing() -> None:
    """Also one that is captured again is told by its last capture."""
    held = [torch.ones(5), torch.ones(3)]
    with watching() as watched:
        made, _ = captured(lambda: held[0] + 1)
        made.reset()
        del held[0]
        made.replay()
        made.capture_begin()
        held[0].add(1)
        made.capture_end()
        made.replay()
        held.clear()
        with pytest.raises(StaleGraphAddress, match="12 bytes"):
            made.replay()
    assert watched.all_of("captures") == [2]


class Scale(nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def graphed(model: Scale) -> Callable[[Tensor], Tensor]:
    """The model as `make_graphed_callables` graphs it; gradients that it returns are cloned."""
    function: Any = make_graphed_callables(model, (torch.zeros(4),))
    model.weight.register_hook(lambda gradient: gradient.clone())
    return function  # type: ignore[no-any-return]


def gradient_of(model: Scale) -> Tensor:
    assert model.weight.grad is not None
    return model.weight.grad


def dropped_in_time(model: Scale) -> None:
    """One microbatch a step, and no gradient is left when the next one comes."""
    function: Any = make_graphed_callables(model, (torch.zeros(4),))
    for _ in range(3):
        function(torch.ones(4)).sum().backward()
        model.weight.grad = None


def accumulates_itself(model: Scale, to_none: bool = True) -> None:
    """A full iteration's gradients lie in its memory by design."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=to_none)
        (model.weight * 2).sum().backward()
        optimizer.step()

    made, _ = captured(step)
    for _ in range(3):
        made.replay()


def put_there_by_the_program(model: Scale) -> None:
    """Where no backward runs, a replay may write what is the gradient by then."""
    made, gradient = captured(lambda: torch.ones(4) * 2)
    for _ in range(3):
        made.replay()
        model.weight.grad = gradient


def forwards_without_a_backward(model: Scale) -> None:
    """As an evaluation has them; and one backward twice, of two losses."""
    function = graphed(model)
    function(torch.ones(4))
    held = []  # so that no two have the same identity
    for _ in range(2):
        y = function(torch.ones(4))
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        held.append(y)


@pytest.mark.parametrize(
    "program",
    [dropped_in_time, accumulates_itself, lambda model: accumulates_itself(model, to_none=False),
     put_there_by_the_program, forwards_without_a_backward],
)  # fmt: skip
def test_what_is_right_is_not_reported(program: Callable[[Scale], None]) -> None:
    model = Scale()
    with watching(model) as watched:
        program(model)
    assert watched.findings == []


def test_a_backward_after_a_later_forward() -> None:
    """Its activations are those of the later one: the gradient is wrong, and it is reported."""
    model = Scale()
    with watching(model) as watched:
        function = graphed(model)
        first, second = (function(torch.full((4,), float(i))) for i in (1, 5))
        (first.sum() + second.sum()).backward()
    assert not torch.equal(gradient_of(model), torch.full((4,), 6.0))
    assert watched.only("static_activation")["forward"] == 0


@pytest.mark.parametrize("clone", [True, False])
def test_callables_accumulate_as_they_do_on_a_gpu(clone: bool) -> None:
    """pytorch #181723: gradients in static buffers are found, clones have eager's bits."""
    inputs = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    model, eager = nn.Linear(4, 4), nn.Linear(4, 4)
    eager.load_state_dict(model.state_dict())
    with watching(model) as watched:
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
    kinds = (f"torch.cuda.make_graphed_callables {kind} 0" for kind in ("forward", "backward"))
    assert watched.all_of("maker") == list(kinds)
    assert watched.all_of("replays") == [3, 3]


def test_poison_is_overwritten_by_a_right_graph() -> None:
    """Results are NaN when the graph runs and not after it; what the program wrote is left."""
    x, kept, seen, model = torch.ones(4), {}, list[str](), Scale()

    def body() -> None:
        kept["empty"], kept["buffer"] = torch.empty(4), torch.empty(4).fill_(1.0)
        kept["result"], kept["written"] = x + 1, x + 2
        (model.weight * 2).sum().backward()  # a gradient may be accumulated into

    def again() -> None:
        held = {**kept, "gradient": gradient_of(model)}
        seen.extend(name for name, tensor in held.items() if tensor.isnan().any())
        kept["result"].copy_(x + 1)

    with watching(model, stress=("poison", "scramble")) as watched:
        made, _ = captured(body)
        kept["empty"].zero_()
        kept["written"].zero_()
        made.body = again
        made.replay()
    assert seen == ["result"]
    assert torch.equal(kept["result"], x + 1)
    assert watched.findings == []


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

    with watching(stress=("poison",)):
        made, result = captured_on_host(half_written)
        made.replay()
    assert total.isnan()
    assert result is None or not result[:64].isnan().any()


def train(*, graphed: bool) -> nn.Module:
    """Two eager steps, then steps that are replays, or eager as well; with dropout and a buffer."""
    torch.manual_seed(0)
    model, static = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)), torch.ones(4)
    model.register_buffer("calls", calls := torch.zeros(()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True, capturable=True)

    def step() -> None:
        optimizer.zero_grad()
        model(static * calls.add_(1)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    run = step
    for number in range(STEPS):
        static.fill_(1.0 + number)
        if graphed and number == WARM_UP:
            made, _ = captured_on_host(step)
            run = made.replay
        run()
    return model


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
    assert of_graph["optimizer_steps"] == 1


@pytest.mark.parametrize("stress", [(), ("poison", "scramble")])
def test_a_right_program_keeps_its_bits(stress: tuple[str, ...]) -> None:
    """Under stressors as well; nothing is found."""
    eager = train(graphed=False)
    with watching(stress=stress) as watched:
        found = train(graphed=True)
    assert bits(found.parameters()) == bits(eager.parameters())
    assert watched.findings == []
    assert watched.all_of("replays") == [STEPS - WARM_UP]


def test_a_capture_has_no_effect() -> None:
    """Neither on tensors nor on random states; what it made gets values at each replay."""
    x, state = torch.zeros(3), torch.get_rng_state()
    made, drawn = captured_on_host(lambda: torch.rand_like(x.add_(1)))
    assert torch.equal(x, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), state)
    made.replay()
    assert torch.equal(x, torch.ones(3))
    torch.set_rng_state(state)
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_those_of_replays(*, training: bool) -> None:
    """Operators of batch norm do not say that they write them: a capture must not, either."""
    norm, x = nn.BatchNorm1d(3).train(training), torch.arange(12.0).reshape(4, 3)
    twin = copy.deepcopy(norm)
    made, _ = captured_on_host(lambda: norm(x))
    for _ in range(2):
        made.replay()
        twin(x)
    for ours, theirs in zip(norm.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def fails(x: Tensor) -> None:
    x.add_(1)
    raise KeyError("lost")


def uses_what_no_operator_made(x: Tensor) -> None:
    x.add_(torch.frombuffer(bytearray(12), dtype=torch.float32))


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [(lambda x: x.sum().item(), RuntimeError,
      "cannot capture aten._local_scalar_dense.* at .*test_grap"),
     (fails, KeyError, "lost"),
     (uses_what_no_operator_made, RuntimeError, "the capture by no operator")],
)  # fmt: skip
def test_a_capture_that_fails(
    body: Callable[[Tensor], None], error: type[Exception], says: str
) -> None:
    """Its own error is raised, nothing is left changed, and the graph can be captured again."""
    x, used, made = torch.zeros(3), torch.zeros(3), CUDAGraph()
    with watching() as watched:
        with pytest.raises(error, match=says), graph(made):
            body(used)
        assert torch.equal(used, torch.zeros(3))
        used.untyped_storage().resize_(0)  # what it used may go
        assert not is_capturing()
        assert gc.isenabled()
        assert _get_current_dispatch_mode_stack() == []
        with pytest.raises(RuntimeError, match="Expected a captured graph"):
            made.replay()
        with graph(made):
            assert is_capturing()
            x.add_(1)
        made.replay()
    assert torch.equal(x, torch.ones(3))
    assert watched.all_of("captures") == [1] or body is uses_what_no_operator_made
