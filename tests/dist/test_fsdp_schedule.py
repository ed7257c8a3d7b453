"""What a training step communicates, when, and how much memory it holds: counted on CPU ranks."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_core.device import Device
from fsdp_core.fsdp import FSDPModule, fully_shard
from fsdp_core.fsdp.pool import make_pool
from tests.dist.fsdp_races import Collective, Races, watching
from tests.dist.fsdp_sides import is_piece
from tests.dist.rank_pool import RankPool
from tests.support.tensors import own_rows

NUM_LAYERS = 4
TIMEOUT_S = 30.0


class _Mark(torch.autograd.Function):
    """Notes when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, note: Callable[[], None]) -> torch.Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.note()
        return grad, None


class Layer(nn.Linear):
    """A Linear that notes its forward and backward; a size of its own tells it in a collective."""

    def __init__(self, index: int, log: list[Any]) -> None:
        super().__init__(4 + 4 * index, 8 + 4 * index, bias=False)
        self.index, self.log = index, log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, 4 + 4 * index] -> [rows, 8 + 4 * index]."""
        self.log.append(f"forward {self.index}")
        y = super().forward(_Mark.apply(x, lambda: self._note("left"))).tanh()
        out: torch.Tensor = _Mark.apply(y, lambda: self._note("backward"))
        return out

    def _note(self, what: str) -> None:
        state = "sharded" if is_piece(self.weight) else "gathered"
        self.log.append(f"{what} {self.index}" if what != "left" else f"left {self.index} {state}")


class Chain(nn.Module):
    """Layers and a head; the head is the root's own."""

    def __init__(self, log: list[Any], *, recompute: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, log) for i in range(NUM_LAYERS))
        self.head = nn.Linear(4 + 4 * NUM_LAYERS, 31)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, 4] -> [rows, 31]."""
        reentrant = self.recompute == "reentrant"
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant) if self.recompute else layer(x)
        out: torch.Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Step:
    """How a step is made."""

    strategy: str | tuple[str, ...] = "optim_grads_params"
    streams: int = 2
    recompute: str = ""
    """`reentrant`, or not: `stopping`, which leaves a recomputation as soon as it has enough."""
    micro: tuple[str, ...] = ("last",)
    """A microbatch each: `last`, `unsynced` (no gradient sync), or `earlier` (not the last)."""
    setting: str = ""
    reshard: bool | None = None
    mesh: tuple[int, ...] = (2,)


def steps(step: Step) -> list[list[str]]:
    """Log of three steps, each a list such as `forward 1`, `gather 2`, `scatter root`."""
    mesh = init_device_mesh("cpu", step.mesh, mesh_dim_names=("outer", "inner")[-len(step.mesh) :])
    options: dict[str, Any] = {"strategy": step.strategy, "overlap": step.streams}
    if step.reshard is not None:
        options["reshard_after_forward"] = step.reshard
    with watching() as races:
        model = Chain(races.log, recompute=step.recompute)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, **options)
        root = cast("Any", fully_shard(model, mesh=mesh, **options))
        if step.setting:
            getattr(root, step.setting)(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        logs = []
        for _ in range(3):
            for kind in step.micro:
                root.set_requires_gradient_sync(kind != "unsynced")
                root.set_is_last_backward(kind != "earlier")
                root(torch.ones(2, 4, requires_grad=True)).square().mean().backward()
            for unit in root.fsdp_schedule.units:
                unit.reshard()
            optimizer.step()
            optimizer.zero_grad()
            logs.append(_named(races, root))
            races.log.clear()
    return logs


def _named(races: Races, root: FSDPModule) -> list[str]:
    """The log with units in the place of sizes."""
    names = {
        group.layout.total_numel: unit.name.rpartition(".")[2]
        for unit in root.fsdp_schedule.units
        for group in unit.groups
    }
    assert len(names) == NUM_LAYERS + 1, "sizes must tell the units apart"
    return [
        f"{e.kind} {names.get(e.numel, '?')}" if isinstance(e, Collective) else e for e in races.log
    ]


def logs_of(ranks: RankPool, step: Step) -> list[list[str]]:
    """The log of rank 0; all ranks communicate the same in the same order."""
    world_size = int(torch.tensor(step.mesh).prod())
    found = ranks.run(steps, step, world_size=world_size, timeout_s=TIMEOUT_S)
    assert all(rank == found[0] for rank in found)
    return cast("list[list[str]]", found[0])


def counts(log: list[str]) -> dict[str, int]:
    kinds = Counter(line.split()[0] for line in log)
    return {kind: kinds[kind] for kind in ("gather", "scatter", "all_reduce")}


N = NUM_LAYERS
COUNTS = [
    # Forward gathers the root and each unit; backward all but the root and the last, which stayed.
    (Step(), (N + 1 + N - 1, N + 1, 0)),
    (Step(streams=1), (N + 1 + N - 1, N + 1, 0)),
    (Step(streams=0), (N + 1 + N - 1, N + 1, 0)),
    (Step(recompute="stopping"), (N + 1 + N - 1, N + 1, 0)),
    (Step(recompute="reentrant"), (N + 1 + N - 1, N + 1, 0)),
    (Step(recompute="reentrant", streams=0), (N + 1 + N - 1, N + 1, 0)),
    (Step(reshard=False), (N + 1, N + 1, 0)),
    (Step(setting="set_reshard_after_forward"), (N + 1, N + 1, 0)),
    # Kept after backward too, so the second microbatch gathers nothing.
    (Step(setting="set_reshard_after_backward", reshard=False, micro=("earlier", "last")),
     (N + 1, 2 * (N + 1), 0)),
    (Step(micro=("unsynced", "last")), (2 * (N + 1 + N - 1), N + 1, 0)),
    (Step(micro=("earlier", "last")), (2 * (N + 1 + N - 1), 2 * (N + 1), 0)),
    # Weights are whole: one gather a unit, after the optimizer has written.
    (Step("optim_grads"), (N + 1, N + 1, 0)),
    (Step("optim_grads", micro=("earlier", "last")), (N + 1, 2 * (N + 1), 0)),
    (Step("optim"), (N + 1, N + 1, 0)),
    (Step("optim", micro=("earlier", "last")), (N + 1, N + 1, 0)),
    (Step("no_shard"), (0, 0, N + 1)),
    (Step("no_shard", micro=("unsynced", "last")), (0, 0, N + 1)),
    # HSDP: scatter inside, all-reduce outside; earlier microbatches stay inside.
    (Step(mesh=(2, 2)), (N + 1 + N - 1, N + 1, N + 1)),
    (Step(mesh=(2, 2), micro=("earlier", "last")),
     (2 * (N + 1 + N - 1), 2 * (N + 1), N + 1)),
    # HFSDP: main weights are gathered from outside once, gradients go on to the outside once.
    (Step(("optim", "optim_grads_params"), mesh=(2, 2)),
     (N + 1 + N + 1 + N - 1, 2 * (N + 1), 0)),
]  # fmt: skip


def label(value: object) -> str:
    """What is not as by default, for the test's name."""
    if not isinstance(value, Step):
        return "x".join(map(str, cast("tuple[int, ...]", value)))
    default = Step()
    return ",".join(f"{k}={v}" for k, v in vars(value).items() if v != getattr(default, k)) or "-"


@pytest.mark.parametrize(("step", "due"), COUNTS, ids=label)
def test_collectives_of_a_step(warm_ranks: RankPool, step: Step, due: tuple[int, int, int]) -> None:
    """A step in the recorded order communicates what its strategy implies and no more."""
    log = logs_of(warm_ranks, step)[-1]
    assert tuple(counts(log).values()) == due, log


def test_each_unit_is_reduced_once_last_first(warm_ranks: RankPool) -> None:
    """Reductions start in the order in which backward leaves the units.

    It leaves the first layer and the root at the same tensor, so those two in either order.
    """
    for log in logs_of(warm_ranks, Step()):
        found = [line.split()[1] for line in log if line.startswith("scatter")]
        assert found[: NUM_LAYERS - 1] == [str(i) for i in reversed(range(1, NUM_LAYERS))], log
        assert sorted(found[NUM_LAYERS - 1 :]) == ["0", "root"], log


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("recompute", ["", "stopping", "reentrant"])
def test_one_unit_is_gathered_ahead(warm_ranks: RankPool, streams: int, recompute: str) -> None:
    """While a layer runs the next one's gather is under way, and no gather further ahead.

    The first step records; from the second on forward goes by the record. Backward goes by the
    forward before it, in the first step too.
    """
    logs = logs_of(warm_ranks, Step(streams=streams, recompute=recompute))
    for log in logs[1:]:
        for index in range(1, NUM_LAYERS):
            gathered = log.index(f"gather {index}")
            assert gathered < log.index(f"forward {index - 1}"), log
            if index > 1:
                assert gathered > log.index(f"forward {index - 2}"), log
    for log in logs:
        backward = log[log.index("forward 3") + 1 :]
        for index in range(NUM_LAYERS - 2):
            gathered = backward.index(f"gather {index}")
            assert gathered < backward.index(f"backward {index + 1}"), log
            assert gathered > backward.index(f"backward {index + 2}"), log


def test_nothing_is_gathered_ahead_without_streams(warm_ranks: RankPool) -> None:
    """With no side stream each gather stands right before its layer."""
    for log in logs_of(warm_ranks, Step(streams=0)):
        for index in range(NUM_LAYERS):
            assert log[log.index(f"forward {index}") - 1] == f"gather {index}", log


@pytest.mark.parametrize("recompute", ["stopping", "reentrant"])
@pytest.mark.parametrize("streams", [0, 1, 2])
def test_recompute_gathers_each_unit_once(
    warm_ranks: RankPool, streams: int, recompute: str
) -> None:
    """Recomputation finds the unit gathered for its backward, and leaves it so to the end."""
    for log in logs_of(warm_ranks, Step(recompute=recompute, streams=streams)):
        assert log.count("forward 0") == 2, "the layers are recomputed"
        backward = log[log.index("forward 3") + 1 :]
        for index in range(NUM_LAYERS):
            assert backward.count(f"gather {index}") <= 1, log
            again = backward.index(f"forward {index}")
            assert f"gather {index}" not in backward[again:], log
            assert f"left {index} gathered" in backward, log


UNIT_LINEARS, WIDTH, UNITS = 4, 128, 8
UNIT_BYTES = 4 * UNIT_LINEARS * WIDTH * WIDTH


def memory_of_steps(streams: int, pool: str, recompute: str) -> dict[str, Any]:
    """Live bytes at rest, after each step, with gradients, and the peak of each step."""
    device = Device("cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # Of this device, so that memory resized in place is counted.
    shared = make_pool(pool, device, persistent_on_miss=True)
    options: dict[str, Any] = {"mesh": mesh, "overlap": streams, "pool": shared}
    with device.counting_memory():
        x = torch.ones(1, WIDTH, requires_grad=True)
        model = nn.Sequential(
            *(
                nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNIT_LINEARS)))
                for _ in range(UNITS)
            )
        )
        for unit in model:
            fully_shard(unit, **options)
        fully_shard(model, **options)
        found: dict[str, Any] = {"rest": [], "grads": [], "peak": []}
        rest = device.live_bytes()
        for _ in range(3):
            assert device.counter is not None
            device.counter.peak_bytes = device.counter.live_bytes
            h = x
            for unit in model if recompute else ():
                h = checkpoint(unit, h, use_reentrant=recompute == "reentrant")
            out = h if recompute else model(x)
            out.square().mean().backward()
            del h, out
            x.grad = None
            grads = sum(own_rows(p.grad).nbytes for p in model.parameters() if p.grad is not None)
            kept = 0 if pool == "dynamic" else (found["rest"] or [None])[-1]
            found["grads"].append(_settled(device, rest + grads, kept) - rest - grads)
            found["peak"].append(device.peak_bytes() - rest - grads)
            for parameter in model.parameters():
                parameter.grad = None
            found["rest"].append(_settled(device, rest, kept) - rest)
        return found


def _settled(device: Device, expected: int, kept: int | None) -> int:
    """Live bytes once gloo's threads have let go of what they sent, or after 3 s.

    `kept` is what the pool keeps, if it is known.
    """
    deadline = time.monotonic() + (0.0 if kept is None else 3.0)
    while device.live_bytes() != expected + (kept or 0) and time.monotonic() < deadline:
        time.sleep(0.001)
    return device.live_bytes()


@pytest.mark.parametrize(("streams", "units"), [(2, 5), (1, 4), (0, 4)])
@pytest.mark.parametrize(
    ("world_size", "recompute"), [(2, ""), (4, ""), (2, "stopping"), (2, "reentrant")]
)
def test_peak_memory(
    warm_ranks: RankPool, world_size: int, recompute: str, streams: int, units: int
) -> None:
    """Beyond weights and gradients at rest, a step holds under 5 full units, 4 with one stream.

    Nothing is left over at its end: not a byte beyond the gradients, then not a byte.
    """
    args = (streams, "dynamic", recompute)
    for rank in warm_ranks.run(memory_of_steps, *args, world_size=world_size, timeout_s=TIMEOUT_S):
        assert max(rank["peak"]) < units * UNIT_BYTES, [p / UNIT_BYTES for p in rank["peak"]]
        assert min(rank["peak"]) > UNIT_BYTES, "a whole unit is gathered at some time"
        assert rank["grads"] == [0, 0, 0]
        assert rank["rest"] == [0, 0, 0]


@pytest.mark.parametrize("pool", ["double", "traced"])
def test_peak_memory_of_fixed_buffers(warm_ranks: RankPool, pool: str) -> None:
    """Pools that keep their buffers stay under the same bound, and stop growing."""
    for rank in warm_ranks.run(memory_of_steps, 2, pool, "", world_size=2, timeout_s=TIMEOUT_S):
        assert max(rank["peak"]) < 5 * UNIT_BYTES, [p / UNIT_BYTES for p in rank["peak"]]
        assert rank["rest"][-1] == rank["rest"][-2]
