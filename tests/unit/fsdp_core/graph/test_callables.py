"""Graphed modules by either maker: one table of hook calls, eager's bits, nothing left behind."""

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.device import Device
from fsdp_core.graph import callables, te_callables
from fsdp_core.graph.capture_order import Order
from fsdp_core.graph.graph import GraphMaker
from fsdp_core.graph.hooks import PHASES, CaptureHooks, hooks_off
from fsdp_core.graph.ledger import StaleAddress
from tests.unit.fsdp_core.graph.te_graph_stand_in import TeGraphStandIn

Make = Callable[..., list[callables.GraphedModule]]


def own(*args: Any, **options: Any) -> list[callables.GraphedModule]:
    """Our way."""
    return callables.make_graphed_callables(GraphMaker(Device("cpu")), *args, **options)


def te(*args: Any, **options: Any) -> list[callables.GraphedModule]:
    """TransformerEngine's way, over a stand-in for it."""
    options.setdefault("library", TeGraphStandIn())
    return te_callables.make_graphed_callables(GraphMaker(Device("cpu")), *args, **options)


both = pytest.mark.parametrize("make", [own, te])

FORWARD, BACKWARD = PHASES[:2], PHASES[2:]
ORDERS = {
    "one microbatch": (None, [(0, FORWARD), (1, FORWARD), (1, BACKWARD), (0, BACKWARD)]),
    "two chunks": (
        Order((1, 2, -2, -1)), [(0, FORWARD), (1, FORWARD), (1, BACKWARD), (0, BACKWARD)],
    ),
    "two microbatches": (
        Order((1, 1, -1, -1)),
        [(0, FORWARD), (1, FORWARD)] * 2 + [(1, BACKWARD), (0, BACKWARD)] * 2,
    ),
    "chunks one after another": (
        Order((1, -1, 2, -2)), [(0, FORWARD), (0, BACKWARD), (1, FORWARD), (1, BACKWARD)],
    ),
}  # fmt: skip
"""An order, and the phases of modules in which one pass through it calls hooks."""


class Block(nn.Module):
    """A linear with dropout and a residual; counts its tokens."""

    tokens: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("tokens", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.tokens.add_(x.shape[0])
        return x + F.dropout(self.linear(x), 0.3, self.training)


def blocks() -> list[Block]:
    """Two, the same each time."""
    torch.manual_seed(0)
    return [Block(), Block()]


def sample() -> tuple[torch.Tensor]:
    """Like an input, with values of its own."""
    return (torch.full((4, 8), 0.5, requires_grad=True),)


def inputs(number: int) -> torch.Tensor:
    """Of a microbatch."""
    drawn = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
    return drawn.requires_grad_()


# ---- hooks at capture time


@both
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_hooks_run_by_the_table(make: Make, order: str, iterations: int) -> None:
    """Both makers call the same hooks: each pass of each warm-up and of the capture, no replay.

    Each with the module itself, before or after the forward or backward and outside of the graph:
    what a hook writes is done once a call, stays after the capture, and is not replayed.
    """
    modules, seen = blocks(), list[tuple[int, str]]()
    written = torch.zeros(1)

    def record(number: int, phase: str, module: nn.Module) -> None:
        assert module is modules[number]
        seen.append((number, phase))
        written.add_(1)

    hooks: list[CaptureHooks] = [
        {phase: {7: functools.partial(record, number, phase)} for phase in PHASES}
        for number in range(2)
    ]
    chosen, one_pass = ORDERS[order]
    graphed = make(
        modules, [sample()] * 2, order=chosen, num_warmup_iters=iterations,
        capture_time_hooks=hooks,
    )  # fmt: skip
    expected = [(number, phase) for number, phases in one_pass for phase in phases]
    assert seen == expected * (iterations + 1)
    for each in graphed:
        each(inputs(1)).sum().backward()
    assert len(seen) == len(expected) * (iterations + 1)
    assert written.item() == len(seen)


@both
def test_hooks_of_one_phase_run_in_their_order(make: Make) -> None:
    """Several hooks of a phase run as their numbers came in; other modules may have none."""
    seen: list[int] = []
    hooks = {number: lambda module, n=number: seen.append(n) for number in (5, 2, 9)}
    make(
        blocks(), [sample()] * 2, num_warmup_iters=1,
        capture_time_hooks=[{"backward_hooks": hooks}, None],
    )  # fmt: skip
    assert seen == [5, 2, 9] * 2


@both
@pytest.mark.parametrize(
    ("hooks", "error", "said"),
    [
        ([None], ValueError, "capture_time_hooks of 2 callables, got 1"),
        ([None, {"forward": {}}], ValueError, "forward_pre_hooks, .*, got forward"),
        ([{"forward_hooks": {0: lambda module: 1}}, None], RuntimeError, "to return None, got int"),
    ],
    ids=["one entry short", "unknown phase", "returns something"],
)
def test_wrong_hooks_are_refused(make: Make, hooks: Any, error: Any, said: str) -> None:
    """Hooks of another shape than the contract's are errors that say what was expected."""
    with pytest.raises(error, match=said):
        make(blocks(), [sample()] * 2, capture_time_hooks=hooks)


@both
def test_hooks_on_modules_are_refused(make: Make) -> None:
    """A module with a hook of its own or of an inner module is refused, naming it."""
    modules = blocks()
    handle = modules[1].linear.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"no forward_hooks of linear at a capture.*hooks_off"):
        make(modules, [sample()] * 2)
    handle.remove()
    modules[0].register_full_backward_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="no backward_pre_hooks of Block at a capture"):
        make(modules, [sample()] * 2)


# ---- replays


def train(modules: list[Block], calls: list[Callable[..., Any]]) -> list[torch.Tensor]:
    """Everything that steps of two open microbatches show."""
    torch.manual_seed(4)
    seen = []
    for step in range(3):
        for module in modules:
            module.zero_grad(set_to_none=step % 2 == 0)
        open_ones = []
        for slot in range(2):
            x = inputs(2 * step + slot)
            open_ones.append((x, calls[1](calls[0](x, slot=slot) * 2, slot=slot)))
        for x, out in open_ones:
            (x_grad,) = torch.autograd.grad(out.square().sum(), [x], retain_graph=False)
            seen += [x_grad, out.detach().clone()]
        for slot in range(2):
            x = inputs(10 + slot)
            calls[1](calls[0](x, slot=slot), slot=slot).square().sum().backward()
            assert x.grad is not None
            seen.append(x.grad)
        seen += [p.grad.clone() for m in modules for p in m.parameters() if p.grad is not None]
        seen += [module.tokens.clone() for module in modules]
    return [*seen, torch.get_rng_state()]


@both
def test_replays_equal_eager(make: Make) -> None:
    """Outputs, all gradients, kept gradients of inputs, counters and the generator: eager's."""
    eager = blocks()
    modules = copy.deepcopy(eager)
    graphed = make(modules, [sample()] * 2, order=Order((1, 1, -1, -1)))
    expected = train(eager, [lambda x, slot, m=m: m(x) for m in eager])
    got = train(modules, [*graphed])
    assert len(expected) == len(got)
    assert [torch.equal(a, b) for a, b in zip(expected, got, strict=True)] == [True] * len(got)


@both
def test_installed_modules_replay_inside_their_hooks(make: Make) -> None:
    """Installed, a call of the module runs its hooks around the replay; removed, it is eager."""
    modules, calls, replays = blocks(), list[str](), list[int]()

    def launched(number: int) -> None:
        calls.append("launch")
        replays.append(number)

    modules[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    modules[0].register_forward_hook(lambda *_: calls.append("after"))
    with hooks_off(modules) as hooks:
        graphed = make(
            modules, [sample()] * 2, capture_time_hooks=hooks,
            on_replay=launched,
        )  # fmt: skip
    assert calls == []
    graphed[0].install()
    modules[0](inputs(3)).sum().backward()
    assert calls == ["before", "launch", "after", "launch"]
    with pytest.raises(RuntimeError, match="Expected Block to run eagerly so far"):
        graphed[0].install()
    modules[0].eval()
    modules[0](inputs(3))
    assert sum(replays) == 2, "the other mode runs eagerly"
    modules[0].train()
    graphed[0].reset()
    modules[0](inputs(3)).sum().backward()
    assert sum(replays) == 2
    assert "forward" not in vars(modules[0])


@both
def test_removed_modules_have_the_forward_that_they_had(make: Make) -> None:
    """One of the instance's own, as a compiled part has, comes back."""
    module = blocks()[0]
    own_forward = module.forward
    module.forward = own_forward  # type: ignore[method-assign]
    (graphed,) = make([module], [sample()])
    graphed.install()
    graphed.remove()
    assert vars(module)["forward"] is own_forward


@both
def test_a_slot_in_use_is_not_replayed(make: Make) -> None:
    """A second forward before the backward raises; after it, or once it is dropped, it works."""
    module = blocks()[0]
    (graphed,) = make([module], [sample()])
    out = graphed(inputs(1))
    with pytest.raises(RuntimeError, match="still awaits its backward"):
        graphed(inputs(2))
    out.sum().backward()
    graphed(inputs(2))  # dropped
    graphed(inputs(3)).sum().backward()
    with pytest.raises(ValueError, match="below 1, got 1"):
        graphed(inputs(3), slot=1)


@both
def test_a_second_backward_is_refused(make: Make) -> None:
    """What a forward saved is gone after its backward: a second one raises."""
    (graphed,) = make(blocks()[:1], [sample()])
    out = graphed(inputs(1)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward of 0: Block for each forward"):
        out.backward()


@both
def test_inputs_unlike_the_samples_are_refused(make: Make) -> None:
    """Another shape, number, or an input that wants a gradient where the sample does not."""
    module = blocks()[0]
    (graphed,) = make([module], [(torch.ones(4, 8),)])
    with pytest.raises(ValueError, match=r"\(4, 8\) torch.float32 on cpu, got \(3, 8\)"):
        graphed(torch.ones(3, 8))
    with pytest.raises(ValueError, match="Expected 1 inputs of 0: Block, got 2"):
        graphed(torch.ones(4, 8), torch.ones(4, 8))
    with pytest.raises(ValueError, match="without a gradient, as captured"):
        graphed(inputs(1))
    graphed(inputs(1).detach()).sum().backward()


@both
def test_moved_parameters_are_stale(make: Make) -> None:
    """With names for a ledger, a parameter that moved stops forward and backward."""
    module = blocks()[0]
    (graphed,) = make([module], [sample()], resolve=lambda: dict(module.named_parameters()))
    out = graphed(inputs(1))
    kept = module.linear.weight.data
    module.linear.weight.data = kept.clone()
    with pytest.raises(StaleAddress, match=r"linear\.weight"):
        out.sum().backward()
    module.linear.weight.data = kept
    out.sum().backward()
    module.linear.weight.data = kept.clone()
    with pytest.raises(StaleAddress, match=r"linear\.weight"):
        graphed(inputs(1))
    module.linear.weight.data = kept
    graphed(inputs(1)).sum().backward()


def test_evaluation_mode_captures_forwards() -> None:
    """Modules in evaluation mode replay forward, captured by our maker."""
    modules = [block.eval() for block in blocks()]
    graphed = own(modules, [(torch.ones(4, 8),)] * 2)
    with torch.no_grad():
        x = inputs(1).detach()
        assert torch.equal(graphed[0](x), modules[0](x))


@both
def test_mixed_modes_are_refused(make: Make) -> None:
    """Some modules in training mode and some in evaluation mode."""
    modules = blocks()
    modules[1].eval()
    with pytest.raises(ValueError, match="some of each"):
        make(modules, [sample()] * 2)


# ---- traces


def traces(modules: list[Block]) -> list[Any]:
    """What a capture could leave behind."""
    return [
        *(p.detach().clone() for m in modules for p in m.parameters()),
        *(m.tokens.clone() for m in modules), torch.get_rng_state(),
        [id(p.grad) for m in modules for p in m.parameters()],
        [sorted(vars(m)) for m in modules], ["__call__" in vars(type(m)) for m in modules],
        gc.isenabled(),
        [len(inner._forward_hooks) for m in modules for inner in m.modules()],
    ]  # fmt: skip


def same(before: list[Any], after: list[Any]) -> bool:
    """Tensors by bits, others by value."""
    pairs = zip(before, after, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@both
def test_capture_leaves_no_trace(make: Make) -> None:
    """Parameters, gradients, counters, generator and the modules themselves are as before."""
    modules = blocks()
    before = traces(modules)
    make(modules, [sample()] * 2, order=Order((1, 1, -1, -1)))
    assert same(before, traces(modules))


class Fails(Block):
    """Raises in its forward at the given call; 0: in its first backward."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.left, self.is_told = call, call != 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError("told to")
        out = super().forward(x)
        if self.left < 0 and not self.is_told:
            self.is_told = True
            out.register_hook(fail)
        return out


def fail(grad: torch.Tensor) -> None:
    """Raise in a backward pass."""
    raise ZeroDivisionError("told to")


@both
@pytest.mark.parametrize(
    "call", [1, 3, 0], ids=["in the warm-up", "in the capture", "in a backward"]
)
def test_a_failed_capture_leaves_everything_as_it_was(make: Make, call: int) -> None:
    """The error comes through, and hooks, wrappers, flags, gradients and state are undone."""
    torch.manual_seed(0)
    modules: list[Block] = [Block(), Fails(call)]
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
    before = traces(modules)
    library = TeGraphStandIn()
    options = {"library": library} if make is te else {}
    with pytest.raises(ZeroDivisionError, match="told to"):
        make(modules, [sample()] * 2, **options)
    assert same(before, traces(modules))
    assert not library.is_capturing
    assert gc.isenabled()
    make(modules, [sample()] * 2, **options)
