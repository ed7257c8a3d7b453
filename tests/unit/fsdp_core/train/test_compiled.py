"""The compiler around parts of a model: what is compiled when, refused, listed and held."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_core.device import Device
from fsdp_core.graph.graph import GraphedCallable, GraphMaker, Segment
from fsdp_core.graph.recorder import CaptureRefused
from fsdp_core.train.compiled import Compiler, StaleGuards

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
"""Inductor's own, as it is imported."""


class Scale(nn.Module):
    """Multiplies by a number that Python holds, counts its calls, and has a weight."""

    counts: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 4.0))
        self.register_buffer("counts", torch.zeros(1))
        self.rate = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts.add_(1.0)
        return (x * self.weight).tanh() * self.rate


@pytest.fixture(params=["aot_eager", "inductor"])
def compiler(request: pytest.FixtureRequest) -> Iterator[Compiler]:
    made = Compiler(request.param)
    with torch._inductor.config.patch({"cpp_cache_precompile_headers": False}):
        yield made
    made.close()


@pytest.fixture
def quick() -> Iterator[Compiler]:
    made = Compiler("aot_eager")
    yield made
    made.close()


def segment(compiler: Compiler, module: Scale, part: Any) -> GraphedCallable:
    x = torch.ones(2, 3, requires_grad=True)
    made = GraphedCallable(
        GraphMaker(Device("cpu"), holds_compiled=True),
        Segment(name="scale", function=part, samples=(x,), parameters=(module.weight,),
                state=compiler.written_unseen([module]),
                resolve=lambda: {"weight": module.weight, "counts": module.counts}),
    )  # fmt: skip
    with compiler.settled("the warm-up"):
        made.warm_up()
    return made


def train(call: Any, module: Scale, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = call(x)
    grads = torch.autograd.grad(out.square().sum(), (x, module.weight))
    return [out.detach().clone(), *grads, module.counts.clone()]


def test_graphs_of_compiled_parts_are_what_was_compiled(compiler: Compiler) -> None:
    """Replays have the bits of compiled calls, buffers that kernels write included."""
    eager, module = Scale(), Scale()
    parts = [compiler.compile(str(i), m.forward) for i, m in enumerate((eager, module))]
    inputs = [torch.randn(2, 3, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    expected = [train(parts[0], eager, x) for x in inputs]
    found = [train(parts[1], module, inputs[0])]
    graphed = segment(compiler, module, parts[1])
    with compiler.captured() as guards:
        graphed.capture_forward()
    graphed.capture_backward()
    assert module.counts.item() == 1.0
    found += [train(graphed, module, x) for x in inputs[1:]]
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))
    (compilation,) = compiler.compilations
    assert str(compilation).startswith("0 (test_compiled.py:")
    names = {name for ledger in graphed.ledgers for name in ledger.names}
    assert {"weight", "counts"} <= names
    assert not sum(ledger.num_unnamed for ledger in graphed.ledgers)
    for each in guards:
        each.check()
    graphed.reset()


def test_guards_of_captured_code_are_held(quick: Compiler) -> None:
    """A Python number that changes stops the replay by its name, until it is back."""
    module = Scale()
    part = quick.compile("scale", module.forward)
    train(part, module, torch.ones(2, 3))
    graphed = segment(quick, module, part)
    with quick.captured() as guards:
        graphed.capture_forward()
    module.rate = 3.0
    with pytest.raises(StaleGuards, match=r"^scale: .*rate.* == 2\.0"):
        guards[0].check()
    module.rate = 2.0
    guards[0].check()


def test_nothing_is_compiled_again_for_a_graph(quick: Compiler) -> None:
    """A warm-up that would compile other code than calls before it is refused, with the guard."""
    module = Scale()
    part = quick.compile("scale", module.forward)
    train(part, module, torch.ones(2, 3))
    module.rate = 3.0
    with pytest.raises(CaptureRefused, match=r"the warm-up makes torch.compile compile .*rate"):
        segment(quick, module, part)
    assert len(quick.compilations) == 1


def test_what_is_compiled_late_says_so(quick: Compiler) -> None:
    """Another shape after the capture is other code, with a reason, and late."""
    part = quick.compile("scale", Scale().forward)
    part(torch.ones(2, 3))
    quick.has_graphs = True
    part(torch.ones(5, 3))
    first, second = quick.compilations
    assert (first.reason, first.late) == ("", False)
    assert "size mismatch" in second.reason
    assert second.late


def test_too_many_variants_are_an_error(quick: Compiler) -> None:
    """The compiler does not go on uncompiled, which would be another program; as it was after."""
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    part = quick.compile("scale", Scale().forward)
    for rows in range(2, 10):
        part(torch.ones(rows, 3))
    with pytest.raises(FailOnRecompileLimitHit):
        part(torch.ones(10, 3))
    assert len(quick.compilations) == 8
    quick.close()
    assert not config.fail_on_recompile_limit_hit


def test_no_graphs_of_the_compilers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are off in what is compiled, whatever the environment asks for."""
    from torch._inductor import compile_fx

    asked = []
    inner = compile_fx.compile_fx_inner

    def look(module: Any, inputs: Any, **options: Any) -> Any:
        asked.append(bool(options["cudagraphs"]))
        return inner(module, inputs, **options)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", look)
    made = Compiler("inductor")
    patch = {"triton.cudagraphs": True, "cpp_cache_precompile_headers": False}
    with torch._inductor.config.patch(patch):
        made.compile("scale", Scale().forward)(torch.ones(2, 3))
    made.close()
    assert asked
    assert not any(asked)
