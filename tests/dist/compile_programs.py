"""Programs on ranks in which torch.compile meets FSDP units, and what the compiler did in them.

A program trains the same model twice, uncompiled and compiled, and answers with a `Comparison`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from fsdp_core.graph.graph import CapturedFunction, GraphMaker
from tests.dist.compiled_frames import Comparison, Run, fresh_compiler
from tests.dist.fsdp_models import WIDTH, Net, loss_of, net, rows
from tests.dist.fsdp_sides import plain_values, weights

STEPS = 6


# ---- how a user compiles


Shard = Callable[[nn.Module], Any]
Way = Callable[[Net, Shard, str], None]
Step = Callable[[torch.Tensor], torch.Tensor]


def compile_then_shard(model: Net, shard: Shard, backend: str) -> None:
    """In place, before."""
    for block in model.blocks:
        block.compile(backend=backend)
        shard(block)


def shard_then_compile(model: Net, shard: Shard, backend: str) -> None:
    """In place, after."""
    for block in model.blocks:
        shard(block)
        block.compile(backend=backend)


def wrap_then_shard(model: Net, shard: Shard, backend: str) -> None:
    """The unit is torch.compile's wrapper."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = cast("nn.Module", torch.compile(block, backend=backend))
        shard(model.blocks[index])


def shard_then_wrap(model: Net, shard: Shard, backend: str) -> None:
    """torch.compile's wrapper has a unit inside."""
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
    """The root is compiled, later."""
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
    """The units that `way` makes, uncompiled."""
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
    """The model of a setting, sharded."""
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
    """Train uncompiled and compiled."""
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
    """Forward and backward."""

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


def compare_captured(backend: str) -> Comparison:
    """Whole steps: eager and uncompiled, and compiled, captured after three and replayed."""
    setting = Setting(compile_then_shard, backend=backend, shape=(2,), pool="double")
    with fresh_compiler():
        eager = steps_maybe_captured(build(setting, compiled=False)[0], capture=False)
        model = build(setting, compiled=True)[0]
        return Comparison(eager, steps_maybe_captured(model, capture=True))


def steps_maybe_captured(model: Any, *, capture: bool) -> Run:
    """Seven steps from a static input; the optimizer is part of them."""
    run, schedule = Run(), model.fsdp_schedule
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    x = torch.zeros_like(rows(0))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        return loss.detach()

    call: Callable[[], torch.Tensor] = step
    for number in range(7):
        if capture and number == 3:
            schedule.quiesce()
            call = CapturedFunction(GraphMaker(schedule.device), step, None)
            schedule.quiesce()
        x.copy_(rows(number))
        run.numbers.append(call().clone())
        run.look()
    run.numbers += [p.detach().to_local().clone() for p in model.parameters()]
    return run


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
