"""Ranks that meet over gloo: enough torch to see what the survivors of a dead rank report.

An entry, never imported by tests: its leaders go by the clock of `leader_clock`.
"""

import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from harness.records import EndRecord, ErrorRecord, RunSpec
from tests.planted import leader_clock
from tests.planted.stub_ranks import Stream, sleep_for_ever, start_record

MEETING_TIMEOUT = timedelta(seconds=120)
"""Of what must work, however busy the machine."""
LOST_TIMEOUT = timedelta(seconds=1)
"""Of the collective that one rank does not come to."""
leader_clock.install()


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    stream = Stream(folder, rank)
    stream.write(start_record(spec, rank))
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=MEETING_TIMEOUT)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=spec.world_size, timeout=MEETING_TIMEOUT
    )
    value = torch.ones(4)
    dist.all_reduce(value)
    assert value[0].item() == spec.world_size
    stub = spec.config["stub"]
    if stub.get(str(rank)) == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if stub.get(str(rank)) == "hang":
        sleep_for_ever(folder / f"hanging{rank}")
    if "hang" in stub.values():
        dist.distributed_c10d._set_pg_timeout(LOST_TIMEOUT, dist.group.WORLD)
    try:
        dist.all_reduce(value)
    except RuntimeError as error:
        stream.write(
            ErrorRecord(
                rank=rank, step=0, what="crashed", type="RuntimeError", message=str(error),
                traceback="",
            )
        )  # fmt: skip
        return 1
    dist.destroy_process_group()
    stream.write(EndRecord(rank=rank, steps=0, peak_bytes=0, startup_s=0.0, wall_s=0.0))
    return 0
