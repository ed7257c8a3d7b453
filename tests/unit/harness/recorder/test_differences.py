"""Programs that differ in one thing have records that differ in it; a failure is on record."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from harness.recorder import record
from harness.recorder.observer import Observer
from tests.unit.harness.recorder.recorded import all_digests, digests, losses, recorded, taps

Program = Callable[[], None]


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def number_of_a_group(value: float) -> None:
    """One that decides nothing yet."""
    model = model_of()
    optimizer = SGD(model.parameters(), 0.1)
    optimizer.param_groups[0]["of_a_schedule"] = value
    model(torch.ones(3)).sum().backward()
    optimizer.step()


def weights_that_an_idle_optimizer_holds(value: float) -> None:
    """They change by hand, after the pass."""
    first, second = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, idle = (SGD(each.parameters(), 0.1) for each in (first, second))
    first(torch.ones(3)).sum().backward()
    with torch.no_grad():
        second.weight.fill_(value)
    optimizer.step()
    idle.zero_grad()


def gradient_in_an_attribute(value: float) -> None:
    """As TransformerEngine's optimizers have it."""
    model = model_of()
    optimizer = SGD(model.parameters(), 0.1)
    model(torch.ones(3)).sum().backward()
    for param in model.parameters():
        param.decoupled_grad = torch.full_like(param, value)  # type: ignore[attr-defined]
        param.grad = None
    optimizer.step()


def imaginary_part(value: float) -> None:
    """Of a parameter; no loss has it."""
    model = model_of()
    model.register_parameter(
        "phase", nn.Parameter(torch.complex(torch.ones(2), torch.full((2,), value)))
    )
    optimizer = SGD(model.parameters(), 0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()


def seed_of_numpy(value: float) -> None:
    """Nothing is drawn."""
    np.random.seed(int(value))
    number_of_a_group(0.0)


@pytest.mark.parametrize(
    "program",
    [
        number_of_a_group, weights_that_an_idle_optimizer_holds, gradient_in_an_attribute,
        imaginary_part, seed_of_numpy,
    ],
)  # fmt: skip
def test_what_differs_is_in_the_digests(program: Callable[[float], None], tmp_path: Path) -> None:
    """And in nothing else: equal programs have equal ones."""
    first, again, other = (
        all_digests(recorded(lambda value=value: program(value), tmp_path / folder))  # type: ignore[misc]
        for folder, value in {"a": 1.0, "b": 1.0, "c": 2.0}.items()
    )
    assert first == again
    assert first != other


def test_the_initial_state_is_recorded_however_seldom_digests_are(tmp_path: Path) -> None:
    """It is before all steps, whichever have digests."""
    records = recorded(lambda: number_of_a_group(0.0), tmp_path, every=3)
    assert digests(records, "weights", -1)


def test_a_loss_is_as_it_was_told(tmp_path: Path) -> None:
    """The program may reuse the tensor before it is read."""

    def program() -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)
        recorder = record(model, optimizer)
        loss = model(torch.ones(3)).sum()
        loss.backward()
        told = torch.tensor(5.0)
        recorder.microbatch(told)
        told.zero_()
        optimizer.step()

    (step,) = recorded(program, tmp_path).steps
    assert losses(step) == [5.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tensors_that_are_not_finite_are_named(value: float, tmp_path: Path) -> None:
    """A single element is enough."""

    def program() -> None:
        model = nn.Linear(3, 1)
        optimizer = SGD(model.parameters(), 0.0)
        model(torch.ones(3)).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad[0, 1] = value
        optimizer.step()

    (step,) = recorded(program, tmp_path).steps
    assert step.nonfinite["grads"] == ("weight",)


class Pair(nn.Module):
    """Returns two tensors, in one order or the other."""

    def __init__(self, *, swapped: bool) -> None:
        super().__init__()
        self.layer, self.swapped = nn.Linear(3, 3), swapped

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.layer(x), x * 2
        return (two, one) if self.swapped else (one, two)


def of_pair(*, swapped: bool) -> Program:
    def run() -> None:
        model: Any = nn.ModuleDict({"pair": Pair(swapped=swapped)})
        optimizer = SGD(model.parameters(), 0.1)
        sum(each.sum() for each in model["pair"](torch.ones(2, 3))).backward()
        optimizer.step()

    return run


def test_the_order_of_a_modules_results_counts(tmp_path: Path) -> None:
    """Two tensors of one shape that change places are another result."""
    plain, swapped = (
        taps(recorded(of_pair(swapped=it), tmp_path / str(it), taps=("pair",)), 0)
        for it in (False, True)
    )
    assert plain.keys() == swapped.keys() != set()
    assert plain != swapped


def test_no_memory_is_no_crash(tmp_path: Path) -> None:
    """As PyTorch's allocator says it."""

    def program() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    records = recorded(program, tmp_path, code=1)
    assert records.error is not None
    assert records.error.what == "oom"


class Broken(dict[str, Tensor]):
    """A group of state that cannot be read."""

    def items(self) -> Any:
        """No tensors."""
        raise RuntimeError("no such state")


@pytest.mark.parametrize("where", ["at the end", "in a step"])
def test_a_recorder_that_fails_gives_no_whole_run(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program goes on and ends well; its records have the error, and no end."""
    if where == "at the end":
        monkeypatch.setattr(Observer, "finish", lambda _: Broken().items())

    def program() -> None:
        if where == "in a step":
            record().state("own", Broken())
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.ones(3)).sum().backward()
            optimizer.step()

    records = recorded(program, tmp_path)
    assert records.error is not None
    assert (records.error.what, records.error.type) == ("unsupported", "RuntimeError")
    assert records.end is None
