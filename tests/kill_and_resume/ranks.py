"""Ranks without torch that take a moment for each step, so that a kill finds them at work."""

import dataclasses
import os
import time
from pathlib import Path

from fsdp_core.config import TrainConfig
from harness.checks.complete import launches, owed
from harness.recorder import RecordFile
from harness.records import EndRecord, RunSpec
from tests.planted.stub_ranks import initial_record, start_record, step_record

STEP_S = 0.02
STARTS_FILE = "starts.log"
"""In the run folder: a line for each start of a run, by its rank 0."""


def note_start(spec: RunSpec, folder: Path, rank: int) -> None:
    """Add the start of a run to the log; its rank 0 does, in one write, as others may start too."""
    if rank:
        return
    log = os.open(folder.parents[1] / STARTS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, f"{spec.key}\n".encode())
    os.close(log)


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    """Write the records of a run, slowly."""
    note_start(spec, folder, rank)
    file = RecordFile(folder / f"rank{rank}.jsonl")
    file.write(dataclasses.replace(start_record(spec, rank), run=spec.key))
    file.write(initial_record(rank))
    steps = spec.config["steps"]
    for step in range(steps):
        time.sleep(STEP_S)
        file.write(step_record(step, rank))
    graphs = tuple(owed(TrainConfig.from_dict(spec.config), rank, steps))
    file.write(
        EndRecord(rank=rank, steps=steps, peak_bytes=1, startup_s=0.0, wall_s=0.0,
                  replays=launches(graphs), graphs=graphs)
    )  # fmt: skip
    return 0
