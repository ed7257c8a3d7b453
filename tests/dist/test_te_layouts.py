"""TransformerEngine's parts on every kind of layout: names, cuts, token order, against torch."""

from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_core.config import ParallelConfig
from fsdp_core.model.te import attention as core
from tests.dist import parity_programs, te_stand_in
from tests.dist.parity_check import judge, packs_of, problem_of, reference
from tests.dist.parity_programs import Layout, Outcome, Problem, Routes
from tests.dist.rank_pool import RankPool


def run_te_case(
    problem: Problem, layout: Layout, routes: Routes | None, fused: bool
) -> tuple[Outcome, int]:
    """`run_case` with the stand-in for a backend, and how often its attention was asked."""
    te_stand_in.DotProductAttention.total = 0

    def make(name: str, **options: str) -> te_stand_in.StandIn:
        del name, options
        return te_stand_in.StandIn(fused_experts=fused)

    with (
        mock.patch.object(parity_programs, "make_layers", make),
        mock.patch.object(core, "_NARROW", (torch.float64,)),
    ):
        outcome = parity_programs.run_case(problem, layout, routes)
    return outcome, te_stand_in.DotProductAttention.total


# ---- tests


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp2 dp2, dense": ("qwen_tiny", {"tp": 2, "dp": 2}, {}),
    "tp2 sp, pp2, dense": ("dense_tiny", {"tp": 2, "pp": 2, "sequence_parallel": True}, {}),
    "cp2 tp2 sp, packed": (
        "dense_tiny", {"cp": 2, "tp": 2, "sequence_parallel": True}, {"packed": True},
    ),
    "cp4": ("dense_tiny", {"cp": 4}, {}),
    "dynamic cp": ("dense_tiny", {"dp": 4, "dynamic_cp": (1, 2, 4)}, {"asked": 1 / 3}),
    "ep2 etp2 tp2, experts fused": ("moe_tiny", {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, {}),
    "ep2 tp2 sp, experts called": (
        "moe_tiny", {"dp": 2, "tp": 2, "ep": 2, "sequence_parallel": True}, {"fused": False},
    ),
    "mla, tp2 sp, ep4": (
        "mla_moe_tiny", {"dp": 2, "tp": 2, "ep": 4, "sequence_parallel": True}, {},
    ),
    "mla, cp2": ("mla_moe_tiny", {"cp": 2, "dp": 2, "ep": 2}, {"asked": 0}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parts_agree_with_one_process(case: str, warm_ranks: RankPool) -> None:
    """Every activation, the loss and every gradient by its global name, in float64's bounds."""
    preset, degrees, options = CASES[case]
    parallel = ParallelConfig(**degrees)
    problem = problem_of(preset, packs_of(parallel, packed=options.get("packed", False)))
    _, routes = reference(problem)
    layout = Layout(parallel)
    found = warm_ranks.run(
        run_te_case, problem, layout, routes, options.get("fused", True),
        world_size=parallel.world_size,
    )  # fmt: skip
    comparison = judge(problem, layout, [outcome for outcome, _ in found])
    assert comparison.first_wrong is None, comparison.first_wrong
    asked = sum(calls for _, calls in found)
    due = problem.model.layers // parallel.pp * problem.batch.number * parallel.world_size
    assert asked == due * options.get("asked", 1.0), "calls of TransformerEngine's attention"
