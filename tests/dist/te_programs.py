"""A step with the parts that TransformerEngine would make, over its stand-in on the CPU."""

from unittest import mock

import torch

from fsdp_core.model.te import attention as core
from tests.dist import parity_programs, te_stand_in
from tests.dist.parity_programs import Layout, Problem, Routes
from tests.dist.parity_watch import Outcome


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
