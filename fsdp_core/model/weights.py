"""Global weights: the same for every layout, drawn, cut, gathered and loaded by name.

    global name   that of the parameter in the model that is not cut, `layers.7.attn.wq.weight`
    draw          each global tensor from a generator of its own, seeded by (seed, global name)
    experts       [E, out, in]: each of the E matrices from its own, so a rank draws its own alone

so a rank draws no more than it keeps of experts, and once a matrix otherwise, and what it gets
depends on nothing but the seed and the name. A model here is the list of a rank's stages.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.fsdp.row_sharded import RowSharded
from fsdp_core.parallel.axes import Axes, Axis
from fsdp_core.parallel.collectives import all_gather
from fsdp_core.parallel.cuts import Cut, CutModule, place, take

_WRITES_RESIDUAL = ("wo", "down")
"""Modules that write to the residual stream, by the last part of their names."""
_EXPERT_AXIS = "ep"

Weights = dict[str, torch.Tensor]


def named_cuts(stage: nn.Module) -> dict[str, tuple[Cut, ...]]:
    """The cuts of every parameter by its name; () for one that is replicated.

    Asked of the modules, which remember them: FSDP puts parameters of its own in place of theirs.
    """
    found: dict[str, tuple[Cut, ...]] = {}
    for prefix, module in stage.named_modules():
        cuts = module._cuts if isinstance(module, CutModule) else {}
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found[f"{prefix}.{name}".lstrip(".")] = cuts.get(name, ())
    return found


def init_weights(stages: Iterable[nn.Module], seed: int, *, layers: int, init_std: float) -> None:
    """Give every parameter its part of the global tensor that the seed and its name draw.

    Before FSDP shards the stages, whose parameters have then their rows of it.

    Matrices are normal with `init_std`, those that write to the residual stream divided by
    sqrt(2 * layers) (Radford et al., 2019); norm weights are one.

    Args:
        layers: of the whole model.

    Raises:
        ValueError: a stage that is sharded already.
    """
    for stage in stages:
        cuts = named_cuts(stage)
        for name, parameter in stage.named_parameters():
            if isinstance(parameter, RowSharded):
                raise ValueError(f"Expected stages to initialise before FSDP, got {name} sharded.")
            with torch.no_grad():
                if parameter.dim() < 2:
                    parameter.fill_(1.0)
                    continue
                residual = name.split(".")[-2] in _WRITES_RESIDUAL
                std = init_std / (2 * layers) ** 0.5 if residual else init_std
                parameter.copy_(_draw(name, parameter, cuts[name], seed, std))


def _draw(
    name: str, parameter: torch.Tensor, cuts: tuple[Cut, ...], seed: int, std: float
) -> torch.Tensor:
    """This rank's part, float32 on the CPU."""
    if parameter.dim() < 3:
        return take(_normal(name, _global_shape(parameter, cuts), seed, std), cuts)
    first, inner = _expert_cut(cuts), tuple(cut for cut in cuts if cut.dim > 0)
    inner = tuple(Cut(c.axis, c.dim - 1, c.axis_size, c.index) for c in inner)
    shape = _global_shape(parameter[0], inner)
    number = first.index * parameter.shape[0]
    return torch.stack(
        [
            take(_normal(f"{name}[{number + i}]", shape, seed, std), inner)
            for i in range(parameter.shape[0])
        ]
    )


def _expert_cut(cuts: tuple[Cut, ...]) -> Cut:
    return next((cut for cut in cuts if cut.dim == 0), Cut(_EXPERT_AXIS, 0, 1, 0))


def _normal(name: str, shape: Sequence[int], seed: int, std: float) -> torch.Tensor:
    digest = hashlib.blake2b(f"{seed}: {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(tuple(shape)).normal_(0.0, std, generator=generator)


def _global_shape(part: torch.Tensor, cuts: tuple[Cut, ...]) -> list[int]:
    shape = list(part.shape)
    for cut in cuts:
        shape[cut.dim] *= cut.axis_size
    return shape


# ---- across ranks


def load_global(stages: Iterable[nn.Module], weights: Mapping[str, torch.Tensor]) -> None:
    """Give every parameter its part of the global tensors; before or after FSDP shards it.

    After it, tell FSDP with `refresh_model_weights`. Names of other stages' parameters are passed
    over. Not a collective.

    Raises:
        ValueError: a parameter that `weights` lack, or one of another global shape.
    """
    for stage in stages:
        cuts = named_cuts(stage)
        for name, parameter in stage.named_parameters():
            if name not in weights:
                raise ValueError(f"Expected a weight for {name}, got none.")
            expected = _global_shape(parameter, cuts[name])
            if list(weights[name].shape) != expected:
                raise ValueError(
                    f"Expected {name} of shape {expected}, got {list(weights[name].shape)}."
                )
            part = take(weights[name], cuts[name])
            with torch.no_grad():
                if isinstance(parameter, RowSharded):
                    parameter.to_local().copy_(parameter.row_spec.own_rows(part))
                else:
                    parameter.copy_(part)


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
        cuts = named_cuts(stage)
        for name, parameter in stage.named_parameters():
            found[name] = _whole(name, parameter, pick(parameter), cuts[name], axes)
    return _of_all_stages(found, axes.pp)


def _whole(
    name: str, parameter: torch.Tensor, value: torch.Tensor | None, cuts: tuple[Cut, ...],
    axes: Axes,
) -> torch.Tensor:  # fmt: skip
    part = _all_rows(name, parameter, value)
    whole = part
    for axis in [axes.etp, axes.ep] if _is_of_experts(cuts) else [axes.tp]:
        whole = _join(name, whole, next((c for c in cuts if c.axis == axis.name), None), axis)
    return whole.cpu()


def _is_of_experts(cuts: tuple[Cut, ...]) -> bool:
    return any(cut.axis == _EXPERT_AXIS for cut in cuts)


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
            return value.full_tensor()
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
            if not _same_bits(parts[0], other):
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


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


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
