"""Norms whose weight is replicated over the tensor-parallel axis.

| sees | gradient of the weight |
| --- | --- |
| all tokens, all of each | whole on every tp rank: nothing to do |
| T / tp tokens (sequence parallel) | a part: summed over tp in the backward pass |
| this rank's heads (norms of q and k) | a part, with and without sequence parallel |
"""

from torch import nn

from fsdp_core.model.backend import Backend
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.tensor_parallel import reduce_replicated_of


def make_norm(backend: Backend, width: int, eps: float, tp: Axis, *, sees_part: bool) -> nn.Module:
    """RMSNorm over the last dim, its weight's gradient summed over `tp` where it sees a part."""
    norm = backend.norm(width, eps)
    if sees_part and tp.size > 1:
        reduce_replicated_of(norm, ["weight"], tp)
    return norm


def make_replicated_linear(
    backend: Backend, in_features: int, out_features: int, tp: Axis, *, sees_part: bool
) -> nn.Module:
    """A linear layer that every tp rank has whole, likewise."""
    layer = backend.linear(in_features, out_features)
    if sees_part and tp.size > 1:
        reduce_replicated_of(layer, ["weight"], tp)
    return layer
