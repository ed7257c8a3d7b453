"""Fully sharded data parallelism with torch FSDP2's interface. DESIGN.md says how it works."""

from fsdp_core.fsdp.api import fully_shard
from fsdp_core.fsdp.clip import clip_grad_norm_
from fsdp_core.fsdp.fsdp_module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
)
from fsdp_core.fsdp.placement import Placements
from fsdp_core.fsdp.precision import MixedPrecisionPolicy
from fsdp_core.fsdp.schedule import Overlap

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "Overlap",
    "Placements",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "register_fsdp_forward_method",
]
