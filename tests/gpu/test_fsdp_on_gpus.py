"""Sharding on GPUs over NCCL: memory, overlap, checkpoints.

That graphs have eager's bits is shown by scenarios: `pr.yaml` and `nightly/` with `--device cuda`.
"""

import gc
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from benchmarks.fsdp.trace import summarise
from fsdp_core.checkpoint import load, save
from fsdp_core.device import Device
from fsdp_core.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from tests.conftest import RANKS_PER_GPU
from tests.dist.rank_pool import RankPool

MIB = 2**20


def device_here() -> Device:
    return Device("cuda", torch.cuda.current_device())


# --- memory -----------------------------------------------------------------------------------

UNITS, WIDTH, LINEARS = 8, 1024, 4
UNIT_BYTES = 4 * LINEARS * WIDTH * WIDTH


def equal_units(mesh: DeviceMesh, device: torch.device, **options: Any) -> nn.Sequential:
    """`UNITS` units of `UNIT_BYTES` each, and a root without parameters of its own."""
    model = nn.Sequential()
    for _ in range(UNITS):
        unit = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(LINEARS))
        )
        model.append(fully_shard(unit, mesh=mesh, **options))
    root: nn.Sequential = fully_shard(model, mesh=mesh, **options)
    return root


def memory_of_steps(streams: int, pool: str, recompute: str) -> dict[str, Any]:
    """Bytes: at rest beyond the formula; each step's peak over rest; left after each step."""
    device = device_here().torch_device
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    x = torch.ones(1, WIDTH, device=device, requires_grad=True)
    warm = torch.ones(WIDTH, WIDTH, device=device, requires_grad=True)
    (warm @ warm).sum().backward()  # the library's workspaces, one a thread, are nobody's
    del warm
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = equal_units(mesh, device, overlap=streams, pool=pool)
    groups = cast("FSDPModule", model).fsdp_groups
    formula = sum(4 * group.layout.shard_numel for group in groups)
    gc.collect()
    found: dict[str, Any] = {"beyond": torch.cuda.memory_allocated() - before - formula}
    found |= {"rest": [], "grads": [], "peak": []}
    rest = torch.cuda.memory_allocated()
    for _ in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        h = x
        for unit in model if recompute else ():
            h = checkpoint(unit, h, use_reentrant=recompute == "reentrant")
        out = h if recompute else model(x)
        out.square().mean().backward()
        del h, out
        x.grad = None
        pieces = [cast("Any", p.grad).to_local() for p in model.parameters() if p.grad is not None]
        grads = sum(piece.nbytes for piece in pieces)
        del pieces
        found["peak"].append(torch.cuda.max_memory_allocated() - rest - grads)
        found["grads"].append(torch.cuda.memory_allocated() - rest - grads)
        for parameter in model.parameters():
            parameter.grad = None
        found["rest"].append(torch.cuda.memory_allocated() - rest)
    return found


# --- what a profiler sees ---------------------------------------------------------------------

WIDE, TOKENS, SLEEP_CYCLES = 4096, 32768, 200_000_000


def profiled_step(strategy: str, folder: str) -> dict[str, Any]:
    """Collectives of one step of `UNITS` units in bf16, as a trace of this rank has them."""
    device = device_here().torch_device
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = nn.Sequential()
    for _ in range(UNITS):
        unit = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False, device=device) for _ in range(2)))
        model.append(fully_shard(unit, mesh=mesh, mp_policy=policy, strategy=strategy))
    fully_shard(model, mesh=mesh, mp_policy=policy, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(TOKENS, WIDE, device=device, dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    # The first step under a profiler pays for its start.
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
    with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
        for number in range(2):
            dist.barrier()
            torch.cuda.synchronize()
            if number:
                profiler.step()
            # So that the host is ahead, as in a long run, and not the device waiting for it.
            torch.cuda._sleep(SLEEP_CYCLES)
            step()
            torch.cuda.synchronize()
    path = Path(folder, f"trace{strategy}{dist.get_rank()}.json")
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    found = summarise(events)
    ranges = {e["name"].rsplit(" ", 1)[0] for e in events if str(e.get("name")).startswith("fsdp ")}
    return {
        "counts": found.counts,
        "exposed": [(c.kind, c.number) for c in found.exposed],
        "comm_ms": found.comm_ms,
        "exposed_ms": found.exposed_ms,
        "ranges": sorted(ranges),
    }


# --- checkpoints ------------------------------------------------------------------------------


def save_and_load(folder: str) -> list[bool]:
    """Train, save, go on; load into another strategy, go on: equal bits of every weight."""
    device = device_here().torch_device
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    def build(strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(37, 41), nn.Tanh(), nn.Linear(41, 3)).to(device)
        fully_shard(model[0], mesh=mesh, strategy=strategy)
        fully_shard(model, mesh=mesh, strategy=strategy)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            generator = torch.Generator(device).manual_seed(number)
            x = torch.randn(16, 37, device=device, generator=generator)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build("optim_grads_params")
    steps(model, optimizer, range(3))
    save(folder, 3, model, optimizer)
    other, other_optimizer = build("optim_grads_params")
    load(folder, other, other_optimizer)
    whole, whole_optimizer = build("no_shard")
    load(folder, whole, whole_optimizer)
    expected = [cast("Any", p).full_tensor() for p in model.parameters()]
    at_load = [cast("Any", p).full_tensor() for p in whole.parameters()]
    same = [torch.equal(a, b) for a, b in zip(expected, at_load, strict=True)]
    steps(model, optimizer, range(3, 6))
    steps(other, other_optimizer, range(3, 6))
    return same + [
        torch.equal(cast("Any", a).full_tensor(), cast("Any", b).full_tensor())
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    ]


PARAMS = "optim_grads_params"


def check_memory(ranks: list[dict[str, Any]], units: int, pool: str) -> None:
    """The bound on the peak, and nothing left over."""
    for rank in ranks:
        assert abs(rank["beyond"]) < MIB
        assert max(rank["peak"]) < units * UNIT_BYTES, [peak / UNIT_BYTES for peak in rank["peak"]]
        assert min(rank["peak"]) > UNIT_BYTES, "a whole unit is gathered at some time"
        if pool == "dynamic":
            assert max(rank["grads"] + rank["rest"]) < MIB
        assert abs(rank["rest"][-1] - rank["rest"][-2]) < MIB


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("streams", "units"), [(2, 5), (1, 4), (0, 4)])
@pytest.mark.parametrize("recompute", ["", "stopping", "reentrant"])
def test_peak_memory(gpu_ranks: RankPool, recompute: str, streams: int, units: int) -> None:
    """Persistent memory is the formula's; a step holds under 5 full units, 4 with one stream."""
    args = (streams, "dynamic", recompute)
    check_memory(gpu_ranks.run(memory_of_steps, *args, world_size=2), units, "dynamic")


@pytest.mark.gpu(2)
@pytest.mark.parametrize("pool", ["double", "traced"])
def test_peak_memory_of_fixed_buffers(gpu_ranks: RankPool, pool: str) -> None:
    """Pools that keep their buffers stay under the same bound, and stop growing."""
    check_memory(gpu_ranks.run(memory_of_steps, 2, pool, "", world_size=2), 5, pool)


GATHERS, REDUCTIONS = 2 * UNITS - 1, UNITS
"""Backward begins with the unit that forward ended with, so that one is gathered once."""


@pytest.mark.gpu(2)
@pytest.mark.skipif(
    RANKS_PER_GPU > 1, reason="ranks that share a GPU take turns: RANKS_PER_GPU must be 1"
)
@pytest.mark.parametrize(
    ("strategy", "counts"),
    [
        (PARAMS, {"AllGather": GATHERS, "ReduceScatter": REDUCTIONS}),
        ("optim_grads", {"AllGather": UNITS, "ReduceScatter": REDUCTIONS}),
        ("optim", {"AllGather": UNITS, "ReduceScatter": REDUCTIONS}),
        ("no_shard", {"AllReduce": REDUCTIONS}),
    ],
)
def test_collectives_overlap(
    gpu_ranks: RankPool, tmp_path: Path, strategy: str, counts: dict[str, int]
) -> None:
    """A step gathers and reduces what its strategy implies, all but first and last under compute.

    Where weights are whole they are gathered after the optimizer, with nothing to hide under.
    """
    size = min(torch.cuda.device_count(), 4)
    for rank in gpu_ranks.run(profiled_step, strategy, str(tmp_path), world_size=size):
        assert rank["counts"] == counts, rank
        allowed = {("AllGather", 1), ("ReduceScatter", REDUCTIONS), ("AllReduce", REDUCTIONS)}
        after = strategy in ("optim", "optim_grads")
        exposed = {c for c in rank["exposed"] if not (after and c[0] == "AllGather")}
        assert exposed <= allowed, rank
        assert {"fsdp unshard", "fsdp reduce"} <= set(rank["ranges"])


@pytest.mark.gpu(2)
def test_checkpoints(gpu_ranks: RankPool, tmp_path: Path) -> None:
    """Saved and loaded over NCCL, into another strategy too, training goes on bit for bit."""
    for rank in gpu_ranks.run(save_and_load, str(tmp_path), world_size=2):
        assert rank == [True] * len(rank)
