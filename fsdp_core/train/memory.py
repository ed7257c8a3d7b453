"""Whose a trainer's memory is, and how much of it each rank keeps between steps.

`owned` names what objects hold; `at_rest` adds it up as arithmetic: from the layout of the flat
buffers alone, so that it also answers for a model that has no memory (`meta`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.train.trainer import Trainer

_ENDINGS = {
    "main_weight": "parameters", "model_weight": "parameters", "main_grad": "gradients",
    "exp_avg": "optimizer", "exp_avg_sq": "optimizer", "step_count": "optimizer",
    "lr": "optimizer", "gathered": "gather buffers", "full gradient": "reduce buffers",
}  # fmt: skip
_MOMENT_BYTES = 4


@dataclass(frozen=True)
class AtRest:
    """Bytes that a rank keeps between steps.

    Attributes:
        parameters: main weights, padding included, and copies in the dtype of compute.
        gradients: kept in the dtype of the main weights.
        optimizer: both moments, and two scalars.
        largest_unit: full weights of the largest unit in the dtype of compute; 0 if no weight is
            gathered.
    """

    parameters: int
    gradients: int
    optimizer: int
    largest_unit: int


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


def at_rest(groups: Iterable[ParamGroup]) -> AtRest:
    """What the parameter groups of a rank, their gradients and AdamW's moments take."""
    parameters = gradients = moments = largest = 0
    for group in groups:
        nest, dtypes, total = group.nest, group.dtypes, group.layout.total_numel
        main = nest.numel(total, nest.main_level) * dtypes.main.itemsize
        parameters += main
        gradients += main
        if group.keeps_copy:
            parameters += nest.numel(total, nest.weight_level) * dtypes.compute.itemsize
        moments += sum(spec.local_numel for spec in group.specs)
        if nest.weight_level:
            largest = max(largest, total * dtypes.compute.itemsize)
    scalars = 2 * torch.float32.itemsize
    return AtRest(parameters, gradients, 2 * moments * _MOMENT_BYTES + scalars, largest)
