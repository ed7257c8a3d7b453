"""Fully sharded data parallelism with torch FSDP2's interface. DESIGN.md says how it works."""

from fsdp_core.fsdp.api import (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
)
from fsdp_core.fsdp.optimizer import clip_grad_norm_
from fsdp_core.fsdp.param_group import MixedPrecisionPolicy

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "register_fsdp_forward_method",
]
