"""Global weights and gradients of a model that is cut over ranks, gathered and loaded by name."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.fsdp.row_sharded import RowSharded
from fsdp_core.model.sharding import global_shape
from fsdp_core.parallel.mesh import Axes, Axis, all_gather
from fsdp_core.parallel.tensor_parallel import (
    Cut,
    Cuts,
    Stretch,
    Stretches,
    named_stretches,
    take,
)
from tests.support.tensors import same_bits

Weights = dict[str, torch.Tensor]


def load_global(stages: Iterable[nn.Module], weights: Mapping[str, torch.Tensor]) -> None:
    """Give every parameter its part of the global tensors; before or after FSDP shards it.

    After it, tell FSDP with `refresh_model_weights`. Names of other stages' parameters are passed
    over. Not a collective.

    Raises:
        ValueError: a parameter that `weights` lack, or one of another global shape.
    """
    for stage in stages:
        stretches = named_stretches(stage)
        for name, parameter in stage.named_parameters():
            parts = [_part_of(parameter, stretch, weights) for stretch in stretches[name]]
            whole = join_stretches(stretches[name], parts)
            with torch.no_grad():
                if isinstance(parameter, RowSharded):
                    parameter.to_local().copy_(parameter.row_spec.own_rows(whole))
                else:
                    parameter.copy_(whole)


def place(part: torch.Tensor, whole: torch.Tensor, cuts: Cuts) -> None:
    """Write `part` where it belongs in the global tensor `whole`: the inverse of `take`."""
    for cut in cuts:
        length = whole.shape[cut.dim] // cut.axis_size
        whole = whole.narrow(cut.dim, cut.index * length, length)
    assert whole.shape == part.shape, (whole.shape, part.shape)
    whole.copy_(part)


def join_stretches(stretches: Stretches, parts: list[torch.Tensor]) -> torch.Tensor:
    """The parameter out of a rank's parts of the global tensors, in the order of `stretches`."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, stretches[0].dim)


def _part_of(
    parameter: torch.Tensor, stretch: Stretch, weights: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    name, shape = stretch.name, list(parameter.shape)
    if name not in weights:
        raise ValueError(f"Expected a weight for {name}, got none.")
    if stretch.length is not None:
        shape[stretch.dim] = stretch.length
    expected = global_shape(shape, stretch.cuts)
    if list(weights[name].shape) != expected:
        raise ValueError(f"Expected {name} of shape {expected}, got {list(weights[name].shape)}.")
    return take(weights[name], stretch.cuts)


def gather_global(stages: Iterable[nn.Module], axes: Axes) -> Weights:
    """Every weight of the whole model, on the CPU of every rank. A collective over all ranks.

    Raises:
        ValueError: a replicated weight whose bits differ between ranks, named.
    """
    return _gather(stages, axes, lambda parameter: parameter.detach())


def gather_global_grads(stages: Iterable[nn.Module], axes: Axes) -> Weights:
    """The same of gradients; a parameter without one on some rank is an error.

    Raises:
        ValueError: no gradient, or a replicated parameter whose gradient differs between ranks.
    """
    return _gather(stages, axes, lambda parameter: parameter.grad)


def _gather(
    stages: Iterable[nn.Module], axes: Axes, pick: Callable[[Any], torch.Tensor | None]
) -> Weights:
    found: Weights = {}
    for stage in stages:
        stretches = named_stretches(stage)
        for name, parameter in stage.named_parameters():
            mine = _all_rows(name, parameter, pick(parameter))
            for stretch in stretches[name]:
                found[stretch.name] = _whole(stretch, stretch.of(mine), axes)
    return _of_all_stages(found, axes.pp)


def _whole(stretch: Stretch, part: torch.Tensor, axes: Axes) -> torch.Tensor:
    whole, cuts = part, stretch.cuts
    for axis in [axes.etp, axes.ep] if _is_of_experts(cuts) else [axes.tp]:
        cut = next((c for c in cuts if c.axis == axis.name), None)
        whole = _join(stretch.name, whole, cut, axis)
    return whole.cpu()


def _is_of_experts(cuts: tuple[Cut, ...]) -> bool:
    return any(cut.axis == "ep" for cut in cuts)


def _all_rows(name: str, parameter: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    """A rank's part with all of FSDP's rows; a rank without rows may have no value."""
    if isinstance(parameter, RowSharded):
        if value is None:
            if parameter.row_spec.local_numel:
                raise ValueError(f"Expected a gradient of {name}, got none.")
            empty = parameter._local_tensor.new_empty(parameter.row_spec.local_shape)
            value = RowSharded.make(empty, parameter.row_spec)
        assert isinstance(value, RowSharded)
        with torch.no_grad():
            whole: torch.Tensor = value.full_tensor()
            return whole
    if value is None:
        raise ValueError(f"Expected a gradient of {name}, got none.")
    return value.detach()


def _join(name: str, part: torch.Tensor, cut: Cut | None, axis: Axis) -> torch.Tensor:
    """Parts of all ranks of an axis as one, or one of them after a look that they are equal."""
    if axis.size == 1:
        return part
    parts = all_gather(part[None].contiguous(), axis, 0).unbind()
    if cut is None:
        for rank, other in enumerate(parts):
            if not same_bits(parts[0], other):
                raise ValueError(
                    f"Expected {name}, which is replicated, to be the same on every rank of "
                    f"{axis.name}, got other bits on rank {rank} than on rank 0."
                )
        return parts[0]
    shape = list(part.shape)
    shape[cut.dim] *= axis.size
    whole = part.new_empty(shape)
    for index, each in enumerate(parts):
        place(each, whole, (Cut(cut.axis, cut.dim, cut.axis_size, index),))
    return whole


def _of_all_stages(mine: Weights, pp: Axis) -> Weights:
    if pp.size == 1:
        return mine
    gathered: list[Any] = [None] * pp.size
    dist.all_gather_object(gathered, mine, group=pp.group)
    return dict(_distinct(gathered))


def _distinct(gathered: Iterable[Weights]) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[str] = set()
    for stage in gathered:
        for name, tensor in stage.items():
            if name in seen:
                raise ValueError(f"Expected {name} on one pipeline rank, got it on two.")
            seen.add(name)
            yield name, tensor
