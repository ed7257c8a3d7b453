"""Programs that graph whole FSDP units, their hooks around replays, and later run them eagerly."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.device import Device
from fsdp_core.fsdp import fully_shard
from fsdp_core.fsdp.pool import make_pool
from fsdp_core.graph import callables, te_callables
from fsdp_core.graph.graph import GraphMaker
from fsdp_core.graph.hooks import hooks_off
from tests.dist.fsdp_models import ROWS, WIDTH, Net
from tests.unit.fsdp_core.graph.te_graph_stand_in import TeGraphStandIn

STEPS, CAPTURE, DELETE, MICROBATCHES = 6, 2, 4, 2


def built(strategy: str, pool: str) -> tuple[Any, torch.optim.Optimizer]:
    """A sharded net of three blocks and its optimizer, the same each time."""
    torch.manual_seed(2)
    model = Net(3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = {
        "mesh": mesh, "strategy": strategy,
        "pool": make_pool(pool, Device("cpu"), persistent_on_miss=True),
    }  # fmt: skip
    for block in model.blocks:
        fully_shard(block, **cast("Any", options))
    fully_shard(model, **cast("Any", options))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def gathered(units: Sequence[Any]) -> list[list[nn.Parameter]]:
    """Of each unit the parameters that its forward computes with."""
    found = []
    for unit in units:
        unit.unshard()
        found.append(list(unit.parameters()))
        unit.reshard()
    return found


def graph_blocks(
    model: Any, way: str, on_replay: Callable[[int], None]
) -> list[callables.GraphedModule]:
    """Capture the blocks and install what was captured."""
    make: Callable[..., list[callables.GraphedModule]] = callables.make_graphed_callables
    if way == "te":
        make = partial(te_callables.make_graphed_callables, library=TeGraphStandIn())
    blocks, sample = list(model.blocks), (torch.zeros(ROWS, WIDTH, requires_grad=True),)
    model.fsdp_schedule.quiesce()
    with hooks_off(blocks) as hooks:
        graphed = make(
            GraphMaker(Device("cpu")), blocks, [sample] * len(blocks),
            parameters=gathered(blocks), capture_time_hooks=hooks, on_replay=on_replay,
        )  # fmt: skip
    model.fsdp_schedule.quiesce()
    for each in graphed:
        each.install()
    return graphed


def train(strategy: str, pool: str, way: str | None) -> list[Any]:
    """Losses, gradients, weights, launches; blocks replay in the middle steps, then run as ever."""
    model, optimizer = built(strategy, pool)
    graphed: list[callables.GraphedModule] = []
    seen: list[Any] = []
    launches: list[int] = []
    for step in range(STEPS):
        if way is not None and step == CAPTURE:
            graphed = graph_blocks(model, way, launches.append)
        if step == DELETE:
            for each in graphed:
                each.reset()
        for microbatch in range(MICROBATCHES):
            number = dist.get_rank() + 10 * microbatch + 100 * step
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = model(x).square().mean()
            loss.backward()
            seen.append(loss.item())
        seen += [_local(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen.append(model(torch.ones(ROWS, WIDTH)).sum().item())
        model.train()
    return [*seen, *(_local(p) for p in model.parameters()), sum(launches)]


def _local(tensor: Any) -> list[float] | None:
    local = None if tensor is None else tensor.to_local()
    return None if local is None else local.flatten().tolist()


def count_differences(strategy: str, pool: str, way: str) -> tuple[int, int]:
    """Launches, and how many of the values seen differ from an eager run's."""
    *expected, none = train(strategy, pool, None)
    *got, launches = train(strategy, pool, way)
    assert none == 0
    assert len(expected) == len(got) > 60
    return launches, sum(a != b for a, b in zip(expected, got, strict=True))
