"""What the ranks of pipeline tests run where one of them fails: how the others end, and when."""

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.pipeline import Microbatch, Pipeline
from fsdp_core.parallel.pipeline_p2p import Transfers
from fsdp_core.parallel.pipeline_schedule import Exchange, Transfer
from tests.dist.pipeline_features import caught
from tests.dist.pipeline_models import Stage, batches
from tests.dist.pipeline_programs import CPU, SPEC, make_stages

TIMEOUT_S = 1.0


def impatient_axis() -> Axis:
    """All ranks as one pipeline whose messages time out soon."""
    ranks = list(range(dist.get_world_size()))
    group = dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT_S))
    assert group is not None
    return Axis("pp", len(ranks), dist.get_rank(), group)


class Raising(Stage):
    """Raises where it is told to."""

    where = ""

    def forward(self, x: torch.Tensor, *args: Any, microbatch: int, **keywords: Any) -> Any:
        """As a stage, but for the second microbatch."""
        out = super().forward(x, *args, microbatch=microbatch, **keywords)
        if microbatch == 1 and self.where == "forward":
            raise ArithmeticError("planted")
        if microbatch == 1 and self.where == "backward":
            out.register_hook(_raise)
        return out[:, :2] if microbatch == 1 and self.where == "shape" else out


def _raise(grad: torch.Tensor) -> None:
    raise ArithmeticError("planted")


def fail(rank: int, where: str) -> tuple[str, float, str]:
    """What a rank raises, how long it takes, and what it says to a second pass."""
    axis = impatient_axis()
    (stage,) = make_stages(axis)
    if axis.rank == rank:
        stage.__class__ = Raising
        stage.where = where  # type: ignore[assignment]
    pipeline = Pipeline([stage], axis, SPEC, CPU)
    began = time.monotonic()
    text = caught(lambda: pipeline.forward_backward(batches(8)))
    took = time.monotonic() - began
    return text, took, caught(lambda: pipeline.forward_backward(batches(8)))


def lose(lost: Transfer, microbatches: int, side: str) -> str:
    """What a rank raises where one message is never sent, or never received."""
    axis = impatient_axis()
    (stage,) = make_stages(axis)
    loser = (lost.source if side == "send" else lost.target) % axis.size

    def post(self: Transfers, exchange: Exchange, outbox: Any) -> None:
        if lost in exchange.transfers and loser == axis.rank:
            outbox.pop(lost, None)
            exchange = Exchange(tuple(t for t in exchange.transfers if t != lost))
        original(self, exchange, outbox)

    original, Transfers.post = Transfers.post, post  # type: ignore[method-assign]
    try:
        pipeline = Pipeline([stage], axis, SPEC, CPU)
        return caught(lambda: pipeline.forward_backward(batches(microbatches)))
    finally:
        Transfers.post = original  # type: ignore[method-assign]


def disagree(case: str) -> str:
    """What ranks raise of which the last runs something else."""
    axis = impatient_axis()
    is_last = axis.rank == axis.size - 1
    number, chunks, spec = 4, 1, SPEC
    if is_last and case == "microbatches":
        number = 3
    if is_last and case == "chunks":
        chunks = 2
    if is_last and case == "boundaries":
        spec = replace(SPEC, dtype=torch.bfloat16)
    pipeline = Pipeline(make_stages(axis, chunks), axis, spec, CPU)
    if case == "kind" and is_last:
        return caught(lambda: pipeline.forward_only(batches(number)))
    if case == "loss":
        return caught(lambda: pipeline.forward_only(batches(number), broadcast_loss=is_last))
    if case == "later":
        pipeline.forward_backward(batches(4))
        number -= is_last
    return caught(lambda: pipeline.forward_backward(batches(number)))


def without_tokens() -> str:
    """What a rank raises where the first has no tokens."""
    axis = impatient_axis()
    pipeline = Pipeline(make_stages(axis), axis, SPEC, CPU)
    return caught(lambda: pipeline.forward_backward([Microbatch()]))
