"""Collectives along one parallel axis, each with its conjugate as its backward.

function             forward                  backward
copy_to              identity                 all-reduce
reduce_from          all-reduce               identity
gather_from          all-gather               reduce-scatter
reduce_scatter_to    reduce-scatter           all-gather
all_to_all           all-to-all               all-to-all, the other way

`copy_to` and `reduce_from` are f and g of Shoeybi et al. (2019); the next pair, of the
sequence-parallel region, is from Korthikanti et al. (2022).

Sums are in the tensor's dtype. On an axis of one rank every function returns its input. The
operators are torch's functional collectives, which the compiler and graphs of both makers take as
they are, without host sync; not their differentiable variants, which accept a second derivative:
here it is refused, as it would leave out what other ranks contribute.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fsdp_core.parallel.mesh import Axis

_OPS: Any = torch.ops._c10d_functional
Operator = Callable[..., torch.Tensor]


def copy_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`x`, the same on every rank, for computation that differs by rank: gradients are summed."""
    return x if axis.size == 1 else _Collective.apply(x, _view, all_reduce, axis)


def reduce_from(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of every rank's `x`; its gradient, the same on every rank, goes to each of them."""
    return x if axis.size == 1 else _Collective.apply(x, all_reduce, _same, axis)


def gather_from(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Every rank's `x`, joined along `dim` in rank order, for computation that differs by rank."""
    if axis.size == 1:
        return x
    return _Collective.apply(x, all_gather, _reduce_scatter, axis, dim)


def reduce_scatter_to(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's chunk along `dim`, a multiple of the ranks, of the sum of every rank's `x`."""
    if axis.size == 1:
        return x
    return _Collective.apply(x, _reduce_scatter, all_gather, axis, dim)


def all_to_all(
    x: torch.Tensor,
    axis: Axis,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
) -> torch.Tensor:
    """Rows (dim 0) of every rank to every rank. `input_splits`: rows that go to each rank, in the
    order in which they lie in `x`; None: equal. `output_splits`: rows that come from each rank, in
    rank order; None: equal parts.
    """
    if axis.size == 1:
        return x
    equal = [x.shape[0] // axis.size] * axis.size
    outgoing, incoming = list(input_splits or equal), list(output_splits or equal)
    # Rows that nobody sends would be waited for without end.
    assert sum(outgoing) == x.shape[0], f"splits {outgoing} of {x.shape[0]} rows"
    assert len(outgoing) == len(incoming) == axis.size, f"{outgoing}, {incoming} on {axis}"
    return _Collective.apply(x, _exchange, _exchange_back, axis, outgoing, incoming)


def all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of every rank's `x`, as a new tensor. Not differentiable."""
    if axis.size == 1:
        return x
    return _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), "sum", axis.group.group_name))


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


class _Collective(torch.autograd.Function):
    """`there` forward, its conjugate `back` backward; both get the gradient's counterpart."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, there: Operator, back: Operator, axis: Axis, *args: Any
    ) -> torch.Tensor:
        ctx.back, ctx.axis, ctx.args = back, axis, args
        return there(x, axis, *args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.back(grad, ctx.axis, *ctx.args), *(None,) * (3 + len(ctx.args))


def _view(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x.view_as(x)


def _same(grad: torch.Tensor, axis: Axis) -> torch.Tensor:
    return grad


def _exchange_back(
    x: torch.Tensor, axis: Axis, outgoing: list[int], incoming: list[int]
) -> torch.Tensor:
    return _exchange(x, axis, incoming, outgoing)
