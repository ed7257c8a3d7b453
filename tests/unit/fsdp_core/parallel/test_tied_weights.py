"""Ends of a tied weight, compared before they are trained."""

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.parallel import tied_weights
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.tied_weights import TiedWeights

ALONE = Axis("pp", 1, 0, cast("dist.ProcessGroup", None))


def described(value: torch.Tensor) -> str:
    """What one end says of itself."""
    return TiedWeights(ALONE, [nn.Parameter(value)]).describe()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("block", [1, 7, 2**22])
def test_ends_are_known_by_every_bit_and_its_place(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block: int
) -> None:
    """Swapped rows, swapped columns, a flipped sign and a negative zero are other values."""
    monkeypatch.setattr(tied_weights, "_BLOCK_BYTES", block)
    value = torch.randn(6, 4, generator=torch.Generator().manual_seed(2)).to(dtype)
    value[0, 0] = 0.0
    others = [value.clone() for _ in range(4)]
    others[0][[1, 4]] = others[0][[4, 1]]
    others[1][:, [0, 3]] = others[1][:, [3, 0]]
    others[2][2].neg_()
    others[3][0, 0] = -0.0
    assert described(value) == described(value.clone())
    assert len({described(each) for each in (value, *others)}) == 5


def test_the_size_of_a_block_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends may be looked at in pieces of any size."""
    value = torch.randn(5, 3)
    found = set()
    for block in (1, 7, 2**22):
        monkeypatch.setattr(tied_weights, "_BLOCK_BYTES", block)
        found.add(described(value))
    assert len(found) == 1
    assert described(torch.empty(0, 3)).endswith("checksum 0")
