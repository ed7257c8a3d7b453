"""Losses and gradients over ranks, in whole numbers: exact however they are cut and accumulated."""

import itertools
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.config import STRATEGIES
from fsdp_core.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from tests.dist.rank_pool import RankPool

PASSES = 3
Strategy = tuple[str, ...]


class Sums(nn.Module):
    """Two Linears and a scale; outputs, and gradients, sums of the inputs, are whole numbers.

    Odd shapes: some ranks hold no rows of the small ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(5, 7), nn.Linear(5, 1)])
        self.scale = nn.Parameter(torch.ones(()))
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape, generator=generator).float()

    def forward(self, x: torch.Tensor, skip: int) -> torch.Tensor:
        used = [linear(x).sum() for i, linear in enumerate(self.inner) if i != skip]
        return cast("torch.Tensor", sum(used) + self.scale * x.sum())


def inputs(rank: int, number: int) -> torch.Tensor:
    """Whole numbers in [-3, 3] of a rank's backward pass: [2, 5]."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randint(-3, 4, (2, 5), generator=generator).float()


def due(ranks: int, numbers: range) -> dict[str, torch.Tensor]:
    """The gradients: sums over passes, means over ranks. Exact in bf16 too, below 256."""
    batches = [inputs(rank, number) for rank in range(ranks) for number in numbers]
    total = torch.stack([x.sum(0) for x in batches]).sum(0) / ranks
    rows = torch.tensor(2.0 * len(batches) / ranks)
    return {
        "inner.0.weight": total.expand(7, 5),
        "inner.0.bias": rows.expand(7),
        "inner.1.weight": total.expand(1, 5),
        "inner.1.bias": rows.expand(1),
        "scale": total.sum(),
    }


def shard(mesh: DeviceMesh, strategy: Strategy, **options: Any) -> FSDPModule:
    model = Sums()
    for inner in model.inner:
        fully_shard(inner, mesh=mesh, strategy=strategy, **options)
    return cast("FSDPModule", fully_shard(model, mesh=mesh, strategy=strategy, **options))


def prepare(root: FSDPModule, how: str, number: int) -> None:
    """What is set before pass `number` to accumulate as `how` says."""
    is_last = number == PASSES - 1
    if how == "not last":
        root.set_is_last_backward(is_last)
    elif how in ("no sync", "no release"):
        root.set_requires_gradient_sync(is_last)
        root.set_reshard_after_backward(is_last or how == "no sync")
    elif how == "no all-reduce":
        root.set_requires_all_reduce(is_last)
    elif how == "mixed":
        root.set_requires_gradient_sync(number != 0)
        root.set_is_last_backward(is_last)


def check(root: FSDPModule, expected: dict[str, torch.Tensor], told: Any) -> None:
    """This rank's rows are exactly the expected ones, also where it has none."""
    for group in root.fsdp_groups:
        for index, (name, parameter) in enumerate(zip(group.names, group.sharded, strict=True)):
            grad: Any = parameter.grad
            assert grad is not None, (told, name)
            start = group.specs[index].row_start
            rows = grad.to_local()
            wanted = expected[name]
            if wanted.dim() or not rows.numel():
                wanted = wanted.reshape(-1, *wanted.shape[1:])[start : start + rows.shape[0]]
            assert torch.equal(rows, wanted), (told, name, rows, wanted)


HOWS = ("each", "not last", "no sync", "no release", "no all-reduce", "mixed")


def accumulate(
    shape: tuple[int, ...], keep_grads: bool, reduce_dtype: torch.dtype, skip: int = -1
) -> int:
    """Every strategy and every way; two rounds, zeroed in between. How many were checked.

    The last pass of a round does not enter the inner unit `skip`.
    """
    mesh, world, checked = init_device_mesh("cpu", shape), dist.get_world_size(), 0
    policy, plain = MixedPrecisionPolicy(reduce_dtype=reduce_dtype), Sums()
    for strategy in itertools.product(STRATEGIES, repeat=len(shape)):
        root = shard(mesh, strategy, keep_grads=keep_grads, mp_policy=policy)
        for how in HOWS:
            for first in (0, 10):
                root.zero_main_grads()
                for number in range(PASSES):
                    prepare(root, how, number)
                    skipped = skip if number == PASSES - 1 else -1
                    x = inputs(dist.get_rank(), first + number)
                    loss = cast("Any", root)(x, skipped)
                    assert loss.item() == plain(x, skipped).item(), (strategy, how)
                    loss.backward()
                expected = due(world, range(first, first + PASSES))
                before = due(world, range(first, first + PASSES - 1))
                expected |= {n: g for n, g in before.items() if n.startswith(f"inner.{skip}.")}
                check(root, expected, (strategy, how, first))
                checked += 1
    return checked


@pytest.mark.parametrize("keep_grads", [False, True])
@pytest.mark.parametrize(
    ("shape", "reduce_dtype"),
    [((2,), torch.float32), ((4,), torch.bfloat16), ((2, 2), torch.float32)],
)
def test_every_way_to_accumulate_gives_the_sum(
    warm_ranks: RankPool, shape: tuple[int, ...], reduce_dtype: torch.dtype, keep_grads: bool
) -> None:
    """Reduced each time, at the end, or up to an axis: the same whole numbers for any strategy."""
    world_size = 2 ** (len(shape) * shape[0] // 2)
    for checked in warm_ranks.run(
        accumulate, shape, keep_grads, reduce_dtype, world_size=world_size
    ):
        assert checked == 4 ** len(shape) * len(HOWS) * 2


def thirds(main: torch.dtype, reduce: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """This rank's gradients of one pass, in pieces and kept, and the sum, rounded and divided."""
    policy = MixedPrecisionPolicy(reduce_dtype=reduce, main_dtype=main)
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), []
    roots = [shard(mesh, ("optim_grads_params",), keep_grads=keep, mp_policy=policy)
             for keep in (False, True)]  # fmt: skip
    for root in roots:
        cast("Any", root)(inputs(dist.get_rank(), 0), -1).backward()
    sums = {name: 3 * mean for name, mean in due(3, range(1)).items()}
    for free, kept in zip(*(root.fsdp_groups for root in roots), strict=True):
        for index, (name, spec) in enumerate(zip(free.names, free.specs, strict=True)):
            both = [cast("Any", group.sharded[index].grad).to_local() for group in (free, kept)]
            found.append((*both, spec.own_rows(sums[name].round().to(main).mul_(1 / 3))))
    return found


@pytest.mark.parametrize("reduce", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("main", [torch.bfloat16, torch.float32])
def test_a_sum_is_divided_in_the_dtype_of_the_gradient(
    warm_ranks: RankPool, main: torch.dtype, reduce: torch.dtype
) -> None:
    """Three ranks, so that it is rounded: the same in every buffer, and once in float32."""
    for found in warm_ranks.run(thirds, main, reduce, world_size=3):
        assert found
        for free, kept, wanted in found:
            assert torch.equal(free, kept)
            assert main is torch.bfloat16 or torch.equal(kept, wanted)


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_a_unit_that_the_last_pass_skips(
    warm_ranks: RankPool, shape: tuple[int, ...], skip: int
) -> None:
    """It has the sum of the passes before, and none of it is added to the next round's."""
    args = (shape, False, torch.float32, skip)
    for checked in warm_ranks.run(accumulate, *args, world_size=2 ** len(shape)):
        assert checked == 4 ** len(shape) * len(HOWS) * 2


def visible(shape: tuple[int, ...]) -> list[set[bool]]:
    """Before the last of two passes: whether gradients are there, for each strategy."""
    mesh, plain = init_device_mesh("cpu", shape), Sums()
    found = []
    for strategy in itertools.product(STRATEGIES, repeat=len(shape)):
        root = shard(mesh, strategy)
        for number in range(2):
            root.set_is_last_backward(number == 1)
            x = inputs(dist.get_rank(), number)
            loss = cast("Any", root)(x, -1)
            assert loss.item() == plain(x, -1).item(), strategy
            loss.backward()
            if number == 0:
                groups = root.fsdp_groups
                found.append({p.grad is not None for g in groups for p in g.sharded})
        check(root, due(dist.get_world_size(), range(2)), strategy)
    return found


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_gradients_show_before_the_last_pass_only_where_fully_reduced(
    warm_ranks: RankPool, shape: tuple[int, ...]
) -> None:
    """Told that more passes follow, only a gradient cut like its main weight is there at once.

    Losses, and gradients after the last pass, are those of one process.
    """
    full = ("optim_grads", "optim_grads_params")
    expected = [
        all(name in full for name in strategy)
        for strategy in itertools.product(STRATEGIES, repeat=len(shape))
    ]
    ranks = warm_ranks.run(visible, shape, world_size=2 ** len(shape))
    assert [set.union(*found) for found in zip(*ranks, strict=True)] == [{e} for e in expected]


class Sometimes(nn.Linear):
    """A Linear whose bias not every rank uses."""

    def forward(self, x: torch.Tensor, with_bias: bool = True) -> torch.Tensor:
        out = x @ self.weight.t()
        return (out + self.bias if with_bias else out).sum()


def unused_on_one_rank(strategy: Strategy, keep_grads: bool) -> None:
    """Only rank 1 uses the bias, and the ranks that hold its rows must learn of it."""
    mesh = init_device_mesh("cpu", (2,))
    options: Any = {"mesh": mesh, "strategy": strategy, "keep_grads": keep_grads}
    root = cast("FSDPModule", fully_shard(Sometimes(5, 7), **options))
    root.set_reduce_scatter_unused_params(True)
    for _ in range(2):
        root.zero_main_grads()
        cast("Any", root)(inputs(dist.get_rank(), 0), with_bias=dist.get_rank() == 1).backward()
        expected = due(2, range(1))
        check(root, {"weight": expected["inner.0.weight"], "bias": torch.ones(7)}, strategy)


@pytest.mark.parametrize("keep_grads", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_used_on_one_rank(
    warm_ranks: RankPool, strategy: str, keep_grads: bool
) -> None:
    """With zeros for unused ones every rank gets the mean, those that did not use it too."""
    warm_ranks.run(unused_on_one_rank, (strategy,), keep_grads, world_size=2)
