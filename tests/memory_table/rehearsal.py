"""How much memory a rank of any layout will take, found out in one process.

    at rest    the rank's stages are built on the meta device and sharded: shapes alone, so a model
               of any size on any number of ranks; the same arithmetic as the flat buffers'
    the rest   the rank itself takes some steps on the CPU, the only one of its world: collectives
               send nothing and leave in their buffers what was there

Memory does not depend on what the numbers are, but for dropless experts on several ranks, whose
buffers are as large as what the others send: these cannot be rehearsed. A rehearsal is eager. What
graphs hold beside is not rehearsed either: a capture is agreed on with ranks that are not there.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_core.config import TrainConfig
from fsdp_core.device import Device
from fsdp_core.model.decoder import make_layers
from fsdp_core.parallel.mesh import Axes, build_axes
from fsdp_core.train import Trainer, make_trainer
from fsdp_core.train.build import TORCH_DTYPES, build_stages, make_streams, roots
from harness.worker.observe import AtRest, at_rest
from tests.memory_table.allocations import Explanation
from tests.memory_table.trace import MemoryTrace

STEPS = 3
"""Of a rehearsal: pool `traced` plans after the first, and later ones find all there is."""

_ENDINGS = {
    "main_weight": "parameters", "model_weight": "parameters", "main_grad": "gradients",
    "exp_avg": "optimizer", "exp_avg_sq": "optimizer", "step_count": "optimizer",
    "lr": "optimizer", "gathered": "gather buffers", "full gradient": "reduce buffers",
}  # fmt: skip


def owned(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    """Owner, and tensor of what a trainer holds now."""
    for name, tensor in trainer.named_tensors().items():
        first, _, _ = name.partition(" of chunk ")
        owner = next((own for end, own in _ENDINGS.items() if _ends(first, end)), "")
        if first.startswith("digest"):
            owner = "digests"
        if owner and tensor is not None:
            yield owner, tensor


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f" {ending}")


@contextlib.contextmanager
def alone(config: TrainConfig, rank: int) -> Iterator[Axes]:
    """The axes of a layout, as its rank of that number sees them, without the other ranks.

    Raises:
        ValueError: there is no such rank.
        RuntimeError: this process is a rank already.
    """
    world_size = config.parallel.world_size
    if not 0 <= rank < world_size:
        raise ValueError(f"Expected a rank from 0 to {world_size - 1}, got {rank}.")
    if dist.is_initialized():
        raise RuntimeError("Expected a process without process groups, this one is a rank.")
    hook = sys.excepthook  # which torch wraps, once more at each call
    dist.init_process_group(
        "fake", rank=rank, world_size=world_size, store=FakeStore(),
        pg_options=FakeProcessGroup.Options(),  # type: ignore[call-arg] # as torch is
    )  # fmt: skip
    try:
        yield build_axes(config.parallel, Device("cpu"))
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def predict_at_rest(config: TrainConfig, rank: int) -> AtRest:
    """What a rank keeps between steps, to the byte; nothing of the model is given memory."""
    device = Device("cpu")
    with alone(config, rank) as axes:
        fused = config.fused_experts or None
        backend = make_layers("torch", fused_experts=fused, dtype=TORCH_DTYPES[config.dtype])
        streams = make_streams(config, axes, device)
        with torch.device("meta"):
            stages = build_stages(config, axes, backend, streams, device)
        return at_rest(group for root in roots(stages) for group in root.fsdp_groups)


def can_rehearse(config: TrainConfig) -> bool:
    """Whether a rank's memory is known without the other ranks."""
    model, parallel = config.model, config.parallel
    spread = parallel.ep * parallel.etp > 1
    return not (model.experts and model.capacity_factor is None and spread)


def rehearse(config: TrainConfig, rank: int) -> Explanation:
    """A rank's peak over some eager steps, and whose it is.

    Raises:
        NotImplementedError: what it takes depends on what other ranks send.
    """
    if not can_rehearse(config):
        raise NotImplementedError(
            "Expected experts with a capacity_factor, or on one rank, to rehearse, got dropless "
            f"ones with ep={config.parallel.ep}: what other ranks send decides their memory."
        )
    plain = dataclasses.replace(
        config, graph=(), compile=(), stress=(), backend="torch", fp8="none", steps=STEPS
    )
    device = Device("cpu")
    trace = MemoryTrace(device)
    with alone(plain, rank) as axes, trace.tracing():
        trainer = make_trainer(plain, axes, device)
        for step in range(STEPS):
            trainer.step(step)
        found = trace.explain(owned(trainer))
        trainer.close()
    return found
