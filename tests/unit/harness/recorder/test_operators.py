"""Operators of one call of a module, and the first that does otherwise in another run."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_core.graph.digest import digest_hex, digest_tensors, empty_rows
from harness.bisect.found import Operator
from harness.bisect.operators import first_operator
from harness.records import KeepSpec, OperatorCalls, operators_in
from harness.store.contents import read_contents
from tests.support.records import run_spec
from tests.unit.harness.recorder.recorded import recorded


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
