"""Graphs of partial scopes on one rank: for all its stages, all slots, installed together.

All are captured before any is installed, so that none is captured over a replay of another. Where
a capture is refused, nothing is left of the others, and the stages stay eager.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from fsdp_core.graph.graph import GraphMaker
from fsdp_core.graph.ledger import Ledger
from fsdp_core.model.batch import Part
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.train.scopes import GraphUse, pieces_in
from fsdp_core.train.stage_graphs import CaptureTools, Chooser, LayerGraphs, StageGraphs


class PartialGraphs:
    """Graphs of every stage, in slots.

    Args:
        scopes: partial ones.
        part: what layers see of every microbatch.
        sample: like what enters a layer.
        new_maker: of graphs that share a memory pool.
        num_slots: microbatches that a stage may have between forward and backward at a time.
        layers: the first and the last that are captured; empty for all.

    Raises:
        CaptureRefused: something in a scope cannot be captured; nothing is installed.
    """

    def __init__(
        self,
        scopes: Sequence[str],
        stages: Sequence[DecoderStage],
        part: Part,
        sample: torch.Tensor,
        tools: CaptureTools,
        *,
        new_maker: Callable[[], GraphMaker],
        num_slots: int,
        layers: Sequence[int] = (),
    ) -> None:
        self._part = part
        pieces = [pieces_in(stage, scopes, layers) for stage in stages]
        self._sets: list[list[LayerGraphs]] = []
        self._installed: list[StageGraphs] = []
        try:
            for stage, of_stage in zip(stages, pieces, strict=True):
                self._sets.append([])
                for slot in range(num_slots):
                    # A maker a slot: slots share no memory.
                    graphs = LayerGraphs(
                        stage, of_stage, new_maker(), part, sample, tools, slot=slot
                    )
                    self._sets[-1].append(graphs)
        except BaseException:
            self.reset()
            raise
        for stage, of_stage, sets in zip(stages, pieces, self._sets, strict=True):
            self._installed.append(StageGraphs(stage, of_stage, self._chooser(sets)))

    def _chooser(self, sets: Sequence[LayerGraphs]) -> Chooser:
        def choose(part: Part, slot: int) -> LayerGraphs | None:
            mine = self._part
            if part.plan is not mine.plan or part.targets.shape != mine.targets.shape:
                return None
            if slot >= len(sets):
                raise ValueError(
                    f"Expected at most {len(sets)} microbatches between forward and backward, as "
                    f"many as graphs have slots, got one in slot {slot}: slots are never shared."
                )
            return sets[slot]

        return choose

    @property
    def num_graphs(self) -> int:
        """Captured graphs."""
        return sum(graphs.num_graphs for graphs in itertools.chain(*self._sets))

    @property
    def uses(self) -> Iterator[GraphUse]:
        """What they did; each slot by itself."""
        return (use for graphs in itertools.chain(*self._sets) for use in graphs.uses)

    @property
    def ledgers(self) -> list[Ledger]:
        """Those of all graphs."""
        return [ledger for graphs in itertools.chain(*self._sets) for ledger in graphs.ledgers]

    def reset(self) -> None:
        """The stages run eagerly again, and the graphs are dropped."""
        for installed in self._installed:
            installed.remove()
        for graphs in itertools.chain(*self._sets):
            graphs.reset()
        self._installed, self._sets = [], []
