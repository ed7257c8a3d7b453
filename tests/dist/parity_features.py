"""What else ranks run with a step of the decoder: clipping, weights carried along, dropout."""

import torch

from fsdp_core.device import Device
from fsdp_core.model.decoder import make_stages
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.sharding import clip_grads, shard_stage
from fsdp_core.model.weights import init_weights
from fsdp_core.parallel.mesh import build_axes
from tests.dist import parity_faults
from tests.dist.parity_programs import (
    Layout,
    Problem,
    Routes,
    sharding_of,
    streams_of,
    take_step,
)
from tests.dist.parity_watch import Outcome
from tests.support.global_weights import gather_global, gather_global_grads, load_global


def run_clipped(
    problem: Problem, layout: Layout, routes: Routes | None, max_norm: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """The norm of the step's gradients, and the gradients after they were clipped."""
    stages, axes, _ = take_step(problem, layout, routes)
    norm = clip_grads(stages, axes, max_norm)
    return norm.item(), gather_global_grads(stages, axes)


def run_weights(problem: Problem, layouts: tuple[Layout, ...]) -> list[dict[str, torch.Tensor]]:
    """Weights of the first layout as drawn, then carried from each layout to the next."""
    found: list[dict[str, torch.Tensor]] = []
    for layout in layouts:
        axes = build_axes(layout.parallel, Device("cpu"))
        stages = make_stages(
            problem.model, axes, LayerFactory(), streams_of(axes),
            chunks=layout.parallel.pp_chunks,
        )  # fmt: skip
        init_weights(
            stages, problem.seed if not found else 0, layers=problem.model.layers,
            init_std=problem.init_std,
        )  # fmt: skip
        for stage in stages:
            shard_stage(stage, axes, sharding_of(layout, torch.float32))
        if found:
            load_global(stages, found[-1])
        found.append(gather_global(stages, axes))
    return found


def run_masks(problem: Problem, layout: Layout) -> Outcome:
    """Which elements each branch dropped of each token: rows of 0 and 1."""
    with parity_faults.planted(layout.fault):
        stages, _, watch = take_step(problem, layout, None, masks=True)
    del stages
    return watch.outcome
