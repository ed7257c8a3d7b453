"""One measurement of a graph scope: its ranks, what they time, and what became of them."""

import itertools
import json
import statistics
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import GIB, enter, run_ranks, settle
from fsdp_core.config import TrainConfig
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train.trainer import Trainer


@dataclass(frozen=True)
class Job:
    """One scope of one workload in one layout, as every rank of it is told.

    Attributes:
        devices: GPU of each rank, see `benchmarks.room`; empty on the CPU.
        folder: takes the figures of the ranks.
    """

    workload: str
    layout: str
    scope: str
    config: dict[str, Any]
    ranks: int
    steps: int
    devices: tuple[str, ...]
    timeout_s: float
    folder: str = ""


@dataclass(frozen=True)
class Result:
    """One measurement. `times_ms` are the slowest rank's; memory is the most of any rank, GiB.

    `losses`: a step each, the bits of all ranks.
    """

    workload: str
    layout: str
    scope: str
    number: int
    seconds: float = 0.0
    error: str | None = None
    log: str = ""
    device: str = ""
    times_ms: list[float] = field(default_factory=list)
    allocated_gib: float = 0.0
    reserved_gib: float = 0.0
    losses: list[str] = field(default_factory=list)
    graphs: int = 0


def rank_main(job: Job, rank: int) -> None:
    """The process of one rank."""
    folder = Path(job.folder)
    place = enter(rank, job.ranks, devices=job.devices, folder=folder, timeout_s=job.timeout_s)
    config = TrainConfig.from_dict(job.config)
    device = Device("cuda" if job.devices else "cpu", place.index or 0)
    with device.counting_memory():
        trainer = Trainer(config, build_axes(config.parallel, device), device)
        losses, index = [], 0
        # Beyond the capture by as many replays again.
        for index in range(2 * config.graph_warmup_steps + 2):
            losses.append(loss_of(trainer, index))
        settle(place)
        times = timed(trainer, range(index + 1, index + 1 + job.steps), losses)
        on_cuda = device.is_cuda
        figures = {
            "device": device.name,
            "times_ms": times,
            "allocated_gib": device.peak_bytes() / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB if on_cuda else 0.0,
            "losses": [struct.pack(">f", float(loss)).hex() for loss in losses],
            "graphs": trainer.counts.captured,
        }
        trainer.close()
    (folder / f"rank{rank}.json").write_text(json.dumps(figures))
    settle(place)


def timed(trainer: Trainer, steps: Sequence[int], losses: list[torch.Tensor]) -> list[float]:
    """Milliseconds of each step; on CUDA between events, so that the host may run ahead."""
    host, events = [time.perf_counter()], [_event(trainer)]
    for index in steps:
        losses.append(loss_of(trainer, index))
        host.append(time.perf_counter())
        events.append(_event(trainer))
    trainer.device.synchronize()
    if trainer.device.is_cuda:
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return [1e3 * (b - a) for a, b in itertools.pairwise(host)]


def loss_of(trainer: Trainer, index: int) -> torch.Tensor:
    """The loss of a step, copied in the order of the stream that the next step overwrites it on."""
    with trainer.device.on(trainer.stream):
        return trainer.step(index).loss.clone()


def _event(trainer: Trainer) -> Any:
    if not trainer.device.is_cuda:
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(trainer.stream)
    return event


def measure(job: Job, number: int) -> Result:
    """Run a job to its end, or to its error."""
    began = time.monotonic()
    blank = Result(job.workload, job.layout, job.scope, number)
    with tempfile.TemporaryDirectory(prefix="scopes-benchmark-") as name:
        folder = Path(name)
        error, log = run_ranks(
            rank_main, (replace(job, folder=name),), job.ranks,
            folder=folder, timeout_s=job.timeout_s,
        )  # fmt: skip
        blank = replace(blank, seconds=time.monotonic() - began)
        if error:
            return replace(blank, error=error, log=log)
        ranks = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(job.ranks)]
    slowest = max(ranks, key=lambda rank: statistics.median(rank["times_ms"]))
    return replace(
        blank,
        device=ranks[0]["device"],
        times_ms=slowest["times_ms"],
        allocated_gib=max(rank["allocated_gib"] for rank in ranks),
        reserved_gib=max(rank["reserved_gib"] for rank in ranks),
        losses=[" ".join(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)],
        graphs=ranks[0]["graphs"],
    )
