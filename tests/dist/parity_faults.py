"""Known mistakes of parallel layouts, planted one at a time for the parity check to find.

| fault | what is wrong | first wrong tensor |
| --- | --- | --- |
| norm not summed | norms under sequence parallel keep each rank's part of their gradient | norm |
| experts divided by edp | expert gradients are divided by the ranks of their own mesh | experts |
| plain chunks | tokens are cut in plain order, attention takes them to be zigzag | attention |
| swapped etp | two ranks of an etp group each take the other's slice | experts |
| aux loss twice | the balancing loss is attached with twice its scale | router |
| one stream for tp | dropout draws the same on tp ranks that hold different tokens | see test |
| half the gradients | FSDP divides by twice the ranks that have tokens | head, the first made |
| swapped halves | a context rank has its late chunk where its early one should be | attention |
| swapped heads | values go to the heads of other keys | attention |
| one prediction | one that counts is left out of a rank's loss | loss |
| one position | one token of one rank turns by the position before its own | attention |
| one boundary | attention takes the first two packed documents for one | attention |
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core.fsdp import FSDPModule
from fsdp_core.model import batch as packing
from fsdp_core.model import cp_attention as sdpa
from fsdp_core.model import layers
from fsdp_core.model.decoder import DecoderStage, MoeBranch
from fsdp_core.model.layers import RopeTable
from fsdp_core.parallel import context
from fsdp_core.parallel.context import ContextPlan, Spans
from fsdp_core.parallel.mesh import Axes
from fsdp_core.parallel.rng import RandomStreams
from tests.support import dense_parts


def axes_of(axes: Axes, fault: str) -> Axes:
    """The axes, with two ranks of etp in each other's place."""
    if fault != "swapped etp":
        return axes
    etp = axes.etp
    return dataclasses.replace(axes, etp=dataclasses.replace(etp, rank=etp.size - 1 - etp.rank))


def after_sharding(stage: DecoderStage, axes: Axes, fault: str) -> None:
    """Divide gradients of experts by the ranks of the mesh that they are sharded over."""
    if fault == "experts divided by edp":
        for layer in stage.numbered_layers.values():
            if isinstance(layer.mlp, MoeBranch):
                experts: Any = layer.mlp.moe.experts
                assert isinstance(experts, FSDPModule)
                experts.set_gradient_divide_factor(float(axes.edp.size))


def loss_scale(right: float, fault: str) -> float:
    return 2 * right if fault == "aux loss twice" else right


def _plain_split(whole: torch.Tensor, dim: int, size: int, rank: int) -> torch.Tensor:
    return whole.chunk(size, dim)[rank]


def _same_stream(streams: Any, *names: str) -> Any:
    del names
    return _equal_over(streams, "tp")


def _keep(module: Any, names: Any, axis: Any) -> None:
    del module, names, axis


def _half(module: FSDPModule, factor: float) -> None:
    _divide(module, 2 * factor)


def _late_first(whole: torch.Tensor, dim: int, size: int, rank: int) -> torch.Tensor:
    part = _split(whole, dim, size, rank)
    return torch.cat(part.chunk(2, dim)[::-1], dim) if rank == 1 else part


def _other_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
    return _attention(q, k, v.flip(2), **how)


def _one_left_out(documents: Any, capacity: Any) -> packing.PackedBatch:
    batch = _pack(documents, capacity)
    batch.loss_mask[int(batch.loss_mask.argmax())] = 0.0
    return batch


def _one_turned(table: RopeTable, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1:
        positions = positions.clone()
        positions[int(positions.argmax())] -= 1
    return _turn(table, x, positions)


def _joined(spans: Spans) -> Spans:
    assert spans.offsets is not None
    offsets = spans.offsets.clone()
    offsets[1] = 0
    return dataclasses.replace(spans, offsets=offsets)


def _one_boundary_less(batch: packing.PackedBatch, *at: Any, **how: Any) -> ContextPlan:
    plan = _plan(batch, *at, **how)
    return dataclasses.replace(plan, spans=_joined(plan.spans), half_spans=_joined(plan.half_spans))


_split, _pack, _turn = context.split, packing.pack, RopeTable.forward
_attention, _plan = sdpa.causal_attention, packing.PackedBatch.plan
_equal_over, _divide = RandomStreams.equal_over, FSDPModule.set_gradient_divide_factor

_PATCHES: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "norm not summed": ((layers, "reduce_replicated_of", _keep),),
    "plain chunks": ((dense_parts, "split", _plain_split),),
    "one stream for tp": ((RandomStreams, "equal_over", _same_stream),),
    "half the gradients": ((FSDPModule, "set_gradient_divide_factor", _half),),
    "swapped halves": ((dense_parts, "split", _late_first),),
    "swapped heads": ((layers, "causal_attention", _other_values),),
    "one prediction": ((packing, "pack", _one_left_out),),
    "one position": ((RopeTable, "forward", _one_turned),),
    "one boundary": ((packing.PackedBatch, "plan", _one_boundary_less),),
}


@contextlib.contextmanager
def planted(fault: str) -> Iterator[None]:
    """Run with a fault that is functions put in others' places."""
    patches = _PATCHES.get(fault, ())
    right = [(owner, name, owner.__dict__[name]) for owner, name, _ in patches]
    for owner, name, wrong in patches:
        setattr(owner, name, wrong)
    try:
        yield
    finally:
        for owner, name, was in right:
            setattr(owner, name, was)
