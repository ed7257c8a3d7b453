"""Ranks without torch that note when they ran, and one that kills the worker that waits for it."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from harness.records import EndRecord, RunSpec
from tests.planted.stub_ranks import Stream, start_record, step_record

LEFT_FILE = "left"
KILLED = "dp1-ulp_s1_rlast-stress_poison"
"""The case whose candidate kills the process that waits for its verdict."""


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    stream = Stream(folder, rank)
    stream.write(start_record(spec, rank))
    ulp = spec.plant is not None
    if ulp and spec.world_size == 1 and "poison" in spec.config["stress"]:
        os.kill(int(Path(f"{KILLED}.pid").read_text()), signal.SIGKILL)
    if spec.world_size == 1:
        _meet_another(folder)
    steps = spec.config["steps"]
    for step in range(steps):
        record = step_record(step, rank)
        if ulp:
            record.digests["weights"] = "1" * 32
        stream.write(record)
    stream.write(EndRecord(rank=rank, steps=steps, peak_bytes=1, startup_s=0.0, wall_s=0.0))
    (folder / f"{LEFT_FILE}{rank}").write_text(str(time.time()))
    return 0


def _meet_another(folder: Path) -> None:
    """Stay until another run is under way, for a moment at most: it may be alone."""
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        under_way = 0
        for other in folder.parent.iterdir():
            with suppress(OSError):
                under_way += any(other.glob("rank*.jsonl")) and not any(other.glob("left*"))
        if under_way > 1:
            return
        time.sleep(0.01)
