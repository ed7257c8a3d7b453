"""The parts of a decoder's layers by TransformerEngine: `fsdp_core.model.parts.Parts`."""

from typing import Any

from torch import nn

from fsdp_core.config import ModelConfig
from fsdp_core.model.backend import Backend
from fsdp_core.model.moe.axes import MoeAxes
from fsdp_core.model.norm import make_norm
from fsdp_core.model.parts import gqa_shape, mla_shape
from fsdp_core.model.rope import RopeTable
from fsdp_core.model.te import attention, feed_forward
from fsdp_core.model.te.experts import make_experts
from fsdp_core.model.te.precision import ROW_MULTIPLE
from fsdp_core.parallel.mesh import Axes


class TeParts:
    """See `Parts`.

    Args:
        te: the module `transformer_engine.pytorch`.
        fp8: as `precision` has it; decides what rows of experts are padded to.
        fused_experts: experts by one operator over their layers, not layer by layer.
    """

    def __init__(
        self, te: Any, config: ModelConfig, axes: Axes, rope: RopeTable, backend: Backend, *,
        fp8: str, fused_experts: bool,
    ) -> None:  # fmt: skip
        self._te, self._config, self._axes, self._rope = te, config, axes, rope
        self._backend, self._fused = backend, fused_experts
        self._multiple = 1 if fp8 == "none" else ROW_MULTIPLE
        self._cut: dict[str, Any] = {"sequence_parallel": axes.sequence_parallel}

    def norm(self) -> nn.Module:
        """A norm of the residual stream."""
        config, axes = self._config, self._axes
        return make_norm(self._backend, config.hidden, config.norm_eps, axes.tp,
                         sees_part=axes.sequence_parallel)  # fmt: skip

    def attention(self) -> tuple[nn.Module, nn.Module]:
        """The norm is inside of what comes second."""
        config, axes = self._config, self._axes
        made: nn.Module
        options = {"backend": self._backend, **self._cut}
        pair = (axes.tp, axes.cp)
        if config.attention == "mla":
            made = attention.LatentAttention(
                self._te, mla_shape(config), self._rope, pair, **options
            )
        else:
            made = attention.GroupedQueryAttention(
                self._te, gqa_shape(config), self._rope, pair, config.norm_eps, **options
            )
        return nn.Identity(), made

    def mlp(self) -> tuple[nn.Module, nn.Module]:
        """The norm is inside of what comes second."""
        config = self._config
        sizes = (config.hidden, config.ffn, config.norm_eps)
        return nn.Identity(), feed_forward.Mlp(self._te, *sizes, self._axes.tp, **self._cut)

    def shared_experts(self) -> nn.Module | None:
        """Shared experts, if the model has some."""
        config = self._config
        if not config.shared_expert_ffn:
            return None
        return feed_forward.SharedExperts(
            self._te, config.hidden, config.shared_expert_ffn, self._axes.tp, **self._cut
        )

    def experts(self) -> nn.Module:
        """Routed experts."""
        config = self._config
        return make_experts(
            self._te,
            config.experts,
            (config.hidden, config.expert_ffn),
            MoeAxes.of(self._axes),
            multiple=self._multiple,
            fused=self._fused,
        )
