"""A small sharded network as a program, over the interface that users of graphs have.

    modules    each block captured forward and backward, FSDP's hooks around the replays
    nested     the same, and an inner layer of each block is a unit, gathered around replays, too
    plain      the same without FSDP, on one rank
    whole      all microbatches of a step, forward and backward, in one graph; the optimizer outside
    each       a graph for the first microbatch and one for the last, which reduces
    fused      the same with experts that one kernel computes, which does not call their layers

Before step `DROPPED` the graphs are dropped, and training goes on eagerly.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.device import Device
from fsdp_core.fsdp import fully_shard
from fsdp_core.fsdp.api import units_in
from fsdp_core.fsdp.pool import Pool, make_pool
from fsdp_core.fsdp.unit import Unit
from fsdp_core.graph.capture_session import CaptureAborted, CaptureSession, Undo
from fsdp_core.graph.digest import Digester, empty_rows
from fsdp_core.graph.graph import CapturedFunction, GraphedCallable, GraphMaker, Segment
from fsdp_core.graph.hooks import CaptureHooks, ExtractedHooks, run_hooks
from fsdp_core.graph.ledger import Resolver
from fsdp_core.graph.recorder import CaptureRefused
from fsdp_core.model.moe.dispatcher import MoeAxes
from fsdp_core.model.moe.experts import make_fused_experts
from fsdp_core.parallel.mesh import Axis
from fsdp_core.stress.stressors import Stressors
from tests.graph_faults.programs import STEPS, WARMUP, Digests, Leg

ROWS, HIDDEN, FFN, BLOCKS, MICROBATCHES, EXPERTS = 8, 16, 24, 2, 2, 2
DROPPED = STEPS - 1


class Block(nn.Module):
    """x + dropout(down(gelu(up(x)))), and a count of the rows that it has seen."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.refuses = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        if self.refuses and x.requires_grad:
            raise CaptureRefused("cannot capture the block: it was told to refuse")
        self.seen.add_(len(x))
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


class FusedBlock(nn.Module):
    """x + experts(x), in one kernel, gate_up and down being units of their own."""

    def __init__(self) -> None:
        super().__init__()
        one = {name: Axis(name, 1, 0, cast("Any", None)) for name in ("ep", "etp", "tp")}
        axes = MoeAxes(**one, tokens=(), num_averaged=1, sequence_parallel=False)
        self.experts = make_fused_experts(EXPERTS, HIDDEN, FFN, axes)
        self.bypasses = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        rows = x.view(EXPERTS, -1, HIDDEN)
        compute = self.experts._run if self.bypasses else self.experts
        return x + compute(rows, None).view_as(x)


class Net(nn.Module):
    """Blocks, then a linear head."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.head = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


class StackProgram:
    """The network as a program.

    Attributes:
        model: its blocks are units of FSDP, if it is sharded.
        optimizer: torch's own, outside of every graph.
        refuses: the capture is to fail in its last block, and training to go on eagerly.
        gathers_inner: units inside of a block act around its replays.
        chosen: which graph each microbatch is replayed from, in kind `each`.
    """

    def __init__(self, kind: str, leg: Leg, device: Device) -> None:
        self.kind, self.leg, self.device = kind, leg, device
        self.stressors = Stressors(leg.stress, device=device, seed=0, rank=dist.get_rank())
        self.refuses, self.gathers_inner = False, True
        self.chosen = list(range(MICROBATCHES))
        with self.stressors.active():
            self.stream = device.new_stream("main")
            with device.on(self.stream):
                self._build()
        self._modules: list[tuple[nn.Module, GraphedCallable]] = []
        self._whole: list[CapturedFunction] = []

    def _build(self) -> None:
        target = self.device.torch_device
        torch.manual_seed(7)
        self.model: Any = Net(FusedBlock if self.kind == "fused" else Block)
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.2)
        self.model.to(target)
        if self.kind != "plain":
            self._shard()
        torch.manual_seed(11 + dist.get_rank())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        shape = (MICROBATCHES, ROWS, HIDDEN)
        self.x, self.y = torch.zeros(shape, device=target), torch.zeros(shape, device=target)
        self.one_x, self.one_y = torch.zeros_like(self.x[0]), torch.zeros_like(self.y[0])
        self._loss = torch.zeros((), device=target)
        self._captures = False

    def _shard(self) -> None:
        mesh = init_device_mesh(self.device.kind, (dist.get_world_size(),))
        pool: Pool = make_pool("double", self.device, persistent_on_miss=True)
        pool = self.stressors.watched(pool)
        options: dict[str, Any] = {"mesh": mesh, "pool": pool, "keep_grads": True}
        for block in self.model.blocks:
            for module in _units_of(self.kind, block):
                fully_shard(module, **options)
        fully_shard(self.model, **options)
        if (races := self.stressors.races) is not None:
            races.units = {group.owner: group.name for group in self.model.fsdp_groups}

    # ---- a step

    def step(self, index: int) -> None:
        """See `Program`."""
        with self.stressors.active(), self.device.on(self.stream):
            self.stressors.before_step()
            generator = torch.Generator().manual_seed(100 * index + dist.get_rank())
            for static in (self.x, self.y):
                static.copy_(torch.randn(static.shape, generator=generator))
            if self.leg.graphed and index == WARMUP:
                self._capture()
            if index == DROPPED:
                self._drop()
            self.optimizer.zero_grad(set_to_none=not self._whole)
            self._loss.zero_()
            for number in range(MICROBATCHES):
                self._microbatch(number)
            self.optimizer.step()
        self.stressors.after_step()

    def _microbatch(self, number: int) -> None:
        if not self._whole:
            self._forward_backward(number)
        elif self.kind == "each":
            self.one_x.copy_(self.x[number])
            self.one_y.copy_(self.y[number])
            self._whole[self.chosen[number]]()
        elif number == 0:
            self._whole[0]()

    def _forward_backward(self, number: int) -> None:
        is_each = self.kind == "each"
        if is_each:
            self.model.set_requires_gradient_sync(number == MICROBATCHES - 1)
            if not self._whole and not self._captures:
                self.one_x.copy_(self.x[number])
                self.one_y.copy_(self.y[number])
        x, y = (self.one_x, self.one_y) if is_each else (self.x[number], self.y[number])
        loss = (self.model(x.clone().requires_grad_()) - y).square().mean() / MICROBATCHES
        loss.backward()
        self._loss.add_(loss.detach())

    # ---- graphs

    def _capture(self) -> None:
        maker, is_sharded = GraphMaker(self.device), self.kind != "plain"
        resolve = self._named if self.leg.ledger else None
        if is_sharded:
            self.model.fsdp_schedule.quiesce()
        if self.kind in ("whole", "fused", "each"):
            self._capture_whole(maker, resolve)
        else:
            try:
                self._capture_modules(maker, resolve)
            except CaptureAborted:
                if not self.refuses:
                    raise
        if is_sharded:
            self.model.fsdp_schedule.pool.freeze()
            self.model.fsdp_schedule.quiesce()

    def _capture_whole(self, maker: GraphMaker, resolve: Resolver | None) -> None:
        numbers = range(MICROBATCHES)
        parts = [[number] for number in numbers] if self.kind == "each" else [[*numbers]]

        def run(part: list[int]) -> None:
            if part[0] == 0:
                self.model.zero_main_grads()
            for number in part:
                self._forward_backward(number)

        self._captures = True
        with Undo(self.device, ()) as undo, undo.watching():
            run([*numbers])
        self.model.fsdp_schedule.quiesce()
        graphs = []
        for part in parts:
            graphs.append(CapturedFunction(maker, functools.partial(run, part), resolve))
            self.model.fsdp_schedule.quiesce()
        self._whole, self._captures = graphs, False

    def _capture_modules(self, maker: GraphMaker, resolve: Resolver | None) -> None:
        blocks = list(self.model.blocks)
        sample = torch.zeros(ROWS, HIDDEN, device=self.device.torch_device, requires_grad=True)
        blocks[-1].refuses = self.refuses
        state = [block.seen for block in blocks]
        try:
            with CaptureSession(self.device, "blocks", state=state) as session:
                hooks = session_hooks(session, blocks)
                graphs = [
                    GraphedCallable(
                        maker,
                        Segment(
                            name=f"blocks.{number}", function=block, samples=(sample,),
                            parameters=tuple(_computed_with(block)), resolve=resolve,
                        ),
                    )
                    for number, block in enumerate(blocks)
                ]  # fmt: skip
                self._modules = [*zip(blocks, graphs, strict=True)]
                session.on_abort(self._drop)
                session.attempt(lambda: capture_in_order(self._modules, hooks))
        finally:
            blocks[-1].refuses = False
        for block, graph in self._modules:
            block.forward = graph
            for unit in units_in(block)[1:] if self.gathers_inner else ():
                block.forward = _around(unit, block.forward)

    def _named(self) -> Mapping[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {"x": self.x, "y": self.y, "loss": self._loss}
        found |= {"one x": self.one_x, "one y": self.one_y}
        found |= dict(self.model.named_buffers())
        if self.kind == "plain":
            return found | {name: p.data for name, p in self.model.named_parameters()}
        for group in self.model.fsdp_groups:
            found[f"{group.name} main weight"] = group.main_weight
            found[f"{group.name} main grad"] = group.gradients.main_grad
            found |= {
                f"{group.name}.{name}": p.data
                for name, p in zip(group.names, group.unsharded, strict=True)
            }
        return found

    def _drop(self) -> None:
        for block, graphed in self._modules:
            vars(block).pop("forward", None)
            graphed.reset()
        for graph in self._whole:
            graph.reset()
        self._modules, self._whole = [], []

    # ---- what it shows

    def loss(self) -> torch.Tensor:
        """See `Program`."""
        return self._loss

    def digests(self) -> Digests:
        """See `Program`."""
        tensors = {f"weight {i}": t for i, t in enumerate(self.weights())}
        for i, parameter in enumerate(self.model.parameters()):
            if parameter.grad is not None:
                tensors[f"grad {i}"] = _local(parameter.grad)
        tensors |= dict(self.model.named_buffers())
        kept = {name: t for name, t in tensors.items() if t.numel()}
        rows = empty_rows(len(kept), self.device.torch_device)
        values = list(kept.values())
        Digester(values, list(kept))(values, rows)
        found = {name: tuple(row) for name, row in zip(kept, rows.tolist(), strict=True)}
        for number, state in enumerate(self.device.rng_states()):
            found[f"rng {number}"] = (hash(state.numpy().tobytes()),)
        return found

    def weights(self) -> list[torch.Tensor]:
        """See `Program`."""
        return [_local(parameter.detach()) for parameter in self.model.parameters()]

    def close(self) -> None:
        """See `Program`."""
        self._drop()
        self.device.synchronize()
        self.stressors.close()


def capture_in_order(
    modules: list[tuple[nn.Module, GraphedCallable]], hooks: list[CaptureHooks] | None
) -> None:
    """Warm-ups, forwards, then backwards in reverse, hooks of capture time around each."""
    each = [(*pair, number) for number, pair in enumerate(modules)]
    for act, order in (
        (GraphedCallable.warm_up, 1),
        (GraphedCallable.capture_forward, 1),
        (GraphedCallable.capture_backward, -1),
    ):
        for block, graph, number in each[::order]:
            mine = {} if hooks is None else hooks[number]
            for phase in ("forward_pre_hooks", "backward_pre_hooks") if mine else ():
                run_hooks(mine, phase, block)
            act(graph)
            for phase in ("forward_hooks", "backward_hooks") if mine else ():
                run_hooks(mine, phase, block)


@contextlib.contextmanager
def hooks_off(blocks: list[nn.Module]) -> Iterator[list[CaptureHooks]]:
    """The hooks of the blocks' subtrees off; what they do at capture time."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ExtractedHooks(block)).capture_hooks for block in blocks]


def session_hooks(session: CaptureSession, blocks: list[nn.Module]) -> Any:
    """The blocks' hooks off until the session ends."""
    stack = contextlib.ExitStack()
    session.at_end(stack.close)
    return stack.enter_context(hooks_off(blocks))


def _around(unit: Unit, replay: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The replay with what the unit's hooks do, which are inside of what is captured."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        args, _ = unit.pre_forward((x,), {})
        result: torch.Tensor = unit.post_forward(replay(*args))
        return result

    return forward


def _units_of(kind: str, block: Any) -> tuple[nn.Module, ...]:
    """What of a block becomes a unit, innermost first."""
    if kind == "fused":
        return block.experts.gate_up, block.experts.down
    return (block.down, block) if kind == "nested" else (block,)


def _computed_with(block: nn.Module) -> list[nn.Parameter]:
    """The block's parameters as its forward has them: gathered, where it is a unit."""
    units = units_in(block)
    if not units:
        return list(block.parameters())
    return [p for unit in units for group in unit.groups for p in group.unsharded]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


KINDS: Mapping[str, int] = MappingProxyType(
    {"modules": 2, "nested": 2, "plain": 1, "whole": 2, "each": 2, "fused": 2}
)
"""Ranks of each kind."""


def maker_of(kind: str) -> Callable[[Leg, Device], StackProgram]:
    """Makes the network of a kind."""
    return lambda leg, device: StackProgram(kind, leg, device)


def blocks_of(program: StackProgram) -> Iterator[Block]:
    """The blocks."""
    return (cast("Block", block) for block in program.model.blocks)
