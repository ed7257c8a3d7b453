"""The module that an exception came from: the innermost one, of its cause."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fsdp_core.device import Device
from fsdp_core.graph.capture import GraphMaker
from fsdp_core.graph.segment import GraphedSegment, Segment
from harness.worker.error_evidence import module_of_error


class _Inner(nn.Module):
    def forward(self, act: Callable[[], None]) -> None:
        act()


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Inner()

    def forward(self, act: Callable[[], None], *, wraps: bool = False) -> None:
        try:
            self.inner(act)
        except ValueError as error:
            if wraps:
                raise RuntimeError("given up") from error
            raise
        raise ValueError("of the outer one")


def _refuse() -> None:
    raise ValueError("refused")


def _pass() -> None:
    pass


def _error_of(stage: nn.ModuleDict, act: Callable[[], None], *, wraps: bool = False) -> Exception:
    with pytest.raises((ValueError, RuntimeError)) as raised:
        stage["outer"](act, wraps=wraps)
    return raised.value


@pytest.mark.parametrize(
    ("act", "wraps", "name"),
    [(_refuse, False, "outer.inner"), (_pass, False, "outer"), (_refuse, True, "outer.inner")],
)
def test_the_innermost_module_of_the_cause_is_named(
    act: Callable[[], None], wraps: bool, name: str
) -> None:
    """Not who passed the exception on, nor who gave up because of it."""
    stage = nn.ModuleDict({"outer": _Outer()})
    assert module_of_error(_error_of(stage, act, wraps=wraps), [stage]) == name


def test_what_no_module_raised_has_no_name() -> None:
    """Neither code beside the model, nor modules of another one."""
    stage = nn.ModuleDict({"outer": _Outer()})
    assert module_of_error(ValueError("never raised"), [stage]) == ""
    assert module_of_error(_error_of(stage, _refuse), [nn.ModuleDict()]) == ""


def test_a_capture_that_is_refused_at_its_end_has_the_name_of_its_segment() -> None:
    """No module runs any more when CUDA finds a stream that was not joined."""
    maker = GraphMaker(Device("cpu"))
    segment = Segment(
        name="outer.inner", function=lambda x: x * 2, samples=(torch.ones(2),), parameters=()
    )
    graphed = GraphedSegment(maker, segment)
    graphed.capture_forward(0)
    with pytest.raises(RuntimeError, match="empty") as raised:
        graphed.capture_forward(0)
    stage = nn.ModuleDict({"outer": _Outer()})
    assert module_of_error(raised.value, [stage]) == "outer.inner"
