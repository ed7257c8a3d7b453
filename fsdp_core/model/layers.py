"""What makes the modules of a decoder's layers: of torch here, of TransformerEngine in `model.te`.

`decoder.make_layers` chooses; attention and experts take what they are made of as arguments. A
library may have norm and projection in one: its norm is then the identity, and its parameters still
have the global names of torch's (`parallel.param_sharding`).

| a replicated norm or linear layer sees | gradient of its weight |
| --- | --- |
| all tokens, all of each | whole on every tp rank: nothing to do |
| T / tp tokens (sequence parallel) | a part: summed over tp in the backward pass |
| this rank's heads (norms of q and k) | a part, with and without sequence parallel |

What layers compute in (fp8) is a `Precision`, eagerly and where graphs stand in for parts of them:

    eager     with precision(): the layers            scales move at its end, and in the backward
    warm-up,  with precision.captured(): a part       nothing moves but what kernels of it write
    capture
    replay    begin(); replay; after its backward, what `begin` returned

Whoever captures puts back what those kernels wrote.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.config import ModelConfig
from fsdp_core.model.attention import (
    FusedRope,
    GroupedQueryAttention,
    LatentAttention,
    RopeTable,
)
from fsdp_core.model.moe.dispatcher import MoeAxes
from fsdp_core.model.moe.experts import Experts, make_fused_experts
from fsdp_core.parallel.mesh import Axes
from fsdp_core.parallel.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    enter,
    reduce_replicated_of,
)

Getter = Callable[[], torch.Tensor | None]
"""Looks a tensor up where it is kept; None while there is none."""
After = Callable[[], None]
"""What is to be done once a backward has been replayed."""
Begin = Callable[[], After | None]
"""Called before each forward replay that stands in for the same modules."""


class BackendMissing(RuntimeError):
    """The chosen backend is not installed on this machine."""


class Precision:
    """What a stage's layers compute in: here nothing but their dtype."""

    def __call__(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def captured(self) -> AbstractContextManager[Any]:
        """Of a part that is warmed up or captured: what happens once a pass is left out."""
        return contextlib.nullcontext()

    def replays(self, modules: Iterable[nn.Module]) -> Begin:
        """What replays do for these modules that their forward and backward would have done."""
        del modules
        return _nothing

    def state(self, root: nn.Module) -> Iterator[tuple[str, Getter]]:
        """Names of what kernels of the modules inside write from pass to pass, past torch."""
        del root
        return iter(())

    def remember(self, root: nn.Module) -> Callable[[], None]:
        """Puts the state back to what it is now; what did not exist, to what it began with."""
        del root
        return _nothing


def _nothing() -> None:
    return None


class RmsNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich, 2019), statistics in float32 or wider."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden] in the input's dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)): SwiGLU (Shazeer, 2020), its width cut over tp."""

    def __init__(self, hidden: int, ffn: int, axes: Axes) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = axes.tp, axes.sequence_parallel
        cut: dict[str, Any] = {"sequence_parallel": axes.sequence_parallel}
        self.gate = ColumnLinear(hidden, ffn, axes.tp, **cut)
        self.up = ColumnLinear(hidden, ffn, axes.tp, **cut)
        self.down = RowLinear(ffn, hidden, axes.tp, **cut)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        whole = enter(x_BTH, self.tp, sequence_parallel=self.sequence_parallel)
        inner = F.silu(self.gate(whole, entered=True)) * self.up(whole, entered=True)
        result: torch.Tensor = self.down(inner)
        return result


class LayerFactory:
    """Makes the modules of one rank's layers, each anew, by torch. `fused_experts`: gate, up and
    down of experts as one autograd function. `fused_rope`: RoPE by a kernel that walks the
    sequences of a pack.
    """

    def __init__(self, *, fused_experts: bool = False, fused_rope: bool = False) -> None:
        self.fused_experts, self.fused_rope = fused_experts, fused_rope

    # ---- what a library has

    def rms_norm(self, width: int, eps: float) -> nn.Module:
        return RmsNorm(width, eps)

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """A linear layer without bias: [..., in] -> [..., out]."""
        return nn.Linear(in_features, out_features, bias=False)

    def rope(self, config: ModelConfig) -> RopeTable:
        """What turns queries and keys: one for all layers of a stage."""
        make = FusedRope if self.fused_rope else RopeTable
        return make(config.seq, config.rope_dim, config.rope_theta)

    def precision(self, axes: Axes) -> Precision:
        """What a stage's layers compute in. All ranks call it together."""
        del axes
        return Precision()

    # ---- parts of layers

    def norm(self, config: ModelConfig, axes: Axes) -> nn.Module:
        """A norm of the residual stream."""
        return self._norm(config, axes, config.hidden, sees_part=axes.sequence_parallel)

    def _norm(self, config: ModelConfig, axes: Axes, width: int, *, sees_part: bool) -> nn.Module:
        return _summed(self.rms_norm(width, config.norm_eps), axes, sees_part=sees_part)

    def _replicated(self, axes: Axes, in_features: int, out_features: int) -> nn.Module:
        layer = self.linear(in_features, out_features)
        return _summed(layer, axes, sees_part=axes.sequence_parallel)

    def attention(
        self, config: ModelConfig, axes: Axes, rope: RopeTable
    ) -> tuple[nn.Module, nn.Module]:
        """What a branch applies one after the other: norm, and attention of x and `Part`."""
        norm = functools.partial(self._norm, config, axes)
        first = self.norm(config, axes)
        if config.attention == "mla":
            linear = functools.partial(self._replicated, axes)
            return first, LatentAttention(config, axes, rope, norm, linear)
        return first, GroupedQueryAttention(config, axes, rope, norm)

    def mlp(self, config: ModelConfig, axes: Axes) -> tuple[nn.Module, nn.Module]:
        return self.norm(config, axes), Mlp(config.hidden, config.ffn, axes)

    def shared_experts(self, config: ModelConfig, axes: Axes) -> nn.Module | None:
        """What every token passes beside the experts, without norm; None: the model has none."""
        if not config.shared_expert_ffn:
            return None
        return Mlp(config.hidden, config.shared_expert_ffn, axes)

    def experts(self, config: ModelConfig, axes: Axes) -> nn.Module:
        """Routed experts of this rank: rows and groups as `moe.dispatcher` has them."""
        make = make_fused_experts if self.fused_experts else Experts
        return make(config.experts, config.hidden, config.expert_ffn, MoeAxes.of(axes))


def _summed(module: nn.Module, axes: Axes, *, sees_part: bool) -> nn.Module:
    """A module whose weight's gradient is summed over tp where it sees a part."""
    if sees_part and axes.tp.size > 1:
        reduce_replicated_of(module, "weight", axes.tp)
    return module
