"""A measurement in fresh processes, and what became of it.

An engine that raises, dies or hangs becomes a result with an error in it.
"""

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.fsdp.measure import Job, rank_main
from benchmarks.ranks import run_ranks


@dataclass(frozen=True)
class Result:
    """One engine on one workload in one round: the slowest rank's times, the most memory.

    Attributes:
        times_ms: a step each, on the rank whose median is the highest.
        losses: of each rank, see `RankFigures`.
        last_loss_bits: of all ranks.
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
    losses: tuple[tuple[float, float, float], ...] = ()
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
        error, log = run_ranks(
            rank_main, (replace(job, folder=folder),), job.ranks,
            folder=Path(folder), timeout_s=job.timeout_s,
        )  # fmt: skip
        ranks = [] if error or job.trace else _read(Path(folder), job.ranks)
    blank = Result(job.workload, job.engine, number, time.monotonic() - began, error, log)
    return combine(blank, ranks) if ranks else blank


def combine(blank: Result, ranks: Sequence[dict[str, Any]]) -> Result:
    """One result of the figures of all ranks."""

    def most(key: str) -> float | None:
        values = [rank[key] for rank in ranks if rank[key] is not None]
        return max(values) if values else None

    slowest = max(ranks, key=lambda rank: statistics.median(rank["times_ms"]))
    return replace(
        blank,
        device=ranks[0]["device"],
        times_ms=slowest["times_ms"],
        allocated_gib=most("allocated_gib"),
        reserved_gib=most("reserved_gib"),
        losses=tuple((first, second, last) for first, second, last in (r["losses"] for r in ranks)),
        last_loss_bits=" ".join(rank["last_loss_bits"] for rank in ranks),
        graphs=ranks[0]["graphs"],
        graph_breaks=ranks[0]["graph_breaks"],
        late_graphs=max(rank["late_graphs"] for rank in ranks),
    )


def _read(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
