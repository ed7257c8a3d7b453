"""The graphs of a trainer: captured on every rank or on none, counted, and dropped.

Before a capture, and after it, each stage's schedule is quiet: events do not cross. Then pools are
frozen, since graphs hold addresses. Of a capture that fails nothing is left but the failure.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core.config import TrainConfig
from fsdp_core.device import Device
from fsdp_core.graph.capture_session import PATIENCE, CaptureSession
from fsdp_core.graph.graph import CapturedFunction, GraphMaker
from fsdp_core.graph.ledger import Resolver
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.parallel.mesh import world_timeout
from fsdp_core.parallel.rng import RandomStreams
from fsdp_core.train.banks import Capturing, DynamicGraphs
from fsdp_core.train.build import roots
from fsdp_core.train.compiled import Compiler
from fsdp_core.train.inputs import Inputs, PackInputs
from fsdp_core.train.partial_graphs import PartialGraphs
from fsdp_core.train.scopes import GraphCounts, GraphUse, refusal, sum_uses
from fsdp_core.train.stage_graphs import CaptureTools


class Captures:
    """Graphs of the scopes that a configuration asks for; none until `capture`.

    Args:
        streams: of random numbers, whose states captures leave alone.
        resolve: names every tensor that graphs may use.
        compiler: of parts that graphs may hold.

    Attributes:
        counts: what the graphs did.
        iteration: the graph of scope full_iteration.
        parts: those of partial scopes.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: Device,
        stages: Sequence[DecoderStage],
        streams: RandomStreams,
        resolve: Callable[[], Resolver],
        compiler: Compiler,
    ) -> None:
        self._compiler = compiler
        self._config, self._device, self._streams = config, device, streams
        self._stages, self._resolve = stages, resolve
        self.counts = GraphCounts()
        self.iteration: CapturedFunction | None = None
        self.parts: PartialGraphs | DynamicGraphs | None = None
        self._has_optimizer = False
        self._dropped: list[GraphUse] = []

    def capture_iteration(
        self, function: Callable[[], None], moments: Sequence[torch.Tensor]
    ) -> None:
        """Capture scope full_iteration.

        Args:
            moments: what the optimizer's step writes; whether the graph does is counted.

        Raises:
            CaptureAborted: it cannot be captured, here or on another rank.
            CaptureLost: the same, and not all ranks can be met again.
        """
        with self._session() as session:
            self._remember(session)
            session.attempt(lambda: self._capture_iteration(function, moments))
        self._keep()

    def capture_parts(self, inputs: Inputs, sample: torch.Tensor, num_slots: int) -> None:
        """Capture partial scopes.

        Args:
            sample: like what enters a layer.
            num_slots: microbatches that a stage may have between forward and backward at a time.

        Raises:
            CaptureAborted: a scope cannot be captured, here or on another rank.
            CaptureLost: the same, and not all ranks can be met again.
        """
        layers = self._config.graph_layers
        with self._session(refusal(self._stages, self._config.graph, layers)) as session:
            self._remember(session)
            tools = CaptureTools(
                resolve=self._resolver, counts=self.counts, attempt=session.attempt,
                compiler=self._compiler,
            )  # fmt: skip
            options: dict[str, Any] = {"new_maker": self._new_maker, "num_slots": num_slots}
            scopes, sample = self._config.graph, sample.requires_grad_()
            if isinstance(inputs, PackInputs):
                capturing = Capturing(
                    context=inputs.context, samples=inputs.samples(), sample=sample, tools=tools,
                    between=self._meet, **options,
                )  # fmt: skip
                self.parts = DynamicGraphs(scopes, self._stages, capturing, layers)
            else:
                (part,) = inputs.samples().values()
                self.parts = PartialGraphs(
                    scopes, self._stages, part, sample, tools, layers=layers, **options
                )
        self._keep()

    def _meet(self) -> None:
        """Nothing is under way, here or on another rank."""
        self._quiesce()
        dist.barrier()

    def _capture_iteration(
        self, function: Callable[[], None], moments: Sequence[torch.Tensor]
    ) -> None:
        # At its replays parameters are at rest: guards, which look at them, cannot be checked.
        with self._compiler.captured():
            self.iteration = CapturedFunction(self._new_maker(), function, self._resolver)
        entries = self.iteration.graph.recording.external()
        written = {entry.address for entry in entries if entry.written}
        self._has_optimizer = all(m.untyped_storage().data_ptr() in written for m in moments)

    @property
    def uses(self) -> list[GraphUse]:
        """What graphs did so far, by scope, layer and direction; those that were dropped, too."""
        return sum_uses([*self._dropped, *self._present])

    @property
    def _present(self) -> list[GraphUse]:
        if self.parts is not None:
            return list(self.parts.uses)
        if self.iteration is None:
            return []
        ways = ("gradients", "optimizer") if self._has_optimizer else ("gradients",)
        return [GraphUse("full_iteration", -1, way, 1, self.iteration.replays) for way in ways]

    def _new_maker(self) -> GraphMaker:
        return GraphMaker(
            self._device, self._streams.generators, holds_compiled=bool(self._config.compile)
        )

    @property
    def _resolver(self) -> Resolver | None:
        return self._resolve() if self._config.ledger else None

    def _session(self, refused: str | None = None) -> CaptureSession:
        self._quiesce()
        what, generators = "+".join(self._config.graph), self._streams.generators
        session = CaptureSession(
            self._device, what, generators=generators, refusal=refused,
            communicates=communicates(self._config),
            patience=min(PATIENCE, world_timeout() / 10),
        )  # fmt: skip
        session.on_abort(self.drop)
        session.on_abort(self._quiesce)
        return session

    def _remember(self, session: CaptureSession) -> None:
        """Warm-ups run kernels that write what torch does not see: scales of fp8."""
        for stage in self._stages:
            session.at_end(stage.around.remember(stage))

    def _keep(self) -> None:
        self._compiler.has_graphs = True
        counts, whole, parts = self.counts, self.iteration, self.parts
        if whole is not None:
            counts.captured += 1
            counts.enter([whole.ledger] if whole.ledger else [])
        if parts is not None:
            counts.captured += parts.num_graphs
            counts.enter(parts.ledgers)
        for root in roots(self._stages):
            root.fsdp_schedule.pool.freeze()
        self._quiesce()

    def _quiesce(self) -> None:
        for root in roots(self._stages):
            root.fsdp_schedule.quiesce()

    def drop(self) -> None:
        """Drop the graphs; what they stood in for runs eagerly again."""
        self._dropped = self.uses
        if self.iteration is not None:
            self.iteration.reset()
        if self.parts is not None:
            self.parts.reset()
        self.iteration = self.parts = None
        self._compiler.has_graphs = False


def communicates(config: TrainConfig) -> bool:
    """Whether what partial scopes capture holds collectives, beside FSDP's around it."""
    layout = config.parallel
    if layout.tp > 1 or layout.cp > 1 or layout.dynamic_cp:
        return True
    return layout.ep * layout.etp > 1 and not set(config.graph) <= {"attn", "mlp"}
