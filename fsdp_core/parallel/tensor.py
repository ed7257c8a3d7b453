"""Linear layers that are cut over the tensor-parallel axis, with or without sequence parallel.

                 input                weight            output
    column       [B, T, in]           [out / tp, in]    [B, T, out / tp]
    row          [B, T, in / tp]      [out, in / tp]    [B, T, out]

and under sequence parallel what is whole between the pairs is cut along T: a column layer's input
is [B, T / tp, in], gathered before the product, a row layer's output is [B, T / tp, out], summed
and scattered after it. B batch, T time. (Shoeybi et al., 2019; Korthikanti et al., 2022.)

Several column layers of one input (q, k and v; gate and up) share what comes before the product:

    whole = enter(x, axis, sequence_parallel=...)
    gate, up = layer_gate(whole, entered=True), layer_up(whole, entered=True)

which gathers once, and sums their gradients before it communicates them once.

Weights are NaN until they are initialised or loaded: a layer that was forgotten shows.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_core.parallel.axes import Axis
from fsdp_core.parallel.collectives import (
    copy_to,
    finish,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    start_all_reduce,
)
from fsdp_core.parallel.cuts import Cut, CutModule, chunk_of

SEQUENCE_DIM = 1
"""Dim of [B, T, H] that sequence parallel cuts."""


def enter(x: torch.Tensor, axis: Axis, *, sequence_parallel: bool) -> torch.Tensor:
    """What a column layer multiplies: [B, T, H] whole, out of [B, T / tp, H] or [B, T, H]."""
    return gather_from(x, axis, SEQUENCE_DIM) if sequence_parallel else copy_to(x, axis)


def leave(partial: torch.Tensor, axis: Axis, *, sequence_parallel: bool) -> torch.Tensor:
    """The sum of every rank's `partial` [B, T, H]: [B, T / tp, H] or [B, T, H]."""
    if sequence_parallel:
        return reduce_scatter_to(partial, axis, SEQUENCE_DIM)
    return reduce_from(partial, axis)


class ColumnLinear(CutModule):
    """A linear layer without bias whose outputs are cut over `axis`.

    Raises:
        ValueError: `out_features` is not a multiple of the ranks.
    """

    weight: nn.Parameter

    def __init__(
        self, in_features: int, out_features: int, axis: Axis, *, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.axis, self.sequence_parallel = axis, sequence_parallel
        local = chunk_of(out_features, "out_features", axis.name, axis.size)
        weight = nn.Parameter(torch.full((local, in_features), torch.nan))
        self.register_cut("weight", weight, Cut(axis.name, 0, axis.size, axis.rank))

    def forward(self, x: torch.Tensor, *, entered: bool = False) -> torch.Tensor:
        """[..., in] -> [..., out / tp].

        Args:
            entered: `x` is what `enter` returned.
        """
        if not entered:
            x = enter(x, self.axis, sequence_parallel=self.sequence_parallel)
        return F.linear(x, self.weight)

    def extra_repr(self) -> str:
        """Global sizes and the axis."""
        return _describe(self)


class RowLinear(CutModule):
    """A linear layer without bias whose inputs are cut over `axis`; outputs are summed over it.

    Raises:
        ValueError: `in_features` is not a multiple of the ranks.
    """

    weight: nn.Parameter

    def __init__(
        self, in_features: int, out_features: int, axis: Axis, *, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.axis, self.sequence_parallel = axis, sequence_parallel
        local = chunk_of(in_features, "in_features", axis.name, axis.size)
        weight = nn.Parameter(torch.full((out_features, local), torch.nan))
        self.register_cut("weight", weight, Cut(axis.name, 1, axis.size, axis.rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in / tp] -> [..., out]."""
        partial = F.linear(x, self.weight)
        return leave(partial, self.axis, sequence_parallel=self.sequence_parallel)

    def extra_repr(self) -> str:
        """Global sizes and the axis."""
        return _describe(self)


def _describe(layer: ColumnLinear | RowLinear) -> str:
    return (
        f"{layer.in_features}, {layer.out_features}, {layer.axis.name}={layer.axis.size}, "
        f"sequence_parallel={layer.sequence_parallel}"
    )


# ---- replicated parameters that see only a part of what they act on


def reduce_replicated(parameters: Sequence[torch.Tensor], axis: Axis) -> tuple[torch.Tensor, ...]:
    """Stand-ins for replicated parameters, whose gradients are summed over `axis`.

    For a forward that uses a replicated parameter on a part of what the whole model uses it on: a
    norm's weight under sequence parallel, which sees T / tp of the tokens, or the norm of queries
    and keys, which sees this rank's heads. Use the stand-ins in place of the parameters. The sum is
    a part of the backward pass, so it is in any graph that captures that, it comes once however
    often gradients accumulate, and it is done before the gradient reaches FSDP.

    Where every rank uses the parameter on the same whole, its gradient is whole on each of them,
    and a sum would multiply it by the number of ranks.
    """
    if axis.size == 1:
        return tuple(parameters)
    return _Replicated.apply(axis, *parameters)


def reduce_replicated_of(module: nn.Module, names: Sequence[str], axis: Axis) -> None:
    """Make a module of any library use `reduce_replicated` for its own parameters `names`.

    The module keeps the names of its parameters, its place in the model and its copies: it becomes
    of a subclass whose forward runs with the stand-ins in place of the parameters.

    Raises:
        ValueError: a name that is no parameter of the module itself, or a module that was given
            here before.
    """
    if isinstance(module, _UsesStandIns):
        raise ValueError(f"Expected a module without reduced parameters, got {type(module)}.")
    for name in names:
        if module._parameters.get(name) is None:
            raise ValueError(f"Expected a parameter of {type(module).__name__}, got {name!r}.")
    module._reduced_names, module._reduced_axis = tuple(names), axis  # type: ignore[assignment]
    kind = type(module)
    module.__class__ = type(f"Reduced{kind.__name__}", (_UsesStandIns, kind), {})


class _UsesStandIns(nn.Module):
    _reduced_names: tuple[str, ...]
    _reduced_axis: Axis

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._stand_ins():
            return super().forward(*args, **kwargs)

    @contextlib.contextmanager
    def _stand_ins(self) -> Iterator[None]:
        held = {name: self._parameters[name] for name in self._reduced_names}
        tensors = reduce_replicated([cast("torch.Tensor", p) for p in held.values()],
                                    self._reduced_axis)  # fmt: skip
        self._parameters.update(zip(held, cast("Any", tensors), strict=True))
        try:
            yield
        finally:
            self._parameters.update(held)


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.axis = axis
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        pending = [start_all_reduce(grad, ctx.axis) for grad in grads]
        return None, *(finish(total) for total in pending)
