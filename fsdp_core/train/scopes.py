"""Captures of each layer's attention branch: graph scope `attn`."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from fsdp_core.fsdp import FSDPModule
from fsdp_core.graph.capture import CapturedModule, GraphMaker
from fsdp_core.graph.ledger import Ledger, Resolver
from fsdp_core.model.decoder import DecoderStage, Layer
from fsdp_core.model.microbatch import Part
from fsdp_core.parallel.rng import RandomStreams


@dataclass
class GraphCounts:
    """What the graphs of a run did: `replays` counts launches of any captured graph."""

    captured: int = 0
    replays: int = 0
    external_names: list[str] = field(default_factory=list)
    unnamed_externals: int = 0

    def enter(self, ledgers: Sequence[Ledger]) -> None:
        """Count what graphs use and do not own."""
        for ledger in ledgers:
            self.external_names.extend(ledger.names)
            self.unnamed_externals += ledger.num_unnamed


class AttentionGraphs:
    """Two graphs a layer of one stage, forward and backward, installed in its attention branch.

    One microbatch may be between forward and backward at a time, and every microbatch has the same
    `part` to attention: no pipeline, no dynamic cp.

    Args:
        sample: like what enters a layer.
        part: what attention sees of any microbatch.
        streams: whose states warming up leaves alone.
        resolve: names tensors for ledgers; None: no ledgers.
    """

    def __init__(
        self, stage: DecoderStage, maker: GraphMaker, sample: torch.Tensor, part: Part,
        streams: RandomStreams, resolve: Resolver | None, counts: GraphCounts,
    ) -> None:  # fmt: skip
        self._layers = list(stage.numbered_layers.values())
        self._schedule = cast("FSDPModule", stage).fsdp_schedule
        self._graphs: list[CapturedModule] = []
        for layer in self._layers:
            with self._gathered(layer):
                graph = CapturedModule(
                    maker, layer.attn, sample, (part,), list(layer.attn.parameters()),
                    resolve=resolve,
                )  # fmt: skip
                states = streams.get_states()
                graph.warm_up()
                streams.set_states(states)
                self._schedule.quiesce()
                graph.capture_forward()
            self._graphs.append(graph)
        for layer, graph in zip(reversed(self._layers), reversed(self._graphs), strict=True):
            with self._gathered(layer):
                self._schedule.quiesce()
                graph.capture_backward()
        for layer, graph in zip(self._layers, self._graphs, strict=True):
            _install(layer.attn, graph, counts)

    @contextlib.contextmanager
    def _gathered(self, layer: Layer) -> Iterator[None]:
        unit = cast("FSDPModule", layer)
        unit.unshard()
        yield
        unit.reshard()

    @property
    def captured(self) -> int:
        """Number of graphs."""
        return 2 * len(self._graphs)

    @property
    def ledgers(self) -> list[Ledger]:
        """Those of all graphs."""
        return [ledger for graph in self._graphs for ledger in graph.ledgers]

    def reset(self) -> None:
        """Drop the graphs; the layers run eagerly again."""
        for layer, graph in zip(self._layers, self._graphs, strict=True):
            del layer.attn.forward
            graph.reset()


def _install(branch: nn.Module, graph: CapturedModule, counts: GraphCounts) -> None:
    def replay(x: torch.Tensor, part: Part) -> torch.Tensor:
        del part
        counts.replays += 2 if torch.is_grad_enabled() else 1
        return graph(x)

    branch.forward = replay
