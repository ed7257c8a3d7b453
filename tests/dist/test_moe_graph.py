"""A mixture of experts in a graph: drop-and-pad whole, dropless up to its dispatch."""

import pytest
import torch

from fsdp_core.model.moe.dispatcher import Delivery
from tests.dist.moe_graph_programs import (
    STEPS,
    capture_dropless,
    replays_equal_eager,
    stages_in_graphs,
)
from tests.dist.moe_layouts import Layout
from tests.dist.rank_pool import RankPool

LAYOUTS = [
    Layout(ep=2),
    Layout(ep=2, etp=2),
    Layout(ep=2, etp=2, tp=2),
    Layout(ep=4, tp=2, sp=True),
]


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_replays_equal_eager(warm_ranks: RankPool, layout: Layout, dispatcher: str) -> None:
    """Drop-and-pad replays eager's bits, gradients and loads, with a new routing each time."""
    delivery = Delivery(dispatcher=dispatcher, capacity_factor=1.0)
    for dtype in (torch.float32, torch.bfloat16):
        routings = warm_ranks.run(
            replays_equal_eager, layout, delivery, dtype, world_size=layout.world_size
        )
        assert routings == [STEPS] * layout.world_size


def test_dropping_by_weight_replays_eager(warm_ranks: RankPool) -> None:
    """Drop by the smallest weight is static too."""
    layout = Layout(ep=2)
    delivery = Delivery(capacity_factor=0.5, drop="probs")
    routings = warm_ranks.run(replays_equal_eager, layout, delivery, torch.float32, world_size=2)
    assert routings == [STEPS] * 2


def test_dropless_is_refused_by_name(warm_ranks: RankPool) -> None:
    """A dropless dispatch reads its sizes on the host, which no graph can hold."""
    said = warm_ranks.run(capture_dropless, Layout(ep=2), world_size=2)
    assert all(text.startswith("CaptureRefused") for text in said), said
    assert all("dispatcher.py" in text for text in said), said


DELIVERIES = [
    Delivery(),
    Delivery(dispatcher="all_gather"),
    Delivery(capacity_factor=1.0),
    Delivery(dispatcher="all_gather", capacity_factor=0.5, drop="probs"),
]


@pytest.mark.parametrize(
    "layout",
    [Layout(ep=2, etp=2), Layout(ep=2, tp=2, sp=True), Layout(etp=2, tp=2)],
    ids=lambda layout: layout.name,
)
def test_stages_are_captured_apart(warm_ranks: RankPool, layout: Layout) -> None:
    """Stages as two graphs each, forward and backward: only tensors cross, with the bits of eager.

    Gradients too: that of the router comes back through the weights that crossed. Up to dispatch
    every shape is static, also dropless; with a capacity the whole layer's are.
    """
    cases = [
        (delivery, dtype, scope)
        for delivery in DELIVERIES
        for dtype, scope in (
            (torch.float32, "moe_router"),
            (torch.bfloat16, "moe_preprocess"),
            (torch.float32, "moe"),
        )
        if delivery.capacity_factor is not None or scope != "moe"
    ]
    by_rank = warm_ranks.run(stages_in_graphs, layout, cases, world_size=layout.world_size)
    assert by_rank == [[STEPS] * len(cases)] * layout.world_size
