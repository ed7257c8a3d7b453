"""What goes through modules: rows of taps, and contents that are kept."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from harness.recorder import record
from harness.records import KeepSpec, RunSpec
from harness.store.contents import read_contents
from tests.unit.harness.recorder.recorded import names, recorded, taps


class Two(nn.Module):
    """Takes and returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, more: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.layer(x), more["y"] * 2


class Net(nn.Module):
    """A first module of two tensors and a second of one, which may be checkpointed."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.first, self.second, self.how = Two(), nn.Linear(3, 1), how

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if self.how == "nested":
            pair = checkpoint(self._inner, x.requires_grad_(), y, use_reentrant=True)
        elif self.how:
            x.requires_grad_()  # of which a reentrant one makes gradients at all
            pair = checkpoint(self.first, x, {"y": y}, use_reentrant=self.how == "reentrant")
        else:
            pair = self.first(x, {"y": y})
        return self.second(pair[0] + pair[1])

    def _inner(self, x: Tensor, y: Tensor) -> Any:
        return checkpoint(self.first, x, {"y": y}, use_reentrant=True)


def program(y: float = 1.0, microbatches: int = 1, **about: Any) -> Callable[[], None]:
    def run() -> None:
        model = Net(**about)
        optimizer = SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.zeros(2, 3), torch.zeros(2, 3))
            for _ in range(microbatches):
                model(torch.ones(2, 3), torch.full((2, 3), y)).sum().backward()
            optimizer.step()

    return run


def test_rows_have_the_modules_name_kind_and_number(tmp_path: Path) -> None:
    """A call a row, inputs, outputs and gradients; evaluation in between is not counted."""
    patterns = ("first:input", "first", "first:gradient", "second:input")
    records = recorded(program(microbatches=2), tmp_path, taps=patterns)
    for step in range(2):
        assert taps(records, step).keys() == {
            f"{name}[{call}]"
            for name in ("first:input", "first:output", "first:gradient", "second:input")
            for call in range(2)
        }
    assert not records.problems


def test_a_row_is_of_all_tensors(tmp_path: Path) -> None:
    """The second tensor of a call decides the row as the first does."""
    patterns = ("first:input", "first:output", "first.layer:input")
    first = recorded(program(1.0), tmp_path / "a", taps=patterns)
    second = recorded(program(3.0), tmp_path / "b", taps=patterns)
    ours, theirs = taps(first, 0), taps(second, 0)
    assert {name for name in ours if ours[name] != theirs[name]} == {
        "first:input[0]", "first:output[0]"
    }  # fmt: skip


@pytest.mark.parametrize("scenario", [(), ("first", "second:input")])
def test_a_script_may_ask_for_taps(scenario: tuple[str, ...], tmp_path: Path) -> None:
    """Patterns of `record` come to those of the scenario; one of both is one row."""

    def run() -> None:
        model = Net()
        optimizer = SGD(model.parameters(), 0.1)
        record(model, optimizer, taps=["second:input", "first:gradient"])
        for _ in range(2):
            model(torch.ones(2, 3), torch.ones(2, 3)).sum().backward()
            optimizer.step()

    records = recorded(run, tmp_path, taps=scenario)
    expected = {"second:input[0]", "first:gradient[0]"}
    expected |= {"first:output[0]"} if scenario else set()
    assert [taps(records, step).keys() for step in range(2)] == [expected, expected]
    (event,) = (each for each in records.events if each.name == "taps")
    assert event.detail == {"patterns": ["second:input", "first:gradient"]}


@pytest.mark.parametrize("pattern", ["first:inputs", "first:", "", "a b", ".first"])
def test_what_is_no_pattern_is_refused(pattern: str, tmp_path: Path) -> None:
    """A script's mistake ends it where it is made, as a scenario's is refused."""
    records = recorded(lambda: record(taps=pattern), tmp_path, code=1)
    assert records.error is not None
    assert records.error.type == "ValueError"
    assert repr(pattern) in records.error.message


@pytest.mark.parametrize("how", ["not reentrant", "reentrant", "nested"])
def test_recomputation_is_not_counted(how: str, tmp_path: Path) -> None:
    """A checkpointed module has the rows of one that is not, gradients in the order of calls."""
    patterns = ("**:input", "**:output", "**:gradient")
    plain = recorded(program(microbatches=2), tmp_path / "a", taps=patterns)
    again = recorded(program(microbatches=2, how=how), tmp_path / "b", taps=patterns)
    assert "first.layer:gradient[1]" in taps(plain, 1)
    for step in range(2):
        assert taps(plain, step) == taps(again, step)
    assert names(plain, "weights") == names(again, "weights")


def test_a_root_has_a_name_and_wildcards_mean_levels(tmp_path: Path) -> None:
    """`*` is one level, `**` any number of them; the outermost module is `(root)`."""
    one = recorded(program(), tmp_path / "a", taps=("*:output",))
    every = recorded(program(), tmp_path / "b", taps=("**:output",))
    level = {"(root):output[0]", "first:output[0]", "second:output[0]"}
    assert taps(one, 0).keys() == level
    assert taps(every, 0).keys() == level | {"first.layer:output[0]"}


def test_a_compiled_modules_calls_are_seen_at_its_wrapper(tmp_path: Path) -> None:
    """torch.compile hides calls inside of what it compiles, not that of the whole."""

    def run() -> None:
        model = nn.Sequential(nn.Linear(3, 1))
        whole: Any = torch.compile(model, backend="eager", fullgraph=True)
        optimizer = SGD(whole.parameters(), 0.1)
        for _ in range(2):
            whole(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    records = recorded(run, tmp_path, taps=("*:output",))
    assert "(root):output[0]" in taps(records, 1)


def test_kept_contents_are_the_tensors_themselves(tmp_path: Path) -> None:
    """Tensors of a step that a run keeps can be read by the harness, under their names."""
    keep = KeepSpec(step=1, names=("first:input*", "grads:second.*"))
    spec = RunSpec(
        config={"program": {}, "steps": 2}, device="cpu", world_size=1, timeout_s=1.0, keep=keep
    )
    recorded(program(2.0), tmp_path, taps=("first:input",), keep=keep.to_json(), run=spec.key)
    found = read_contents(tmp_path, spec)
    assert found.problems == ()
    held = {(each.about.name, each.about.part): each for each in found.ranks[0]}
    assert held.keys() == {
        ("first:input[0]", 0), ("first:input[0]", 1), ("grads:second.weight", 0),
        ("grads:second.bias", 0),
    }  # fmt: skip
    assert held["first:input[0]", 1].data == struct.pack("<6f", *[2.0] * 6)
    assert held["first:input[0]", 1].about.shape == (2, 3)


class Pair(nn.Module):
    """Returns two tensors, in one order or the other."""

    def __init__(self, *, swapped: bool) -> None:
        super().__init__()
        self.layer, self.swapped = nn.Linear(3, 3), swapped

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.layer(x), x * 2
        return (two, one) if self.swapped else (one, two)


def of_pair(*, swapped: bool) -> Callable[[], None]:
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
