"""Graphs of partial scopes of one stage: captured by slot, installed together, replayed in layers.

    LayerGraphs   forward and backward graphs of every piece of the stage's layers, in one slot
    StageGraphs   what stands in for the pieces, and chooses for each microbatch

**Slots.** A pipeline has several microbatches between forward and backward, each in a slot of its
own, and so has each slot graphs of its own. Graphs of one slot share a memory pool: its microbatch
goes forward through the layers and then backward, so what the forward of a layer saved may be used
again once its backward is over. Another slot's microbatch may come in between, in an order that
changes with the number of microbatches, so slots share no memory.

**Around a replay.** FSDP gathers parameters before it and reduces gradients after it. Hooks of the
layer, which is a unit, run as in eager training. Units inside of what is captured (experts) are
gathered around the whole replay, and their hooks do nothing inside. What modules do in Python for
scales of fp8 is done by `model.around`.

**Eager** are evaluation, forward passes without gradients, microbatches of other shapes, and
everything before the capture.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from fsdp_core.fsdp import FSDPModule
from fsdp_core.fsdp.api import units_in
from fsdp_core.graph.graph import GraphMaker
from fsdp_core.graph.ledger import Ledger, Resolver
from fsdp_core.graph.segment import GraphedSegment, Segment
from fsdp_core.model.around import Around, Begin
from fsdp_core.model.batch import Part
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.train.compiled import Compiler, HeldGuards
from fsdp_core.train.scopes import GraphCounts, GraphUse, Outputs, Piece


def _over(stage: DecoderStage, piece: Piece, part: Part) -> Callable[[torch.Tensor], Outputs]:
    def run(x: torch.Tensor) -> Outputs:
        with stage.around.captured():
            return piece.run(x, part)

    return run


def _state_of(piece: Piece, around: Around) -> list[torch.Tensor]:
    """What its kernels write from pass to pass."""
    held = (get() for module in piece.modules for _, get in around.state(module))
    return [tensor for tensor in held if tensor is not None]


Attempt = Callable[[Callable[[], None]], None]
"""Calls a capture, or leaves it out where an earlier one failed: `CaptureSession.attempt`."""


def at_once(capture: Callable[[], None]) -> None:
    """An `Attempt` that lets failures through."""
    capture()


@dataclass(frozen=True, kw_only=True)
class CaptureTools:
    """What all captures of a trainer have in common.

    Attributes:
        resolve: names tensors for ledgers; None: no ledgers.
        counts: told of every launch.
        attempt: what captures are made through.
        compiler: of compiled parts.
    """

    resolve: Resolver | None
    counts: GraphCounts
    attempt: Attempt = at_once
    compiler: Compiler = field(default_factory=Compiler)


def _around(piece: Piece, capture: Callable[[Piece], None], attempt: Attempt) -> None:
    """Capture with the piece's parameters where replays will find them, and none of its hooks."""

    def captured() -> None:
        with piece.without_hooks():
            capture(piece)

    units = [*units_in(piece.layer)[:1], *piece.inner_units]
    try:
        # Collectives: every rank issues them, whatever became of its captures.
        for unit in units:
            unit.unshard()
            unit.wait_unshard()
        attempt(captured)
    finally:
        for unit in reversed(units):
            unit.reshard()


class LayerGraphs:
    """Forward and backward graphs of all pieces of a stage, for one microbatch at a time.

    Args:
        pieces: in the order in which they run.
        part: what layers see of any microbatch that is replayed, in tensors that stay.
        sample: like what enters a layer.
        slot, variant: for names; what tells these graphs from others of the stage.
    """

    def __init__(
        self,
        stage: DecoderStage,
        pieces: Sequence[Piece],
        maker: GraphMaker,
        part: Part,
        sample: torch.Tensor,
        tools: CaptureTools,
        *,
        slot: int,
        variant: str = "",
    ) -> None:
        self._schedule = cast("FSDPModule", stage).fsdp_schedule
        around, self._begins = stage.around, dict[str, Begin]()
        self._graphs: dict[str, GraphedSegment] = {}
        self._pieces = tuple(pieces)
        compiler, self._guards = tools.compiler, dict[str, list[HeldGuards]]()
        suffix = (f" {variant}" if variant else "") + (f" slot {slot}" if slot else "")

        def warm_up(piece: Piece) -> None:
            segment = Segment(
                name=piece.name + suffix,
                function=_over(stage, piece, part),
                samples=(sample,),
                parameters=piece.parameters,
                state=compiler.written_unseen(piece.modules),
            )
            graph = GraphedSegment(
                maker, segment, resolve=tools.resolve, on_replay=tools.counts.launched,
                relied=lambda: _state_of(piece, around),
            )  # fmt: skip
            self._graphs[piece.name] = graph
            with compiler.settled("the warm-up"):
                graph.warm_up()
            # What its modules make at their first forward is there now.
            self._begins[piece.name] = around.replays(piece.modules)

        def forward(piece: Piece) -> None:
            self._schedule.quiesce()
            with compiler.captured() as guards:
                self._graphs[piece.name].capture_forward(0)
            self._guards[piece.name] = guards

        def backward(piece: Piece) -> None:
            self._schedule.quiesce()
            with compiler.settled("the capture"):
                self._graphs[piece.name].capture_backward(0)

        try:
            # All warm-ups first: they run what ranks do together, a capture on a GPU does not. So a
            # rank whose capture fails leaves no other one waiting.
            for capture, order in ((warm_up, 1), (forward, 1), (backward, -1)):
                for piece in pieces[::order]:
                    _around(piece, capture, tools.attempt)
        except BaseException:
            self.reset()
            raise

    def replay(self, piece: Piece, x: torch.Tensor) -> torch.Tensor:
        """The output of the piece's owner."""
        units = piece.inner_units
        args: tuple[torch.Tensor, ...] = (x,)
        for unit in units:
            args, _ = unit.pre_forward(args, {})
        for guards in self._guards[piece.name]:
            guards.check()
        after = self._begins[piece.name]()
        outputs: Outputs = self._graphs[piece.name](*args, after=after)
        for unit in reversed(units):
            outputs = unit.post_forward(outputs)
        return piece.rest(outputs)

    @property
    def is_waiting(self) -> bool:
        """Whether a microbatch that went forward still awaits its backward."""
        return any(graph.is_waiting for graph in self._graphs.values())

    @property
    def num_graphs(self) -> int:
        """Captured graphs."""
        return sum(graph.num_graphs for graph in self._graphs.values())

    @property
    def uses(self) -> Iterator[GraphUse]:
        """What each piece's graphs did, scope by scope."""
        for piece in self._pieces:
            graph = self._graphs.get(piece.name)
            if graph is None:
                continue
            for scope in piece.scopes:
                for way, *counts in zip(
                    ("forward", "backward"), graph.captures, graph.replays, strict=True
                ):
                    yield GraphUse(scope, piece.number, way, *counts)

    @property
    def ledgers(self) -> list[Ledger]:
        """Those of all graphs."""
        return [ledger for graph in self._graphs.values() for ledger in graph.ledgers]

    def reset(self) -> None:
        """Drop the graphs; a second time does nothing."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs, self._begins, self._guards = {}, {}, {}


Chooser = Callable[[Part, int], LayerGraphs | None]
"""Says which graphs a microbatch with that part is replayed from, in that slot; None: eagerly."""


class StageGraphs:
    """Replays in place of the pieces of a stage, until `remove`.

    Args:
        choose: asked once a microbatch that trains.
    """

    def __init__(self, stage: DecoderStage, pieces: Sequence[Piece], choose: Chooser) -> None:
        self._stage, self._pieces, self._choose = stage, tuple(pieces), choose
        self._chosen: LayerGraphs | None = None
        # What a compiled part put there, if one did.
        self._before = [vars(piece.owner).get("forward") for piece in self._pieces]
        for piece in self._pieces:
            piece.owner.forward = self._stand_in(piece)
        stage.on_microbatch = self._begin

    def _begin(self, part: Part, slot: int) -> None:
        trains = self._stage.training and torch.is_grad_enabled()
        self._chosen = self._choose(part, slot) if trains else None

    def _stand_in(self, piece: Piece) -> Callable[[torch.Tensor, Part], torch.Tensor]:
        eager = piece.owner.forward

        def forward(x: torch.Tensor, part: Part) -> torch.Tensor:
            if self._chosen is None:
                result: torch.Tensor = eager(x, part)
                return result
            return self._chosen.replay(piece, x)

        return forward

    def remove(self) -> None:
        """The stage runs eagerly again."""
        for piece, before in zip(self._pieces, self._before, strict=True):
            del piece.owner.forward
            if before is not None:
                piece.owner.forward = before
        self._stage.on_microbatch = None
        self._pieces, self._before, self._chosen = (), [], None
