"""Fully sharded data parallelism with torch FSDP2's interface: see docs/ARCHITECTURE.md."""

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from fsdp_core.fsdp.api import (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fsdp_core.fsdp.dtypes import MixedPrecisionPolicy
from fsdp_core.fsdp.norms import clip_grad_norm_

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
