"""Experts: one SwiGLU network (Shazeer, 2020) an expert, as grouped linear layers, called or fused.

    gate, up   [L, F / etp, H]        down   [L, H, F / etp]       three layers, called as modules
    gate_up    [L, 2 F / etp, H], gate above up; and down          two layers, and a kernel of both

L local experts, H hidden, F feed-forward width. Under etp each rank has a slice of every expert's
width and its outputs are parts of a sum over etp, which combine adds up.

Rows [L, n, H] are one batched GEMM over experts; rows [n, H] torch's grouped GEMM on CUDA in
bfloat16, its group ends on the device, where widths allow it, else a matmul an expert.

A fused kernel reads the weights of layers that it does not call. FSDP gathers these in the modules'
forward pre-hooks, and marks in their forward hooks where the backward pass begins, so that it
gathers and reduces there: without the hooks the kernel reads what is left of the weights, and
gradients go nowhere. So the hooks run around it:

    called     pre-hooks A, A(x), hooks A      pre-hooks B, B(y), hooks B
    fused      pre-hooks A, pre-hooks B        kernel(x)        hooks B, hooks A
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.model.moe.dispatcher import Groups
from fsdp_core.parallel.mesh import Axes
from fsdp_core.parallel.tensor_parallel import Cut, CutModule, chunk_of, consecutive, set_stretches

_GROUPED_BYTES = 16  # the grouped GEMM wants rows that begin at multiples of this


class GroupedLinear(CutModule):
    """A linear layer without bias for each local expert: rows by expert -> rows by expert.
    `cut_dim`: dim of [L, out, in] that etp cuts.
    """

    weight: nn.Parameter

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, axes: Axes, *, cut_dim: int
    ) -> None:  # fmt: skip
        super().__init__()
        ep, etp = axes.ep, axes.etp
        local = chunk_of(num_experts, "experts", ep.name, ep.size)
        shape = [local, out_features, in_features]
        shape[cut_dim] = chunk_of(shape[cut_dim], "features of an expert", etp.name, etp.size)
        weight = nn.Parameter(torch.full(shape, torch.nan))
        cuts = Cut(ep.name, 0, ep.size, ep.rank), Cut(etp.name, cut_dim, etp.size, etp.rank)
        self.register_cut("weight", weight, *cuts)

    def forward(self, rows: torch.Tensor, groups: Groups | None) -> torch.Tensor:
        """[n, in] or [L, n, in] -> the same with `out`."""
        if groups is None:
            return torch.bmm(rows, self.weight.transpose(1, 2))
        # No kernel runs on nothing; the gradient of a loop over nothing is zero.
        if rows.numel() and self._is_grouped(rows):
            ends, empty = groups.ends, None
            if 0 in groups.counts:
                empty = ends.diff(prepend=ends.new_zeros(1)) == 0
            return _GroupedProduct.apply(rows, self.weight, ends, empty)
        return _product(rows, self.weight, groups.counts)

    def _is_grouped(self, rows: torch.Tensor) -> bool:
        """Whether the grouped GEMM can take them, and is fast."""
        widths = (size * rows.element_size() for size in self.weight.shape[1:])
        is_aligned = not any(width % _GROUPED_BYTES for width in widths)
        return rows.is_cuda and rows.dtype == torch.bfloat16 and is_aligned


class _GroupedProduct(torch.autograd.Function):
    """rows [n, in] times each group's matrix [out, in], with a backward pass that can be relied on.
    Torch's own refuses a gradient that is an expanded scalar (that of a sum, say), and on Blackwell
    leaves what was in memory before as the gradient of a group without rows (pytorch #172439).
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor,
        ends: torch.Tensor, empty: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
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
    """down(silu(gate(rows)) * up(rows)) of each row's expert. The layers are called as modules, so
    that hooks on them (FSDP's gathers) run on every path.
    """

    def __init__(self, num_experts: int, hidden: int, ffn: int, axes: Axes) -> None:
        super().__init__()
        self.gate = GroupedLinear(num_experts, hidden, ffn, axes, cut_dim=1)
        self.up = GroupedLinear(num_experts, hidden, ffn, axes, cut_dim=1)
        self.down = GroupedLinear(num_experts, ffn, hidden, axes, cut_dim=2)

    def forward(self, rows: torch.Tensor, groups: Groups | None) -> torch.Tensor:
        """Rows as `Dispatch` laid them out, and back; under etp a part of their sum."""
        inner = F.silu(self.gate(rows, groups)) * self.up(rows, groups)
        result: torch.Tensor = self.down(inner, groups)
        return result


# ---- fused

_PHASES = ("forward_pre", "forward", "backward_pre", "backward")


def call_as_forward_of(modules: Sequence[nn.Module], kernel: Callable[..., Any], *args: Any) -> Any:
    """`kernel(*args)` as the forward of `modules`, each inside of the one before, so that torch
    runs the hooks of all, which are told the kernel's inputs and output in place of the module's.

    Raises ValueError: hooks that a kernel cannot serve: a backward hook on a module, any hook on a
        module inside of it, a pre-hook that returns other inputs, a hook that returns another
        output (the same memory as a new tensor may be) of a module but the last.
    """
    first, *others = modules
    _refuse_other_hooks(first)
    made: list[Any] = []

    def forward(*got: Any, **named: Any) -> Any:
        if named or len(got) != len(args) or any(map(operator.is_not, got, args)):
            raise _unserved(first, "pre-hooks that leave its inputs as they are (FSDP casts them "
                            "without MixedPrecisionPolicy(cast_forward_inputs=False))")  # fmt: skip
        made.append(call_as_forward_of(others, kernel, *got) if others else kernel(*got))
        return made[0]

    first.forward = forward
    try:
        # Not the instance's, by which taps see calls: the module itself is not called.
        output = nn.Module._call_impl(first, *args)
    finally:
        del first.forward
    if others and _memory_of(output) != _memory_of(made[0]):
        raise _unserved(first, "hooks that return None or the same memory")
    return output


def _refuse_other_hooks(module: nn.Module) -> None:
    if module._backward_pre_hooks or module._backward_hooks:
        raise _unserved(module, "no backward hooks")
    for inner in (each for each in module.modules() if each is not module):
        if any(getattr(inner, f"_{phase}_hooks") for phase in _PHASES):
            raise _unserved(module, f"no hooks on the {type(inner).__name__} inside")


def _memory_of(value: Any) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.dtype, value.stride(), value.data_ptr(), value.grad_fn is None


def _unserved(module: nn.Module, expected: str) -> ValueError:
    return ValueError(
        f"Expected of {type(module).__name__}, for which a fused kernel computes: {expected}. "
        "Hook the module around it, or run the modules unfused."
    )


Kernel = Callable[[nn.Module, nn.Module, torch.Tensor, Groups | None], torch.Tensor]
"""down(silu(gate) * up) of each row's expert, out of the weights of gate_up and down as they are
now: rows by expert, [n, H] or [L, n, H], and back."""


class FusedExperts(nn.Module):
    """down(silu(gate(rows)) * up(rows)) of each row's expert. `gate_up`, `down`: the layers;
    gate_up's output is gate's beside up's. `kernel`: what computes both at once; None: the layers
    are called.
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
        result = call_as_forward_of((self.gate_up, self.down), self._run, rows, groups)
        return result

    def _run(self, rows: torch.Tensor, groups: Groups | None) -> torch.Tensor:
        assert self.kernel is not None
        return self.kernel(self.gate_up, self.down, rows, groups)


def name_gate_up(experts: nn.Module, gate_up: GroupedLinear) -> None:
    """Let the two halves of `experts.gate_up.weight` be known as gate.weight and up.weight."""
    (whole,), width = gate_up._stretches["weight"], gate_up.weight.shape[1] // 2
    halves = {"gate.weight": width, "up.weight": width}
    set_stretches(experts, {"gate_up.weight": consecutive(halves, whole.cuts, dim=1)})


def make_fused_experts(num_experts: int, hidden: int, ffn: int, axes: Axes) -> FusedExperts:
    """Experts of torch, fused: their bits are those of the layers, called."""
    gate_up = GroupedLinear(num_experts, hidden, 2 * ffn, axes, cut_dim=1)
    down = GroupedLinear(num_experts, ffn, hidden, axes, cut_dim=2)
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
