"""Losses, norms and skipped steps: with the bits that the program had, before they are scaled."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from harness.checks import exact
from harness.recorder import record
from harness.records import RunOutcome, RunResult, RunSpec
from tests.unit.harness.recorder.recorded import digests, losses, recorded


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def bits(value: float) -> str:
    return struct.pack(">f", value).hex()


VALUES: dict[str, tuple[Callable[[float], Any], str]] = {
    "float64": (lambda value: torch.tensor(value, dtype=torch.float64), ">d"),
    "a Python float": (float, ">d"),
    "a NumPy float64": (np.float64, ">d"),
    "float32": (torch.tensor, ">f"),
    "a NumPy float32": (np.float32, ">d"),
}
_INT = 2**24 + 1


@pytest.mark.parametrize("value", [1 + 2.0**-50, 1e300, float("nan"), float(_INT)])
@pytest.mark.parametrize("kind", VALUES)
def test_losses_and_norms_have_the_bits_that_the_program_had(
    kind: str, value: float, tmp_path: Path
) -> None:
    """Nothing is rounded before it is compared: 64 bits stay 64 bits, and finite stays finite."""
    make, form = VALUES[kind]
    if "32" in kind:
        value = float(torch.tensor(value))

    def program() -> None:
        recorder = record(model_of())
        with recorder.step():
            recorder.microbatch(make(value))
            recorder.grad_norm(make(value))

    (step,) = recorded(program, tmp_path).steps
    for found in (step.loss, *step.microbatch_losses, step.grad_norm):
        assert found is not None
        assert found.bits == struct.pack(form, value).hex()
        assert found.value == (value if np.isfinite(value) else None)


@pytest.mark.parametrize("norm", [_INT, torch.tensor(_INT), np.int64(_INT)])
def test_a_whole_number_is_a_float64(norm: Any, tmp_path: Path) -> None:
    """More digits than a float32 has are kept."""

    def program() -> None:
        recorder = record(model_of())
        with recorder.step():
            recorder.grad_norm(norm)

    (step,) = recorded(program, tmp_path).steps
    assert step.grad_norm is not None
    assert step.grad_norm.value == _INT


def test_a_float64_root_of_a_backward_pass_is_not_rounded(tmp_path: Path) -> None:
    """Hooks record what the script's own lines would, the mean in the wider of two formats too."""
    wide = 1 + 2.0**-50

    def program() -> None:
        model = nn.Linear(3, 1).double()
        optimizer = SGD(model.parameters(), 0.0)
        root = model(torch.ones(3).double()).sum() * 0
        (root + wide).backward(retain_graph=True)
        (root.float() + 1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    (step,) = recorded(program, tmp_path).steps
    assert losses(step) == [wide, 1.0]
    assert [len(loss.bits) for loss in step.microbatch_losses] == [16, 8]
    assert step.loss is not None
    assert step.loss.value == (wide + 1.0) / 2
    assert step.grad_norm is not None
    assert len(step.grad_norm.bits) == 16


def test_bf16_losses_are_exact_and_a_nan_keeps_its_bits(tmp_path: Path) -> None:
    """A bfloat16 loss is recorded as the float32 of the same value; NaN has no value, but bits."""

    def program() -> None:
        model = nn.Linear(1, 1).bfloat16()
        optimizer = SGD(model.parameters(), 0.0)
        for value in (0.1, float("nan")):
            loss = model(torch.ones(1).bfloat16()).sum() * 0 + value
            loss.backward()
            optimizer.step()

    first, second = recorded(program, tmp_path).steps
    assert first.loss is not None
    assert first.loss.value == float(torch.tensor(0.1).bfloat16())
    assert second.loss is not None
    assert (second.loss.finite, second.loss.value) == (False, None)


CLIPS: dict[str, Callable[[Any], Any]] = {
    "by module": lambda params: torch.nn.utils.clip_grad_norm_(params, 0.5),
    "of a generator": lambda params: torch.nn.utils.clip_grad_norm_(iter(list(params)), 0.5),
    "by its file": lambda params: torch.nn.utils.clip_grad.clip_grad_norm_(params, 0.5),
    "by two calls": lambda params: torch.nn.utils.clip_grads_with_norm_(
        params, 0.5, torch.nn.utils.get_total_norm([p.grad for p in params])
    ),
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_the_norm_is_that_of_clipping(clip: Callable[[Any], Any], tmp_path: Path) -> None:
    """The norm before clipping is recorded, however the program calls torch for it."""

    def program() -> None:
        model = nn.Linear(3, 1, bias=False)
        optimizer = SGD(model.parameters(), 0.1)
        model(torch.tensor([2.0, 3.0, 6.0])).sum().backward()
        clip(list(model.parameters()))
        optimizer.step()

    (step,) = recorded(program, tmp_path).steps
    assert step.grad_norm is not None
    assert step.grad_norm.value == 7.0


def test_the_norm_of_a_name_imported_after_the_start(tmp_path: Path) -> None:
    """`from torch.nn.utils import clip_grad_norm_` gives the function that is recorded."""

    def program() -> None:
        from torch.nn.utils import clip_grad_norm_

        model = nn.Linear(2, 1, bias=False)
        optimizer = SGD(model.parameters(), 0.1)
        model(torch.tensor([3.0, 4.0])).sum().backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    (step,) = recorded(program, tmp_path).steps
    assert step.grad_norm is not None
    assert step.grad_norm.value == 5.0


def scaled(explicit: bool, num_optimizers: int) -> None:
    """Three steps under a scaler; the gradient of the second overflows."""
    model = model_of()
    optimizers = [SGD(part.parameters(), 0.1) for part in model][:num_optimizers]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    recorder = record(model, optimizers)
    for factor in (1.0, float("inf"), 1.0):

        def step(factor: float = factor) -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(model(torch.ones(3)).sum()).backward()
            for param in model.parameters():
                assert param.grad is not None
                param.grad *= factor
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()

        if explicit:
            with recorder.step():
                step()
        else:
            step()


@pytest.mark.parametrize("num_optimizers", [1, 2])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_step_that_a_scaler_skips(explicit: bool, num_optimizers: int, tmp_path: Path) -> None:
    """Only the step that no optimizer took is recorded as skipped, and its weights stay."""
    records = recorded(lambda: scaled(explicit, num_optimizers), tmp_path)
    assert [bool(step.skipped) for step in records.steps] == [False, True, False]
    assert digests(records, "weights", 0) == digests(records, "weights", 1)
    assert digests(records, "weights", 1) != digests(records, "weights", 2)


def overflowing(loss_of: Callable[[Tensor], Tensor], scaler: Any = None) -> Callable[[], None]:
    """Two steps under a scaler whose first scale is too large for the loss, as is its habit."""

    def run() -> None:
        model = nn.Linear(3, 1)
        optimizer = SGD(model.parameters(), 0.1)
        made = (scaler or torch.amp.GradScaler)("cpu", init_scale=2.0**127, backoff_factor=1e-30)
        for _ in range(2):
            optimizer.zero_grad()
            loss = loss_of(model(torch.ones(3)).sum())
            made.scale(loss).backward()
            made.step(optimizer)
            made.update()

    return run


class OwnScaler(torch.amp.GradScaler):
    """Scales by itself, as FSDP's does."""

    def scale(self, outputs: Any) -> Any:
        super().scale(torch.ones(1))  # makes the scale
        return outputs * self._scale


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, OwnScaler])
@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_a_scaled_loss_is_recorded_as_it_was(scaler: Any, factor: float, tmp_path: Path) -> None:
    """A scale that is too large is no infinite loss; a loss that is infinite before it is one."""

    def loss_of(out: Tensor) -> Tensor:
        return ((out - out.detach()) * 4 + 3.0) * factor

    records = recorded(overflowing(loss_of, scaler), tmp_path)
    first, second = records.steps
    assert (bool(first.skipped), bool(second.skipped)) == (True, factor > 1)
    (loss,) = first.microbatch_losses
    assert loss.bits == bits(3.0 * factor)
    assert first.loss == loss
    spec = RunSpec(config={"program": {}, "steps": 2}, device="cpu", world_size=1, timeout_s=1.0)
    outcome = RunOutcome(key=spec.key, what="", message="", culprit_rank=None,
                         started_unix_s=0.0, wall_s=1.0, ranks=())  # fmt: skip
    run = RunResult(spec=spec, outcome=outcome, ranks=(records,))
    answer = exact.finite(run, run)
    assert answer.outcome == ("failed" if factor > 1 else "passed")
    if factor > 1:
        assert answer.difference is not None
        assert answer.difference.quantity == "loss"


def test_losses_that_are_scaled_together_are_each_their_own(tmp_path: Path) -> None:
    """A list of losses comes back as a list, of which each may be a root."""

    def program() -> None:
        model = nn.Linear(3, 1)
        optimizer = SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        outputs = [model(torch.ones(3)).sum() * 0 + value for value in (1.0, 2.0)]
        for loss in scaler.scale(outputs):
            loss.backward(retain_graph=True)
        scaler.step(optimizer)

    (step,) = recorded(program, tmp_path).steps
    assert losses(step) == [1.0, 2.0]


def test_losses_of_one_backward_pass_are_all_recorded(tmp_path: Path) -> None:
    """`torch.autograd.backward` takes several."""

    def program() -> None:
        model = nn.Linear(3, 2, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, second = model(torch.ones(3)) * torch.tensor([1.0, 2.0])
        torch.autograd.backward((first, second))
        optimizer.step()

    (step,) = recorded(program, tmp_path).steps
    assert set(losses(step)) == {3.0, 6.0}
