"""Sketches of gradients: when they are made, and what they tell of two programs' gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam

from harness.checks.gradients import distance
from tests.unit.harness.recorder.recorded import PARAMS, model_of, pair, recorded, train


@pytest.mark.parametrize(("asked", "steps"), [("none", []), ("first", [0]), ("all", [0, 1])])
def test_gradients_are_sketched_in_the_steps_asked_for(
    tmp_path: Path, asked: str, steps: list[int]
) -> None:
    """Their numbers tell length and distance of the gradients that the optimizer is given."""

    def program() -> None:
        model = model_of()
        train(model, SGD(model.parameters(), 0.0), steps=2)

    def wrong() -> None:
        model = model_of()
        last: Any = model[1]
        last.weight.register_hook(lambda grad: 3 * grad)
        train(model, SGD(model.parameters(), 0.0), steps=2)

    left, right = (
        recorded(each, tmp_path / each.__name__, sketch=asked) for each in (program, wrong)
    )
    assert [step.step for step in left.steps if step.sketches] == steps
    model = model_of()
    for ours, theirs in zip(left.steps, right.steps, strict=True):
        for name, numbers in ours.sketches.items():
            assert numbers[0] == dict(model.named_parameters())[name].numel()
            gap = distance(numbers, theirs.sketches[name])
            length = 2 * numbers[1] if name == "1.weight" else 0.0
            assert gap == pytest.approx(length, rel=0.6, abs=1e-12)
    assert not steps or set(left.steps[0].sketches) == set(PARAMS)


@pytest.mark.parametrize("fused", [False, True])
def test_the_first_step_that_is_taken_is_sketched(fused: bool, tmp_path: Path) -> None:
    """One that a GradScaler skips has gradients that tell nothing."""

    def program() -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-127)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 3)).square().mean() * 8).backward()
            scaler.step(optimizer)
            scaler.update()

    steps = recorded(program, tmp_path, sketch="first").steps
    assert [bool(step.skipped) for step in steps] == [True, False, False]
    assert [bool(step.sketches) for step in steps] == [False, True, False]


@pytest.mark.parametrize("fused", [False, True])
def test_sketches_are_of_gradients_without_a_scale(tmp_path: Path, *, fused: bool) -> None:
    """Fused optimizers get scaled gradients from a GradScaler, others get them unscaled."""

    def program(scale: float) -> None:
        model = model_of()
        optimizer = Adam(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(model(torch.ones(2, 3)).square().mean()).backward()
        scaler.step(optimizer)

    left, right = pair(program, tmp_path, 1.0, 1024.0, sketch="first")
    for name, numbers in left.steps[0].sketches.items():
        assert right.steps[0].sketches[name] == pytest.approx(numbers)
