"""The axes, process groups and meshes of a layout, over the ranks of the default process group.

`fsdp_core.config.parallel` has the arithmetic. An axis of size 1 has a process group of one rank.

Collectives along one parallel axis, each with its conjugate as its backward.

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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.config import ParallelConfig
from fsdp_core.config.parallel import AXES, axis_rank, dense_sizes, expert_sizes, groups
from fsdp_core.device import Device

Partition = tuple[tuple[int, ...], ...]
_SHARDED_OVER = ("dp", "dp_outer", "edp")
"""Axes that FSDP, or nobody, communicates along; see `_Groups`."""


@dataclass(frozen=True)
class Axis:
    """One parallel axis as this rank sees it: its name in `AXES`, and this rank's coordinate. The
    group has the ranks along the axis in the order of their coordinates. `cuts_sequence`: under
    sequence parallel tp cuts activations [B, T, H] between its regions along T.
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup
    cuts_sequence: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        """Itself: a copy of a module talks to the same ranks over the same group."""
        return self


@dataclass(frozen=True)
class Axes:
    """All axes of a layout. `dense_mesh`: what FSDP shards dense parameters over: dp and cp as one
    axis, and dp_outer as an outer one where it is larger than 1. `expert_mesh`, for experts: edp.
    """

    tp: Axis
    cp: Axis
    pp: Axis
    dp: Axis
    dp_outer: Axis
    ep: Axis
    etp: Axis
    edp: Axis
    dense_mesh: DeviceMesh
    expert_mesh: DeviceMesh

    __deepcopy__ = Axis.__deepcopy__

    @property
    def averaged(self) -> tuple[Axis, ...]:
        """Ranks along these have different samples or chunks of them; R is their product."""
        return self.dp_outer, self.dp, self.cp

    @property
    def num_averaged(self) -> int:
        """R: ranks over which the loss, and gradients of dense parameters, are averaged."""
        return math.prod(axis.size for axis in self.averaged)

    @property
    def tokens(self) -> tuple[Axis, ...]:
        """Ranks along these have different tokens between tensor-parallel regions."""
        return (*self.averaged, self.tp) if self.tp.cuts_sequence else self.averaged

    @property
    def etp_shares_tokens(self) -> bool:
        """Whether ranks of an etp group, which then are those of tp, have the same tokens."""
        return self.tp.size > 1 and not self.tp.cuts_sequence


def init_ranks(
    device: Device, store: dist.Store, rank: int, world_size: int, timeout_s: float
) -> None:
    """Join the default process group through `store`; all ranks arrive within `timeout_s`."""
    dist.init_process_group(
        device.collective_backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device.torch_device if device.is_cuda else None,
    )


def world_timeout() -> timedelta:
    """How long operations of the default group may take; groups beside it must be told so too."""
    world = dist.group.WORLD
    assert world is not None
    (first, *_) = world._device_types
    timeout = world._get_backend(first).options._timeout
    assert isinstance(timeout, timedelta)
    return timeout


def build_axes(parallel: ParallelConfig, device: Device) -> Axes:
    """All axes of a layout, as this rank sees them (`ValueError`: not for so many ranks).
    Collective. Call it once a run and hand the result on: groups made again for the same ranks are
    other groups, and what was captured with the first ones does not work with the second.
    """
    if parallel.world_size != dist.get_world_size():
        expected, got = parallel.world_size, dist.get_world_size()
        raise ValueError(f"Expected {expected} ranks for {parallel}, got {got}.")
    made = _Groups(parallel)
    me = dist.get_rank()
    axes = {
        name: Axis(name, getattr(parallel, name), axis_rank(parallel, name, me), made.group(name))
        for name in AXES
    }
    sizes, of_experts = dense_sizes(parallel), expert_sizes(parallel)
    shape = (sizes.pp, sizes.dp_outer, sizes.dp * sizes.cp, sizes.tp)
    flat: dict[str, str | tuple[str, ...]]
    flat = {"pp": "pp", "dp_outer": "dp_outer", "dp_cp": ("dp", "cp"), "tp": "tp"}
    dense = _whole_mesh(device, shape, {name: made.group(each) for name, each in flat.items()})
    named = {axis: made.group(axis) for axis in of_experts._fields}
    expert = _whole_mesh(device, of_experts, named)
    axes["tp"] = replace(axes["tp"], cuts_sequence=parallel.sequence_parallel)
    return Axes(
        **axes,
        dense_mesh=dense["dp_cp"] if parallel.dp_outer == 1 else dense["dp_outer", "dp_cp"],
        expert_mesh=expert["edp"],
    )


class _Groups:
    """Makes each process group once; axes that cut the ranks alike share it. Only within two
    families, though: FSDP communicates on streams of its own, beside the layers. One communicator
    would put both into one queue, or, where a graph holds the layers' part, into two queues that
    know nothing of each other.
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        self.parallel = parallel
        self.made: dict[tuple[bool, Partition], dist.ProcessGroup] = {}

    def group(self, axes: str | tuple[str, ...]) -> dist.ProcessGroup:
        partition = groups(self.parallel, axes)
        for_fsdp = not isinstance(axes, str) or axes in _SHARDED_OVER
        if len(partition) == self.parallel.world_size:
            for_fsdp = True  # groups of one: nothing is sent
        elif len(partition) == 1 and for_fsdp:
            return _default_group()
        key = (for_fsdp, partition)
        if key not in self.made:
            name = axes if isinstance(axes, str) else "_".join(axes)
            self.made[key] = _make_group(partition, name)
        return self.made[key]


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _make_group(partition: Partition, name: str) -> dist.ProcessGroup:
    """This rank's group of a partition of all ranks; every rank makes all groups in one order."""
    world = _default_group()
    # Made without it, a group has torch's own timeout, of many minutes.
    timeout = world_timeout()
    if world.bound_device_id is not None:
        # Communicators exist, so NCCL splits them, all groups of a partition in one call.
        ranks = [list(part) for part in partition]
        mine = dist.split_group(world, ranks, timeout=timeout, group_desc=name)
    else:
        me, mine = dist.get_rank(), None
        for part in partition:
            made = dist.new_group(list(part), timeout=timeout, group_desc=name)
            mine = made if me in part else mine
    assert mine is not None
    return mine


def _whole_mesh(
    device: Device, shape: tuple[int, ...], named: dict[str, dist.ProcessGroup]
) -> DeviceMesh:
    """A mesh of all ranks over groups that exist, of which FSDP has slices."""
    ranks = torch.arange(dist.get_world_size()).view(shape)
    return DeviceMesh.from_group(
        list(named.values()), device.kind, mesh=ranks, mesh_dim_names=tuple(named)
    )


# ---- collectives along an axis


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
