"""What a rank gives to a collective: what it brings along, not what it will be given."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.records import GivenCall, RankRecords, given_in
from harness.worker.given import Given

_RECORDS = RankRecords(
    rank=1, start=None, steps=(), events=(), error=None, end=None, problems=()
)  # fmt: skip


def _operator(name: str, *arguments: str) -> Any:
    names = [SimpleNamespace(name=argument) for argument in arguments]
    return SimpleNamespace(_schema=SimpleNamespace(name=name, arguments=names))


GATHER = _operator("c10d::_allgather_base_", "output_tensor", "input_tensor", "process_group")
SUM = _operator("c10d::allreduce_", "tensors", "process_group")


def _taken(func: Any, *args: Any) -> GivenCall:
    given = Given()
    given.take(func, (*args, "0"), "layers.1", (0, 1))
    event = given.event(1, 3)
    assert given.event(1, 4).detail == {"calls": []}
    records = RankRecords(**{**vars(_RECORDS), "events": (event,)})
    assert given_in(records, 4) == ()
    (call,) = given_in(records, 3)
    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_is_brought_along_decides_the_digest(dtype: torch.dtype) -> None:
    """Every bit of the input counts, in any dtype and layout; what the output holds does not."""
    one, other = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)
    call = _taken(GATHER, one, other)
    assert (call.operator, call.label, call.group) == ("allgather_base", "layers.1", (0, 1))
    assert _taken(GATHER, other, other) == call
    assert _taken(GATHER, one, one) != call
    assert _taken(GATHER, one, torch.ones(4, 2, dtype=dtype)[:, 0]) == call
    assert _taken(GATHER, one, -other if dtype.is_floating_point else other + 1) != call


def test_all_tensors_of_a_list_count() -> None:
    """An all-reduce takes several."""
    a, b = torch.zeros(2), torch.ones(2)
    assert _taken(SUM, [a, b]) == _taken(SUM, [a.clone(), b.clone()])
    assert _taken(SUM, [a, b]) != _taken(SUM, [a, a])


def test_what_was_looked_at_is_left_as_it_was() -> None:
    """Its storage can still be given back and made larger, as pools of buffers do."""
    tensor = torch.zeros(4)
    _taken(GATHER, tensor, tensor)
    assert tensor.untyped_storage().resizable()


def test_damage_is_nothing_given() -> None:
    """An event of another shape is no answer, and no crash either."""
    event = Given().event(1, 3)
    event.detail["calls"] = [{"operator": 1}]
    records = RankRecords(**{**vars(_RECORDS), "events": (event,)})
    assert given_in(records, 3) == ()
