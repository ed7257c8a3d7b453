"""How well an answer says where a fault is, and what each cheap check would have seen of it."""

import dataclasses
from typing import Any

import pytest

from harness.bisect.found import Location
from harness.campaign.scoring import localised
from harness.faults.fault import Pointer

POINTER = Pointer(phase="backward", module="layers.1.attn*", tensor="layers.1.attn.*.weight")
TRUE = Location(
    step=3, phase="backward", module="layers.1.attn.attention", quantity="grads",
    tensor="layers.1.attn.attention.wq.weight", rank=1, ranks=(1,),
)  # fmt: skip


def judge(pointer: Pointer = POINTER, planted_on: int | None = 1, **changes: Any) -> str:
    found = dataclasses.replace(TRUE, **changes)
    return localised(found, pointer, step=3, rank=planted_on, num_layers=2)


def test_what_matches_in_all_is_exact() -> None:
    """Phase, module, tensor, step and rank are those of the plant."""
    assert judge() == "exactly"


def test_a_fault_that_can_show_only_later_is_due_later() -> None:
    """The step of the plant plus `later` is exact, the plant's own too early for any answer."""
    late = dataclasses.replace(POINTER, later=1)
    assert judge(late, step=4) == "exactly"
    assert judge(late, step=5) == "near"
    assert judge(late, step=3) == "no"


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "forward"},
        {"step": 4},
        {"step": None},
        {"rank": 0},
        {"rank": None},
        {"tensor": ""},
        {"tensor": "layers.1.attn.attention.wq.weight.exp_avg"},
        {"module": "layers.1.mlp", "tensor": "layers.1.mlp.w1.weight"},
        {"module": "layers.0.mlp", "tensor": "layers.0.mlp:output"},
        {"module": "norm", "tensor": "norm.weight"},
    ],
)
def test_one_thing_off_in_or_beside_the_part_is_near(change: dict[str, Any]) -> None:
    """Another phase, rank, tensor, a step later or unknown, the part before or after."""
    assert judge(**change) == "near"


@pytest.mark.parametrize(
    "change",
    [
        {"step": 2},
        {"step": 5},
        {"module": "embedding", "tensor": "embedding.weight"},
        {"module": "head", "tensor": "head.weight"},
        {"module": "", "tensor": ""},
        {"module": "something.else", "tensor": ""},
    ],
)
def test_what_is_elsewhere_early_late_or_unsaid_is_no(change: dict[str, Any]) -> None:
    """Two parts away, before the plant, two steps after it, or no place at all."""
    assert judge(**change) == "no"


def test_an_empty_answer_is_no() -> None:
    """Nothing said is nothing found, whatever the entry asks for."""
    for pointer in (POINTER, Pointer(phase="outside"), Pointer(phase="reduce", tensor="*")):
        for rank in (None, 1):
            assert localised(Location(), pointer, step=3, rank=rank, num_layers=2) == "no"


def test_a_pointer_asks_only_for_what_it_names() -> None:
    """One without module and tensor is met by its phase; near is the rank, or the phase late."""
    outside = Pointer(phase="outside")
    assert judge(outside, phase="outside") == "exactly"
    assert judge(outside, phase="outside", step=4) == "near"
    assert judge(outside, phase="forward") == "near"  # the rank is right
    assert judge(outside, phase="forward", rank=0) == "no"
    assert judge(outside, planted_on=None, phase="forward") == "no"


def test_a_plant_of_no_step_or_every_rank_has_none_to_find() -> None:
    """Where the plant has no step and no rank, no answer is wrong about them."""
    for step, rank in ((7, 0), (None, None)):
        found = dataclasses.replace(TRUE, step=step, rank=rank)
        assert localised(found, POINTER, step=None, rank=None, num_layers=2) == "exactly"


@pytest.mark.parametrize(
    ("pattern", "tensor"),
    [
        ("embedding:output", "embedding:output[1]"),
        ("grads:embedding.weight", "embedding.weight"),
        ("embedding.weight", "grads:embedding.weight"),
        ("embedding:output[[]1]", "embedding:output[1]"),
    ],
)
def test_a_tensor_has_several_spellings(pattern: str, tensor: str) -> None:
    """With and without its quantity, a call with and without its number."""
    pointer = Pointer(phase="backward", tensor=pattern)
    assert judge(pointer, tensor=tensor) == "exactly"
