"""What a layer of the decoder is made of, whoever makes it; and torch's way.

`fsdp_core.model.backend` chooses, `fsdp_core.model.decoder` puts parts together. A library may have
norm and projection in one: its norm is then the identity, and its parameters still have the global
names of torch's (`param_sharding`).
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.config import ModelConfig
from fsdp_core.model.attention import GqaShape, GroupedQueryAttention, LatentAttention, MlaShape
from fsdp_core.model.backend import Backend
from fsdp_core.model.moe.dispatcher import MoeAxes
from fsdp_core.model.moe.experts import Experts, make_fused_experts
from fsdp_core.model.moe.layer import SharedExperts
from fsdp_core.model.norm import make_norm
from fsdp_core.model.rope import RopeTable
from fsdp_core.parallel.mesh import Axes, Axis
from fsdp_core.parallel.tensor_parallel import ColumnLinear, RowLinear, enter


class Parts(Protocol):
    """Makes the parts of one rank's layers, each anew."""

    def norm(self) -> nn.Module:
        """A norm of the residual stream."""

    def attention(self) -> tuple[nn.Module, nn.Module]:
        """What a branch applies one after the other: norm, and attention of x and `Part`."""

    def mlp(self) -> tuple[nn.Module, nn.Module]:
        """Norm and dense feed-forward, likewise."""

    def shared_experts(self) -> nn.Module | None:
        """What every token passes beside the experts, without norm; None: the model has none."""

    def experts(self) -> nn.Module:
        """Routed experts of this rank: rows and groups as `moe.dispatch` has them."""


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)): SwiGLU (Shazeer, 2020), its width cut over tp."""

    def __init__(self, hidden: int, ffn: int, tp: Axis, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.gate = ColumnLinear(hidden, ffn, tp, sequence_parallel=sequence_parallel)
        self.up = ColumnLinear(hidden, ffn, tp, sequence_parallel=sequence_parallel)
        self.down = RowLinear(ffn, hidden, tp, sequence_parallel=sequence_parallel)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        whole = enter(x_BTH, self.tp, sequence_parallel=self.sequence_parallel)
        inner = F.silu(self.gate(whole, entered=True)) * self.up(whole, entered=True)
        result: torch.Tensor = self.down(inner)
        return result


class TorchParts:
    """See `Parts`."""

    def __init__(
        self, config: ModelConfig, axes: Axes, rope: RopeTable, backend: Backend, *,
        fused_experts: bool = False,
    ) -> None:  # fmt: skip
        self._config, self._axes, self._rope, self._backend = config, axes, rope, backend
        self._fused = fused_experts
        self._cut: dict[str, Any] = {"sequence_parallel": axes.sequence_parallel}

    def norm(self) -> nn.Module:
        """A norm of the residual stream."""
        config, axes = self._config, self._axes
        return make_norm(
            self._backend, config.hidden, config.norm_eps, axes.tp,
            sees_part=axes.sequence_parallel,
        )  # fmt: skip

    def attention(self) -> tuple[nn.Module, nn.Module]:
        """Norm and attention."""
        tp, options = self._axes.tp, {"backend": self._backend, **self._cut}
        config, made = self._config, None
        if config.attention == "mla":
            made = LatentAttention(mla_shape(config), self._rope, tp, **options)
            return self.norm(), made
        return self.norm(), GroupedQueryAttention(gqa_shape(config), self._rope, tp, **options)

    def mlp(self) -> tuple[nn.Module, nn.Module]:
        """Norm and dense feed-forward."""
        config = self._config
        return self.norm(), Mlp(config.hidden, config.ffn, self._axes.tp, **self._cut)

    def shared_experts(self) -> nn.Module | None:
        """Shared experts, if the model has some."""
        config = self._config
        if not config.shared_expert_ffn:
            return None
        return SharedExperts(config.hidden, config.shared_expert_ffn, self._axes.tp, **self._cut)

    def experts(self) -> nn.Module:
        """Routed experts."""
        config = self._config
        make = make_fused_experts if self._fused else Experts
        return make(config.experts, config.hidden, config.expert_ffn, MoeAxes.of(self._axes))


def gqa_shape(config: ModelConfig) -> GqaShape:
    """Sizes of grouped-query attention."""
    return GqaShape(
        hidden=config.hidden, heads=config.heads, kv_heads=config.kv_heads,
        head_dim=config.head_dim, norm_eps=config.norm_eps if config.qk_norm else None,
    )  # fmt: skip


def mla_shape(config: ModelConfig) -> MlaShape:
    """Sizes of latent attention."""
    return MlaShape(
        hidden=config.hidden, heads=config.heads, q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank, nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim, v_dim=config.v_head_dim, norm_eps=config.norm_eps,
    )  # fmt: skip
