"""Static parts: metadata are copied to where graphs read them, or the microbatch is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_core.model.batch import Capacity, Document, Part, pack, packed_part
from fsdp_core.parallel.mesh import Axis
from fsdp_core.train.inputs import StaticPart, _leaves_of

LOCAL = 16
pytestmark = pytest.mark.usefixtures("mesh")


def axis_of(size: int, rank: int = 0) -> Axis:
    group = dist.group.WORLD
    assert group is not None
    return Axis("cp", size, rank, group)


def part_of(lengths: tuple[int, ...], axis: Axis, *, slots: int = 5, local: int = LOCAL) -> Part:
    capacity = Capacity(tokens=local * axis.size, slots=slots, multiple=2 * axis.size)
    documents = [Document(torch.arange(n), torch.arange(n)) for n in lengths]
    return packed_part(pack(documents, capacity), axis, 1.0).part


def tensors_of(part: Part) -> dict[str, torch.Tensor]:
    return {name.partition(": ")[2]: t for name, t in StaticPart(part, "x").named_tensors()}


@pytest.mark.parametrize("size", [1, 4])
def test_follows_every_tensor_and_moves_none(size: int) -> None:
    """After it everything is as in the microbatch, at the addresses of before."""
    axis = axis_of(size, size // 2)
    static = StaticPart(part_of((3, 8), axis), "static")
    named = dict(static.named_tensors())
    before = {name: t.data_ptr() for name, t in named.items()}
    assert len(set(before.values())) == len(before) >= (7 if size == 1 else 11)
    for lengths in ((1, 1, 2, 7), (), (16,)):
        part = part_of(lengths, axis)
        expected = tensors_of(part)
        static.follow(part)
        assert tensors_of(static.part).keys() == expected.keys()
        for name, tensor in static.named_tensors():
            assert torch.equal(tensor, expected[name.partition(": ")[2]]), name
        assert {name: t.data_ptr() for name, t in static.named_tensors()} == before


def test_keeps_nothing_of_its_sample() -> None:
    """The sample may change or go, and slots made of one sample have nothing in common."""
    sample = part_of((3, 8), axis_of(1))
    static = StaticPart(sample, "static")
    lent = {t.data_ptr() for _, t in _leaves_of(sample) if isinstance(t, torch.Tensor)}
    assert len(lent) > 5
    for name, tensor in static.named_tensors():
        assert tensor.data_ptr() not in lent, name
    sample.plan.positions.fill_(-1)
    assert static.part.plan.positions.min() == 0
    assert static.part.cp is sample.cp


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"slots": 6}, r"plan.spans.offsets = \(7,\) .* got \(8,\)"),
    ({"local": 24}, r"plan.rows = \(16,\).*got \(24,\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=["slots", "tokens"])
def test_refuses_what_graphs_cannot_hold(change: dict[str, Any], message: str) -> None:
    """Another capacity is an error, and what graphs read stays as it was."""
    axis = axis_of(4, 1)
    static = StaticPart(part_of((3, 8), axis), "static")
    before = {name: t.clone() for name, t in static.named_tensors()}
    with pytest.raises(ValueError, match=message):
        static.follow(part_of((9,), axis, **change))
    for name, tensor in static.named_tensors():
        assert torch.equal(tensor, before[name])


def test_refuses_another_place() -> None:
    """The rank, the size and the communicator were fixed by the capture."""
    static = StaticPart(part_of((3, 8), axis_of(4, 1)), "static")
    with pytest.raises(ValueError, match=r"Expected plan.rank = 1, as captured in graphs, got 2"):
        static.follow(part_of((3, 8), axis_of(4, 2)))
    other = dist.new_group([0])
    assert isinstance(other, dist.ProcessGroup)
    with pytest.raises(ValueError, match="Expected context group"):
        static.follow(part_of((3, 8), Axis("cp", 4, 1, other)))
