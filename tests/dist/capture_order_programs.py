"""In which order a trainer warms up and captures what shares memory."""

from collections.abc import Callable
from typing import Any
from unittest import mock

from fsdp_core.graph.graph import GraphedCallable
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer
from tests.dist.scope_programs import WARMUP, Scoped
from tests.dist.train_layout_programs import DEVICE

PHASES = ("warm_up", "capture_forward", "capture_backward")


def captures_in_order(scoped: Scoped) -> list[tuple[str, str]]:
    """Phase and segment of everything that a trainer's capture calls."""
    seen: list[tuple[str, str]] = []

    def noting(phase: str) -> Callable[..., Any]:
        plain = getattr(GraphedCallable, phase)

        def call(graph: GraphedCallable, *args: Any, **kwargs: Any) -> Any:
            seen.append((phase, graph.name))
            return plain(graph, *args, **kwargs)

        return call

    trainer = Trainer(scoped.config, build_axes(scoped.run.parallel, DEVICE), DEVICE)
    patches: dict[str, Any] = {phase: noting(phase) for phase in PHASES}
    with mock.patch.multiple(GraphedCallable, **patches):
        for step in range(WARMUP + 1):
            trainer.step(step)
    trainer.close()
    return seen
