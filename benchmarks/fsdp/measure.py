"""One rank of one measurement: build, warm up, time, write what was found to a file.

Runs in a process of its own that leaves without tearing anything down: destroying a process group
while a graph that captured its work is alive hangs, and the driver frees all memory anyway.
"""

import itertools
import json
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch._dynamo.utils
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.fsdp.engines import ENGINES, Setting, Step
from benchmarks.fsdp.workloads import FULL, TINY
from benchmarks.ranks import GIB, enter, settle

WARM_UP = 6
"""Steps before the timed ones: longer than a graph's eager steps and a plan's tracing ones."""


@dataclass(frozen=True)
class Job:
    """One engine on one workload, as every rank of it is told.

    Attributes:
        folder: a rank writes `rank<n>.json` there; the ranks meet over a file there.
        devices: GPU of each rank, see `benchmarks.room`; empty on the CPU.
        timeout_s: shortly before it a rank that is still there writes its stacks to its log.
        trace: profile one step on rank 0 and write the trace there, in place of timing.
    """

    workload: str
    engine: str
    ranks: int
    steps: int
    reduce: str
    devices: tuple[str, ...]
    tiny: bool
    compile_backend: str
    folder: str
    timeout_s: float
    trace: str | None = None


@dataclass(frozen=True)
class RankFigures:
    """What one rank found. Memory is None where it is not counted (on the CPU).

    Attributes:
        losses: before the first update, after it, and in the last timed step.
        last_loss_bits: the last loss, float32, in hex.
        graphs, graph_breaks: of torch.compile, over the whole run.
        late_graphs: graphs compiled during the timed steps; more than none spoils the times.
    """

    device: str
    times_ms: list[float]
    allocated_gib: float | None
    reserved_gib: float | None
    losses: tuple[float, float, float]
    last_loss_bits: str
    graphs: int
    graph_breaks: int
    late_graphs: int


def rank_main(job: Job, rank: int) -> None:
    """The process of one rank. What goes wrong ends up, as its last line, in `rank<n>.log`."""
    device = enter(
        rank, job.ranks, devices=job.devices, folder=Path(job.folder), timeout_s=job.timeout_s
    )
    mesh = init_device_mesh(device.type, (job.ranks,), mesh_dim_names=("dp",))
    engine = ENGINES[job.engine]
    setting = Setting(
        workload=(TINY if job.tiny else FULL)[job.workload],
        mesh=mesh,
        device=device,
        reduce={"bf16": torch.bfloat16, "fp32": torch.float32}[job.reduce],
        compile_backend=job.compile_backend if engine.compiled else None,
    )
    if device.type == "cuda":
        # A stream of its own: what warms up there can be captured there.
        with torch.cuda.stream(torch.cuda.Stream()):
            _run(job, engine.build(setting), rank, device)
    else:
        _run(job, engine.build(setting), rank, device)


def _run(job: Job, step: Step, rank: int, device: torch.device) -> None:
    early = [step().clone() for _ in range(2)]  # a graph's loss is overwritten by the next
    for _ in range(WARM_UP - 2):
        step()
    if job.trace is not None:
        _profile(step, Path(job.trace) if rank == 0 else None, device)
    else:
        figures = _time(step, early, job.steps, device)
        Path(job.folder, f"rank{rank}.json").write_text(json.dumps(asdict(figures)))
    settle(device)


def _time(step: Step, early: list[torch.Tensor], steps: int, device: torch.device) -> RankFigures:
    on_cuda = device.type == "cuda"
    before = _compiled_graphs()
    settle(device)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
        times, last_loss = _cuda_times(step, steps)
    else:
        times, last_loss = _host_times(step, steps)
    last = float(last_loss)
    return RankFigures(
        device=torch.cuda.get_device_name() if on_cuda else "CPU",
        times_ms=times,
        allocated_gib=torch.cuda.max_memory_allocated() / GIB if on_cuda else None,
        reserved_gib=torch.cuda.max_memory_reserved() / GIB if on_cuda else None,
        losses=(float(early[0]), float(early[1]), last),
        last_loss_bits=struct.pack(">f", last).hex(),
        graphs=_compiled_graphs(),
        graph_breaks=sum(torch._dynamo.utils.counters["graph_break"].values()),
        late_graphs=_compiled_graphs() - before,
    )


def _cuda_times(step: Step, steps: int) -> tuple[list[float], torch.Tensor]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    loss = torch.zeros(())
    marks[0].record()
    for mark in marks[1:]:
        loss = step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)], loss


def _host_times(step: Step, steps: int) -> tuple[list[float], torch.Tensor]:
    marks, loss = [time.perf_counter()], torch.zeros(())
    for _ in range(steps):
        loss = step()
        marks.append(time.perf_counter())
    return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)], loss


def _profile(step: Step, path: Path | None, device: torch.device) -> None:
    """Trace one step on the rank that has a `path`; all ranks run the same two steps."""
    if path is None:
        for _ in range(2):
            settle(device)
            step()
        settle(device)
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # The first step under a profiler pays for its start.
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
    with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
        settle(device)
        step()
        settle(device)
        profiler.step()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    settle(device)


def _compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
