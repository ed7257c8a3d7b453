"""Layouts of rows over 1 to 4 ranks and 1 or 2 mesh axes, for tests of what is sharded by rows.

Cut in ways that even shards are not: nearly all rows on one rank, ranks without any, parameters of
no dims and of no elements.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.fsdp.row_sharded import RowSharded, RowSpec

# name: shape of the mesh, axes that cut, coarsest first
MESHES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": ((1,), (0,)),
    "two": ((2,), (0,)),
    "three": ((3,), (0,)),
    "four": ((4,), (0,)),
    "replicas of two": ((2, 2), (1,)),
    "outer axis": ((2, 2), (0,)),
    "inner then outer": ((2, 2), (1, 0)),
    "outer then inner": ((2, 2), (0, 1)),
    "whole": ((2,), ()),
}
SHAPES: list[tuple[int, ...]] = [(7, 3), (5,), (), (1, 4), (2, 3, 2, 2), (0, 3), (3, 0)]


def world_of(name: str) -> int:
    return math.prod(MESHES[name][0])


def cuts(rows: int, num_shards: int) -> Iterator[tuple[int, ...]]:
    """Bounds: like even ones but for the remainder, most rows first, all on the last."""
    yield tuple(rows * s // num_shards for s in range(num_shards + 1))
    most = rows - rows // 4
    yield (0, *([most] * (num_shards - 1)), rows) if num_shards > 1 else (0, rows)
    yield (0,) * num_shards + (rows,)


def layouts(name: str) -> Callable[[tuple[int, ...]], list[RowSpec]]:
    """A function from a parameter's shape to its layouts over the mesh `name`, one a way to cut."""
    mesh_shape, axes = MESHES[name]
    mesh = init_device_mesh("cpu", mesh_shape)
    num_shards = math.prod(mesh_shape[axis] for axis in axes)

    def specs(shape: tuple[int, ...]) -> list[RowSpec]:
        rows = shape[0] if shape else 1
        return [RowSpec(mesh, torch.Size(shape), bounds, axes) for bounds in cuts(rows, num_shards)]

    return specs


def reference(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """The whole tensor, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sharded(full: torch.Tensor, spec: RowSpec) -> RowSharded:
    """This rank's rows of `full`, inside a larger buffer as at rest."""
    own = spec.own_rows(full)
    flat = torch.zeros(own.numel() + 5, dtype=full.dtype)
    local = flat[3 : 3 + own.numel()].view(own.shape)
    local.copy_(own)
    return RowSharded.make(local, spec)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes: -0.0 is not 0.0, and NaN equals itself."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    flat = [t.detach().contiguous().flatten().view(torch.uint8) for t in (one, other)]
    return alike and torch.equal(*flat)
