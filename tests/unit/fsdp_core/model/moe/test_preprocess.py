"""Settings of the delivery, and the plan's shapes."""

import pytest
import torch

from fsdp_core.model.moe.dispatcher import Delivery, MoeAxes, Preprocess

EXPERTS, TOKENS, CHOICES = 4, 5, 2


@pytest.mark.parametrize(
    ("factor", "slots", "experts", "capacity"),
    [
        (None, 10, 4, None),
        (1.0, 10, 4, 3),
        (1.0, 8, 4, 2),
        (1.25, 8, 4, 3),
        (0.01, 8, 4, 1),
        (1.1, 100, 10, 11),
        (0.07, 100, 1, 7),
    ],
)
def test_capacity_is_rounded_up(
    factor: float | None, slots: int, experts: int, capacity: int | None
) -> None:
    """ceil(slots * factor / experts), at least one; none without a factor."""
    assert Delivery(capacity_factor=factor).capacity(slots, experts) == capacity


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("factor", [None, 1.0])
def test_shapes_do_not_depend_on_the_routing(
    alone: MoeAxes, dispatcher: str, factor: float | None
) -> None:
    """A plan is int64 of the documented shapes, whatever was chosen."""
    delivery = Delivery(dispatcher=dispatcher, capacity_factor=factor)
    stage = Preprocess(EXPERTS, delivery, alone)
    capacity = delivery.capacity(TOKENS * CHOICES, EXPERTS)
    places = TOKENS * CHOICES if capacity is None else EXPERTS * capacity
    gathers, static = dispatcher == "all_gather", factor is not None
    for experts in (torch.zeros(TOKENS, CHOICES), torch.full((TOKENS, CHOICES), EXPERTS)):
        plan = stage(experts.long(), torch.ones(TOKENS, CHOICES))
        assert {tensor.dtype for tensor in plan} == {torch.int64}
        assert plan.slot_of_place.shape == (places,)
        assert plan.place_of_slot.shape == (TOKENS, CHOICES)
        assert plan.sent.shape == (0 if gathers else 1, EXPERTS)
        assert plan.received.shape == (0 if static and not gathers else 1, EXPERTS)
