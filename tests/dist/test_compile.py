"""torch.compile in and around FSDP units: the same bits, one graph a block, no recompilation.

The compiler here is dynamo with aot_eager, which runs the operators that the uncompiled program
runs, in its order: bits are due. A block's code is compiled twice, for training and, at the first
evaluation, without gradients; all blocks of one class share both. That graphs of whole steps have
the bits of compiled ones is shown by `scenarios/nightly/graph_scopes.yaml`.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from tests.dist.fsdp_sides import (
    WIDTH,
    Block,
    Net,
    differences,
    loss_of,
    net,
    plain_values,
    rows,
    weights,
    within,
)
from tests.dist.rank_pool import RankPool

METRICS_KEPT = 64
"""How many frames torch remembers."""


@dataclass(frozen=True)
class Frame:
    """A forward frame that dynamo compiled, or tried to.

    Attributes:
        code: see `code_of`.
        path: of the file.
        reason: why it was compiled again.
        stopped: what kept it from being compiled; empty if nothing did.
    """

    code: str
    path: str
    reason: str
    stopped: str


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Dynamo as in a new process, and left so."""
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    try:
        yield
    finally:
        torch._dynamo.reset()
        counters.clear()
        clear_compilation_metrics()


def code_of(function: Any) -> str:
    code = function.__code__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}:{code.co_name}"


def frames() -> list[Frame]:
    """What dynamo has compiled so far; backward graphs belong to their forward's frame."""
    metrics = get_compilation_metrics()
    assert len(metrics) < METRICS_KEPT, "some are forgotten"
    found: list[Frame] = []
    for each in metrics:
        if each.co_name is not None:
            path = Path(each.co_filename or "")
            code = f"{path.name}:{each.co_firstlineno}:{each.co_name}"
            found.append(
                Frame(
                    code,
                    str(path),
                    each.recompile_reason or "",
                    f"{each.fail_type} {each.fail_reason}" if each.fail_type else "",
                )
            )
    return found


@dataclass
class Run:
    """What one training showed: numbers, and what was compiled after each of the steps."""

    numbers: list[Any] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    frames_after: list[int] = field(default_factory=list)
    num_graphs: int = 0
    breaks: list[str] = field(default_factory=list)

    def look(self) -> None:
        """Note what has been compiled by now."""
        self.frames = frames()
        self.frames_after.append(len(self.frames))
        self.num_graphs = counters["stats"]["unique_graphs"]
        self.breaks = sorted(counters["graph_break"])


@dataclass
class Comparison:
    """The same training uncompiled and compiled."""

    eager: Run
    compiled: Run


STEPS = 6


# ---- how a user compiles


Shard = Callable[[nn.Module], Any]
Way = Callable[[Net, Shard, str], None]
Step = Callable[[torch.Tensor], torch.Tensor]


def compile_then_shard(model: Net, shard: Shard, backend: str) -> None:
    for block in model.blocks:
        block.compile(backend=backend)
        shard(block)


def shard_then_compile(model: Net, shard: Shard, backend: str) -> None:
    for block in model.blocks:
        shard(block)
        block.compile(backend=backend)


def wrap_then_shard(model: Net, shard: Shard, backend: str) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = cast("nn.Module", torch.compile(block, backend=backend))
        shard(model.blocks[index])


def shard_then_wrap(model: Net, shard: Shard, backend: str) -> None:
    for index, block in enumerate(model.blocks):
        shard(block)
        model.blocks[index] = cast("nn.Module", torch.compile(block, backend=backend))


class Up(nn.Linear):
    """Not torch's: the compiler leaves a module of torch.nn alone if it is all that is compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]."""
        return torch.relu(super().forward(x))


def inner_compiled(model: Net, shard: Shard, backend: str) -> None:
    """A module in a unit, in place."""
    for block in model.blocks:
        cast("Any", block).up.compile(backend=backend)
        shard(block)


def inner_wrapped(model: Net, shard: Shard, backend: str) -> None:
    """A module in a unit, in torch.compile's wrapper, after."""
    for block in cast("Any", model.blocks):
        shard(block)
        block.up = torch.compile(block.up, backend=backend)


def nested(model: Net, shard: Shard, backend: str) -> None:
    """A compiled unit has a unit inside."""
    for block in cast("Any", model.blocks):
        shard(block.up)
        block.compile(backend=backend)
        shard(block)


def blocks_sharded(model: Net, shard: Shard, backend: str) -> None:
    del backend
    for block in model.blocks:
        shard(block)


@dataclass(frozen=True)
class Setting:
    """A model and how it is sharded and compiled.

    Attributes:
        way: one of the functions above.
        shape: of the mesh.
        recompute: non-reentrant checkpoints: `outside` of the units, `inside` of the blocks, or
            `wrapped`: blocks in torch's checkpoint wrappers, which are compiled and made units.
        microbatches: a step; all but the last without communication.
        norm: blocks end in a batch norm, whose buffers forward writes.
    """

    way: Way
    backend: str = "aot_eager"
    shape: tuple[int, ...] = (2,)
    pool: str = "dynamic"
    strategy: str = "optim_grads_params"
    recompute: str = ""
    bf16: bool = False
    microbatches: int = 1
    norm: bool = False


def eager_twin(model: Net, shard: Shard, way: Way) -> None:
    for block in cast("Any", model.blocks):
        if way is nested:
            shard(block.up)
        shard(block)


class Straight(Net):
    """Calls its blocks one after another, so that dynamo can compile what is between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, 3]."""
        h = self.blocks[0](self.embed(x)).sin()
        h = self.blocks[1](h * self.embed.bias)
        out: torch.Tensor = self.head(h.cos())
        return out


def build(setting: Setting, *, compiled: bool, base: type[Net] = Net) -> tuple[Any, DeviceMesh]:
    names = ("outer", "inner")[-len(setting.shape) :]
    mesh = init_device_mesh("cpu", setting.shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if setting.bf16 else None
    model: Any = net()
    model.__class__ = base
    if setting.way in (inner_compiled, inner_wrapped):
        for block in model.blocks:
            block.up.__class__ = Up
    if setting.norm:
        for block in model.blocks:
            block.down = nn.Sequential(block.down, nn.BatchNorm1d(WIDTH))
    if setting.recompute == "outside":
        model.checkpointed = False
    for index, block in enumerate(model.blocks):
        if setting.recompute == "inside":
            block.checkpointed = False
        if setting.recompute == "wrapped":
            model.blocks[index] = checkpoint_wrapper(block)

    def shard(module: nn.Module) -> Any:
        return fully_shard(
            module, mesh=mesh, pool=setting.pool, strategy=setting.strategy, mp_policy=policy
        )

    if compiled:
        setting.way(model, shard, setting.backend)
    else:
        eager_twin(model, shard, setting.way)
    shard(model)
    return model, mesh


# ---- training


def train(
    setting: Setting,
    model: Any,
    mesh: DeviceMesh,
    call: Any = None,
    before: Callable[[], None] = lambda: None,
) -> Run:
    """`STEPS` steps, every other one followed by an evaluation.

    Args:
        call: in place of `model` itself, from input to output.
        before: called before the first step.
    """
    run = Run()
    call = model if call is None else call
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before()
    for step in range(STEPS):
        for number in range(setting.microbatches):
            model.set_requires_gradient_sync(number == setting.microbatches - 1)
            loss = loss_of(call(rows(setting.microbatches * step + number)))
            loss.backward()
            run.numbers.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            model.eval()
            with torch.no_grad():
                run.numbers.append(call(rows(1000 + step)))
            model.train()
        run.look()
    run.numbers += list(weights(model, mesh).values())
    run.numbers += [buffer.clone() for buffer in model.buffers()]
    run.numbers = plain_values(run.numbers)
    return run


def compare(setting: Setting) -> Comparison:
    with fresh_compiler():
        eager = train(setting, *build(setting, compiled=False))
        assert not eager.frames
        return Comparison(eager, train(setting, *build(setting, compiled=True)))


def compare_whole(setting: Setting, straight: bool, in_place: bool) -> Comparison:
    """The root is compiled, with its units inside."""
    base = Straight if straight else Net
    with fresh_compiler():
        eager = train(setting, *build(setting, compiled=False, base=base))
        model, mesh = build(setting, compiled=True, base=base)
        if in_place:
            model.compile(backend=setting.backend)
            return Comparison(eager, train(setting, model, mesh))
        compiled = torch.compile(model, backend=setting.backend)
        return Comparison(eager, train(setting, model, mesh, compiled))


def refuse_fullgraph() -> str:
    """What a user hears who wants one graph of a model with units."""
    with fresh_compiler():
        model, _ = build(Setting(blocks_sharded, shape=(1,)), compiled=True)
        try:
            torch.compile(model, backend="eager", fullgraph=True)(rows(0))
        except torch._dynamo.exc.Unsupported as error:
            return str(error)
        return ""


# ---- more than the model is compiled, or less than its forward


class WithMethod(Net):
    """Has a second forward, which leaves the blocks out."""

    def ends(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, 3]."""
        out: torch.Tensor = self.head(self.embed(x).tanh())
        return out


def few_steps(model: Any, step: Step) -> Run:
    """Two steps of a function that runs forward and backward and returns the loss."""
    run = Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        run.numbers.append(step(rows(number)).clone())
        optimizer.step()
        optimizer.zero_grad()
        run.look()
    run.numbers += [p.detach().to_local().clone() for p in model.parameters()]
    return run


def step_of(call: Callable[[torch.Tensor], torch.Tensor]) -> Step:

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(call(x))
        loss.backward()
        return loss.detach()

    return step


def compiled_step(model: Any) -> Step:
    """One compiled function of forward and backward."""
    return cast("Step", torch.compile(step_of(model), backend="aot_eager"))


def compiled_method(model: Any) -> Step:
    """A compiled method that was registered as a forward."""
    return step_of(torch.compile(model.ends, backend="aot_eager"))


def compiled_backward(model: Any) -> Step:
    """The backward pass is compiled, by torch's compiled autograd."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x))
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        return loss.detach()

    return step


def inductor_blocks(model: Any) -> Step:
    """Blocks are compiled to machine code, scalar and without what only speeds compiling many."""
    for block in model.blocks:
        block.compile(backend="inductor")
    step = step_of(model)
    options = {"compile_threads": 1, "cpp.simdlen": 1, "cpp_cache_precompile_headers": False}

    def configured(x: torch.Tensor) -> torch.Tensor:
        with torch._inductor.config.patch(options):
            return step(x)

    return configured


def compare_step(kind: str) -> Comparison:
    """Few steps on one rank, with what the function `kind` compiles compiled."""
    setting = Setting(blocks_sharded, shape=(1,))
    with fresh_compiler():
        plain, model = (build(setting, compiled=False, base=WithMethod)[0] for _ in range(2))
        for each in (plain, model):
            register_fsdp_forward_method(each, "ends")
        eager = few_steps(plain, step_of(plain.ends if kind == "compiled_method" else plain))
        return Comparison(eager, few_steps(model, globals()[kind](model)))


def train_after_errors() -> tuple[Comparison, list[str]]:
    """Forwards that raise in the compilation of a block and in a hook; what they raised."""
    setting = Setting(compile_then_shard, shape=(1,))
    raised: list[str] = []

    def refuse(module: nn.Module, args: Any) -> None:
        raise ValueError(f"planted in {type(module).__name__} with {len(args)} arguments")

    def fail() -> None:
        for call in (lambda: model.blocks[0](torch.ones(2, WIDTH + 1)), lambda: model(rows(0))):
            hook = model.blocks[1].register_forward_pre_hook(refuse)
            try:
                call()
            except (RuntimeError, ValueError) as error:
                raised.append(type(error).__name__)
            hook.remove()

    with fresh_compiler():
        eager = train(setting, *build(setting, compiled=False))
        model, mesh = build(setting, compiled=True)
        return Comparison(eager, train(setting, model, mesh, before=fail)), raised


TIMEOUT_S = 240.0
"""The first program in a rank imports the compiler, which takes seconds on an idle machine."""

BLOCK, UP = code_of(Block.forward), code_of(Up.forward)


def on_ranks(ranks: RankPool, program: Any, *args: Any, world_size: int = 1) -> list[Comparison]:
    return ranks.run(program, *args, world_size=world_size, timeout_s=TIMEOUT_S)


def assert_same_numbers(found: Comparison) -> None:
    """Losses, evaluations, weights and buffers, to the bit."""
    wrong = differences(found.eager.numbers, found.compiled.numbers)
    assert not wrong, "\n".join(wrong)


def assert_settled(found: Comparison) -> None:
    """Nothing is compiled after the first step and evaluation."""
    after = found.compiled.frames_after
    late = found.compiled.frames[after[0] :]
    assert not late, late


def assert_one_graph(found: Comparison, code: str) -> None:
    """`code` is all that is compiled: whole, once for training and once for evaluation."""
    compiled = found.compiled
    assert [frame.code for frame in compiled.frames] == [code, code]
    assert not any(frame.stopped for frame in compiled.frames)
    assert "grad_mode" in compiled.frames[1].reason
    assert (compiled.num_graphs, compiled.breaks) == (2, [])
    assert_settled(found)


WAYS = {
    "compile_then_shard": BLOCK,
    "shard_then_compile": BLOCK,
    "wrap_then_shard": BLOCK,
    "shard_then_wrap": BLOCK,
    "inner_compiled": UP,
    "inner_wrapped": UP,
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_compile(warm_ranks: RankPool, way: str) -> None:
    """Blocks or modules in them compiled in place or wrapped, before or after: one graph each."""
    for found in on_ranks(warm_ranks, compare, Setting(globals()[way]), world_size=2):
        assert_same_numbers(found)
        assert_one_graph(found, WAYS[way])


CELLS = {
    "double": Setting(compile_then_shard, pool="double"),
    "traced": Setting(compile_then_shard, pool="traced"),
    "no_shard": Setting(compile_then_shard, strategy="no_shard"),
    "two axes": Setting(compile_then_shard, shape=(2, 1)),
    "bf16, microbatches": Setting(compile_then_shard, bf16=True, microbatches=3),
    "batch norm": Setting(compile_then_shard, norm=True),
    "recompute outside": Setting(compile_then_shard, recompute="outside"),
    "recompute inside": Setting(compile_then_shard, recompute="inside", pool="double"),
}


@pytest.mark.parametrize("cell", CELLS)
def test_compiled_blocks(warm_ranks: RankPool, cell: str) -> None:
    """Pools that move or share memory, dtypes, accumulation, buffers, recomputation: one graph."""
    for found in on_ranks(warm_ranks, compare, CELLS[cell], world_size=2):
        assert_same_numbers(found)
        assert_one_graph(found, BLOCK)


def test_compiled_checkpoint_wrapper(warm_ranks: RankPool) -> None:
    """Blocks in torch's checkpoint wrapper, compiled and then sharded with it: one graph."""
    setting = Setting(compile_then_shard, recompute="wrapped")
    for found in on_ranks(warm_ranks, compare, setting, world_size=2):
        assert_same_numbers(found)
        assert_one_graph(found, code_of(CheckpointWrapper.forward))


def ours(found: Comparison) -> list[str]:
    """Code of the library that was compiled: it knows no such life."""
    return [f.code for f in found.compiled.frames if "fsdp_core" in f.path]


def assert_breaks_at_units(found: Comparison) -> None:
    """What stops the compiler is the hooks of units, or `backward`, and nothing else."""
    stops = [*found.compiled.breaks, *(f.stopped for f in found.compiled.frames if f.stopped)]
    assert stops
    for stop in stops:
        assert "FSDP gathers or releases here" in stop or "Tensor.backward" in stop, stop


def test_unit_in_a_compiled_unit(warm_ranks: RankPool) -> None:
    """A compiled block breaks where a unit in it gathers and releases, and computes the same."""
    for found in on_ranks(warm_ranks, compare, Setting(nested), world_size=2):
        assert_same_numbers(found)
        assert_settled(found)
        assert_breaks_at_units(found)
        assert not ours(found)


@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
@pytest.mark.parametrize("straight", [False, True], ids=["loop", "straight"])
def test_compiled_root(warm_ranks: RankPool, straight: bool, in_place: bool) -> None:
    """A compiled model breaks at its units, each of which is one graph, and computes the same.

    Between calls in a row everything is compiled; a loop over the units is left uncompiled.
    """
    setting = Setting(blocks_sharded)
    args = (setting, straight, in_place)
    for found in on_ranks(warm_ranks, compare_whole, *args, world_size=2):
        assert_same_numbers(found)
        assert_settled(found)
        assert_breaks_at_units(found)
        assert not ours(found)
        blocks = [f for f in found.compiled.frames if f.code == BLOCK and not f.stopped]
        assert len(blocks) == 2


def test_one_graph_of_a_model_with_units_is_refused(warm_ranks: RankPool) -> None:
    """`fullgraph=True` over units is an error that says what to do."""
    (text,) = warm_ranks.run(refuse_fullgraph, world_size=1, timeout_s=TIMEOUT_S)
    assert "FSDP gathers or releases here: compile the modules of units" in text


@pytest.mark.parametrize("kind", ["compiled_step", "compiled_method", "compiled_backward"])
def test_compiled_around_units(warm_ranks: RankPool, kind: str) -> None:
    """A step with its backward pass, a registered forward, a compiled backward pass: the same.

    No code of the library is compiled, whatever calls it: hooks, the end of the backward pass. What
    `register_fsdp_forward_method` makes is, since the method is in the middle of it.
    """
    for found in on_ranks(warm_ranks, compare_step, kind):
        assert_same_numbers(found)
        assert found.compiled.frames
        assert [code for code in ours(found) if not code.startswith("api.py")] == []


def test_errors_leave_compiled_units_whole(warm_ranks: RankPool) -> None:
    """After a shape that cannot be compiled and a hook that raises, training is the same."""
    ((found, raised),) = warm_ranks.run(train_after_errors, world_size=1, timeout_s=TIMEOUT_S)
    assert raised == ["TorchRuntimeError", "ValueError"]
    assert_same_numbers(found)


def test_inductor(warm_ranks: RankPool) -> None:
    """Machine code for the blocks gives the same losses up to rounding.

    Against the uncompiled block its tanh and the order of at most 7 terms of a sum differ: some
    ulp of values around 1 in each of two steps.
    """
    for found in on_ranks(warm_ranks, compare_step, "inductor_blocks"):
        same = within(64 * 2**-24)
        assert not differences(found.eager.numbers, found.compiled.numbers, same=same)
        assert [frame.code for frame in found.compiled.frames] == [BLOCK]
