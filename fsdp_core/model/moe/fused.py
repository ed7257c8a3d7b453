"""Experts as two grouped linear layers and one kernel over both, which does not call them.

    gate_up   [L, 2 F / etp, H], gate above up        down   [L, H, F / etp]

    unfused   gate_up(rows) -> silu(gate) * up -> down
    fused     one autograd function, which keeps rows and gate_up's output and nothing in between

The fused path reads the weights of both layers, so it runs between their hooks (`hooked`): FSDP may
have made a unit of each. Bits are those of the unfused path.

`Kernel` is what a library fuses with: `TorchKernel` here, TransformerEngine's operators in
`fsdp_core.model.te.experts`.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.model.hooked import run_fused
from fsdp_core.model.moe.axes import MoeAxes
from fsdp_core.model.moe.dispatch import Groups
from fsdp_core.model.moe.experts import GroupedLinear
from fsdp_core.parallel.param_sharding import consecutive, set_stretches


class Kernel(Protocol):
    """down(silu(gate) * up) of each row's expert, out of the layers' weights as they are now."""

    def __call__(
        self, gate_up: nn.Module, down: nn.Module, rows: torch.Tensor, groups: Groups | None
    ) -> torch.Tensor:
        """Rows by expert, [n, H] or [L, n, H], and back."""


class FusedExperts(nn.Module):
    """down(silu(gate(rows)) * up(rows)) of each row's expert.

    Args:
        gate_up, down: the layers; gate_up's output is gate's beside up's.
        kernel: what computes both at once; None: the layers are called.
    """

    def __init__(self, gate_up: nn.Module, down: nn.Module, kernel: Kernel | None) -> None:
        super().__init__()
        self.gate_up, self.down, self.kernel = gate_up, down, kernel

    def forward(self, rows: torch.Tensor, groups: Groups | None) -> torch.Tensor:
        """Rows as `Dispatch` laid them out, and back; under etp a part of their sum."""
        if self.kernel is None:
            gate, up = self.gate_up(rows, groups).chunk(2, -1)
            result: torch.Tensor = self.down(F.silu(gate) * up, groups)
            return result
        return run_fused((self.gate_up, self.down), self._run, rows, groups)

    def _run(self, rows: torch.Tensor, groups: Groups | None) -> torch.Tensor:
        assert self.kernel is not None
        return self.kernel(self.gate_up, self.down, rows, groups)


def name_gate_up(experts: nn.Module, gate_up: GroupedLinear) -> None:
    """Let the two halves of `experts.gate_up.weight` be known as gate.weight and up.weight."""
    cuts, width = gate_up._cuts["weight"], gate_up.weight.shape[1] // 2
    halves = {"gate.weight": width, "up.weight": width}
    set_stretches(experts, {"gate_up.weight": consecutive(halves, cuts, dim=1)})


def make_fused_experts(
    num_experts: int, hidden: int, ffn: int, axes: MoeAxes, path: str = "auto"
) -> FusedExperts:
    """Experts of torch, fused."""
    gate_up = GroupedLinear(num_experts, hidden, 2 * ffn, axes, cut_dim=1, path=path)
    down = GroupedLinear(num_experts, ffn, hidden, axes, cut_dim=2, path=path)
    experts = FusedExperts(gate_up, down, torch_kernel)
    name_gate_up(experts, gate_up)
    return experts


def torch_kernel(
    gate_up: nn.Module, down: nn.Module, rows: torch.Tensor, groups: Groups | None
) -> torch.Tensor:
    """`Kernel` of torch: a matmul an expert, or one batched for rows [L, n, H]."""
    counts = None if groups is None else groups.counts
    result: torch.Tensor = _SwiGlu.apply(rows, gate_up.weight, down.weight, counts)
    return result


Counts = tuple[int, ...] | None
"""Rows of each expert; None for [L, n, H]."""


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, counts: Counts
    ) -> torch.Tensor:
        both = _product(rows, gate_up, counts)
        # The parameters themselves: FSDP gathers into them again before backward.
        ctx.save_for_backward(rows, both, gate_up, down)
        ctx.counts = counts
        gate, up = both.chunk(2, -1)
        return _product(F.silu(gate) * up, down, counts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, both, gate_up, down = ctx.saved_tensors
        counts = ctx.counts
        gate, up = both.chunk(2, -1)
        act = F.silu(gate)
        inner_grad, down_grad = _gradients(grad, act * up, down, counts)
        gate_grad = torch.ops.aten.silu_backward(inner_grad * up, gate)
        both_grad = torch.cat((gate_grad, inner_grad * act), -1)
        rows_grad, gate_up_grad = _gradients(both_grad, rows, gate_up, counts)
        return rows_grad, gate_up_grad, down_grad, None


def _product(rows: torch.Tensor, weight: torch.Tensor, counts: Counts) -> torch.Tensor:
    if counts is None:
        return torch.bmm(rows, weight.transpose(1, 2))
    parts = zip(rows.split(counts), weight.unbind(0), strict=True)
    return torch.cat([F.linear(part, matrix) for part, matrix in parts])


def _gradients(
    grad: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, counts: Counts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `_product`'s rows and weight."""
    if counts is None:
        return torch.bmm(grad, weight), torch.bmm(rows.transpose(1, 2), grad).transpose(1, 2)
    triples = list(zip(grad.split(counts), rows.split(counts), weight.unbind(0), strict=True))
    rows_grad = torch.cat([part @ matrix for part, _, matrix in triples])
    return rows_grad, torch.stack([part.t() @ row for part, row, _ in triples])
