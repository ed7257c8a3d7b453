"""What goes through modules: rows of taps, and contents that are kept."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from harness.recorder import record
from harness.records import KeepSpec
from harness.store.contents import read_contents
from tests.support.records import run_spec
from tests.unit.harness.recorder.recorded import model_of, names, pair, recorded, taps


class Two(nn.Module):
    """Takes and returns two tensors, in one order or the other."""

    swapped = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, more: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        one, two = self.layer(x), more["y"] * 2
        return (two, one) if self.swapped else (one, two)


class Net(nn.Module):
    """A first module of two tensors and a second of one, which may be checkpointed."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.first, self.second, self.how = Two(), nn.Linear(3, 1), how
        self.first.swapped = how == "swapped"

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if self.how == "nested":
            both = checkpoint(self._inner, x.requires_grad_(), y, use_reentrant=True)
        elif "reentrant" in self.how:
            x.requires_grad_()  # of which a reentrant one makes gradients at all
            both = checkpoint(self.first, x, {"y": y}, use_reentrant=self.how == "reentrant")
        else:
            both = self.first(x, {"y": y})
        return self.second(both[0] + both[1])

    def _inner(self, x: Tensor, y: Tensor) -> Any:
        return checkpoint(self.first, x, {"y": y}, use_reentrant=True)


def program(
    y: float = 1.0, microbatches: int = 1, asks: tuple[str, ...] = (), **about: Any
) -> Callable[[], None]:
    def run() -> None:
        model = Net(**about)
        optimizer = SGD(model.parameters(), 0.1)
        if asks:
            record(model, optimizer, taps=asks)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.zeros(2, 3), torch.zeros(2, 3))
            for _ in range(microbatches):
                model(torch.ones(2, 3), torch.full((2, 3), y)).sum().backward()
            optimizer.step()

    return run


ROWS = ("(root):output", "first:output", "second:output")
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[str, ...]]] = {
    # `*` is one level, `**` any number of them; the outermost module is `(root)`.
    "a level": (("*:output",), {}, ROWS),
    "all levels": (("**:output",), {}, (*ROWS, "first.layer:output")),
    # A call a row; evaluation in between is not counted.
    "kinds": (("first:input", "first", "first:gradient", "second:input"), {"microbatches": 2},
              ("first:input", "first:output", "first:gradient", "second:input")),
    # What the script asks for comes to that of the scenario; one of both is one row.
    "the script's": ((), {"asks": ("second:input", "first:gradient")},
                     ("second:input", "first:gradient")),
    "both": (("first", "second:input"), {"asks": ("second:input", "first:gradient")},
             ("first:output", "second:input", "first:gradient")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_modules_name_kind_and_number(name: str, tmp_path: Path) -> None:
    patterns, about, rows = CASES[name]
    records = recorded(program(**about), tmp_path, taps=patterns)
    expected = {f"{row}[{call}]" for row in rows for call in range(about.get("microbatches", 1))}
    assert [taps(records, step).keys() for step in range(2)] == [expected, expected]
    assert not records.problems
    asked = [event.detail["patterns"] for event in records.events if event.name == "taps"]
    assert asked == [list(about["asks"]) for _ in about.keys() & {"asks"}]


def test_a_row_is_of_all_tensors_in_their_order(tmp_path: Path) -> None:
    """The second tensor of a call decides the row as the first does."""
    patterns = ("first:input", "first:output", "first.layer:input")
    ours, other, swapped = (
        taps(recorded(it, tmp_path / str(number), taps=patterns), 0)
        for number, it in enumerate((program(1.0), program(3.0), program(1.0, how="swapped")))
    )
    rows = {"first:input[0]", "first:output[0]"}
    assert {name for name in ours if ours[name] != other[name]} == rows
    assert {name for name in ours if ours[name] != swapped[name]} == {"first:output[0]"}


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grads_with_norm_"])
def test_gradients_before_clipping_are_those_of_tapped_modules(clip: str, tmp_path: Path) -> None:
    """One wrong gradient is in all of them afterwards; a row a parameter, after all calls."""

    def run(factor: float) -> None:
        model = Net()
        optimizer = SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3), torch.ones(2, 3)).sum().backward()
            assert model.second.bias.grad is not None
            model.second.bias.grad *= factor
            held = [p.grad for p in model.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(held)
            if clip == "clip_grad_norm_":
                nn.utils.clip_grad_norm_(iter(model.parameters()), 0.1)
            else:
                nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
            optimizer.step()

    one, other = pair(run, tmp_path, 1.0, 2.0, taps=("second:gradient", "first:input"))
    rows, others = taps(one, 0), taps(other, 0)
    unclipped = ["second.weight:unclipped[0]", "second.bias:unclipped[0]"]
    assert list(rows) == ["first:input[0]", "second:gradient[0]", *unclipped]
    assert [name for name in rows if rows[name] != others[name]] == [unclipped[1]]
    ours, theirs = (records.steps[0].digests["grads"] for records in (one, other))
    assert ours[:32] != theirs[:32]


@pytest.mark.parametrize("how", ["not reentrant", "reentrant", "nested"])
def test_recomputation_is_not_counted(how: str, tmp_path: Path) -> None:
    """A checkpointed module has the rows of one that is not, gradients in the order of calls."""
    patterns = ("**:input", "**:output", "**:gradient")
    plain, again = pair(
        lambda how: program(microbatches=2, how=how)(), tmp_path, "", how, taps=patterns
    )
    assert "first.layer:gradient[1]" in taps(plain, 1)
    assert [taps(plain, step) for step in range(2)] == [taps(again, step) for step in range(2)]
    assert names(plain, "weights") == names(again, "weights")


def test_kept_contents_are_the_tensors_themselves(tmp_path: Path) -> None:
    """Tensors of a step that a run keeps can be read by the harness, under their names; an
    optimizer's numbers as float64."""
    keep = KeepSpec(step=1, names=("first:input*", "grads:second.*", "optim:group0.lr*"))
    spec = run_spec(config={"program": {}, "steps": 2}, keep=keep)
    recorded(program(2.0), tmp_path, taps=("first:input",), keep=keep.to_json(), run=spec.key)
    found = read_contents(tmp_path, spec)
    assert found.problems == ()
    held = {(each.about.name, each.about.part): each for each in found.ranks[0]}
    assert held.keys() == {
        ("first:input[0]", 0), ("first:input[0]", 1), ("grads:second.weight", 0),
        ("grads:second.bias", 0), ("optim:group0.lr", 0),
    }  # fmt: skip
    assert struct.unpack("<d", held["optim:group0.lr", 0].data) == (0.1,)
    assert held["first:input[0]", 1].data == struct.pack("<6f", *[2.0] * 6)
    assert held["first:input[0]", 1].about.shape == (2, 3)


def test_what_a_pipeline_tries_its_stages_on_is_no_call(tmp_path: Path) -> None:
    """torch learns shapes by a pass over memory that nobody has written."""

    def program() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)
        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            schedule.step(torch.ones(4, 3), target=torch.ones(4, 1))
            optimizer.step()
        dist.destroy_process_group()

    records = recorded(program, tmp_path, taps=("**:input",))
    calls = {f"{name}:input[{number}]" for name in ("(root)", "0", "1") for number in range(2)}
    assert [taps(records, step).keys() for step in range(2)] == [calls, calls]
