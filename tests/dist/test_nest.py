"""`Nest` over ranks: slices nest, gathers complete them, reductions sum into them."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.config import STRATEGIES
from fsdp_core.fsdp.layout import Nest, all_gather, placements_of
from tests.dist.rank_pool import RankPool

TOTAL = 24
LAYOUTS: dict[tuple[int, ...], list[tuple[str, ...]]] = {
    (2,): [(name,) for name in STRATEGIES],
    (4,): [(name,) for name in STRATEGIES],
    (2, 2): list(itertools.product(STRATEGIES, repeat=2)),
    (1, 2): [("optim", "optim_grads_params"), ("no_shard", "optim")],
}


def nests(shape: tuple[int, ...]) -> list[Nest]:
    """A nest of each strategy on a mesh of this shape."""
    mesh = init_device_mesh("cpu", shape)
    return [Nest(mesh, placements_of(names, len(shape))) for names in LAYOUTS[shape]]


def check_slices(shape: tuple[int, ...]) -> list[list[int]]:
    """Slices on this rank, checked against arithmetic; the shard index of each nest and level."""
    buffer = torch.arange(TOTAL)
    indices = []
    for nest in nests(shape):
        assert nest.num_shards == math.prod(nest.sizes)
        levels = range(nest.main_level + 1)
        for level in levels:
            numel = nest.numel(TOTAL, level)
            found = nest.slice(buffer, 0, level)
            assert found.numel() == numel
            assert found.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            assert found.tolist() == list(range(int(found[0]), int(found[0]) + numel))
            for finer in range(level, nest.main_level + 1):
                again = nest.slice(found, level, finer)
                assert torch.equal(again, nest.slice(buffer, 0, finer)), (level, finer)
        # The shards of the main weight lie in the order of `shard_index`.
        own = nest.slice(buffer, 0, nest.main_level)
        assert int(own[0]) == nest.shard_index * own.numel()
        indices.append([int(nest.slice(buffer, 0, k)[0]) // nest.numel(TOTAL, k) for k in levels])
    return indices


@pytest.mark.parametrize("shape", list(LAYOUTS))
def test_slices_nest_and_cover(warm_ranks: RankPool, shape: tuple[int, ...]) -> None:
    """A slice of a slice is the finer slice; at each level every part is held equally often."""
    world_size = math.prod(shape)
    ranks = warm_ranks.run(check_slices, shape, world_size=world_size)
    for number, names in enumerate(LAYOUTS[shape]):
        placements = placements_of(names, len(shape))
        sizes = [shape[axis] for axis in placements.nest]
        for level in range(len(sizes) + 1):
            parts = math.prod(sizes[:level])
            held = sorted(rank[number][level] for rank in ranks)
            assert held == sorted(list(range(parts)) * (world_size // parts)), (names, level)


def check_gathers(shape: tuple[int, ...]) -> int:
    """Gathers between every two levels, in place, around NaN; how many were checked."""
    whole = torch.arange(float(TOTAL))
    checked = 0
    for nest in nests(shape):
        for at, start in itertools.combinations_with_replacement(range(nest.main_level + 1), 2):
            due = nest.slice(whole, 0, at)
            buffer = torch.full_like(due, torch.nan)
            nest.slice(buffer, at, start).copy_(nest.slice(whole, 0, start))
            for step in nest.gather_steps(buffer, start, at):
                all_gather(*step)
            assert torch.equal(buffer, due), (nest.placements, start, at)
            checked += 1
    return checked


@pytest.mark.parametrize("shape", list(LAYOUTS))
def test_gather_completes_a_slice(warm_ranks: RankPool, shape: tuple[int, ...]) -> None:
    """From any level to any coarser one, what was one's own slice becomes the whole of that one."""
    for checked in warm_ranks.run(check_gathers, shape, world_size=math.prod(shape)):
        assert checked > len(LAYOUTS[shape])


def contribution(rank: int) -> torch.Tensor:
    """What a rank puts into a sum: integers, so that sums are exact in any order."""
    return torch.arange(float(TOTAL)) * (rank + 1) + 100 * rank


def check_reductions(shape: tuple[int, ...]) -> int:
    """Reductions between every two levels against sums over the ranks of the axes on the way."""
    rank = dist.get_rank()
    ranks = torch.arange(math.prod(shape)).view(shape)
    place = tuple(int(i) for i in (ranks == rank).nonzero()[0])
    checked = 0
    for nest in nests(shape):
        for start, stop in itertools.combinations_with_replacement(range(nest.main_level + 1), 2):
            mine = nest.slice(contribution(rank), 0, start).clone()
            kept = mine.clone()
            outputs = [
                torch.full((nest.numel(TOTAL, k + 1),), torch.nan) for k in range(start, stop)
            ]
            found = nest.reduce(mine, outputs, start)
            summed = set(nest.axes[start:stop])
            index = tuple(slice(None) if a in summed else c for a, c in enumerate(place))
            due = torch.stack([contribution(int(r)) for r in ranks[index].flatten()]).sum(0)
            assert torch.equal(found, nest.slice(due, 0, stop)), (nest.placements, start, stop)
            assert torch.equal(mine, kept), "a reduction must not write into its input"
            assert found is (outputs[-1] if outputs else mine)
            checked += 1
    return checked


@pytest.mark.parametrize("shape", list(LAYOUTS))
def test_reduce_sums_into_a_slice(warm_ranks: RankPool, shape: tuple[int, ...]) -> None:
    """From any level to any finer one the result is the sum over the axes in between, sliced."""
    for checked in warm_ranks.run(check_reductions, shape, world_size=math.prod(shape)):
        assert checked > len(LAYOUTS[shape])


def replica_sums(shape: tuple[int, ...]) -> list[list[float]]:
    """A one summed over each nest's replica groups, one group after another."""
    found = []
    for nest in nests(shape):
        one = torch.ones(1)
        sizes = []
        for group in nest.replica_groups:
            dist.all_reduce(one, group=group)
            sizes.append(one.item())
        found.append(sizes)
    return found


def test_what_is_not_cut_is_replicated(warm_ranks: RankPool) -> None:
    """Cut and replicated axes together are all of the mesh: no gradient misses a rank."""
    for rank in warm_ranks.run(replica_sums, (2, 2), world_size=4):
        for names, sizes in zip(LAYOUTS[2, 2], rank, strict=True):
            placements = placements_of(names, 2)
            assert (sizes[-1] if sizes else 1) * 2 ** len(placements.nest) == 4, names


def outer_mesh() -> tuple[Any, Any, Any]:
    """Axes, shape and this rank's place of a layout of two outer groups of one rank."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_outer", "dp"))
    return mesh.mesh_dim_names, tuple(mesh.shape), tuple(mesh.get_coordinate() or ())


def test_the_outer_axis_comes_first(warm_ranks: RankPool) -> None:
    """Ranks of an inner group are neighbours, as GPUs of a node are; outer groups are far apart."""
    names = ("dp_outer", "dp")
    expected = [(names, (2, 1), (0, 0)), (names, (2, 1), (1, 0))]
    assert warm_ranks.run(outer_mesh, world_size=2) == expected
