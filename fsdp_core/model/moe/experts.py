"""Experts: one SwiGLU network (Shazeer, 2020) an expert, as three grouped linear layers.

    gate, up   [L, F / etp, H]        down   [L, H, F / etp]

L local experts, H hidden, F feed-forward width. Under etp each rank has a slice of every expert's
width and its outputs are parts of a sum over etp, which combine adds up.

| path | what it is | rows |
| --- | --- | --- |
| loop | a matmul an expert, the reference | both |
| grouped | torch's grouped GEMM, its group ends on the device; float32, bfloat16, float16 | both |
| batched | one batched GEMM over experts | [L, n, H] |
| auto | batched for [L, n, H]; for [n, H] grouped on CUDA where it can, else loop | both |
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.model.moe.axes import MoeAxes
from fsdp_core.model.moe.dispatch import Groups
from fsdp_core.parallel.param_sharding import Cut, CutModule, chunk_of

PATHS = ("auto", "loop", "grouped", "batched")
_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GROUPED_BYTES = 16  # the grouped GEMM wants rows that begin at multiples of this


class GroupedLinear(CutModule):
    """A linear layer without bias for each local expert: rows by expert -> rows by expert.

    Args:
        cut_dim: dim of [L, out, in] that etp cuts.
        path: one of `PATHS`.

    Raises:
        ValueError: unknown path, or etp does not divide the features that are cut.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        axes: MoeAxes,
        *,
        cut_dim: int,
        path: str = "auto",
    ) -> None:
        super().__init__()
        if path not in PATHS:
            raise ValueError(f"Expected path in {PATHS}, got {path!r}.")
        self.path = path
        shape = [axes.local_experts(num_experts), out_features, in_features]
        ep, etp = axes.ep, axes.etp
        shape[cut_dim] = chunk_of(shape[cut_dim], "features of an expert", etp.name, etp.size)
        weight = nn.Parameter(torch.full(shape, torch.nan))
        self.register_cut(
            "weight",
            weight,
            Cut(ep.name, 0, ep.size, ep.rank),
            Cut(etp.name, cut_dim, etp.size, etp.rank),
        )

    def forward(self, rows: torch.Tensor, groups: Groups | None) -> torch.Tensor:
        """[n, in] or [L, n, in] -> the same with `out`.

        Raises:
            ValueError: a path that cannot take these rows.
        """
        weight = self.weight
        path = self._path(rows)
        if path == "batched":
            if groups is not None:
                raise ValueError("Expected rows of static shape for the batched path, got ragged.")
            return torch.bmm(rows, weight.transpose(1, 2))
        if path == "grouped":
            return self._grouped(rows, groups)
        if groups is None:
            pairs = zip(rows.unbind(0), weight.unbind(0), strict=True)
            return torch.stack([F.linear(part, matrix) for part, matrix in pairs])
        parts = zip(rows.split(groups.counts), weight.unbind(0), strict=True)
        return torch.cat([F.linear(part, matrix) for part, matrix in parts])

    def _path(self, rows: torch.Tensor) -> str:
        if self.path != "auto":
            # No kernel runs on nothing; the gradient of a loop over nothing is zero.
            return self.path if rows.numel() else "loop"
        if rows.dim() == 3:
            return "batched"
        grouped = rows.is_cuda and rows.dtype == torch.bfloat16 and self._aligned(rows)
        return "grouped" if grouped and rows.numel() else "loop"

    def _aligned(self, rows: torch.Tensor) -> bool:
        sizes = self.weight.shape[1:]
        return all(size * rows.element_size() % _GROUPED_BYTES == 0 for size in sizes)

    def _grouped(self, rows: torch.Tensor, groups: Groups | None) -> torch.Tensor:
        if rows.dtype not in _GROUPED_DTYPES or not self._aligned(rows):
            raise ValueError(
                f"Expected rows of {_GROUPED_DTYPES} in multiples of {_GROUPED_BYTES} bytes for "
                f"the grouped path, got {rows.dtype} and weights {tuple(self.weight.shape)}."
            )
        if groups is not None:
            ends, empty = groups.ends, None
            if 0 in groups.counts:
                empty = ends.diff(prepend=ends.new_zeros(1)) == 0
            return _GroupedProduct.apply(rows, self.weight, ends, empty)
        num_experts, num_rows, _ = rows.shape
        numbers = torch.arange(1, num_experts + 1, device=rows.device, dtype=torch.int32)
        flat = _GroupedProduct.apply(rows.flatten(0, 1), self.weight, numbers * num_rows, None)
        return flat.view(num_experts, num_rows, -1)


class _GroupedProduct(torch.autograd.Function):
    """rows [n, in] times each group's matrix [out, in], with a backward pass that can be relied on.

    Torch's own refuses a gradient that is an expanded scalar (that of a sum, say), and on Blackwell
    leaves what was in memory before as the gradient of a group without rows (pytorch #172439).
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        ends: torch.Tensor,
        empty: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, ends, empty)
        return F.grouped_mm(rows.contiguous(), weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, ends, empty = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = F.grouped_mm(grad, weight, offs=ends)
        grad_weight = F.grouped_mm(grad.t(), rows.contiguous(), offs=ends)
        if empty is not None:
            # One kernel, however many experts there are and whichever are empty.
            grad_weight.masked_fill_(empty[:, None, None], 0.0)
        return grad_rows, grad_weight, None, None


class Experts(nn.Module):
    """down(silu(gate(rows)) * up(rows)) of each row's expert.

    The layers are called as modules, so that hooks on them (FSDP's gathers) run on every path.
    """

    def __init__(
        self, num_experts: int, hidden: int, ffn: int, axes: MoeAxes, path: str = "auto"
    ) -> None:
        super().__init__()
        self.gate = GroupedLinear(num_experts, hidden, ffn, axes, cut_dim=1, path=path)
        self.up = GroupedLinear(num_experts, hidden, ffn, axes, cut_dim=1, path=path)
        self.down = GroupedLinear(num_experts, ffn, hidden, axes, cut_dim=2, path=path)

    def forward(self, rows: torch.Tensor, groups: Groups | None) -> torch.Tensor:
        """Rows as `Dispatch` laid them out, and back; under etp a part of their sum."""
        inner = F.silu(self.gate(rows, groups)) * self.up(rows, groups)
        return self.down(inner, groups)
