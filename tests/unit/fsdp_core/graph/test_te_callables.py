"""Graphed modules of TransformerEngine: what is refused, by its maker or ours."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_core.device import Device
from fsdp_core.graph import te_callables
from fsdp_core.graph.graph import GraphMaker
from fsdp_core.graph.hooks import CaptureHooks
from tests.unit.fsdp_core.graph.te_graph_stand_in import TeGraphStandIn
from tests.unit.fsdp_core.graph.test_callables import Make, blocks, both, inputs, own, sample, te


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_warmup_iters": 0}, "Expected at least one warm-up, got 0"),
        ({"options": {"cache_quantized_params": True}}, "enabled, .*, got cache_quantized_params"),
        ({"options": {"enabled": (False, True)}}, "Expected a recipe beside enabled fp8"),
    ],
)
def test_what_the_library_does_not_serve_is_refused(options: Any, said: str) -> None:
    """What it takes and then fails at, or what would differ from eager training."""
    with pytest.raises(ValueError, match=said):
        te(blocks(), [sample()] * 2, **options)


def test_the_library_captures_no_evaluation() -> None:
    """With an order it fails in evaluation mode, by an error that says nothing: refused before."""
    modules = [block.eval() for block in blocks()]
    with pytest.raises(ValueError, match="in training mode, got some in evaluation mode"):
        te(modules, [(torch.ones(4, 8),)] * 2)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_replays_are_in_the_precision_of_their_capture(is_fp8: bool) -> None:
    """In an autocast if captured for fp8, outside of it if not: scales would never move, or the
    replay would not compute as eager training does."""
    library = TeGraphStandIn()
    options = {"enabled": True, "recipe": object()} if is_fp8 else None
    (graphed,) = te(blocks()[:1], [sample()], library=library, options=options)
    library.is_fp8 = is_fp8
    graphed(inputs(1)).sum().backward()
    library.is_fp8 = not is_fp8
    with pytest.raises(RuntimeError, match="an autocast for fp8, as it was captured, got one"):
        graphed(inputs(1))


def test_random_streams_are_registered_with_their_graphs() -> None:
    """Generators of streams are among those of the library during the capture, and only then."""
    library, generator = TeGraphStandIn(), torch.Generator()
    te_callables.make_graphed_callables(
        GraphMaker(Device("cpu"), [generator]), blocks(), [sample()] * 2, library=library
    )
    assert library.registered == ["fsdp_core stream 0"]
    assert library.states == {}


@both
def test_kernels_that_add_to_gradients_are_refused(make: Make) -> None:
    """What is in `main_grad` after a replay, nobody is told of: an inner module is named."""
    modules = blocks()
    modules[1].linear.fuse_wgrad_accumulation = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match="linear without fuse_wgrad_accumulation"):
        make(modules, [sample()] * 2)


def test_delayed_scales_are_refused_by_our_maker() -> None:
    """A module that has computed with delayed scales in a warm-up: no graph of one moves them."""
    modules = blocks()

    def computes(*_: object) -> None:
        state = SimpleNamespace(amax_history=torch.zeros(1))
        vars(modules[1].linear).update(fp8=True, fp8_meta={"scaling_fwd": state})

    hooks: list[CaptureHooks | None] = [None, {"forward_hooks": {0: computes}}]
    with pytest.raises(ValueError, match="linear without delayed scaling of fp8, got it"):
        own(modules, [sample()] * 2, capture_time_hooks=hooks)
