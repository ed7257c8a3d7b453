"""Global weights: the same for every layout, drawn, cut, gathered and loaded by name.

    global name   that of the parameter in the model that is not cut, `layers.7.mlp.norm.weight`;
                  what a library makes of it is translated (`param_sharding`)
    draw          each global tensor from a generator of its own, seeded by (seed, global name)
    experts       [E, out, in]: each of the E matrices from its own, so a rank draws its own alone

so a rank draws no more than it keeps of experts, and once a matrix otherwise, and what it gets
depends on nothing but the seed and the name. A model here is the list of a rank's stages.
"""

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fsdp_core.fsdp.row_sharded import RowSharded
from fsdp_core.parallel.param_sharding import (
    Cut,
    named_stretches,
    take,
)

_WRITES_RESIDUAL = ("wo", "down")
"""Modules that write to the residual stream, by the last part of their names."""
EXPERT_AXIS = "ep"


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
        stretches = named_stretches(stage)
        for name, parameter in stage.named_parameters():
            if isinstance(parameter, RowSharded):
                raise ValueError(f"Expected stages to initialise before FSDP, got {name} sharded.")
            with torch.no_grad():
                if parameter.dim() < 2:
                    parameter.fill_(1.0)
                    continue
                for stretch in stretches[name]:
                    residual = stretch.name.split(".")[-2] in _WRITES_RESIDUAL
                    std = init_std / (2 * layers) ** 0.5 if residual else init_std
                    part = stretch.of(parameter)
                    part.copy_(_draw(stretch.name, part, stretch.cuts, seed, std))


def _draw(
    name: str, parameter: torch.Tensor, cuts: tuple[Cut, ...], seed: int, std: float
) -> torch.Tensor:
    """This rank's part, float32 on the CPU."""
    if parameter.dim() < 3:
        return take(_normal(name, global_shape(parameter.shape, cuts), seed, std), cuts)
    first, inner = _expert_cut(cuts), tuple(cut for cut in cuts if cut.dim > 0)
    inner = tuple(Cut(c.axis, c.dim - 1, c.axis_size, c.index) for c in inner)
    shape = global_shape(parameter.shape[1:], inner)
    number = first.index * parameter.shape[0]
    return torch.stack(
        [
            take(_normal(f"{name}[{number + i}]", shape, seed, std), inner)
            for i in range(parameter.shape[0])
        ]
    )


def _expert_cut(cuts: tuple[Cut, ...]) -> Cut:
    return next((cut for cut in cuts if cut.dim == 0), Cut(EXPERT_AXIS, 0, 1, 0))


def _normal(name: str, shape: Sequence[int], seed: int, std: float) -> torch.Tensor:
    digest = hashlib.blake2b(f"{seed}: {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(tuple(shape)).normal_(0.0, std, generator=generator)


def global_shape(part: Sequence[int], cuts: tuple[Cut, ...]) -> list[int]:
    """Of the tensor that a rank's part is of."""
    shape = list(part)
    for cut in cuts:
        shape[cut.dim] *= cut.axis_size
    return shape
