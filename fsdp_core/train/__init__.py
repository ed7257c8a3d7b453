"""One rank's training: stages, FSDP, pipeline, optimizer and graphs put together.

build      stages of the decoder on a device, sharded; their optimizer; all that lives long, by name
inputs     what a rank has of every microbatch, in static tensors
scopes     what of a layer each scope captures, and what stays eager
graphs     all graphs of a trainer, on every rank or on none
trainer    the step, and what it shows: losses, norm, digests; what of it lasts, saved and loaded
engines    the step by torch's FSDP2 or DDP, or by megatron-fsdp; `make_trainer`
"""

from fsdp_core.train.engines import make_trainer
from fsdp_core.train.scopes import GraphCounts
from fsdp_core.train.trainer import StepOutputs, Trainer

__all__ = ["GraphCounts", "StepOutputs", "Trainer", "make_trainer"]
