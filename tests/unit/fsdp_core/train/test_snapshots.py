"""Snapshot copies: the bits of the call that was asked for, whatever shapes calls have."""

import pytest
import torch

from fsdp_core.graph.digest_torch import INT_OF_SIZE, PATTERNS
from fsdp_core.train.taps import CallCopies, SnapshotArena, TensorCopies

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", PATTERNS, ids=str)
def test_every_bit_of_every_type_is_kept(dtype: torch.dtype) -> None:
    """All patterns of bytes, NaN payloads among them, of a tensor that is not contiguous."""
    raw = torch.arange(1024, dtype=torch.int64).to(torch.uint8)
    tensor = raw.view(dtype).view(8, -1).t()
    copies = TensorCopies({"x": tensor}, SnapshotArena(1 << 12, CPU))
    copies.take()
    ((name, copy),) = copies.read()
    assert (name, copy.dtype, copy.shape) == ("x", dtype, tensor.shape)
    whole = INT_OF_SIZE[dtype.itemsize]
    assert torch.equal(copy.view(whole), tensor.view(whole))
    assert copy.data_ptr() != tensor.data_ptr()


def test_the_call_that_was_asked_for_is_kept_whatever_its_shape() -> None:
    """Calls of growing, shrinking and equal shapes, step after step: each row has its own call."""
    wanted = {(0, 0): "x:output[0]", (0, 1): "x:output[1]"}
    calls, seen = CallCopies(wanted, SnapshotArena(1 << 12, CPU)), torch.zeros(2).int()
    for sizes in ((4, 7), (7, 4), (9, 2), (3, 3), (2, 9)):
        calls.begin()
        seen.zero_()
        given = [torch.randn(size) for size in sizes]
        for tensor in given:
            calls.record(0, seen[0], [tensor, tensor[:1].bool()])
            calls.record(1, seen[1], [torch.ones(3)])
            seen.add_(1)
        found = dict(calls.read())
        assert list(found) == list(wanted.values())
        for tensor, (kept, flag) in zip(given, found.values(), strict=True):
            assert torch.equal(kept, tensor)
            assert torch.equal(flag, tensor[:1].bool())


def test_a_row_without_a_call_in_this_step_has_nothing() -> None:
    """What a step before has written is not passed off as this step's."""
    calls, seen = CallCopies({(0, 0): "x:output[0]"}, SnapshotArena(64, CPU)), torch.zeros(1).int()
    calls.begin()
    calls.record(0, seen[0], [torch.ones(2)])
    assert len(list(calls.read())) == 1
    calls.begin()
    assert list(calls.read()) == []


def test_there_is_room_for_so_many_bytes_and_no_more() -> None:
    """The last byte fits; one more is refused with both numbers and the name."""
    room = SnapshotArena(8, CPU)
    TensorCopies({"a": torch.zeros(2)}, room)
    with pytest.raises(ValueError, match="at most 8 bytes on a rank, got 9 with b"):
        TensorCopies({"b": torch.zeros(1, dtype=torch.bool)}, room)
