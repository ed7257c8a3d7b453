"""Known mistakes of parallel layouts, planted one at a time for the parity check to find.

| fault | what is wrong | first wrong tensor |
| --- | --- | --- |
| norm not summed | norms under sequence parallel keep each rank's part of their gradient | norm |
| experts divided by edp | expert gradients are divided by the ranks of their own mesh | experts |
| plain chunks | tokens are cut in plain order, attention takes them to be zigzag | attention |
| swapped etp | two ranks of an etp group each take the other's slice | experts |
| aux loss twice | the balancing loss is attached with twice its scale | router |
| one stream for tp | dropout draws the same on tp ranks that hold different tokens | see test |
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from fsdp_core.fsdp import FSDPModule
from fsdp_core.model import decoder, microbatch, norm
from fsdp_core.model.decoder import DecoderStage, MoeBranch
from fsdp_core.parallel.axes import Axes


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
    """The scale of the balancing loss."""
    return 2 * right if fault == "aux loss twice" else right


def _plain_split(whole: torch.Tensor, dim: int, size: int, rank: int) -> torch.Tensor:
    return whole.chunk(size, dim)[rank]


def _same_stream(p: float, streams: Any, *, sequence_parallel: bool) -> decoder.Residual:
    del sequence_parallel
    return decoder.Residual(p, streams.equal_over("tp"))


def _keep(module: Any, names: Any, axis: Any) -> None:
    del module, names, axis


_PATCHES: dict[str, tuple[Any, str, Any]] = {
    "norm not summed": (norm, "reduce_replicated_of", _keep),
    "plain chunks": (microbatch, "split", _plain_split),
    "one stream for tp": (decoder.Residual, "of", _same_stream),
}


@contextlib.contextmanager
def planted(fault: str) -> Iterator[None]:
    """Run with a fault that is a function put in another's place."""
    if fault not in _PATCHES:
        yield
        return
    owner, name, wrong = _PATCHES[fault]
    right = owner.__dict__[name]
    setattr(owner, name, wrong)
    try:
        yield
    finally:
        setattr(owner, name, right)
