"""What a rank notes of the exception that ends it: fields, by attributes and frames."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_core.device import Device
from fsdp_core.errors import TensorError
from fsdp_core.fsdp.api import FSDPModule
from fsdp_core.graph.graph import CapturedFunction, GraphedCallable, GraphMaker, Segment
from fsdp_core.graph.ledger import StaleAddress
from fsdp_core.model.sharding import clip_grads
from fsdp_core.optim import AdamW
from fsdp_core.parallel.pipeline import Pipeline
from fsdp_core.stress.races import Access, Clocks, Race, RaceFound
from fsdp_core.train.trainer import Trainer
from harness.records import RaceEvidence, StreamUse
from harness.worker.error_evidence import evidence_of


def caught(function: Callable[..., Any], *arguments: Any, **how: Any) -> BaseException:
    """What a function raises when it is given what it cannot use."""
    try:
        inspect.unwrap(function)(*arguments, **how)
    except Exception as error:  # noqa: BLE001 - whichever it is
        return error
    raise AssertionError(f"{function} did not raise")


def chained(error: BaseException, function: Callable[..., Any], *arguments: Any) -> BaseException:
    outer = caught(function, *arguments)
    outer.__cause__ = error
    return outer


FORWARD = caught(Pipeline._forward, None, None, None, 0)


@pytest.mark.parametrize(
    ("error", "phase"),
    [
        (FORWARD, "forward"),
        (caught(Pipeline._backward, None, None, None, 0), "backward"),
        (caught(torch.autograd.backward, None), "backward"),
        (caught(AdamW.step, None), "optimizer"),
        (caught(clip_grads, None, None, 1.0), "reduce"),
        (caught(Trainer._require_grads, None), "reduce"),
        (caught(FSDPModule.zero_main_grads, None), "forward"),
        (caught(CapturedFunction.__call__, None), "replay"),
        (caught(Trainer._capture, None, 0), "capture"),
        (chained(FORWARD, Trainer._capture, None, 0), "capture"),
        (chained(FORWARD, Pipeline._backward, None, None, None, 0), "backward"),
        (caught(int, "no number"), ""),
    ],
)
def test_a_phase_is_that_of_the_functions_that_an_exception_passed(
    error: BaseException, phase: str
) -> None:
    """A capture calls what a step calls, a backward may compute a forward again: these count."""
    assert evidence_of(error, [])["phase"] == phase


class _Inner(nn.Module):
    def forward(self, fails: bool) -> None:
        if fails:
            raise ValueError("refused")


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Inner()

    def forward(self, *, fails: bool, wraps: bool = False) -> None:
        try:
            self.inner(fails)
        except ValueError as error:
            if wraps:
                raise RuntimeError("given up") from error
            raise
        raise ValueError("of the outer one")


STAGE = nn.ModuleDict({"outer": _Outer()})


@pytest.mark.parametrize(
    ("error", "stage", "name"),
    [
        (caught(STAGE["outer"], fails=True), STAGE, "outer.inner"),
        (caught(STAGE["outer"], fails=False), STAGE, "outer"),
        (caught(STAGE["outer"], fails=True, wraps=True), STAGE, "outer.inner"),
        (caught(STAGE["outer"], fails=True), nn.ModuleDict(), ""),
        (ValueError("never raised"), STAGE, ""),
    ],
)
def test_the_innermost_module_of_the_cause_is_named(
    error: BaseException, stage: nn.Module, name: str
) -> None:
    """Not who passed the exception on, nor who gave up because of it, nor another model's."""
    assert evidence_of(error, [stage])["module"] == name


def test_a_capture_that_is_refused_at_its_end_has_the_name_of_its_segment() -> None:
    """No module runs any more when CUDA finds a stream that was not joined."""
    samples = (torch.ones(2),)
    segment = Segment(name="outer.inner", function=abs, samples=samples)
    graphed = GraphedCallable(GraphMaker(Device("cpu")), segment)
    graphed.capture_forward()
    error = caught(graphed.capture_forward)
    assert "empty" in str(error)
    assert evidence_of(error, [STAGE])["module"] == "outer.inner"


def test_the_place_is_the_innermost_of_the_cause_outside_of_torch() -> None:
    """Where torch noticed it says nothing; where it was called does."""

    def adds() -> None:
        torch.ones(2) + torch.ones(3)

    place = evidence_of(chained(caught(adds), clip_grads, None, None, 1.0), [])["raised_at"]
    file, function = place.split(" ")
    assert (file.partition(":")[0], function) == ("test_error_evidence.py", "adds")
    inside = evidence_of(caught(torch.nn.functional.linear, None, None), [])["raised_at"]
    assert inside.endswith(" caught")


def test_names_of_tensors_are_the_exceptions_own() -> None:
    """Also those of a cause; an attribute of another library's exception is none of a tensor."""
    stale = StaleAddress(["layers.0.w", "head"], "captured at 0x1, now at 0x2")
    assert evidence_of(stale, [])["tensors"] == ("layers.0.w", "head")
    lost = chained(TensorError("no gradient", "norm.weight"), clip_grads, None, None, 1.0)
    assert evidence_of(lost, [])["tensors"] == ("norm.weight",)
    other = ValueError("layers.0.w")
    other.names = ["layers.0.w"]  # type: ignore[attr-defined]
    assert evidence_of(other, [])["tensors"] == ()


def test_a_race_keeps_both_uses() -> None:
    """Tensor with its unit, streams, and whether gradients are in it."""
    clocks = Clocks()
    main, reduce = clocks.new_stream("main"), clocks.new_stream("reduce")
    earlier = Access(0, 4, reduce, 1, True, "c10d::_reduce_scatter_base_", "a.py:1")
    later = Access(0, 4, main, 2, False, "aten::add", "b.py:2")
    found = evidence_of(RaceFound([Race("grad buffer", "layers.1", earlier, later, True)]), [])
    assert found["race"] == RaceEvidence(
        tensor="grad buffer of unit layers.1", unit="layers.1", is_gradient=True,
        later=StreamUse(operator="aten::add", writes=False, stream="main", place="b.py:2"),
        earlier=StreamUse(
            operator="c10d::_reduce_scatter_base_", writes=True, stream="reduce", place="a.py:1"
        ),
    )  # fmt: skip
