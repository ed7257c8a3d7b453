"""Shared experts with a gate, which no model of the product has: `MoeLayer` takes any module."""

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.tensor_parallel import ColumnLinear, RowLinear, enter, reduce_replicated


class SharedExperts(nn.Module):
    """[B, T, H] -> [B, T, H]; with `gated`, times a sigmoid of one number a token.

    The shared experts of a model are one network of their summed width. Under sequence parallel T
    is cut over tp, and the gradient of the gate's weight, which sees this rank's part, is summed
    over tp in the backward pass.
    """

    share_weight: nn.Parameter | None

    def __init__(
        self, hidden: int, ffn: int, tp: Axis, *, sequence_parallel: bool, gated: bool = False
    ) -> None:
        super().__init__()
        self._tp, self._sequence_parallel = tp, sequence_parallel
        self.gate = ColumnLinear(hidden, ffn, tp, sequence_parallel=sequence_parallel)
        self.up = ColumnLinear(hidden, ffn, tp, sequence_parallel=sequence_parallel)
        self.down = RowLinear(ffn, hidden, tp, sequence_parallel=sequence_parallel)
        weight = nn.Parameter(torch.full((1, hidden), torch.nan)) if gated else None
        self.register_parameter("share_weight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]; the gate is computed in float32."""
        whole = enter(x, self._tp, sequence_parallel=self._sequence_parallel)
        inner = F.silu(self.gate(whole, entered=True)) * self.up(whole, entered=True)
        out: torch.Tensor = self.down(inner)
        if self.share_weight is None:
            return out
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = self.share_weight.to(dtype)
        if self._sequence_parallel:
            weight = reduce_replicated(weight, self._tp)
        share = F.linear(x.to(dtype), weight).sigmoid()
        return (out * share).to(out.dtype)
