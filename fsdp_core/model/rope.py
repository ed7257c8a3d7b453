"""Rotary position embedding (Su et al., 2021), halves convention: pairs are (i, i + d/2)."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn


def rope_tables(
    seq: int, head_dim: int, theta: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine tables, float32 [seq, head_dim / 2]."""
    # On the CPU, whatever the default device: every device then has the same bits.
    wide: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    exponent = torch.arange(0, head_dim, 2, **wide) / head_dim
    angles = torch.outer(torch.arange(seq, **wide), theta**-exponent)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def apply_rope(x_BTND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [batch, time, heads, head_dim] by position; in float32 (float64 for float64)."""
    wide = torch.promote_types(x_BTND.dtype, torch.float32)
    # As [1, 1, B, T, N, D]: of four or five dims torch.cat, which the gradient of a chunk is, too,
    # guesses a layout from the strides of dims of size 1. Those differ between gradients that
    # autograd adds in place and the same ones under a recorder, where it does not; then sums over
    # them differ in their last bits, and a graph from the eager run.
    a, b = x_BTND.to(wide).unsqueeze(0).unsqueeze(0).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    whole = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return whole.squeeze(0).squeeze(0).to(x_BTND.dtype)


class RopeTable(nn.Module):
    """Cosines and sines of every position, made once and kept as long as the model.

    A layer looks its tokens' positions up inside of what a graph captures. The graph then reads
    this table, which is always there, and the positions, which are an input of it: nothing that is
    made in one forward pass and gone by the next. It stays where it is, in float32, through casts
    of the model; only another device makes it anew, out of the formula: one that comes from meta
    has no values to copy.

    Args:
        num_positions: positions 0 to num_positions - 1 may be looked up.
        width: of the part of a head that is turned, even.

    Raises:
        ValueError: no position, or an odd width.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, num_positions: int, width: int, theta: float, device: torch.device | None = None
    ) -> None:
        super().__init__()
        if num_positions < 1 or width < 2 or width % 2:
            raise ValueError(
                f"Expected a position or more and an even width, got {num_positions} and {width}."
            )
        self._formula = num_positions, width, theta
        cos, sin = rope_tables(*self._formula, device or torch.device("cpu"))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002  (torch's signature)
        """For `Module.to` and its kin: only the device may change."""
        del recurse
        device = fn(self.cos[:1]).device
        if device != self.cos.device:
            self.cos, self.sin = rope_tables(*self._formula, device)
        return self

    def forward(self, x_BTND: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Rotate [B, T, N, D]; a position past the table is the error that torch makes of it."""
        cos, sin = (table.index_select(0, positions_T) for table in (self.cos, self.sin))
        return apply_rope(x_BTND, cos, sin)
