"""FSDP over a stage of the decoder, and the norm of gradients that are cut in several ways.

    parameters       unit                     mesh                           gradients divided by
    experts          `Experts` of each layer  expert_mesh: edp               R
    rest of a layer  `Layer`                  dense_mesh: (dp_outer,) dp cp  R
    all others       the stage                dense_mesh                     R

R = dp_outer * dp * cp is the number of ranks with tokens of their own (`microbatch` says what the
loss is multiplied by). It is the size of the dense mesh but not of the expert mesh: an expert's
gradient on one rank is a sum over the tokens that all ranks of its ep and etp groups sent to it, so
the sum over edp holds the tokens of all R ranks.

Global weights: the same for every layout, drawn, cut, gathered and loaded by name.

    global name   that of the parameter in the model that is not cut, `layers.7.mlp.norm.weight`;
                  what a library makes of it is translated (`tensor_parallel`)
    draw          each global tensor from a generator of its own, seeded by (seed, global name)
    experts       [E, out, in]: each of the E matrices from its own, so a rank draws its own alone

so a rank draws no more than it keeps of experts, and once a matrix otherwise, and what it gets
depends on nothing but the seed and the name. A model here is the list of a rank's stages.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from fsdp_core.config import FsdpConfig
from fsdp_core.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp_core.fsdp.norms import scale_to, total_norm
from fsdp_core.fsdp.pool import Pool
from fsdp_core.model.decoder import DecoderStage, MoeBranch
from fsdp_core.parallel.mesh import Axes, all_reduce
from fsdp_core.parallel.rng import seed_of
from fsdp_core.parallel.tensor_parallel import Cut, named_cuts, named_stretches, take

_WRITES_RESIDUAL = ("wo", "down")
"""Modules that write to the residual stream, by the last part of their names."""


def init_weights(stages: Iterable[nn.Module], seed: int, *, layers: int, init_std: float) -> None:
    """Give every parameter its part of the global tensor that the seed and its name draw.

    Before FSDP shards the stages, whose parameters have then their rows of it.

    Matrices are normal with `init_std`, those that write to the residual stream divided by
    sqrt(2 * layers) (Radford et al., 2019); norm weights are one.

    layers: of the whole model.
    """
    for stage in stages:
        stretches = named_stretches(stage)
        for name, parameter in stage.named_parameters():
            with torch.no_grad():
                if parameter.dim() < 2:
                    parameter.fill_(1.0)
                    continue
                for stretch in stretches[name]:
                    residual = stretch.name.split(".")[-2] in _WRITES_RESIDUAL
                    std = init_std / (2 * layers) ** 0.5 if residual else init_std
                    part = stretch.of(parameter)
                    part.copy_(_draw(stretch.name, part, stretch.cuts, seed, std))


def _draw(
    name: str, parameter: torch.Tensor, cuts: tuple[Cut, ...], seed: int, std: float
) -> torch.Tensor:
    """This rank's part, float32 on the CPU."""
    if parameter.dim() < 3:
        return take(_normal(name, global_shape(parameter.shape, cuts), seed, std), cuts)
    local = parameter.shape[0]
    first = next(cut.index * local for cut in cuts if cut.dim == 0)
    inner = tuple(replace(cut, dim=cut.dim - 1) for cut in cuts if cut.dim)
    shape = global_shape(parameter.shape[1:], inner)
    names = (f"{name}[{number}]" for number in range(first, first + local))
    return torch.stack([take(_normal(each, shape, seed, std), inner) for each in names])


def _normal(name: str, shape: Sequence[int], seed: int, std: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    return torch.empty(tuple(shape)).normal_(0.0, std, generator=generator)


def global_shape(part: Sequence[int], cuts: tuple[Cut, ...]) -> list[int]:
    """Of the tensor that a rank's part is of."""
    shape = list(part)
    for cut in cuts:
        shape[cut.dim] *= cut.axis_size
    return shape


def shard_stage(
    stage: DecoderStage, axes: Axes, fsdp: FsdpConfig, *, policy: MixedPrecisionPolicy,
    pool: Pool | str = "dynamic", keep_grads: bool = False, splits_experts: bool = False,
) -> None:  # fmt: skip
    """Make a stage an FSDP root: experts, layers and the stage itself become units.

    policy: dtypes. Forward inputs must not be cast: positions and masks stay as they are.
    pool: of gathered buffers.
    keep_grads: see `fully_shard`.
    splits_experts: each layer of fused experts is a unit of its own.
    """
    assert not policy.cast_forward_inputs, policy
    dense = axes.dense_mesh
    strategy = (fsdp.outer_strategy, fsdp.strategy) if dense.ndim == 2 else fsdp.strategy
    shard = functools.partial(
        fully_shard, mp_policy=policy, pool=pool, keep_grads=keep_grads, overlap=fsdp.overlap
    )
    for layer in stage.numbered_layers.values():
        mlp = layer.mlp
        reshard = fsdp.reshard_after_forward
        if isinstance(mlp, MoeBranch):
            experts = mlp.moe.experts
            for unit in experts.children() if splits_experts else (experts,):
                shard(
                    unit, mesh=axes.expert_mesh, strategy=fsdp.strategy,
                    reshard_after_forward=reshard,
                )  # fmt: skip
        shard(layer, mesh=dense, strategy=strategy, reshard_after_forward=reshard)
    # The root's own parameters are needed first and last, so it stays gathered in between.
    shard(stage, mesh=dense, strategy=strategy, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(axes.num_averaged))


# ---- the norm of all gradients


def clip_grads(stages: Iterable[nn.Module], axes: Axes, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their total norm over the whole model is at most `max_norm`.

    Each element of the global gradient counts once: FSDP's norm sums over the ranks of each mesh;
    what is cut over tp is summed over tp, what is cut over ep and etp is summed over these, what is
    replicated over tp is not summed; then come the stages of the pipeline. A collective over all
    ranks. With 0 and inf only the norm before clipping is returned, the same on every rank.
    """
    by_cuts = _by_cuts(stages)
    parameters = [parameter for alike in by_cuts.values() for parameter in alike]
    total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for across, alike in by_cuts.items():
        # Of no parameters it is 0.
        norm = total_norm(alike) if alike else total * 0
        power = norm.to(total.device) ** 2.0
        for name in across:
            power = all_reduce(power, getattr(axes, name))
        total = total + power
    norm = all_reduce(total, axes.pp) ** 0.5
    if max_norm > 0:
        scale_to(parameters, max_norm, norm)
    return norm if parameters[0].dtype == torch.float64 else norm.float()


def _by_cuts(stages: Iterable[nn.Module]) -> dict[tuple[str, ...], list[torch.Tensor]]:
    """Parameters by the axes that cut them: none, tp, or ep and etp; the same keys on all ranks."""
    found: dict[tuple[str, ...], list[torch.Tensor]] = {(): [], ("tp",): [], ("ep", "etp"): []}
    for stage in stages:
        cuts = named_cuts(stage)
        for name, parameter in stage.named_parameters():
            found[tuple(sorted({cut.axis for cut in cuts[name]}))].append(parameter)
    return found
