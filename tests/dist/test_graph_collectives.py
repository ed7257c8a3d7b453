"""Collectives on the host graph: a replay talks to the other ranks and gets eager's bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from fsdp_core.device import Device
from fsdp_core.dispatch import IS_2_13, REDUCE_SCATTER
from fsdp_core.fsdp.layout import all_gather, reduce_scatter
from fsdp_core.graph.device_graphs import HostGraph
from fsdp_core.graph.recorder import Recorder
from tests.dist.rank_pool import RankPool
from tests.dist.test_fsdp import settled


def drop_while_under_way() -> list[int]:
    """Live bytes of a tensor that is dropped first, while rank 1 is waited for, and after."""
    device = Device("cpu")
    with device.counting_memory():
        ready, tensor = torch.zeros(1), torch.ones(1000)
        if dist.get_rank() == 1:
            dist.recv(ready, 0)
            dist.all_reduce(tensor)
            return []
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        del tensor
        before = device.live_bytes()
        dist.send(ready, 1)
        work.wait()
        return [before, device.live_bytes()]


def test_what_is_lent_lives_until_the_work_is_complete(warm_ranks: RankPool) -> None:
    """A tensor that the program drops while gloo works on it stays, and is counted, until then."""
    assert warm_ranks.run(drop_while_under_way, world_size=2) == [[4004, 4], []]


gather_tensor: Any = getattr(funcol, "all_gather_single" if IS_2_13 else "all_gather_tensor")
scatter_tensor: Any = getattr(funcol, REDUCE_SCATTER)
scatter_async: Any = getattr(dist, REDUCE_SCATTER)
HANDLES: list[Any] = []
NUMEL = 12
REPLAYS = 4

State = dict[str, torch.Tensor]


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def gather(s: State) -> Any:
    """All-gather into a buffer that outlives the step."""
    all_gather(s["full"], s["shard"] * 2, world_group())
    return s["full"].sum()


def scatter(s: State) -> Any:
    """Reduce-scatter of an intermediate into an intermediate."""
    reduced = torch.empty(NUMEL)
    reduce_scatter(reduced, s["full"] + s["shard"].repeat(dist.get_world_size()), world_group())
    s["shard"].add_(reduced, alpha=0.5)
    return reduced * 1.0


def reduce_all(s: State) -> Any:
    """All-reduce in place, of a static tensor and of an intermediate, with two operations."""
    total = s["shard"].square().sum()
    dist.all_reduce(total)
    dist.all_reduce(s["shard"], op=dist.ReduceOp.MAX)
    return total.sqrt()


def broadcast(s: State) -> Any:
    sent = s["shard"] * 3
    dist.broadcast(sent, src=dist.get_world_size() - 1)
    s["shard"].add_(sent)
    return sent


def gather_list(s: State) -> Any:
    parts = [torch.empty(NUMEL) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, s["shard"])
    return torch.stack(parts) * 1.0


def functional(s: State) -> Any:
    """Functional collectives, whose results are new tensors to wait for."""
    gathered = gather_tensor(s["shard"], 0, world_group())
    scattered = scatter_tensor(gathered * 0.5, "sum", 0, world_group())
    total = funcol.all_reduce(scattered, "sum", world_group())
    s["shard"].mul_(0.9).add_(total, alpha=0.1)
    return gathered + 1, scattered * 2


def handle_kept(s: State) -> Any:
    """A reduce-scatter whose handle, and so gloo's own buffer, outlives the capture."""
    reduced = torch.empty(NUMEL)
    work = scatter_async(reduced, s["full"] * 1.25, async_op=True)
    HANDLES.append(work)
    work.wait()
    s["shard"].add_(reduced, alpha=0.5)
    return reduced * 1.0


def waited_later(s: State) -> Any:
    """An asynchronous collective with other work before the wait."""
    total = s["shard"] * 1.5
    work = dist.all_reduce(total, async_op=True)
    other = s["full"] * 2
    assert work is not None
    work.wait()
    s["full"].copy_(other * 0.5)
    return total + other[:NUMEL]


PROGRAMS: list[Callable[[State], Any]] = [
    gather, scatter, reduce_all, broadcast, gather_list, functional, waited_later, handle_kept,
]  # fmt: skip


def fresh_state() -> State:
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    return {
        "shard": torch.randn(NUMEL, generator=generator),
        "full": torch.randn(NUMEL * world, generator=generator),
    }


def snapshot(result: Any, state: State) -> list[list[int]]:
    """Bits of the results and the state."""
    tensors = [*(result if isinstance(result, tuple) else (result,)), *state.values()]
    return [t.detach().contiguous().view(-1).view(torch.int32).tolist() for t in tensors]


def replay_against_eager(number: int) -> int:
    """Run a program eagerly, then captured; returns the collectives' replays that agreed."""
    program = PROGRAMS[number]
    state, expected = fresh_state(), []
    for _ in range(REPLAYS):
        expected.append(snapshot(program(state), state))
    state = fresh_state()
    graph = HostGraph(Device("cpu"))
    before = snapshot((), state)
    result = graph.capture(lambda: program(state))
    assert snapshot((), state) == before, "the capture left a trace"
    agreed = 0
    for replay in range(REPLAYS):
        graph.replay()
        assert snapshot(result, state) == expected[replay], (program.__name__, replay)
        agreed += 1
    return agreed


@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=[p.__name__ for p in PROGRAMS])
def test_collectives_replay(warm_ranks: RankPool, number: int) -> None:
    """Each collective replays between two ranks with eager's bits, on every rank."""
    assert warm_ranks.run(replay_against_eager, number, world_size=2) == [REPLAYS, REPLAYS]


def replay_sees_the_other_rank() -> list[float]:
    """What an all-reduce gives when the other rank's input changes between replays."""
    x = torch.zeros(3)
    graph = HostGraph(Device("cpu"))

    def total() -> torch.Tensor:
        summed = x + 0
        dist.all_reduce(summed)
        return summed

    result = graph.capture(total)
    seen = []
    for value in range(3):
        x.fill_(float(value * 10 ** dist.get_rank()))
        graph.replay()
        seen.append(result[0].item())
    return seen


def test_replay_sees_the_other_ranks_data(warm_ranks: RankPool) -> None:
    """A replay sends what is in the static tensors now, and receives what the others send now."""
    assert warm_ranks.run(replay_sees_the_other_rank, world_size=2) == [[0, 11, 22]] * 2


def count_functional() -> list[int]:
    """Live bytes while a functional collective's results are held, and after."""
    device, world = Device("cpu"), dist.get_world_size()
    with device.counting_memory():
        shard = torch.ones(NUMEL)
        doubled = gather_tensor(shard, 0, world_group()) * 2
        held = settled(device, 4 * NUMEL * (1 + world))
        del doubled, shard
        return [held, settled(device, 0)]


def test_pending_results_are_counted_once(warm_ranks: RankPool) -> None:
    """A functional collective's wrapped result neither hides nor doubles its memory."""
    assert warm_ranks.run(count_functional, world_size=2) == [[4 * NUMEL * 3, 0]] * 2


def write_to_what_dies() -> list[str]:
    """Who made the external storages that a warm-up writes, where collectives run on aliases."""
    device = Device("cpu")
    saved: list[str] = []
    recorder = Recorder(
        keep_operations=False, before_write=lambda number, _: saved.append(str(number))
    )
    with device.counting_memory(), recorder:
        whole = torch.ones(NUMEL * dist.get_world_size())
        for work in (None, HANDLES):
            mine = torch.empty(NUMEL)
            handle = scatter_async(mine, whole, async_op=work is not None)
            if handle is not None:
                handle.wait()
    return saved + [entry.made_by for entry in recorder.recording.external()]


def test_a_warm_up_saves_nothing_of_its_own_collectives(warm_ranks: RankPool) -> None:
    """Counted collectives run on aliases of the program's tensors, which do not own the memory.

    An undo that saved one would write to freed memory when it puts back.
    """
    assert warm_ranks.run(write_to_what_dies, world_size=2) == [[], []]
