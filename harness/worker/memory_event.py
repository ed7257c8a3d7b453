"""What a rank says of its memory at the end: the event `memory`.

    at_rest               bytes that it keeps between steps, by its layout; of our engine alone
    reserved_peak_bytes   what the caching allocator had from the driver at most (CUDA)
    explained             whose the peak was, where the run was made to tell (`RunSpec.explain`)

Nothing of it is compared between legs; limits of `peak_memory` may rest on it.
"""

import dataclasses
from typing import Any

import torch

from fsdp_core.memory_trace import MemoryTrace
from fsdp_core.train import Trainer
from fsdp_core.train.memory import at_rest, owned
from harness.records import EventRecord

NAME = "memory"


def memory_event(trainer: Trainer, rank: int, step: int, trace: MemoryTrace | None) -> EventRecord:
    """The event of one rank; with `trace`, called inside of its `tracing`."""
    device = trainer.device
    detail: dict[str, Any] = {}
    if trainer.config.engine == "ours":
        detail["at_rest"] = dataclasses.asdict(at_rest(trainer.groups))
    if device.is_cuda:
        detail["reserved_peak_bytes"] = torch.cuda.max_memory_reserved(device.torch_device)
    if trace is not None:
        found = trace.explain(owned(trainer))
        detail["explained"] = {
            "peak_bytes": found.peak_bytes,
            "owners": found.owners,
            "largest_rest": [list(item) for item in found.largest_rest],
            "graph_pool_bytes": trace.graph_pool_bytes(),
        }
    return EventRecord(name=NAME, rank=rank, step=step, detail=detail)
