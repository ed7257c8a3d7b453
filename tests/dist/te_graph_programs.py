"""Training by TransformerEngine's parts under graph scopes, over its stand-in on the CPU."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from fsdp_core.model.te import attention as core
from fsdp_core.parallel.mesh import Axes, build_axes
from fsdp_core.train import Trainer, trainer
from tests.dist import library_graphs_stand_in
from tests.dist import te_fp8_stand_in as stand_in
from tests.dist.te_stand_in import DotProductAttention, StandIn
from tests.dist.train_layout_programs import DEVICE, STEPS, Run, bits


@contextlib.contextmanager
def stood_in(*, fused: bool) -> Iterator[None]:
    """Trainers inside compute by the stand-in."""

    def make(name: str, *, fp8: str, fused_rope: bool, **others: Any) -> Any:
        del others
        assert name == "te"
        return StandIn(fused_experts=fused, fp8_recipe=fp8, fused_rope=fused_rope)

    narrow = (torch.float32, torch.bfloat16)
    with (
        library_graphs_stand_in.stood_in(),
        mock.patch.object(trainer, "make_layers", make),
        mock.patch.object(core, "_NARROW", narrow),
    ):
        yield


def train(run: Run, axes: Axes) -> dict[str, Any]:
    """Bits of all steps, of scales after each, what moved them, and what graphs did."""
    stand_in.Manager.reset()
    DotProductAttention.total = 0
    made = Trainer(run.config, axes, DEVICE)
    steps, scales = [], []
    for step in range(STEPS):
        steps.append(bits(made, step))
        found = [tensor for stage in made.stages for tensor in stand_in.states_of(stage)]
        scales.append([tensor.flatten().tolist() for tensor in found])
    counts = made.counts
    seen = {
        "steps": steps, "scales": scales, "moved": list(stand_in.Manager.moved),
        "captured": counts.captured, "replays": counts.replays, "unnamed": counts.unnamed_externals,
        "names": sorted({name for name in counts.external_names if "fp8" in name}),
        "attention": DotProductAttention.total,
    }  # fmt: skip
    made.close()
    return seen


def train_all(runs: list[Run], fused: bool = False) -> list[dict[str, Any]]:
    """Runs of one layout, one after another."""
    axes = build_axes(runs[0].parallel, DEVICE)
    with stood_in(fused=fused):
        return [train(run, axes) for run in runs]
