"""Collectives along one parallel axis, each with its conjugate as its backward.

function             forward                  backward
copy_to              identity                 all-reduce
reduce_from          all-reduce               identity
gather_from          all-gather               reduce-scatter
reduce_scatter_to    reduce-scatter           all-gather
all_to_all           all-to-all               all-to-all, the other way

`copy_to` and `reduce_from` are the pair that Shoeybi et al. (2019) call f and g; the pair of the
sequence-parallel region is from Korthikanti et al. (2022).

Sums are in the tensor's dtype. On an axis of one rank every function returns its input: callers
need no case of their own, and the group of one is never asked. The operators are torch's functional
collectives, which the compiler and graphs of both makers take as they are, without host sync; not
their differentiable variants, which accept a second derivative. Here it is refused, as it would
leave out what other ranks contribute.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fsdp_core.parallel.mesh import Axis

_OPS: Any = torch.ops._c10d_functional


def copy_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`x`, the same on every rank, for computation that differs by rank: gradients are summed."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of every rank's `x`; its gradient, the same on every rank, goes to each of them."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def gather_from(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Every rank's `x`, joined along `dim` in rank order, for computation that differs by rank."""
    return x if axis.size == 1 else _Gather.apply(x, axis, dim)


def reduce_scatter_to(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's chunk along `dim`, a multiple of the ranks, of the sum of every rank's `x`."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis, dim)


def all_to_all(
    x: torch.Tensor,
    axis: Axis,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
) -> torch.Tensor:
    """Rows (dim 0) of every rank to every rank.

    Args:
        input_splits: rows that go to each rank, in the order in which they lie in `x`.
        output_splits: rows that come from each rank, in rank order. Without splits every rank
            gets, and gives, equal parts.
    """
    if axis.size == 1:
        return x
    equal = [x.shape[0] // axis.size] * axis.size
    outgoing, incoming = list(input_splits or equal), list(output_splits or equal)
    # Rows that nobody sends would be waited for without end.
    assert sum(outgoing) == x.shape[0], f"splits {outgoing} of {x.shape[0]} rows"
    assert len(outgoing) == len(incoming) == axis.size, f"{outgoing}, {incoming} on {axis}"
    return _AllToAll.apply(x, axis, outgoing, incoming)


# ---- without gradients


def all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of every rank's `x`, as a new tensor. Not differentiable."""
    return x if axis.size == 1 else finish(start_all_reduce(x, axis))


def start_all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Begin `all_reduce`; the result is there after `finish`. The axis has several ranks."""
    return _OPS.all_reduce(x.contiguous(), "sum", axis.group.group_name)


def finish(pending: torch.Tensor) -> torch.Tensor:
    """Wait, in stream order, for what `start_all_reduce` returned."""
    return _OPS.wait_tensor(pending)


def all_gather(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Every rank's `x`, joined along `dim` in rank order. Not differentiable."""
    if axis.size == 1:
        return x
    gathered = _OPS.wait_tensor(
        _OPS.all_gather_into_tensor(x.contiguous(), axis.size, axis.group.group_name)
    )
    return gathered if dim == 0 else torch.cat(gathered.chunk(axis.size), dim)


def _reduce_scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    assert x.shape[dim] % axis.size == 0, f"dim {dim} of {tuple(x.shape)} over {axis.size} ranks"
    if dim != 0:
        x = torch.cat(x.chunk(axis.size, dim))
    return _OPS.wait_tensor(
        _OPS.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.group.group_name)
    )


def _exchange(
    x: torch.Tensor, axis: Axis, outgoing: list[int], incoming: list[int]
) -> torch.Tensor:
    return _OPS.wait_tensor(
        _OPS.all_to_all_single(x.contiguous(), incoming, outgoing, axis.group.group_name)
    )


# ---- autograd


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_reduce(grad, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return all_reduce(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _reduce_scatter(grad, ctx.axis, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _reduce_scatter(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_gather(grad, ctx.axis, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: Axis, outgoing: list[int], incoming: list[int]
    ) -> torch.Tensor:
        ctx.axis, ctx.outgoing, ctx.incoming = axis, outgoing, incoming
        return _exchange(x, axis, outgoing, incoming)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _exchange(grad, ctx.axis, ctx.incoming, ctx.outgoing), None, None, None
