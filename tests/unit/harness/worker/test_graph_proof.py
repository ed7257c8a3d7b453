"""What a rank's end record states of its graphs, with all of them and with some left out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fsdp_core.config import TrainConfig
from fsdp_core.train.graphs import StageGraphs
from harness.checks.complete import not_as_owed
from harness.records import EndRecord, PlantSpec, RunSpec
from harness.soaking import SoakSpec
from tests.unit.harness.worker.conftest import TINY

Spec = Callable[..., RunSpec]
EXPERTS = replace(
    TINY, layers=3, experts=4, top_k=2, expert_ffn=8, shared_expert_ffn=8, first_dense_layers=1,
    capacity_factor=2.0,
)  # fmt: skip
FAULTS = [
    ("layer_not_captured", ("attn", "mlp"), ("layers.1 attn", "captures.forward", "1", "0")),
    ("scope_not_captured", ("attn", "mlp"), ("layers.0 mlp", "captures.forward", "1", "0")),
    ("microbatches_not_replayed", ("layer",), ("layers.0 layer", "replays.forward", "6", "3")),
    ("optimizer_not_captured", ("full_iteration",),
     ("full_iteration", "captures.optimizer", "1", "0")),
]  # fmt: skip


def short_of(rank: Any, run: RunSpec) -> Any:
    """The first graphs that are not as owed; None if all are."""
    (end,) = (record for record in rank.run(run) if isinstance(record, EndRecord))
    return not_as_owed(TrainConfig.from_dict(run.config), 0, end.steps, end)


@pytest.mark.parametrize(
    ("graph", "options"),
    [
        (("attn", "mlp"), {}),
        (("layer",), {"graph_layers": (1, 1)}),
        (("full_iteration",), {}),
        (("full_iteration",), {"graph_optimizer": False}),
        (("attn", "mlp", "moe_router", "moe_preprocess"), {"model": EXPERTS}),
        (("mlp", "moe"), {"model": EXPERTS, "graph_warmup_steps": 1}),
    ],
)
def test_right_runs_state_all_that_they_owe(
    rank: Any, spec: Spec, graph: tuple[str, ...], options: dict[str, Any]
) -> None:
    """Captures and replays of each scope, layer and direction are exactly those of the config."""
    assert short_of(rank, spec(graph=graph, **options)) is None


@pytest.mark.parametrize("graph", [("attn", "mlp"), ("full_iteration",)])
def test_graphs_that_were_captured_anew_count_together(
    rank: Any, spec: Spec, graph: tuple[str, ...]
) -> None:
    """A soak captures at each stressor's turn; what the graphs before did is not forgotten."""
    run = spec(graph=graph, stress=("poison", "scramble"), steps=8)
    assert short_of(rank, replace(run, soak=SoakSpec(by="steps", amount=8, turn_steps=3))) is None


@pytest.mark.parametrize(("fault", "graph", "expected"), FAULTS)
def test_what_is_left_eager_is_named(
    rank: Any, spec: Spec, fault: str, graph: tuple[str, ...], expected: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A layer, scope, microbatch or optimizer that runs beside the graphs is named."""
    monkeypatch.setattr(StageGraphs, "_begin", StageGraphs._begin)  # a fault undoes nothing
    found = short_of(rank, spec(PlantSpec(fault=fault), graph=graph)).difference
    assert (found.tensor, found.quantity, found.reference, found.candidate) == expected
