"""What looking costs a timed run: the seconds of the digests that every step takes.

Both legs digest the same bytes, so the time cancels out of their difference, but not out of a
ratio: the check `throughput` takes it off both. Asked of a timed run once, at its end.

Not on CUDA: launched from the host, as here, digests take longer than inside of a graph, so a
graphed candidate would have more taken off than it spent, and pass though it is slower.
"""

import time

from fsdp_core.graph.digest import Digester, empty_rows
from fsdp_core.train import Trainer
from harness.records import EventRecord, RunSpec
from harness.repeats import is_timed

NAME = "digest_time"
TIMES = 5


def is_told(spec: RunSpec) -> bool:
    """Whether a run says what its digests take."""
    return is_timed(spec) and spec.device == "cpu"


def digest_time_event(trainer: Trainer, rank: int, step: int) -> EventRecord:
    """The event of one rank; its `seconds` are the least of `TIMES`, so never too much."""
    return EventRecord(name=NAME, rank=rank, step=step, detail={"seconds": digest_seconds(trainer)})


def digest_seconds(trainer: Trainer) -> float:
    """Seconds that it takes to digest all that a step digests, the fastest of some."""
    device = trainer.device
    with device.on(trainer.stream):
        work = [
            (Digester(tensors, names), tensors, empty_rows(len(names), device.torch_device))
            for names, tensors in trainer.digested.values()
        ]
    found = []
    for _ in range(TIMES):
        device.synchronize()
        began = time.perf_counter()
        with device.on(trainer.stream):
            for digester, tensors, out in work:
                digester(tensors, out)
        device.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)
