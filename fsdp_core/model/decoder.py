"""The decoder on any layout, in pipeline stages: embedding, layers, final norm, head, loss.

    first stage   tokens [B, T]   -> embedding -> layers -> x
    inner stages  x               -> layers -> x
    last stage    x               -> layers -> norm -> head -> scalar loss

A model that is not cut is one stage, both first and last. x is [B, T, H], or [B, T / tp, H] under
sequence parallel. Parameters have the names of the whole model, so layers keep their global numbers
(`layers.7.attn.attention.wq.weight` on any stage), and no two stages have one name in common.

B batch, T local tokens, H hidden, V vocabulary.

A mixture of experts in stages, with nothing but tensors at the boundaries that graphs cut.

    x [B, T, H] --router_stage--> probs, experts, (shared output)       scope moe_router
                --preprocess----> plan                                  scope moe_preprocess
                --dispatch------> rows at their experts
                --experts-------> rows
                --combine-------> y [B, T, H]                           all of it: scope moe

Scope moe needs a capacity factor: every shape is static then and nothing is read on the host. B
batch, T local time, S = B * T tokens of this rank in the order of B, then T, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from fsdp_core.config import (
    DEGREES,
    LAYOUT_RULES,
    Layout,
    ModelConfig,
    ParallelConfig,
    broken,
)
from fsdp_core.model.batch import Part
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.moe.dispatcher import Combine, Dispatch, Plan, Preprocess
from fsdp_core.model.moe.router import Router
from fsdp_core.parallel.mesh import Axes, Axis
from fsdp_core.parallel.pipeline_schedule import split_layers
from fsdp_core.parallel.rng import RandomStream, RandomStreams
from fsdp_core.parallel.tensor_parallel import ColumnLinear, VocabEmbedding, vocab_cross_entropy

# ---- a mixture of experts


class Routed(NamedTuple):
    """What crosses after the router stage.

    probs: float32 [S, K], connected to the router by autograd.
    experts: int64 [S, K].
    shared: output of the shared experts, None without them.
    """

    probs: torch.Tensor
    experts: torch.Tensor
    shared: torch.Tensor | None


class MoeLayer(nn.Module):
    """Routed experts plus shared ones: [B, T, H] -> [B, T, H]. `experts`: computes rows of experts
    as `experts.Experts` does. `shared`: what every token passes, if the model has some.
    """

    def __init__(
        self, config: ModelConfig, axes: Axes, experts: nn.Module, shared: nn.Module | None
    ) -> None:
        super().__init__()
        self.router = Router(config, axes)
        self.preprocess = Preprocess(config, axes)
        self.dispatch = Dispatch(config, axes)
        self.experts = experts
        self.combine = Combine(config, axes)
        self.shared = shared

    def forward(self, x_BTH: torch.Tensor, valid_BT: torch.Tensor | None = None) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]; rows of zeros for tokens whose `valid_BT` (bool) is false. What
        such tokens hold, be it NaN, reaches no other token and no gradient of a weight
        (`RuntimeError`: dropless while a CUDA graph is captured).
        """
        routed = self.router_stage(x_BTH, valid_BT)
        plan = self.preprocess(routed.experts, routed.probs)
        return self.experts_stage(x_BTH, routed, plan)

    def router_stage(self, x_BTH: torch.Tensor, valid_BT: torch.Tensor | None = None) -> Routed:
        valid_S = None if valid_BT is None else valid_BT.flatten()
        probs, experts = self.router(x_BTH.flatten(0, 1), valid_S)
        shared_BTH = None
        if self.shared is not None:
            if valid_BT is not None:
                x_BTH = x_BTH.masked_fill(~valid_BT[..., None], 0.0)
            shared_BTH = self.shared(x_BTH)
        return Routed(probs, experts, shared_BTH)

    def experts_stage(self, x_BTH: torch.Tensor, routed: Routed, plan: Plan) -> torch.Tensor:
        """Dispatch, experts, combine, and the shared output added."""
        rows, groups = self.dispatch(x_BTH.flatten(0, 1), plan)
        rows = self.experts(rows, groups)
        y_BTH = self.combine(rows, routed.probs, plan, groups).view(x_BTH.shape)
        return y_BTH if routed.shared is None else y_BTH + routed.shared


# ---- branches and layers


@dataclass(frozen=True)
class Residual:
    """Dropout, of probability p, of what a branch adds to the residual stream."""

    p: float
    stream: RandomStream

    def add(self, x: torch.Tensor, out: torch.Tensor, *, training: bool) -> torch.Tensor:
        return x + self.stream.dropout(out, self.p, training=training)


Run = Callable[[torch.Tensor, Part], torch.Tensor]
Recompute = Callable[[Run, torch.Tensor, Part], torch.Tensor]
"""Runs a part of a layer, and perhaps once more in its backward pass."""


def run_once(run: Run, x: torch.Tensor, part: Part) -> torch.Tensor:
    """A `Recompute` that keeps everything for the backward pass."""
    return run(x, part)


def recompute_with(streams: RandomStreams | None, *, reentrant: bool) -> Recompute:
    """torch's checkpoint; `streams` are what the part draws from, None if it draws nothing."""
    contexts = noop_context_fn if streams is None else streams.checkpoint_contexts

    def recompute(run: Run, x: torch.Tensor, part: Part) -> torch.Tensor:
        result: torch.Tensor = checkpoint(
            run, x, part, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
        return result

    def recompute_reentrant(run: Run, x: torch.Tensor, part: Part) -> torch.Tensor:
        if not torch.is_grad_enabled():  # torch would warn that nothing has a gradient
            return run(x, part)
        first, again = contexts()

        def run_in_context(x: torch.Tensor, part: Part) -> torch.Tensor:
            # Such a checkpoint runs the first time without gradients.
            with again if torch.is_grad_enabled() else first:
                return run(x, part)

        result: torch.Tensor = checkpoint(
            run_in_context, x, part, use_reentrant=True, preserve_rng_state=False
        )
        return result

    return recompute_reentrant if reentrant else recompute


class AttentionBranch(nn.Module):
    """x + dropout(attention(norm(x))): graph scope `attn`. `recompute`: see `Layer`."""

    def __init__(
        self, norm: nn.Module, attention: nn.Module, residual: Residual,
        recompute: Recompute = run_once,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm, self.attention, self.residual = norm, attention, residual
        self._recompute = recompute

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        return self._recompute(self._run, x_BTH, part)

    def _run(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        out = self.attention(self.norm(x_BTH), part)
        return self.residual.add(x_BTH, out, training=self.training)


class MlpBranch(nn.Module):
    """x + dropout(mlp(norm(x))): graph scope `mlp`."""

    def __init__(self, norm: nn.Module, mlp: nn.Module, residual: Residual) -> None:
        super().__init__()
        self.norm, self.mlp, self.residual = norm, mlp, residual

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        del part  # for branches of experts
        out = self.mlp(self.norm(x_BTH))
        return self.residual.add(x_BTH, out, training=self.training)


class Crossing(NamedTuple):
    """What crosses from the front of an expert branch, which graphs may hold, to its rest.

    normed: what experts take, [B, T, H].
    routed: see there; weights are connected to the router by autograd.
    plan: of the dispatcher, None if it is left to the rest.
    residual: x [B, T, H] itself. It crosses, too, or its gradient would be added to the sum of the
        norm's and not, as where nothing is captured, the norm's to it one by one.
    """

    normed: torch.Tensor
    routed: Routed
    plan: Plan | None
    residual: torch.Tensor


class MoeBranch(nn.Module):
    """x + dropout(moe(norm(x))); padding goes to no routed expert: graph scope `moe`.

    front(x) -> crossing    norm, router, shared experts    scope moe_router
                            the dispatcher's plan           scope moe_preprocess
    rest(crossing)          dispatch, experts, combine, residual
    """

    def __init__(self, norm: nn.Module, moe: MoeLayer, residual: Residual, tp: Axis) -> None:
        super().__init__()
        self.norm, self.moe, self.residual, self._tp = norm, moe, residual, tp

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        out = self.moe(self.norm(x_BTH), part.valid(self._tp))
        return self.residual.add(x_BTH, out, training=self.training)

    def front(self, x_BTH: torch.Tensor, part: Part, *, plans: bool) -> Crossing:
        """[B, T, H] to what experts need of it; with `plans` where rows go, too."""
        normed_BTH = self.norm(x_BTH)
        routed = self.moe.router_stage(normed_BTH, part.valid(self._tp))
        plan = self.moe.preprocess(routed.experts, routed.probs) if plans else None
        # Last, so that its gradient comes first.
        return Crossing(normed_BTH, routed, plan, x_BTH.view_as(x_BTH))

    def rest(self, crossing: Crossing) -> torch.Tensor:
        """What `front` made, through the experts and back: [B, T, H]."""
        normed_BTH, routed, plan, x_BTH = crossing
        if plan is None:
            plan = self.moe.preprocess(routed.experts, routed.probs)
        out = self.moe.experts_stage(normed_BTH, routed, plan)
        return self.residual.add(x_BTH, out, training=self.training)


class Layer(nn.Module):
    """Attention branch, then a dense or an expert branch. The FSDP unit. What is computed again
    (`recompute`) lies inside of the unit's hooks, and inside of what a graph captures of it:
    backward finds the weights gathered, and a graph holds both runs.
    """

    def __init__(
        self, attn: AttentionBranch, mlp: MlpBranch | MoeBranch, recompute: Recompute = run_once
    ) -> None:
        super().__init__()
        self.attn, self.mlp, self._recompute = attn, mlp, recompute

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        return self._recompute(self._run, x_BTH, part)

    def _run(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        result: torch.Tensor = self.mlp(self.attn(x_BTH, part), part)
        return result


class LayerMaker:
    """Makes layers by number, with what all layers of a rank share."""

    def __init__(
        self, config: ModelConfig, axes: Axes, factory: LayerFactory, streams: RandomStreams,
        recompute: str,
    ) -> None:  # fmt: skip
        self._config, self._axes, self._factory = config, axes, factory
        what, _, reentrant = recompute.partition("_")
        again = recompute_with(streams if config.dropout else None, reentrant=bool(reentrant))
        self._again = {name: again if what == name else run_once for name in ("full", "attn")}
        # Ranks of tp draw the same where they hold the same activations.
        stream = streams.equal_over(*(() if axes.tp.cuts_sequence else ("tp",)))
        self._residual = Residual(config.dropout, stream)
        self.rope = factory.rope(config)

    def layer(self, number: int) -> Layer:
        config, axes, factory = self._config, self._axes, self._factory
        attention = factory.attention(config, axes, self.rope)
        attn = AttentionBranch(*attention, self._residual, self._again["attn"])
        if config.has_experts(number):
            return Layer(attn, self._moe_branch(), self._again["full"])
        branch = MlpBranch(*factory.mlp(config, axes), self._residual)
        return Layer(attn, branch, self._again["full"])

    def _moe_branch(self) -> MoeBranch:
        config, axes, factory = self._config, self._axes, self._factory
        shared, experts = factory.shared_experts(config, axes), factory.experts(config, axes)
        moe = MoeLayer(config, axes, experts, shared)
        return MoeBranch(factory.norm(config, axes), moe, self._residual, axes.tp)


class DecoderStage(nn.Module):
    """Some layers of the decoder, the embedding if it is first, the head and loss if it is last.

    Weights are NaN, or whatever torch left there, until `sharding.init_weights` gives them values.

    layers: global numbers of its layers; None: all.
    streams: what dropout draws from; made with the axes pp, dp_outer, dp, cp and tp.
    recompute: what of each layer is computed again in backward: see `TrainConfig`.
    around: what its layers compute in (fp8), see `layers.Precision`.
    on_microbatch: told the part and the slot of each microbatch before its layers run.
    """

    def __init__(
        self,
        config: ModelConfig,
        axes: Axes,
        factory: LayerFactory,
        streams: RandomStreams,
        *,
        layers: range | None = None,
        is_first: bool = True,
        is_last: bool = True,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        self.config, self.axes = config, axes
        self.on_microbatch: Callable[[Part, int], None] | None = None
        make = LayerMaker(config, axes, factory, streams, recompute)
        numbers = range(config.layers) if layers is None else layers
        self.rope = make.rope
        self.around = factory.precision(axes)
        vocab, hidden = config.vocab_size, config.hidden
        self.embedding = VocabEmbedding(vocab, hidden, axes.tp) if is_first else None
        self.layers = nn.ModuleDict({str(number): make.layer(number) for number in numbers})
        self.norm = factory.norm(config, axes) if is_last else None
        self.head = ColumnLinear(hidden, vocab, axes.tp) if is_last else None

    def forward(self, x: torch.Tensor, part: Part, *, microbatch: int = 0) -> torch.Tensor:
        """Tokens int64 [B, T], or x, to x, or to this rank's loss: float32 (float64) scalar.
        `microbatch`: slot of the microbatch, for graphs, which are kept by slot (`ValueError`: rows
        of more tokens than `seq`, out of bounds of the table of positions).
        """
        length, most = part.plan.rows.shape[0] * part.plan.size, self.config.seq
        if part.plan.spans.offsets is None and length > most:  # else see `Capacity.longest`
            raise ValueError(f"Expected sequences of at most {most} tokens (seq), got {length}.")
        if self.on_microbatch is not None:
            self.on_microbatch(part, microbatch)
        if self.embedding is not None:
            x = self._without_padding(self.embedding(x), part)
        with self.around():
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

    def _without_padding(self, x: torch.Tensor, part: Part) -> torch.Tensor:
        """Zeros in rows of padding, which then stay zero through every layer. Whatever they held
        would be multiplied by gradients of zero, and NaN times zero is NaN.
        """
        valid = part.valid(self.axes.tp)
        return x if valid is None else x.masked_fill(~valid[..., None], 0.0)

    @property
    def numbered_layers(self) -> dict[str, Layer]:
        return {number: cast("Layer", layer) for number, layer in self.layers.items()}

    @property
    def routers(self) -> dict[str, Router]:
        return {
            f"layers.{number}.mlp.moe": layer.mlp.moe.router
            for number, layer in self.numbered_layers.items()
            if isinstance(layer.mlp, MoeBranch)
        }

    def set_loss_scale(self, scale: float) -> None:
        """Tell routers what the loss of a microbatch is multiplied by: 1 / microbatches."""
        for router in self.routers.values():
            router.loss_scale.fill_(scale)


def make_layers(
    backend: str, *, fp8: str = "none", fused_experts: bool | None = None, fused_rope: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> LayerFactory:  # fmt: skip
    """The factory of layers of `backend`, torch or te.

    fp8: none, delayed, current or block; of `te` only.
    fused_experts: compute an expert's layers at once; None: where the backend has kernels of its
        own for it, which `te` has for some recipes, on some machines.
    fused_rope: RoPE by a kernel that walks the sequences of a pack.
    dtype: compute dtype.
    Raises BackendMissing: `te` where TransformerEngine or CUDA is absent.
    Raises ValueError: fp8 of another backend than `te`, or fused experts in its blocks.
    """
    if fp8 != "none" and (backend != "te" or (fp8 == "block" and fused_experts)):
        raise ValueError(f"Expected fp8 none of backend {backend}, {fused_experts=}, got {fp8}.")
    if backend == "te":
        from fsdp_core.model.te.layers import TeLayers

        return TeLayers(recipe=fp8, fused_experts=fused_experts, fused_rope=fused_rope, dtype=dtype)
    return LayerFactory(fused_experts=fused_experts is True, fused_rope=fused_rope)


def make_stages(
    config: ModelConfig,
    axes: Axes,
    factory: LayerFactory,
    streams: RandomStreams,
    *,
    chunks: int = 1,
    recompute: str = "none",
) -> list[DecoderStage]:
    """This pipeline rank's stages in order: stages rank, rank + pp, ... (`ConfigError`: a rule of
    layouts that the model and the axes break).
    """
    pp, sizes = axes.pp, {name: getattr(axes, name).size for name in DEGREES}
    is_cut = axes.tp.cuts_sequence
    layout = ParallelConfig(**sizes, sequence_parallel=is_cut, pp_chunks=chunks)
    if error := broken(LAYOUT_RULES, Layout(config, layout, pp.size)):
        raise error
    ranges = split_layers(config.layers, pp.size, chunks)[pp.rank]
    return [
        DecoderStage(
            config, axes, factory, streams, layers=numbers, recompute=recompute,
            is_first=pp.rank == 0 and chunk == 0,
            is_last=pp.rank == pp.size - 1 and chunk == chunks - 1,
        )
        for chunk, numbers in enumerate(ranges)
    ]  # fmt: skip
