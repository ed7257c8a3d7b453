"""What a rank says that it launched, of a step that is looked at."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.worker.launched import EVENT, Launched


@pytest.fixture
def trainer() -> Callable[..., Any]:
    """A trainer's configuration and device, on the CPU."""

    def make(compile: tuple[str, ...] = ()) -> Any:
        return types.SimpleNamespace(
            config=types.SimpleNamespace(compile=compile, steps=3),
            device=types.SimpleNamespace(is_cuda=False),
        )

    return make


def _step(launched: Launched, step: int) -> None:
    with launched.counting(step):
        weight = torch.ones(2, 2, requires_grad=True)
        (weight @ weight).sum().backward()


def test_operators_of_the_first_step_are_counted(trainer: Callable[..., Any]) -> None:
    """The product is there once, its two gradients twice, and later steps count for nothing."""
    launched = Launched(trainer(), wanted=True)
    for step in range(3):
        _step(launched, step)
    event = launched.event(1, 2)
    assert (event.name, event.rank, event.step) == (EVENT, 1, 2)
    assert event.detail["operators"]["aten.mm.default"] == 3
    assert set(event.detail) == {"operators"}


def test_who_is_not_asked_counts_nothing(trainer: Callable[..., Any]) -> None:
    """Neither a plain run nor compiled parts are looked into."""
    for launched in (
        Launched(trainer(), wanted=False),
        Launched(trainer(compile=("attn",)), wanted=True),
    ):
        _step(launched, 0)
        assert launched.counts == {}
