"""A measurement in fresh processes, and what became of it.

What one engine leaves in memory, in NCCL or in torch.compile's caches is not the next one's. Ranks
are forked from a server that has torch imported and no device touched. An engine that raises,
dies or hangs becomes a result with an error in it.
"""

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.fsdp.measure import Job, rank_main

EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Refused|Interrupt|Unsupported)\b")
MAX_LOG_CHARS = 8000


@dataclass(frozen=True)
class Result:
    """One engine on one workload in one round: the slowest rank's times, the most memory.

    Attributes:
        times_ms: a step each, on the rank whose median is the highest.
        losses: of rank 0, see `RankFigures`.
        error: what went wrong; all figures are empty then.
        log: with an error, the end of what the rank at fault has written.
    """

    workload: str
    engine: str
    number: int
    seconds: float
    error: str | None = None
    log: str = ""
    device: str = ""
    times_ms: list[float] = field(default_factory=list)
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    losses: tuple[float, float, float] | None = None
    last_loss_bits: str = ""
    graphs: int = 0
    graph_breaks: int = 0
    late_graphs: int = 0


def start_server() -> None:
    """Let the server that ranks are forked from import torch now."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "benchmarks.fsdp.measure"])


def run(job: Job, number: int) -> Result:
    """Run `job` to its end, or to its error; none of its processes is left."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fsdp-benchmark-") as folder:
        error, log = _run_ranks(replace(job, folder=folder))
        ranks = [] if error or job.trace else _read(Path(folder), job.ranks)
    blank = Result(job.workload, job.engine, number, time.monotonic() - began, error, log)
    return combine(blank, ranks) if ranks else blank


def combine(blank: Result, ranks: Sequence[dict[str, Any]]) -> Result:
    """One result of the figures of all ranks."""

    def most(key: str) -> float | None:
        values = [rank[key] for rank in ranks if rank[key] is not None]
        return max(values) if values else None

    slowest = max(ranks, key=lambda rank: statistics.median(rank["times_ms"]))
    first, second, last = ranks[0]["losses"]
    return replace(
        blank,
        device=ranks[0]["device"],
        times_ms=slowest["times_ms"],
        allocated_gib=most("allocated_gib"),
        reserved_gib=most("reserved_gib"),
        losses=(first, second, last),
        last_loss_bits=ranks[0]["last_loss_bits"],
        graphs=ranks[0]["graphs"],
        graph_breaks=ranks[0]["graph_breaks"],
        late_graphs=max(rank["late_graphs"] for rank in ranks),
    )


def _read(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def _run_ranks(job: Job) -> tuple[str | None, str]:
    """What went wrong, or None, and the log of the rank at fault."""
    context = multiprocessing.get_context("forkserver")
    processes: list[BaseProcess] = [
        context.Process(target=rank_main, args=(job, rank), name=f"rank {rank}")
        for rank in range(job.ranks)
    ]
    try:
        for process in processes:
            process.start()
        failed = _first_failure(processes, job.timeout_s)
        if failed is None:
            return None, ""
        log = _read_log(Path(job.folder, f"rank{processes.index(failed)}.log"))
        if failed.exitcode is None:
            return f"{failed.name} hung: no end after {job.timeout_s:.0f} s", log
        return f"{failed.name} ended with {failed.exitcode}: {_telling_line(log)}", log
    finally:
        _end(processes)


def _first_failure(processes: Sequence[BaseProcess], timeout_s: float) -> BaseProcess | None:
    """The first process to fail, or one that has not ended in time, or None."""
    deadline = time.monotonic() + timeout_s
    waiting = {process.sentinel: process for process in processes}
    while waiting:
        left = max(0.0, deadline - time.monotonic())
        ended = multiprocessing.connection.wait(list(waiting), left)
        if not ended:
            return next(iter(waiting.values()))
        for sentinel in ended:
            assert isinstance(sentinel, int)
            process = waiting.pop(sentinel)
            process.join()
            if process.exitcode:
                return process
    return None


def _end(processes: Sequence[BaseProcess]) -> None:
    """Kill what is left, each rank with its own children, and reap it."""
    for process in processes:
        if process.pid is not None and process.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # a rank that has no session of its own yet
    for process in processes:
        if process.pid is not None:
            process.join()


def _read_log(path: Path) -> str:
    return path.read_text(errors="replace")[-MAX_LOG_CHARS:] if path.exists() else ""


def _telling_line(log: str) -> str:
    """The last line that an exception begins, or else the last line."""
    lines = [line.strip() for line in log.split("\n") if line.strip()]
    raised = [line for line in lines if EXCEPTION.match(line)]
    return (raised or lines or ["nothing was said"])[-1]
