"""Graphs of partial scopes under dynamic context parallelism: a set for every size, in every slot.

    capture    size 4:  slot 0, slot 1, ...     size 2:  slot 0, slot 1, ...     size 1:  ...
    choose     microbatch of a size, in a slot: its metadata into the static part, and its graphs

Each rank chooses by its own microbatch. Ranks of one context group share its sequences, so they
have one size; groups side by side may differ in the same microbatch. That keeps nobody waiting: of
the collectives in partial scopes only those of attention depend on the size, and they stay in the
group; those of tp, and of all ranks that route tokens, are equally many and large at any size.

Graphs of all sizes share a slot's memory, as a slot holds one microbatch at a time.
"""

import itertools
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from fsdp_core.graph.bank import GraphBank
from fsdp_core.graph.graph import GraphMaker
from fsdp_core.graph.ledger import Ledger, Resolver
from fsdp_core.model.batch import Part
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.parallel.context import DynamicContext
from fsdp_core.train.scopes import GraphUse, Piece, pieces_in
from fsdp_core.train.stage_graphs import CaptureTools, LayerGraphs, StageGraphs
from fsdp_core.train.static_parts import StaticParts


@dataclass(frozen=True, kw_only=True)
class Capturing:
    """What the captures of all stages have in common.

    Attributes:
        context: the groups of all sizes.
        samples: a part of each size, as microbatches will have it.
        sample: like what enters a layer.
        new_maker: of graphs that share a memory pool.
        num_slots: microbatches that a stage may have between forward and backward at a time.
        between: called before each size: nothing may be under way, on no rank.
    """

    context: DynamicContext
    samples: Mapping[int, Part]
    sample: torch.Tensor
    tools: CaptureTools
    new_maker: Callable[[], GraphMaker]
    num_slots: int
    between: Callable[[], None]


class Slots:
    """The graphs of one context size, by slot: a `bank.GraphSet`."""

    def __init__(self) -> None:
        self.graphs: list[LayerGraphs] = []

    def reset(self) -> None:
        """See `bank.GraphSet`."""
        for graphs in reversed(self.graphs):
            graphs.reset()
        self.graphs = []


class StageBank:
    """The graphs of one stage, of every size and slot; `choose` is a `stage_graphs.Chooser`.

    Args:
        pieces: of the stage, in the order in which they run.
    """

    def __init__(self, stage: DecoderStage, pieces: Sequence[Piece], options: Capturing) -> None:
        self._stage, self._pieces, self._options = stage, tuple(pieces), options
        self._parts = StaticParts(options.context, options.samples, options.num_slots)
        self._bank: GraphBank[Slots] = GraphBank(options.samples, "context size")

    def capture(self) -> None:
        """Capture all sizes, largest first, or none; every rank must call it.

        Warming up talks over the groups of each size in turn.
        """
        # A maker a slot, of all sizes: slots share no memory.
        makers = [self._options.new_maker() for _ in range(self._options.num_slots)]
        # Graphs find the tables at their addresses, whatever becomes of the model's own.
        self._bank.keep(*self._stage.rope.buffers())
        self._bank.capture(lambda size: self._capture_size(size, makers), self._options.between)

    def _capture_size(self, size: int, makers: Sequence[GraphMaker]) -> Slots:
        options, found = self._options, Slots()
        tools = replace(options.tools, resolve=self._resolver())
        try:
            for slot, maker in enumerate(makers):
                part = self._parts.of(size, slot).part
                graphs = LayerGraphs(
                    self._stage, self._pieces, maker, part, options.sample, tools,
                    slot=slot, variant=f"context size {size}",
                )  # fmt: skip
                found.graphs.append(graphs)
        except BaseException:
            found.reset()
            raise
        return found

    def _resolver(self) -> Resolver | None:
        resolve = self._options.tools.resolve
        if resolve is None:
            return None
        static = dict(self._parts.named_tensors())
        # Looked up one by one, where the trainer can do that.
        return lambda: ChainMap(static, cast("dict[str, torch.Tensor]", resolve()))

    def choose(self, part: Part, slot: int) -> LayerGraphs:
        """The graphs of a microbatch, ready for it: what they read of it is copied in.

        Raises:
            ValueError: more sequences, tokens or microbatches than there is room for, or a size
                that nothing was captured for.
            RuntimeError: a group that was made anew, nothing is captured, or the slot's last
                microbatch still awaits its backward.
        """
        slots = self._bank.select(part.cp.size)
        self._parts.of(part.cp.size, slot)
        self._require_free(slot)
        self._parts.follow(part, slot)
        return slots.graphs[slot]

    def _require_free(self, slot: int) -> None:
        # Of any size: they share the slot's memory, and each knows of its own replays only.
        if any(slots.graphs[slot].is_waiting for slots in self._bank.sets):
            raise RuntimeError(
                f"Expected slot {slot} to be free, got one whose microbatch still awaits its "
                "backward: graphs of another context size would overwrite what it saved."
            )

    @property
    def graphs(self) -> list[LayerGraphs]:
        """Those of every size and slot."""
        return [graphs for slots in self._bank.sets for graphs in slots.graphs]

    def reset(self) -> None:
        """Drop the graphs, and the tables that were kept for them."""
        self._bank.reset()


class DynamicGraphs:
    """Banks of every stage, installed together; used as `partial_graphs.PartialGraphs`.

    Args:
        scopes: partial ones.
        layers: the first and the last that are captured; empty for all.

    Raises:
        CaptureRefused: something in a scope cannot be captured; nothing is installed.
    """

    def __init__(
        self,
        scopes: Sequence[str],
        stages: Sequence[DecoderStage],
        options: Capturing,
        layers: Sequence[int] = (),
    ) -> None:
        pieces = [pieces_in(stage, scopes, layers) for stage in stages]
        self._banks = [StageBank(*each, options) for each in zip(stages, pieces, strict=True)]
        self._installed: list[StageGraphs] = []
        try:
            for bank in self._banks:
                bank.capture()
        except BaseException:
            self.reset()
            raise
        for stage, of_stage, bank in zip(stages, pieces, self._banks, strict=True):
            self._installed.append(StageGraphs(stage, of_stage, bank.choose))

    @property
    def _graphs(self) -> list[LayerGraphs]:
        return list(itertools.chain(*(bank.graphs for bank in self._banks)))

    @property
    def num_graphs(self) -> int:
        """Captured graphs."""
        return sum(graphs.num_graphs for graphs in self._graphs)

    @property
    def uses(self) -> Iterator[GraphUse]:
        """What they did; each slot and size by itself."""
        return (use for graphs in self._graphs for use in graphs.uses)

    @property
    def ledgers(self) -> list[Ledger]:
        """Those of all graphs."""
        return [ledger for graphs in self._graphs for ledger in graphs.ledgers]

    def reset(self) -> None:
        """The stages run eagerly again, and the graphs are dropped."""
        for installed in self._installed:
            installed.remove()
        for bank in self._banks:
            bank.reset()
        self._installed, self._banks = [], []
