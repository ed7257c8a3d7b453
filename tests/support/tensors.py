"""Tensors of ranks, put together and compared."""

from typing import Any

import torch


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes: -0.0 is not 0.0, and NaN equals itself."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    flat = [t.detach().contiguous().flatten().view(torch.uint8) for t in (one, other)]
    return alike and torch.equal(*flat)


def whole(tensor: Any) -> torch.Tensor:
    """All rows, gathered where ranks have a part each: a collective then."""
    value: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return value.detach()


def own_rows(tensor: Any) -> torch.Tensor:
    """The rows that this rank has: the very memory."""
    plain = tensor.detach()
    rows: torch.Tensor = plain.to_local() if hasattr(plain, "to_local") else plain
    return rows
