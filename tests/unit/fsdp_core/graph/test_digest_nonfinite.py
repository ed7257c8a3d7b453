"""The digest's fifth column: 1 if any element is not finite."""

import itertools

import pytest
import torch
from torch import Tensor

from fsdp_core.graph import digest_torch as definition
from fsdp_core.graph.digest import digest_hex, digest_tensors, empty_rows

FLOATS = [dtype for dtype, pattern in definition.PATTERNS.items() if pattern.fields]


def rows_of(*tensors: Tensor) -> Tensor:
    """The digest's rows."""
    rows = empty_rows(len(tensors), "cpu")
    digest_tensors(tensors, rows)
    return rows


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_flags_nonfinite(dtype: torch.dtype) -> None:
    """The fifth column agrees with `isfinite` on every exponent, wherever in the tensor it is."""
    size = dtype.itemsize
    lows = (0, 1, 0x7F, 0x80, 0xEF, 0xF0, 0xFB, 0xFC, 0xFF) if size > 1 else (0,)
    tensors = []
    for i, (high, low) in enumerate(itertools.product(range(256), lows)):
        data = torch.zeros(5, size, dtype=torch.uint8)
        data[i % 5, -2 if size > 1 else -1] = low
        data[i % 5, -1] = high
        tensors.append(data.view(dtype).reshape(-1))
    expected = [int(not t.to(torch.float64).isfinite().all()) for t in tensors]
    assert 0 < sum(expected) < len(expected)
    assert digest_hex(rows_of(*tensors))[1] == expected


def test_flag_is_one_however_many() -> None:
    """A tensor of nothing but NaN, over several rows of a page, has the flag 1, as one NaN has."""
    many, one = torch.full((1000,), float("nan")), torch.zeros(1000)
    one[999] = float("inf")
    assert digest_hex(rows_of(many, one, torch.zeros(3)))[1] == [1, 1, 0]


def test_low_half_of_a_double_is_no_exponent() -> None:
    """A finite float64 whose low word looks like a float32 NaN is finite."""
    tensor = torch.tensor([0x3FF000007FF80000] * 3).view(torch.float64)
    assert bool(tensor.isfinite().all())
    assert digest_hex(rows_of(tensor))[1] == [0]


def test_integers_are_finite() -> None:
    """All-ones integers are no NaN."""
    tensors = [torch.full((9,), -1, dtype=dtype) for dtype in (torch.int32, torch.int64)]
    assert digest_hex(rows_of(*tensors))[1] == [0, 0]
