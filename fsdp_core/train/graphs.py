"""The graphs of a trainer: captured on every rank or on none, installed, counted, dropped.

    full_iteration    one graph of a whole step
    partial scopes    of a stage graphs[context size, slot][region]: a forward and a backward graph

**Slots.** A pipeline has several microbatches between forward and backward, each in a slot with
graphs of its own. Those of one slot share a memory pool, as what a forward saved may be used again
once its backward is over; slots share none: another microbatch comes in between.

**Context sizes.** Under dynamic context parallelism there is a set of graphs for each size,
captured largest first; sizes share a slot's memory. Each rank chooses by its own microbatch, and
nobody waits: of the collectives in partial scopes only attention's depend on the size, and they
stay in the context group.

**A capture** is made while each stage's schedule is quiet. All regions of all stages are captured
before any is installed, then pools are frozen. **A replay** stands in for the region's Python:
hooks of the layer, a unit, run around it as eagerly, and units inside are gathered around all of
it. Evaluation, passes without gradients and other shapes run eagerly.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from fsdp_core.config import TrainConfig
from fsdp_core.device import Device
from fsdp_core.fsdp import FSDPModule
from fsdp_core.graph.capture_session import (
    CLOSING,
    PATIENCE,
    PHASES,
    CaptureHook,
    CaptureHooks,
    CaptureSession,
    own_capture_hooks,
)
from fsdp_core.graph.graph import CapturedFunction, GraphedCallable, GraphMaker, Segment
from fsdp_core.graph.library_graphs import LibraryGraph, capture_by_te, capture_by_torch
from fsdp_core.graph.recorder import AddressBook, Resolver
from fsdp_core.model.batch import Part
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.model.layers import Begin
from fsdp_core.model.te.layers import prefer_cudnn_of_torch
from fsdp_core.parallel.context import DynamicContext
from fsdp_core.parallel.mesh import world_timeout
from fsdp_core.parallel.rng import RandomStreams
from fsdp_core.train.build import roots
from fsdp_core.train.compiled import Compiler, HeldGuards
from fsdp_core.train.inputs import PackInputs, RowInputs, StaticPart
from fsdp_core.train.scopes import (
    GraphCounts,
    GraphUse,
    Outputs,
    Region,
    refusal,
    regions_in,
    sum_uses,
)


class Graphs:
    """Graphs of the scopes that a configuration asks for; none until they are captured.

    streams: of random numbers, whose states captures leave alone.
    resolve: names every tensor that graphs may use.
    counts: what the graphs did.
    iteration, parts: the graph of scope full_iteration; those of partial scopes, by stage.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: Device,
        stages: Sequence[DecoderStage],
        streams: RandomStreams,
        resolve: Callable[[], AddressBook],
        compiler: Compiler,
    ) -> None:
        self.config, self._device, self._streams = config, device, streams
        self._stages, self._resolve, self.compiler = stages, resolve, compiler
        self.counts = GraphCounts()
        self.iteration: CapturedFunction | None = None
        self.parts: list[StageGraphs] = []
        self._has_optimizer = False
        self._dropped: list[GraphUse] = []

    def capture_iteration(
        self, function: Callable[[], None], moments: Sequence[torch.Tensor]
    ) -> None:
        """Capture scope full_iteration; `CaptureAborted` or `CaptureLost` if a rank cannot. Whether
        the graph writes the optimizer's `moments` is counted.
        """

        def capture() -> None:
            # At its replays parameters are at rest: guards, which look at them, cannot be checked.
            book = self.book
            resolve = None if book is None else book.now
            with self.compiler.captured():
                self.iteration = CapturedFunction(self.new_maker(), function, resolve)
            entries = self.iteration.graph.recording.external()
            written = {entry.address for entry in entries if entry.written}
            self._has_optimizer = all(m.untyped_storage().data_ptr() in written for m in moments)

        with self._session() as session:
            session.attempt(capture)
        self._keep()

    def capture_parts(
        self, inputs: RowInputs | PackInputs, sample: torch.Tensor, num_slots: int
    ) -> None:
        """Capture partial scopes; `CaptureAborted` or `CaptureLost` if a rank cannot. `sample` is
        like what enters a layer; `num_slots` microbatches may be between a forward and backward.
        """
        config = self.config
        regions = [[*regions_in(s, config.graph, config.graph_layers)] for s in self._stages]
        refused = refusal(region for of_stage in regions for region in of_stage)
        context = inputs.context if isinstance(inputs, PackInputs) else None
        sample.requires_grad_()
        with self._session(refused) as session:
            parts = [
                StageGraphs(
                    self, stage, mine, inputs.samples(), attempt=session.attempt,
                    num_slots=num_slots, context=context,
                ) for stage, mine in zip(self._stages, regions, strict=True)
            ]  # fmt: skip
            try:
                for act in (lambda part: part.capture(sample), StageGraphs.install):
                    for part in parts:
                        act(part)
            except BaseException:
                for part in parts:
                    part.reset()
                raise
            self.parts = parts
        self._keep()

    @contextlib.contextmanager
    def _session(self, refused: str | None = None) -> Iterator[CaptureSession]:
        self._quiesce()
        session = CaptureSession(
            self._device, "+".join(self.config.graph), generators=self._streams.generators,
            refusal=refused, communicates=communicates(self.config),
            patience=min(PATIENCE, world_timeout() / 10),
        )  # fmt: skip
        session.on_abort(self.drop)
        session.on_abort(self._quiesce)
        with session:
            # Warm-ups run kernels that write what torch does not see: scales of fp8.
            for stage in self._stages:
                session.at_end(stage.around.remember(stage))
            yield session

    def meet(self) -> None:
        """Nothing is under way, here or on another rank."""
        self._quiesce()
        dist.barrier()

    def _quiesce(self) -> None:
        for root in roots(self._stages):
            root.fsdp_schedule.quiesce()

    def new_maker(self) -> GraphMaker:
        return GraphMaker(
            self._device, self._streams.generators, holds_compiled=bool(self.config.compile)
        )

    @property
    def book(self) -> AddressBook | None:
        """A new one each time."""
        # Other engines free what they gather and make it anew, so it has no address to hold to.
        is_checked = self.config.ledger and self.config.engine == "ours"
        return self._resolve() if is_checked else None

    def _keep(self) -> None:
        self.compiler.has_graphs = True
        counts, whole, parts = self.counts, self.iteration, self.parts
        if whole is not None:
            counts.captured += 1
            counts.enter([whole.ledger] if whole.ledger else [])
        for each in (each for part in parts for each in part.captured):
            counts.captured += sum(each.graph.captures)
            counts.enter(each.graph.ledgers)
        for root in roots(self._stages):
            root.fsdp_schedule.pool.freeze()
        self._quiesce()

    @property
    def uses(self) -> list[GraphUse]:
        """What graphs did so far, by scope, layer and direction; those that were dropped, too."""
        return sum_uses([*self._dropped, *self._present])

    @property
    def _present(self) -> Iterator[GraphUse]:
        for each in (each for part in self.parts for each in part.captured):
            yield from each.uses
        if self.iteration is not None:
            for way in ("gradients", "optimizer") if self._has_optimizer else ("gradients",):
                yield GraphUse("full_iteration", -1, way, 1, self.iteration.replays)

    def drop(self) -> None:
        """Drop the graphs; what they stood in for runs eagerly again."""
        self._dropped = self.uses
        if self.iteration is not None:
            self.iteration.reset()
        for part in self.parts:
            part.reset()
        self.iteration, self.parts = None, []
        self.compiler.has_graphs = False


def communicates(config: TrainConfig) -> bool:
    """Whether captures hold collectives that a failed one does not issue: by layout and scope, and
    all of TransformerEngine's, whose hooks have FSDP's.
    """
    layout = config.parallel
    if layout.tp > 1 or layout.cp > 1 or layout.dynamic_cp or config.capture_by == "te":
        return True
    return layout.ep * layout.etp > 1 and not set(config.graph) <= {"attn", "mlp"}


@dataclass
class CapturedRegion:
    """The graphs of a region in one slot, and what is done around their replays. `begin`: called
    before each forward replay; what it returns, after the backward's. `guards`: of compiled code
    that the forward graph holds.
    """

    region: Region
    graph: GraphedCallable | LibraryGraph
    begin: Begin = lambda: None
    guards: list[HeldGuards] = field(default_factory=list)

    def replay(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the region's owner."""
        units = self.region.inner_units
        args: tuple[torch.Tensor, ...] = (x,)
        for unit in units:
            args, _ = unit.pre_forward(args, {})
        for guards in self.guards:
            guards.check()
        outputs: Outputs = self.graph(*args, after=self.begin())
        for unit in reversed(units):
            outputs = unit.post_forward(outputs)
        return self.region.rest(outputs)

    @property
    def uses(self) -> Iterator[GraphUse]:
        counts = tuple(zip(self.graph.captures, self.graph.replays, strict=True))
        for scope in self.region.scopes:
            for way, (captures, replays) in zip(("forward", "backward"), counts, strict=True):
                yield GraphUse(scope, self.region.number, way, captures, replays)


Attempt = Callable[[Callable[[], None]], None]
SlotGraphs = dict[str, CapturedRegion]
"""The regions of a stage by name, for one microbatch at a time."""


@dataclass
class SlotCapture:
    """Captures all regions of a stage in one slot, by whichever maker.

    owner: of all graphs of the rank.
    attempt: what captures are made through: `CaptureSession.attempt`.
    maker: of the slot: what else it captures, shares its memory.
    part: what layers see of any microbatch that is replayed, in tensors that stay.
    sample: like what enters a layer.
    resolve: names tensors for ledgers; None: no ledgers.
    suffix: of names; what tells these graphs from others of the stage.
    """

    owner: Graphs
    stage: DecoderStage
    regions: Sequence[Region]
    attempt: Attempt
    maker: GraphMaker
    part: Part
    sample: torch.Tensor
    resolve: Resolver | None
    suffix: str
    found: SlotGraphs = field(default_factory=dict)

    def run(self) -> None:
        """Capture into `found`; what failed has to be dropped."""
        makers = {"ours": self._by_us, "te": self._by_te, "torch": self._by_torch}
        makers[self.owner.config.capture_by]()

    def _quiesce(self) -> None:
        cast("FSDPModule", self.stage).fsdp_schedule.quiesce()

    def _function(self, region: Region) -> Callable[[torch.Tensor], Outputs]:
        def run(x: torch.Tensor) -> Outputs:
            with self.stage.around.captured():
                return region.run(x, self.part)

        return run

    def _state_of(self, region: Region) -> list[torch.Tensor]:
        """What its kernels write from pass to pass."""
        held = (get() for m in region.modules for _, get in self.stage.around.state(m))
        return [tensor for tensor in held if tensor is not None]

    def _segment(self, region: Region, state: Sequence[torch.Tensor] = ()) -> Segment:
        return Segment(
            name=region.name + self.suffix,
            function=self._function(region),
            samples=(self.sample,),
            parameters=region.parameters,
            state=state,
            modules=region.modules,
            relied=functools.partial(self._state_of, region),
            resolve=self.resolve,
            on_replay=self.owner.counts.launched,
        )

    def _gathered(self, region: Region, act: Callable[[Region], None]) -> None:
        """Act with the region's parameters where replays will find them, and none of its hooks."""

        def attempted() -> None:
            with region.without_hooks():
                act(region)

        try:
            # Collectives: every rank issues them, whatever became of its captures.
            for unit in region.units:
                unit.unshard()
                unit.wait_unshard()
            self.attempt(attempted)
        finally:
            region.release()

    def _by_us(self) -> None:
        # All warm-ups first: they run what ranks do together, a capture on a GPU does not. So a
        # rank whose capture fails leaves no other one waiting.
        for act, order in ((self._warm_up, 1), (self._forward, 1), (self._backward, -1)):
            for region in self.regions[::order]:
                self._gathered(region, act)

    def _warm_up(self, region: Region) -> None:
        state = self.owner.compiler.written_unseen(region.modules)
        graph = GraphedCallable(self.maker, self._segment(region, state))
        captured = self.found[region.name] = CapturedRegion(region, graph)
        with self.owner.compiler.settled("the warm-up"):
            graph.warm_up()
        # What its modules make at their first forward is there now.
        captured.begin = self.stage.around.replays(region.modules)

    def _forward(self, region: Region) -> None:
        self._quiesce()
        captured = self.found[region.name]
        assert isinstance(captured.graph, GraphedCallable)
        with self.owner.compiler.captured() as guards:
            captured.graph.capture_forward()
        captured.guards = guards

    def _backward(self, region: Region) -> None:
        self._quiesce()
        graph = self.found[region.name].graph
        assert isinstance(graph, GraphedCallable)
        with self.owner.compiler.settled("the capture"):
            graph.capture_backward()

    def _library_graph(self, region: Region) -> LibraryGraph:
        graph = LibraryGraph(self._segment(region))
        self.found[region.name] = CapturedRegion(region, graph)
        return graph

    def _by_torch(self) -> None:
        def capture(region: Region) -> None:
            self._quiesce()
            capture_by_torch(self.maker, self._library_graph(region))
            self.found[region.name].begin = self.stage.around.replays(region.modules)

        for region in self.regions:
            self._gathered(region, capture)

    def _by_te(self) -> None:
        """All at once: hooks gather and release around each forward and backward."""
        graphs: list[LibraryGraph] = []

        def capture() -> None:
            self._quiesce()
            with contextlib.ExitStack() as off:
                for region, graph in zip(self.regions, graphs, strict=True):
                    off.callback(region.release)  # a failure may come before the hook that does
                    graph.hooks = off.enter_context(self._rerouted(region))
                prefer_cudnn_of_torch()  # before TransformerEngine is imported
                capture_by_te(self.maker, graphs, self.maker.pool)

        for region in self.regions:
            self._gathered(region, lambda region: graphs.append(self._library_graph(region)))
        self.attempt(capture)

    @contextlib.contextmanager
    def _rerouted(self, region: Region) -> Iterator[CaptureHooks]:
        """Hooks of the region are off; those of it and of its layer, an FSDP unit, by their marks
        as functions of the four phases around warm-ups and captures."""
        is_layer = region.owner is region.layer
        outer: CaptureHooks = {} if is_layer else own_capture_hooks(region.layer)
        with region.without_hooks() as inner:
            found: dict[str, list[CaptureHook]] = {}
            for phase in PHASES:
                layers = outer.get(phase, ()), inner[phase]
                if phase in CLOSING:  # outer modules open first and close last
                    found[phase] = [*layers[1], *layers[0]]
                else:
                    found[phase] = [*layers[0], *layers[1], lambda _: self._quiesce()]
            yield found


class StageGraphs:
    """Graphs of one stage by context size and slot, and from `install` until `reset` replays in the
    place of its regions.

    owner: of all graphs of the rank: makers, names, configuration.
    regions: in the order in which they run.
    samples: for each context size, a part like those of microbatches to come.
    attempt: see `SlotCapture`.
    num_slots: microbatches that may be between forward and backward at a time.
    context: the groups of all sizes where microbatches bring their own metadata, which are then
        copied to where graphs read them; None where all have the sample's.
    """

    def __init__(
        self, owner: Graphs, stage: DecoderStage, regions: Sequence[Region],
        samples: Mapping[int, Part],
        *, attempt: Attempt, num_slots: int, context: DynamicContext | None = None,
    ) -> None:  # fmt: skip
        self._owner, self._stage, self._regions = owner, stage, tuple(regions)
        self._samples, self._attempt = dict(samples), attempt
        self._num_slots, self._context = num_slots, context
        self.graphs: dict[tuple[int, int], SlotGraphs] = {}
        self._static: dict[tuple[int, int], StaticPart] = {}
        # What a compiled part put in the place of each region's forward, if one did.
        self._before: list[Any] | None = None
        self._chosen: SlotGraphs | None = None
        # A graph knows addresses, not tensors: tables that the model replaces must stay.
        self._kept = list(stage.rope.buffers())

    # ---- capture

    def capture(self, sample: torch.Tensor) -> None:
        """Capture all, largest sizes first. Every rank must call it: warming up talks over the
        groups of each size in turn.
        """
        # Memory of its own for each slot, shared by all sizes.
        makers = [self._owner.new_maker() for _ in range(self._num_slots)]
        sizes, context = sorted(self._samples, reverse=True), self._context
        keys = [(size, slot) for size in sizes for slot in range(self._num_slots)]
        if context is not None:
            for size, slot in keys:
                context.check(self._samples[size].cp)
                static = StaticPart(self._samples[size], f"context size {size}, slot {slot}")
                self._static[size, slot] = static
        for key in keys:
            size, slot = key
            part, suffix = self._samples[size], f" slot {slot}" if slot else ""
            if context is not None:
                part, suffix = self._static[key].part, f" context size {size}{suffix}"
                if slot == 0:
                    self._owner.meet()
            capture = SlotCapture(
                self._owner, self._stage, self._regions, self._attempt, makers[slot], part, sample,
                self._resolver, suffix,
            )  # fmt: skip
            self.graphs[key] = capture.found
            capture.run()

    @property
    def _resolver(self) -> Resolver | None:
        """Names of what graphs of a stage read of microbatches, beside the trainer's."""
        book = self._owner.book
        if book is None:
            return None
        for part in self._static.values():
            for name, tensor in part.named_tensors():
                book.hold(name, tensor)
        return book.now

    @property
    def captured(self) -> Iterator[CapturedRegion]:
        return (each for slot in self.graphs.values() for each in slot.values())

    # ---- replay

    def install(self) -> None:
        """From now on a microbatch that trains is replayed, if there are graphs of its kind."""
        self._before = [vars(region.owner).get("forward") for region in self._regions]
        for region in self._regions:
            region.owner.forward = self._stand_in(region)
        self._stage.on_microbatch = self._begin

    def _begin(self, part: Part, slot: int) -> None:
        trains = self._stage.training and torch.is_grad_enabled()
        self._chosen = self.choose(part, slot) if trains else None

    def _stand_in(self, region: Region) -> Callable[[torch.Tensor, Part], torch.Tensor]:
        eager = region.owner.forward

        def forward(x: torch.Tensor, part: Part) -> torch.Tensor:
            if self._chosen is None:
                result: torch.Tensor = eager(x, part)
                return result
            return self._chosen[region.name].replay(x)

        return forward

    def choose(self, part: Part, slot: int) -> SlotGraphs | None:
        """The graphs of a microbatch, what they read of it copied in; None if it runs eagerly."""
        size = part.cp.size
        if self._context is None:
            (mine,) = self._samples.values()
            if part.plan is not mine.plan or part.targets.shape != mine.targets.shape:
                return None
        if self._context is not None:
            self._require_free(slot)
            self._context.check(part.cp)
            self._static[size, slot].follow(part)
        return self.graphs[size, slot]

    def _require_free(self, slot: int) -> None:
        # Of any size: they share the slot's memory, and each knows of its own replays only.
        sizes = (self.graphs[size, slot].values() for size in self._samples)
        is_free = not any(each.graph.is_waiting for of_size in sizes for each in of_size)
        assert is_free, f"the microbatch in slot {slot} still awaits its backward"

    def reset(self) -> None:
        """The stage runs eagerly again, graphs are dropped, then what was kept for them."""
        if self._before is not None:
            for region, before in zip(self._regions, self._before, strict=True):
                del region.owner.forward
                if before is not None:
                    region.owner.forward = before
            self._stage.on_microbatch = None
        for each in reversed(list(self.captured)):
            each.graph.reset()
        self.graphs, self._static, self._kept = {}, {}, []
        self._before = self._chosen = None
