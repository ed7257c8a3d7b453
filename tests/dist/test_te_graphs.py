"""TransformerEngine's parts under graph scopes, over its stand-in: eager's bits and scales."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_core.model.te import attention as core
from fsdp_core.parallel.mesh import Axes, build_axes
from fsdp_core.train import Trainer, trainer
from tests.dist import library_graphs_stand_in
from tests.dist import te_fp8_stand_in as stand_in
from tests.dist.rank_pool import RankPool
from tests.dist.te_stand_in import DotProductAttention, StandIn
from tests.dist.test_dynamic_graphs import replayed
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


# ---- tests


DELAYED: dict[str, Any] = {"backend": "te", "fp8": "delayed"}
CAPACITY: dict[str, Any] = {"capacity_factor": 1.25}
WIDE: dict[str, Any] = {"kv_heads": 4, "expert_ffn": 64, "ffn": 64, "layers": 1}
"""Multiples of 16 on each of two ranks."""
LONG: dict[str, Any] = {"seq": 32, "layers": 1}
CASES: dict[str, tuple[Run, list[tuple[str, ...]]]] = {
    "experts, scales over tp": (
        Run({"tp": 2, "etp": 2, "sequence_parallel": True}, "moe_tiny", CAPACITY | WIDE,
            micro_batch_size=2, **DELAYED),
        [("attn", "moe_router", "moe_preprocess"), ("layer",)],
    ),
    "microbatches in flight": (
        Run({"pp": 2}, "dense_tiny_dropout", microbatches=4, **DELAYED),
        [("attn", "mlp")],
    ),
    "an operator that is the first module": (
        Run({"dp": 1}, "mla_moe_tiny", CAPACITY | {"q_lora_rank": 32, "layers": 2}, **DELAYED),
        [("attn", "moe"), ("full_iteration",)],
    ),
}  # fmt: skip
PACKS = {
    "16 bits": Run({"dp": 2, "dynamic_cp": (1, 2)}, overrides=LONG, backend="te"),
    "fp8": Run({"dp": 2, "dynamic_cp": (1, 2)}, overrides=LONG, **DELAYED),
}


def check(eager: dict[str, Any], seen: dict[str, Any], scopes: tuple[str, ...]) -> None:
    """What a graphed run saw is what the eager one did."""
    assert seen["steps"] == eager["steps"]
    assert seen["scales"] == eager["scales"]
    if scopes != ("full_iteration",):
        assert seen["moved"] == eager["moved"], "and by nobody else"
    assert seen["captured"] > 0 < seen["replays"]
    assert seen["unnamed"] == 0


@pytest.mark.parametrize("name", CASES)
def test_delayed_scales_move_as_eagerly(name: str, warm_ranks: RankPool) -> None:
    """Steps, scales and histories have eager's bits, and scales move as often, in eager's order."""
    run, scopes = CASES[name]
    runs = [run, *(replace(run, graph=each) for each in scopes)]
    for eager, *graphed in warm_ranks.run(train_all, runs, world_size=run.parallel.world_size):
        # Steps that do nothing to scales would agree, too.
        changed = [now != last for last, now in itertools.pairwise(eager["scales"])]
        assert changed == [True] * (STEPS - 1)
        for each, seen in zip(scopes, graphed, strict=True):
            check(eager, seen, each)


@pytest.mark.parametrize("name", PACKS)
def test_packs_in_banks(name: str, warm_ranks: RankPool) -> None:
    """Packs of either context size have eager's bits; its own attention takes those of size 1."""
    run, sizes = PACKS[name], (1, 2)
    assert replayed(run) == set(itertools.product(sizes, range(1)))
    for eager, seen in warm_ranks.run(train_all, [run, replace(run, graph=("attn",))],
                                      world_size=2):  # fmt: skip
        check(eager, seen, ("attn",))
        assert eager["attention"] > 0 < seen["attention"]
