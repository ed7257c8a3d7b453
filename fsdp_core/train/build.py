"""A rank's stages of the decoder, from a configuration: made, initialised, moved and sharded."""

from collections.abc import Iterable, Iterator
from typing import cast

import torch

from fsdp_core.config import TrainConfig
from fsdp_core.device import Device
from fsdp_core.fsdp import FSDPModule, MixedPrecisionPolicy
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.pool import make_pool
from fsdp_core.layouts import AXES
from fsdp_core.model.decoder import DecoderStage, make_stages
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.sharding import Sharding, shard_stage
from fsdp_core.model.weights import init_weights
from fsdp_core.parallel.mesh import Axes
from fsdp_core.parallel.rng import RandomStreams

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def require_same(config: TrainConfig, axes: Axes) -> None:
    """See that axes are those of a configuration (`ValueError`)."""
    for name in AXES:
        expected, got = getattr(config.parallel, name), getattr(axes, name).size
        if got != expected:
            raise ValueError(f"Expected axes with {name}={expected}, as configured, got {got}.")


def make_streams(config: TrainConfig, axes: Axes, device: Device) -> RandomStreams:
    """What dropout draws from: ranks agree or differ by where they stand on the dense axes."""
    dense = (axes.pp, axes.dp_outer, axes.dp, axes.cp, axes.tp)
    return RandomStreams(config.seed, dense, device.torch_device)


def build_stages(
    config: TrainConfig, axes: Axes, backend: LayerFactory, streams: RandomStreams, device: Device
) -> list[DecoderStage]:
    """This rank's stages, FSDP roots; weights depend on the seed and names alone.

    Where the default device is `meta` they have no memory, and no weights.
    """
    model, parallel, fsdp = config.model, config.parallel, config.fsdp
    stages = make_stages(
        model, axes, backend, streams, chunks=parallel.pp_chunks, recompute=config.recompute
    )
    is_meta = torch.get_default_device().type == "meta"
    if not is_meta:
        init_weights(stages, config.seed, layers=model.layers, init_std=model.init_std)
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPES[config.dtype],
        reduce_dtype=TORCH_DTYPES[fsdp.reduce_dtype],
        # The model casts for itself; its RoPE tables are float32 on purpose.
        cast_forward_inputs=False,
    )
    for stage in stages:
        if not is_meta:
            stage.to(device.torch_device)
        stage.set_loss_scale(1.0 / config.microbatches)
        # A pool of its own: a pool follows the order of one root.
        pool = make_pool(fsdp.pool, device, persistent_on_miss=fsdp.persistent_on_miss)
        shard_stage(stage, axes, Sharding(
            fsdp=fsdp, policy=policy, pool=pool, keep_grads=True,
            splits_experts=config.fused_experts,
        ))  # fmt: skip
    return stages


def roots(stages: Iterable[DecoderStage]) -> Iterator[FSDPModule]:
    """The stages as what `fully_shard` made of them."""
    for stage in stages:
        yield cast("FSDPModule", stage)


def named_states(groups: Iterable[ParamGroup]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, main weight and main gradient of this rank's rows of every parameter."""
    found = []
    for group in groups:
        main_grad = group.gradients.main_grad
        assert main_grad is not None
        for i, name in enumerate(group.names):
            rows = group.local_rows(group.main_weight, i), group.local_rows(main_grad, i)
            found.append((name, *rows))
    return found
