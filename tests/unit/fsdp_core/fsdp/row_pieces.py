"""Layouts over the three ranks of the fixture `trio`, and tensors in them."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.fsdp.row_sharded import RowSharded, RowSpec


def spec(trio: DeviceMesh, shape: tuple[int, ...], *bounds: int) -> RowSpec:
    """Layout over the three ranks, cut at `bounds`."""
    return RowSpec(trio, torch.Size(shape), bounds, (0,))


def filled(layout: RowSpec, value: float = 2.0, **options: Any) -> Any:
    """A tensor whose rows here hold `value`."""
    return RowSharded.make(torch.full(layout.local_shape, value, **options), layout)


def parameter_of(tensor: torch.Tensor) -> Any:
    """An nn.Parameter, which type checkers know not to be of the tensor's own type too."""
    return nn.Parameter(tensor)


def is_parameter(value: Any) -> bool:
    """Whether modules would register it; as a function, so that it narrows no type."""
    return isinstance(value, nn.Parameter)
