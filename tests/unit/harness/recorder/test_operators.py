"""Operators of one call of a module, and the first that does otherwise in another run."""

import inspect
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

from fsdp_core.graph.digest import digest_hex, digest_tensors, empty_rows
from harness.bisect.found import Operator
from harness.bisect.operators import first_operator
from harness.recorder import record
from harness.records import KeepSpec, OperatorCalls, operators_in
from harness.store.contents import read_contents
from tests.support.records import run_spec
from tests.unit.harness.recorder.recorded import model_of, names, pair, recorded, taps


class Sum(torch.autograd.Function):
    """Adds, and may double a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x + y  # in Sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], grads[0] * ctx.factor, None  # of Sum


class Block(nn.Module):
    """A softmax of a linear layer on a residual stream, which may go wrong."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = torch.softmax(y, 0 if self.how == "dim" else -1)  # softmax
        if self.how in ("room", "other room"):
            # Memory that holds what was there before, of which a part is written and used.
            room = torch.empty(4096)
            room.numpy()[:] = len(self.how)
            late = torch.empty(4)
            late.untyped_storage().resize_(0)
            late.untyped_storage().resize_(16)  # as FSDP2's weights, which are filled later
            late.numpy()[:] = len(self.how)
            y = y + late.view(2, 2).fill_(1).sum()
            room[:4] = y[0].detach()
            y = y + room.mul_(1)[:4].sum()
        if self.how.isdigit():
            torch.manual_seed(int(self.how))
            y = nn.functional.dropout(y, 0.5)  # drawn
        if self.how == "scaled":
            y = y.clone().mul_(3)  # scaled
        if self.how == "copy":
            y = y.clone().view(-1).view(y.shape)
        if self.how == "mul":
            return x * y  # mul
        if self.how == "dropped":
            return y
        if self.how == "exp":
            return (x + y).exp()  # exp
        return Sum.apply(x, y, 2.0 if self.how == "backward" else 1.0)  # type: ignore[no-any-return]


def line_of(text: str) -> str:
    lines, first = inspect.getsourcelines(inspect.getmodule(Block))  # type: ignore[arg-type]
    (number,) = (n for n, line in enumerate(lines, max(first, 1)) if line.endswith(f"# {text}\n"))
    return f"test_operators.py:{number}"


def program(how: str) -> Callable[[], None]:
    def run() -> None:
        model = nn.Sequential(nn.Linear(4, 4), Block(how))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2):
            optimizer.zero_grad()
            if step and how == "weight":
                model.get_parameter("1.up.weight").data[0, 0] += 1
            for micro in range(2):
                x = torch.arange(8.0).view(2, 4) + micro + step
                model(x).square().mean().backward()
            optimizer.step()

    return run


def seen(how: str, folder: Path, **spec: Any) -> OperatorCalls:
    asked = {"step": 0, "module": "1", "call": 1, "backward": False, "kept": None} | spec
    return operators_in(recorded(program(how), folder, operators=asked))


def first(how: str, folder: Path, **spec: Any) -> Operator | None:
    pair = (seen(each, folder / str(n), **spec).calls for n, each in enumerate(("", how)))
    return first_operator(*pair)


@pytest.mark.parametrize(
    ("how", "ours", "theirs", "line"),
    [("mul", "aten.add.Tensor", "aten.mul.Tensor", "mul"),
     ("dim", "aten._softmax.default", "aten._softmax.default", "softmax"),
     ("exp", None, "aten.exp.default", "exp"),
     ("dropped", "aten.add.Tensor", None, "in Sum")],
)  # fmt: skip
def test_a_wrong_operator_is_named_by_its_line(
    tmp_path: Path, how: str, ours: str | None, theirs: str | None, line: str
) -> None:
    """In both runs, with equal inputs, in the call that was asked about."""
    found = first(how, tmp_path)
    assert found is not None
    sides = [each and each.operator for each in (found.reference, found.candidate)]
    assert (sides, found.outside) == ([ours, theirs], ())
    named = found.candidate or found.reference
    assert named is not None
    assert named.line == line_of(line)
    if how == "dim":
        assert [c and c.settings[:6] for c in (found.reference, found.candidate)] == [
            "dim=-1", "dim=0,",
        ]  # fmt: skip


@pytest.mark.parametrize(("how", "line", "backward"),
                         [("scaled", "scaled", False), ("", "softmax", True)])  # fmt: skip
def test_the_tensors_of_one_operator_are_kept_as_they_were_digested(
    tmp_path: Path, how: str, line: str, backward: bool
) -> None:
    """What it took before it ran, what it gave after; called by the frames of the program."""
    calls = seen(how, tmp_path, backward=backward).calls
    call = [call for call in calls if call.line == line_of(line)][-1]
    assert [frame.rpartition(" ")[2] for frame in call.stack[-2:]] == [
        "program.<locals>.run", "Block.forward",
    ]  # fmt: skip
    assert len(call.stack) <= 8
    asked = {"step": 0, "module": "1", "call": 1, "backward": backward, "kept": call.number}
    keep = KeepSpec(step=0, names=("operator:*",))
    spec = run_spec(config={"program": {}, "steps": 2}, keep=keep)
    recorded(program(how), tmp_path / "2", operators=asked, keep=keep.to_json(), run=spec.key)
    found = read_contents(tmp_path / "2", spec)
    assert found.problems == ()
    texts = dict[str, str]()
    for each in found.ranks[0]:
        tensor, rows = (
            torch.frombuffer(bytearray(each.data), dtype=torch.float32),
            empty_rows(1, "cpu"),
        )
        digest_tensors([tensor.view(each.about.shape)], rows)
        texts[each.about.name] = digest_hex(rows)[0]
    expected = {f"operator:input {n}": text for n, text in enumerate(call.inputs)}
    expected |= {f"operator:output {n}": text for n, text in enumerate(call.outputs)}
    assert texts == expected
    assert call.outputs[0] not in call.inputs


def test_of_a_wrong_input_it_is_said_where_it_came_from(tmp_path: Path) -> None:
    """A weight of the module, or what the module was given: no operator of the call made it."""
    found = first("weight", tmp_path, step=1)
    assert found is not None
    assert found.outside == ("up.weight",)
    found = first("weight", tmp_path / "two", step=1, call=0, module="1.up")
    assert found is not None
    assert found.outside == ("weight",)


def test_other_random_numbers_are_of_the_operator_that_drew_them(tmp_path: Path) -> None:
    """Not of the one that took them."""
    found = first_operator(*(seen(how, tmp_path / how).calls for how in ("1", "2")))
    assert found is not None
    assert found.candidate is not None
    assert found.candidate.line == line_of("drawn")
    assert (found.candidate.operator, found.outside) == ("aten.bernoulli_.float", ())


def test_a_backward_pass_has_the_lines_of_its_forward_pass(tmp_path: Path) -> None:
    """Operators of the call's own nodes alone; of a Python function's its own lines."""
    found = first("backward", tmp_path, backward=True)
    assert found is not None
    assert found.candidate is not None
    assert (found.candidate.operator, found.candidate.line) == (
        "aten.mul.Tensor",
        line_of("of Sum"),
    )
    calls = seen("", tmp_path / "two", backward=True, call=None).calls
    lines = {call.operator: call.line for call in calls}
    assert lines["aten._softmax_backward_data.default"] == line_of("softmax")
    assert "aten.pow.Tensor_Scalar" not in lines  # of the loss
    assert not any("hooks.py" in line for line in lines.values())
    assert sum(call.operator == "aten._softmax_backward_data.default" for call in calls) == 2


def test_what_makes_no_other_value_is_not_at_fault(tmp_path: Path) -> None:
    """The same program, and one with copies and views in addition; nothing outside of the call."""
    assert first("", tmp_path) is None
    assert first("copy", tmp_path / "two") is None
    rooms = (seen(how, tmp_path / how).calls for how in ("room", "other room"))
    assert first_operator(*rooms) is None
    held = seen("", tmp_path / "three")
    assert held.num_calls == 2
    assert len(held.calls) == len([call for call in held.calls if call.line])
    assert not seen("", tmp_path / "four", call=7).calls


# --- what goes through modules: rows of taps, and contents that are kept --------------------------


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


def tapped(
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
    records = recorded(tapped(**about), tmp_path, taps=patterns)
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
        for number, it in enumerate((tapped(1.0), tapped(3.0), tapped(1.0, how="swapped")))
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
        lambda how: tapped(microbatches=2, how=how)(), tmp_path, "", how, taps=patterns
    )
    assert "first.layer:gradient[1]" in taps(plain, 1)
    assert [taps(plain, step) for step in range(2)] == [taps(again, step) for step in range(2)]
    assert names(plain, "weights") == names(again, "weights")


def test_kept_contents_are_the_tensors_themselves(tmp_path: Path) -> None:
    """Tensors of a step that a run keeps can be read by the harness, under their names; an
    optimizer's numbers as float64."""
    keep = KeepSpec(step=1, names=("first:input*", "grads:second.*", "optim:group0.lr*"))
    spec = run_spec(config={"tapped": {}, "steps": 2}, keep=keep)
    recorded(tapped(2.0), tmp_path, taps=("first:input",), keep=keep.to_json(), run=spec.key)
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

    def tapped() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)
        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            schedule.step(torch.ones(4, 3), target=torch.ones(4, 1))
            optimizer.step()
        dist.destroy_process_group()

    records = recorded(tapped, tmp_path, taps=("**:input",))
    calls = {f"{name}:input[{number}]" for name in ("(root)", "0", "1") for number in range(2)}
    assert [taps(records, step).keys() for step in range(2)] == [calls, calls]
