"""Captured functions, and modules as segments: eager's bits forward and backward, or a refusal."""

import copy
import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.device import Device
from fsdp_core.graph.graph import CapturedFunction, GraphedCallable, GraphMaker, Segment
from fsdp_core.graph.recorder import CaptureRefused, Resolver, StaleAddress

DEVICE = Device("cpu")
TIME = 12


class Branch(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.dropout = dropout

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(x) * scale.to(x.dtype))), self.dropout)


def branch(dropout: float) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Branch(dropout), (torch.full((24,), 0.7),)


def microbatch(number: int) -> torch.Tensor:
    drawn = torch.randn(2, TIME, 16, generator=torch.Generator().manual_seed(number))
    return drawn.requires_grad_()


def like_microbatch() -> torch.Tensor:
    return torch.zeros(2, TIME, 16, requires_grad=True)


class Captured(GraphedCallable):
    def __init__(
        self,
        module: nn.Module,
        constants: tuple[torch.Tensor, ...],
        like: torch.Tensor,
        resolve: Resolver | None,
    ) -> None:
        segment = Segment(
            name="module", function=lambda x: module(x, *constants), samples=(like,),
            parameters=tuple(module.parameters()), resolve=resolve,
        )  # fmt: skip
        super().__init__(GraphMaker(DEVICE), segment)
        self.warm_up()
        self.capture_forward()
        self.capture_backward()

    def replay(self, x: torch.Tensor) -> torch.Tensor:
        result = self(x)
        assert isinstance(result, torch.Tensor)
        return result


def captured_module(
    module: nn.Module, constants: tuple[torch.Tensor, ...], *, named: bool = True
) -> Captured:
    """Captured forward and backward, the ledger knowing every parameter and constant."""

    def resolve() -> dict[str, torch.Tensor]:
        found = {name: p.data for name, p in module.named_parameters()}
        return found | {f"constant {i}": c for i, c in enumerate(constants)}

    return Captured(module, constants, like_microbatch(), resolve if named else None)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, TIME + 1, 16),
        torch.zeros(1, TIME, 16),
        torch.zeros(2, TIME, 16, dtype=torch.bfloat16),
    ],
    ids=["longer", "fewer rows", "dtype"],
)
def test_wrong_input_is_refused(wrong: torch.Tensor) -> None:
    """Another shape or dtype than captured is an error with both, never a broadcast copy."""
    module, constants = branch(0.0)
    graphed = captured_module(module, constants)
    with pytest.raises(ValueError, match=r"captured input 0 of module, \(2, 12, 16\)") as caught:
        graphed.replay(wrong)
    assert str(tuple(wrong.shape)) in str(caught.value)
    assert str(wrong.dtype) in str(caught.value)


def test_moved_parameter_is_stale_in_both_graphs() -> None:
    """A parameter that moved stops the forward, and one that moves later stops the backward."""
    module, constants = branch(0.0)
    graphed = captured_module(module, constants)
    assert isinstance(module, Branch)
    assert "up.weight" in graphed.ledgers[0].names
    assert "down.weight" in graphed.ledgers[1].names
    output = graphed.replay(microbatch(0))
    kept = module.down.weight.data
    module.down.weight.data = kept.clone()
    with pytest.raises(StaleAddress, match=r"down\.weight"):
        output.sum().backward()
    del output
    with pytest.raises(StaleAddress, match=r"down\.weight"):
        graphed.replay(microbatch(1))
    module.down.weight.data = kept
    graphed.replay(microbatch(1)).sum().backward()


def test_captured_function_returns_its_result() -> None:
    """A captured function gives its structure of results, fresh after each call, until reset."""
    x = torch.ones(3)
    captured = CapturedFunction(GraphMaker(DEVICE), lambda: {"sum": x.sum(), "twice": x * 2}, None)
    assert captured.ledger is None
    x.fill_(5)
    result = captured()
    assert (result["sum"].item(), result["twice"].tolist()) == (15, [10, 10, 10])
    captured.reset()
    with pytest.raises(RuntimeError, match="empty"):
        captured()


def test_what_the_function_uses_lives_as_long_as_the_graph() -> None:
    """Nobody else needs to hold the model: on CUDA a replay over freed memory is illegal."""
    model = nn.Linear(4, 4)
    alive = weakref.ref(model)
    x = torch.ones(2, 4)
    captured = CapturedFunction(
        GraphMaker(DEVICE), functools.partial(_without_grad, model, x), None
    )
    del model
    gc.collect()
    assert alive() is not None
    captured.reset()
    gc.collect()
    assert alive() is None


def _without_grad(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(x)
    return result


class Router(nn.Module):
    """Several inputs and outputs: some integer, some without a gradient; counts its tokens."""

    counts: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.shared = nn.Linear(8, 4), nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((8,), 0.5), requires_grad=False)
        self.register_buffer("counts", torch.zeros(4))

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        probs = self.gate(F.dropout(x * self.frozen, 0.25)).softmax(-1)
        probs = probs * valid[:, None]
        top, chosen = probs.max(-1)
        with torch.no_grad():
            self.counts.add_((chosen[:, None] == torch.arange(4)).sum(0))
        return self.shared(x), top, chosen + positions, probs.detach(), valid.logical_not()


def router_inputs(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens that get a gradient, positions, and which tokens are real."""
    drawn = torch.randn(6, 8, generator=torch.Generator().manual_seed(number))
    return drawn.requires_grad_(), torch.arange(6) * number, torch.arange(6) % (number + 2) != 1


def capture_all(*segments: Segment) -> list[GraphedCallable]:
    """Warmed up, all forwards captured, then all backwards in reverse."""
    maker = GraphMaker(DEVICE)
    graphed = [GraphedCallable(maker, segment) for segment in segments]
    for each in graphed:
        each.warm_up()
    for each in graphed:
        each.capture_forward()
    for each in reversed(graphed):
        each.capture_backward()
    return graphed


def capture(segment: Segment) -> GraphedCallable:
    (graphed,) = capture_all(segment)
    return graphed


def train(module: Router, call: Sequence[Callable[..., Any]]) -> list[object]:
    """Everything that three steps of three overlapping microbatches show; None where none is."""
    torch.manual_seed(5)
    seen: list[object] = []
    for step in range(3):
        module.zero_grad()
        forwards = []
        for microbatch in range(3):
            inputs = router_inputs(step * 3 + microbatch + 1)
            forwards.append((inputs[0], call[microbatch](*inputs)))
        for microbatch in (1, 0, 2):
            x, outputs = forwards[microbatch]
            (outputs[0].square().sum() + outputs[1].sum()).backward()
            seen += [x.grad, *(output.detach().clone() for output in outputs)]
            seen += [output.requires_grad for output in outputs]
        for parameter in module.parameters():
            seen.append(None if parameter.grad is None else parameter.grad.clone())
        seen.append(module.counts.clone())
    return [*seen, torch.get_rng_state()]


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    return one == other


def test_many_inputs_and_outputs_equal_eager() -> None:
    """Three microbatches at a time, kinds of inputs and outputs mixed: eager's bits everywhere."""
    torch.manual_seed(0)
    eager = Router()
    module = copy.deepcopy(eager)
    segment = Segment(
        name="router", function=module, samples=router_inputs(1),
        parameters=tuple(module.parameters()),
    )  # fmt: skip
    expected = train(eager, [eager] * 3)
    got = train(module, capture_all(segment, segment, segment))
    assert [same(a, b) for a, b in zip(expected, got, strict=True)] == [True] * len(expected)


# ---- what it leaves, and what it refuses


def segment_of(
    function: Callable[..., Any], *samples: torch.Tensor, parameters: tuple[nn.Parameter, ...] = ()
) -> Segment:
    return Segment(name="part", function=function, samples=samples, parameters=parameters)


def wanted(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


def test_warm_up_and_capture_leave_no_trace() -> None:
    """Buffers that the function writes, what it says it changes unseen, and numbers: as before."""
    seen, unseen = torch.zeros(3), torch.zeros(3)

    def unseen_write(x: torch.Tensor) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            unseen.add_(1)
        seen.add_(1)
        return F.dropout(x, 0.5)

    torch.manual_seed(1)
    state = torch.get_rng_state()
    segment = Segment(
        name="part", function=unseen_write, samples=(wanted(3),), parameters=(), state=(unseen,)
    )
    graphed = GraphedCallable(GraphMaker(DEVICE), segment)
    graphed.warm_up(3)
    assert (seen.tolist(), unseen.tolist()) == ([0.0] * 3, [0.0] * 3)
    graphed.capture_forward()
    graphed.capture_backward()
    assert (seen.tolist(), unseen.tolist()) == ([0.0] * 3, [0.0] * 3)
    assert torch.equal(state, torch.get_rng_state())
    graphed(wanted(3))
    assert seen.tolist() == [1.0] * 3


def test_a_failed_warm_up_leaves_no_trace() -> None:
    """What was written before the failure is put back."""
    seen = torch.zeros(2)

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.add_(x.detach())
        raise ZeroDivisionError

    graphed = GraphedCallable(GraphMaker(DEVICE), segment_of(function, wanted(2)))
    with pytest.raises(ZeroDivisionError):
        graphed.warm_up()
    assert seen.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("function", "samples", "said"),
    [
        (lambda x: [x], (wanted(2),), "tensors out of part, got list as output 0"),
        (lambda x: (x, None), (wanted(2),), "tensors out of part, got NoneType as output 1"),
    ],
    ids=["a list", "None among outputs"],
)
def test_outputs_that_are_no_tensors_are_refused(
    function: Callable[..., Any], samples: tuple[torch.Tensor, ...], said: str
) -> None:
    """Only tensors leave a graph."""
    graphed = GraphedCallable(GraphMaker(DEVICE), segment_of(function, *samples))
    with pytest.raises(ValueError, match=said):
        graphed.warm_up()


def test_a_changed_input_is_refused() -> None:
    """A function that writes into its input would write into the graph's copy of it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)

    graphed = GraphedCallable(GraphMaker(DEVICE), segment_of(function, torch.ones(2)))
    with pytest.raises(CaptureRefused, match="changes its input 0 in place"):
        graphed.capture_forward()


def test_a_forgotten_parameter_is_refused() -> None:
    """A bound tensor that needs a gradient and is not named would never get one."""
    linear, leaf = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    table = leaf * 2  # of a computation that is not captured
    for function in (linear, lambda x: x * table):
        segment = segment_of(function, wanted(1, 2), parameters=tuple(linear.parameters())[:1])
        graphed = GraphedCallable(GraphMaker(DEVICE), segment)
        with pytest.raises(CaptureRefused, match=r"needs a gradient and is no input and none of"):
            graphed.capture_forward()


def test_an_output_without_the_gradient_it_was_captured_with_raises() -> None:
    """The graph adds all gradients up: a missing one is not taken for zeros."""
    graphed = capture(segment_of(lambda x: (x * 2, x * 3), wanted(2)))
    one, _ = graphed(wanted(2))
    with pytest.raises(RuntimeError, match="got none of number 1"):
        one.sum().backward()


def test_an_output_changed_before_the_backward_raises() -> None:
    """The graph may have saved it: a backward would compute with what was written into it."""
    graphed = capture(segment_of(lambda x: x.exp(), wanted(2)))
    x = wanted(2)
    out = graphed(x)
    assert isinstance(out, torch.Tensor)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="output 0 of part unchanged until its backward"):
        out.sum().backward()
    del out
    out = graphed(x)
    assert isinstance(out, torch.Tensor)
    (out * 2).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach().exp())


def test_returned_gradients_are_nobody_elses() -> None:
    """What autograd hands out is kept as it is by a caller, whatever is replayed after."""
    weight = nn.Parameter(torch.full((2,), 3.0))
    graphed = capture(segment_of(lambda x: x * weight, wanted(2), parameters=(weight,)))
    kept = []
    for number in range(3):
        x = torch.full((2,), float(number), requires_grad=True)
        out = graphed(x)
        assert isinstance(out, torch.Tensor)
        kept.append(torch.autograd.grad(out, [x, weight], torch.full((2,), 10.0**number)))
    assert [[grad[0].item() for grad in grads] for grads in kept] == [[3, 0], [30, 10], [300, 200]]


def test_callables_share_what_gradients_leave_through() -> None:
    """Memory of gradients does not grow with their number, and each gets its own values."""
    weights = [nn.Parameter(torch.full((64,), value)) for value in (2.0, 5.0)]
    segments = [
        segment_of(lambda x, w=weight: x * w, wanted(64), parameters=(weight,))
        for weight in weights
    ]
    graphs = capture_all(*segments * 2)
    named = [graph.named_tensors() for graph in graphs]
    places = {
        tensor.data_ptr() for each in named for name, tensor in each.items() if "gradient" in name
    }
    assert len(places) == 3  # of an output, of an input, of a parameter
    x = wanted(64)
    out = graphs[1](graphs[2](x))  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    assert x.grad is not None
    grads = [tensor.grad for tensor in (x, *weights)]
    assert [None if g is None else g.unique().tolist() for g in grads] == [[10.0], [5.0], [2.0]]


def test_an_input_without_a_gradient_ends_the_path() -> None:
    """Where the function lets no gradient through, nothing upstream gets one: None, not zeros."""
    graphed = capture(segment_of(lambda x, y: x * y.detach(), wanted(2), wanted(2)))
    upstream = wanted(2)
    x = wanted(2)
    out = graphed(x, upstream * 2)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]
    assert upstream.grad is None


def test_gradient_hooks_run_once() -> None:
    """A hook on a parameter's gradient acts around the replay, not inside of the graph as well."""
    weight = nn.Parameter(torch.ones(2))
    weight.register_hook(lambda grad: grad * 10)
    graphed = capture(segment_of(lambda x: x * weight, wanted(2), parameters=(weight,)))
    out = graphed(wanted(2))
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [10, 10]


def test_forward_alone_without_grad() -> None:
    """Under `no_grad` the forward replays alone and holds no slot, but takes none in use either."""
    launches = Counter[str]()
    segment = replace(
        segment_of(lambda x: x * 2, wanted(2)), on_replay=lambda: launches.update("x")
    )
    graphed = capture(segment)
    with torch.no_grad():
        graphed(wanted(2))
        out = graphed(wanted(2))
        assert isinstance(out, torch.Tensor)
        assert not out.requires_grad
    assert launches.total() == 2
    held = graphed(wanted(2))
    with torch.no_grad(), pytest.raises(RuntimeError, match="still awaits its backward"):
        graphed(wanted(2))
    del held
    graphed(wanted(2))


def test_a_function_without_gradients_has_one_graph() -> None:
    """Nothing to differentiate: no backward graph, and outputs need no gradient."""
    graphed = capture(segment_of(lambda x, y: (x + y, x > y), torch.ones(2), torch.ones(2)))
    assert graphed.captures == [1, 0]
    outputs = graphed(torch.ones(2), torch.zeros(2))
    assert [out.requires_grad for out in outputs] == [False, False]
    assert outputs[1].tolist() == [True, True]


def test_inputs_of_any_layout_are_copied_in() -> None:
    """Strided, transposed and expanded inputs, and one that lies where the static one does."""
    graphed = capture(segment_of(lambda x: x + 1, torch.ones(3, 3)))
    base = torch.arange(18.0).view(3, 6)
    for x in (base[:, ::2], base[:, :3].t(), base[0, 0].expand(3, 3)):
        out = graphed(x)
        assert isinstance(out, torch.Tensor)
        assert torch.equal(out, x + 1)
    static = graphed.named_tensors()["part input 0"]
    static.copy_(base[:, :3])
    out = graphed(static.t())
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, base[:, :3].t() + 1)


def test_outputs_that_are_inputs_may_come_back_in_another_order() -> None:
    """Aliases of the slot's own inputs are read before any of them is overwritten."""
    graphed = capture(segment_of(lambda x, y: (x, y, x - y), torch.zeros(2), torch.zeros(2)))
    x, y, _ = graphed(torch.full((2,), 5.0), torch.full((2,), 3.0))
    outputs = graphed(y, x)
    assert [out.tolist() for out in outputs] == [[3, 3], [5, 5], [-2, -2]]


def test_reset_drops_both_graphs() -> None:
    """After it no tensor of the graphs lives, and replays of either direction say so."""
    device = Device("cpu")
    with device.counting_memory():
        x = wanted(1000)
        before = device.live_bytes()
        graphed = capture(segment_of(lambda x: (x * 2).exp(), x))
        assert device.live_bytes() > before
        graphed.reset()
        assert device.live_bytes() == before
    with pytest.raises(RuntimeError, match="Expected a captured forward of part"):
        graphed(x)
    graphed = capture(segment_of(lambda x: (x * 2).exp(), x))
    out = graphed(x)
    assert isinstance(out, torch.Tensor)
    graphed.reset()
    with pytest.raises(RuntimeError, match="empty"):
        out.sum().backward()


def test_captures_out_of_order_are_refused() -> None:
    """A backward before its forward, and a forward twice."""
    graphed = GraphedCallable(GraphMaker(DEVICE), segment_of(lambda x: x * 2, wanted(2)))
    with pytest.raises(RuntimeError, match="Expected a captured forward"):
        graphed.capture_backward()
    graphed.capture_forward()
    with pytest.raises(RuntimeError, match="to be empty, got a captured one"):
        graphed.capture_forward()
