"""The decoder on any layout, in pipeline stages: embedding, layers, final norm, head, loss.

    first stage   tokens [B, T]   -> embedding -> layers -> x
    inner stages  x               -> layers -> x
    last stage    x               -> layers -> norm -> head -> scalar loss

A model that is not cut is one stage, both first and last. x is [B, T, H], or [B, T / tp, H] under
sequence parallel. Parameters have the names of the whole model, so layers keep their global numbers
(`layers.7.attn.wq.weight` on any stage), and no two stages have one name in common.

B batch, T local tokens, H hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.config import ModelConfig
from fsdp_core.model.backend import Backend
from fsdp_core.model.gqa import GqaShape, GroupedQueryAttention
from fsdp_core.model.microbatch import Part
from fsdp_core.model.mla import LatentAttention, MlaShape
from fsdp_core.model.moe.axes import MoeAxes
from fsdp_core.model.moe.layer import MoeLayer
from fsdp_core.model.moe.preprocess import Delivery
from fsdp_core.model.moe.router import Router
from fsdp_core.model.moe.routing import RouterRule
from fsdp_core.model.moe.shared import SharedExperts
from fsdp_core.model.norm import make_norm
from fsdp_core.model.rope import RopeTable
from fsdp_core.parallel.axes import Axes, Axis
from fsdp_core.parallel.pipeline_split import split_layers
from fsdp_core.parallel.rng import RandomStream, RandomStreams
from fsdp_core.parallel.tensor import ColumnLinear, RowLinear, enter
from fsdp_core.parallel.vocab import VocabEmbedding, vocab_cross_entropy


@dataclass(frozen=True)
class Residual:
    """Dropout of what a branch adds to the residual stream.

    Attributes:
        p: probability.
        stream: of random numbers. Ranks of tp draw the same where they hold the same activations,
            and their own under sequence parallel, where each holds other tokens.
    """

    p: float
    stream: RandomStream

    @classmethod
    def of(cls, p: float, streams: RandomStreams, *, sequence_parallel: bool) -> "Residual":
        """That of a layout."""
        return cls(p, streams.equal_over(*(() if sequence_parallel else ("tp",))))

    def add(self, x: torch.Tensor, out: torch.Tensor, *, training: bool) -> torch.Tensor:
        """x + dropout(out)."""
        return x + self.stream.dropout(out, self.p, training=training)


class AttentionBranch(nn.Module):
    """x + dropout(attention(norm(x))): graph scope `attn`."""

    def __init__(self, norm: nn.Module, attention: nn.Module, residual: Residual) -> None:
        super().__init__()
        self.norm, self.attention, self.residual = norm, attention, residual

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        out = self.attention(self.norm(x_BTH), part)
        return self.residual.add(x_BTH, out, training=self.training)


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


class MlpBranch(nn.Module):
    """x + dropout(mlp(norm(x))): graph scope `mlp`."""

    def __init__(self, norm: nn.Module, mlp: Mlp, residual: Residual) -> None:
        super().__init__()
        self.norm, self.mlp, self.residual = norm, mlp, residual

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]; `part` is for branches of experts."""
        del part
        out = self.mlp(self.norm(x_BTH))
        return self.residual.add(x_BTH, out, training=self.training)


class MoeBranch(nn.Module):
    """x + dropout(moe(norm(x))); padding goes to no routed expert: graph scope `moe`."""

    def __init__(self, norm: nn.Module, moe: MoeLayer, residual: Residual, axes: MoeAxes) -> None:
        super().__init__()
        self.norm, self.moe, self.residual, self._axes = norm, moe, residual, axes

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        axes = self._axes
        valid = part.valid(axes.tp, sequence_parallel=axes.sequence_parallel)
        out = self.moe(self.norm(x_BTH), valid)
        return self.residual.add(x_BTH, out, training=self.training)


class Layer(nn.Module):
    """Attention branch, then a dense or an expert branch. The FSDP unit."""

    def __init__(self, attn: AttentionBranch, mlp: MlpBranch | MoeBranch) -> None:
        super().__init__()
        self.attn, self.mlp = attn, mlp

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        result: torch.Tensor = self.mlp(self.attn(x_BTH, part), part)
        return result


class LayerMaker:
    """Makes layers by number, with what all layers of a rank share."""

    def __init__(
        self, config: ModelConfig, axes: Axes, backend: Backend, streams: RandomStreams
    ) -> None:
        self._config, self._axes, self._backend = config, axes, backend
        self._cut = {"sequence_parallel": axes.sequence_parallel}
        self._residual = Residual.of(config.dropout, streams, **self._cut)
        self.rope = RopeTable(config.seq, config.rope_dim, config.rope_theta)

    def norm(self) -> nn.Module:
        """A norm of the residual stream."""
        config, axes = self._config, self._axes
        return make_norm(
            self._backend, config.hidden, config.norm_eps, axes.tp,
            sees_part=axes.sequence_parallel,
        )  # fmt: skip

    def layer(self, number: int) -> Layer:
        """The layer of that global number."""
        attn = AttentionBranch(self.norm(), self._attention(), self._residual)
        make = self._moe_branch if self._config.has_experts(number) else self._mlp_branch
        return Layer(attn, make())

    def _attention(self) -> nn.Module:
        config, tp = self._config, self._axes.tp
        if config.attention == "mla":
            latent = MlaShape(
                hidden=config.hidden, heads=config.heads, q_lora_rank=config.q_lora_rank,
                kv_lora_rank=config.kv_lora_rank, nope_dim=config.qk_nope_head_dim,
                rope_dim=config.qk_rope_head_dim, v_dim=config.v_head_dim,
                norm_eps=config.norm_eps,
            )  # fmt: skip
            return LatentAttention(latent, self.rope, tp, backend=self._backend, **self._cut)
        grouped = GqaShape(
            hidden=config.hidden, heads=config.heads, kv_heads=config.kv_heads,
            head_dim=config.head_dim, norm_eps=config.norm_eps if config.qk_norm else None,
        )  # fmt: skip
        return GroupedQueryAttention(grouped, self.rope, tp, backend=self._backend, **self._cut)

    def _mlp_branch(self) -> MlpBranch:
        config = self._config
        mlp = Mlp(config.hidden, config.ffn, self._axes.tp, **self._cut)
        return MlpBranch(self.norm(), mlp, self._residual)

    def _moe_branch(self) -> MoeBranch:
        config, axes = self._config, MoeAxes.of(self._axes)
        rule = RouterRule(
            num_experts=config.experts, top_k=config.top_k, scores=config.score,
            normalised=config.normalise_top_k, scale=config.route_scale,
            aux_coeff=config.aux_loss, z_coeff=config.z_loss, expert_bias=config.expert_bias,
        )  # fmt: skip
        delivery = Delivery(
            dispatcher=config.dispatcher, capacity_factor=config.capacity_factor, drop=config.drop
        )
        shared = None
        if config.shared_expert_ffn:
            shared = SharedExperts(config.hidden, config.shared_expert_ffn, axes.tp, **self._cut)
        moe = MoeLayer(
            config.hidden, config.expert_ffn, rule, axes, delivery=delivery, shared=shared
        )
        return MoeBranch(self.norm(), moe, self._residual, axes)


class DecoderStage(nn.Module):
    """Some layers of the decoder, the embedding if it is first, the head and loss if it is last.

    Weights are NaN, or whatever torch left there, until `weights.init_weights` or
    `weights.load_global` gives them values.

    Args:
        layers: global numbers of its layers; None: all.
        streams: what dropout draws from; made with the axes pp, dp_outer, dp, cp and tp.

    Raises:
        ValueError: sizes that the axes do not divide.
    """

    def __init__(
        self,
        config: ModelConfig,
        axes: Axes,
        backend: Backend,
        streams: RandomStreams,
        *,
        layers: range | None = None,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.axes = config, axes
        make = LayerMaker(config, axes, backend, streams)
        numbers = range(config.layers) if layers is None else layers
        cut = {"sequence_parallel": axes.sequence_parallel}
        self.rope = make.rope
        self.embedding = (
            VocabEmbedding(config.vocab_size, config.hidden, axes.tp, **cut) if is_first else None
        )
        self.layers = nn.ModuleDict({str(number): make.layer(number) for number in numbers})
        self.norm = make.norm() if is_last else None
        self.head = (
            ColumnLinear(config.hidden, config.vocab_size, axes.tp, **cut) if is_last else None
        )

    def forward(self, x: torch.Tensor, part: Part, *, microbatch: int = 0) -> torch.Tensor:
        """Tokens int64 [B, T], or x, to x, or to this rank's loss: float32 (float64) scalar.

        Args:
            microbatch: slot of the microbatch, for graphs, which are kept by slot.
        """
        del microbatch
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.numbered_layers.values():
            x = layer(x, part)
        if self.head is None or self.norm is None:
            return x
        logits = self.head(self.norm(x))
        losses = vocab_cross_entropy(logits, part.targets, self.axes.tp, loss_mask=part.counted)
        weight = part.weight
        if isinstance(weight, torch.Tensor):
            weight = weight.to(losses.dtype)
        return losses.sum() * weight

    @property
    def numbered_layers(self) -> dict[str, Layer]:
        """This stage's layers by their global numbers."""
        return {number: cast("Layer", layer) for number, layer in self.layers.items()}

    @property
    def routers(self) -> dict[str, Router]:
        """Routers of this stage's layers by the name of the layer's experts."""
        return {
            f"layers.{number}.mlp.moe": layer.mlp.moe.router
            for number, layer in self.numbered_layers.items()
            if isinstance(layer.mlp, MoeBranch)
        }

    def set_loss_scale(self, scale: float) -> None:
        """Tell routers what the loss of a microbatch is multiplied by: 1 / microbatches."""
        for router in self.routers.values():
            router.loss_scale.fill_(scale)


def make_stages(
    config: ModelConfig,
    axes: Axes,
    backend: Backend,
    streams: RandomStreams,
    *,
    chunks: int = 1,
) -> list[DecoderStage]:
    """This pipeline rank's stages in order: stages rank, rank + pp, ...

    Raises:
        ValueError: fewer layers than stages, or sizes that the axes do not divide.
    """
    pp = axes.pp
    ranges = split_layers(config.layers, pp.size, chunks)[pp.rank]
    return [
        DecoderStage(
            config, axes, backend, streams, layers=numbers,
            is_first=pp.rank == 0 and chunk == 0,
            is_last=pp.rank == pp.size - 1 and chunk == chunks - 1,
        )
        for chunk, numbers in enumerate(ranges)
    ]  # fmt: skip
