"""`predict`: configurations on stdin, what each of their ranks will take in memory on stdout.

A rehearsal trains, so it is only held where it is soon over: `MOST_FLOPS` a step and rank, and
`MOST_BYTES` of weights on a rank. Beyond, what is at rest is still exact.
"""

import dataclasses
import json
import sys
from typing import Any

import torch

from fsdp_core.config import TrainConfig
from fsdp_core.determinism import prepare_environment
from fsdp_core.train.rehearsal import can_rehearse, predict_at_rest, ranks_that_differ, rehearse
from harness.checks.speed import step_flops

MOST_FLOPS = 2e10
MOST_BYTES = 1 << 30
EVERY_RANK_TO = 4
"""World size up to which every rank is rehearsed: those of a stage differ by some rows."""


def predict() -> int:
    """Read a JSON list of plain configurations, answer with a JSON list; the exit code."""
    prepare_environment()
    torch.set_num_threads(1)
    configs = [TrainConfig.from_dict(plain) for plain in json.load(sys.stdin)]
    json.dump([predicted(config) for config in configs], sys.stdout, allow_nan=False)
    return 0


def predicted(config: TrainConfig) -> dict[str, Any]:
    """At rest, of the first rank of every pipeline stage; and the largest peak rehearsed."""
    at_rest = {rank: predict_at_rest(config, rank) for rank in ranks_that_differ(config)}
    found: dict[str, Any] = {
        "at_rest": {str(rank): dataclasses.asdict(kept) for rank, kept in at_rest.items()},
        "peak": None,
        "why_no_peak": _why_not(config, max(kept.parameters for kept in at_rest.values())),
    }
    if not found["why_no_peak"]:
        world_size = config.parallel.world_size
        ranks = range(world_size) if world_size <= EVERY_RANK_TO else at_rest
        peaks = {rank: rehearse(config, rank) for rank in ranks}
        worst = max(peaks, key=lambda rank: (peaks[rank].peak_bytes, -rank))
        found["peak"] = {
            "rank": worst,
            "peak_bytes": peaks[worst].peak_bytes,
            "owners": peaks[worst].owners,
        }
    return found


def _why_not(config: TrainConfig, parameters: int) -> str:
    if config.backend != "torch":
        return f"backend {config.backend} needs a GPU to rehearse"
    if not can_rehearse(config):
        return "what dropless experts take depends on what other ranks send"
    flops = step_flops(config.to_dict())
    whole = parameters * config.parallel.world_size
    if whole > MOST_BYTES or (flops or 0.0) / config.parallel.world_size > MOST_FLOPS:
        return "too large to rehearse on a CPU"
    return ""
