"""One rank's peak as it is measured: the same steps as a rehearsal takes, with all ranks there."""

import dataclasses
import gc
from typing import Any

import torch

from fsdp_core.config import TrainConfig
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import make_trainer
from harness.worker.observe import at_rest
from tests.memory_table.rehearsal import STEPS, owned
from tests.memory_table.trace import MemoryTrace


def measure(plain: dict[str, Any], kind: str = "cpu", steps: int = STEPS) -> dict[str, Any]:
    """Peak, its owners, what is kept at rest and in graphs' pools, of this rank of a run."""
    # A warm rank may still hold, in cycles and in cuBLAS, what it measured before.
    gc.collect()
    if kind == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
    config, device = TrainConfig.from_dict(plain), Device(kind)
    axes, trace = build_axes(config.parallel, device), MemoryTrace(device)
    with trace.tracing():
        trainer = make_trainer(config, axes, device)
        for step in range(steps):
            trainer.step(step)
        found, pools = trace.explain(owned(trainer)), trace.graph_pool_bytes()
        trainer.close()
    return {
        "peak_bytes": found.peak_bytes,
        "owners": found.owners,
        "largest_rest": found.largest_rest,
        "graph_pool_bytes": pools,
        "at_rest": dataclasses.asdict(at_rest(trainer.groups)),
    }
