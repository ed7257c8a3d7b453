"""One rank's training: stages, FSDP, pipeline, optimizer and graphs put together.

    build      stages of the decoder on a device, sharded
    inputs     what a rank has of every microbatch, in static tensors
    outputs    what a step shows: losses, norm, digests
    scopes     what of a layer each scope captures, and what stays eager
    stage_graphs, partial_graphs, banks    graphs of a stage, of all stages, of all context sizes
    captures   all graphs of a trainer, on every rank or on none
    trainer    the step
    engines    the step by torch's FSDP2 or DDP, or by megatron-fsdp
    stressed   the same under stressors; `make_trainer` gives the one that a configuration asks for
    memory     whose a trainer's memory is

`Trainer` runs any legal layout of any model.
"""

from fsdp_core.train.outputs import StepOutputs
from fsdp_core.train.scopes import GraphCounts
from fsdp_core.train.stressed import StressedTrainer, make_trainer
from fsdp_core.train.trainer import Trainer

__all__ = ["GraphCounts", "StepOutputs", "StressedTrainer", "Trainer", "make_trainer"]
