"""A kernel over sharded layers that it does not call: gathered, marked, reduced, bit for bit."""

import pytest
import torch

from tests.dist import fused_expert_programs as programs
from tests.dist.rank_pool import RankPool


@pytest.mark.parametrize("pool", ["dynamic", "double"])
@pytest.mark.parametrize("ragged", [True, False])
def test_fused_trains_as_unfused(pool: str, ragged: bool, warm_ranks: RankPool) -> None:
    """Outputs, gradients and weights of both layers have the bits that calling them gives."""
    fused = warm_ranks.run(programs.train_fused, "fused", pool, ragged, world_size=2)
    unfused = warm_ranks.run(programs.train_fused, "unfused", pool, ragged, world_size=2)
    for one, other in zip(fused, unfused, strict=True):
        assert all(map(torch.equal, one, other))


def test_bypassed_hooks_show(warm_ranks: RankPool) -> None:
    """A kernel without the hooks finds no weights, or leaves gradients: no silent success."""
    for said in warm_ranks.run(programs.try_bypass, "dynamic", world_size=2):
        assert said != "nothing"


def test_bypassed_forward_hooks_are_named(warm_ranks: RankPool) -> None:
    """Weights are gathered, but nothing tells where the unit's backward pass begins."""
    for named in warm_ranks.run(programs.without_forward_hooks, "dynamic", world_size=2):
        assert named == "layers.1.gate_up.weight"


def test_both_gathers_and_the_reduction_happen(warm_ranks: RankPool) -> None:
    """Each unit is gathered in forward, again in backward if it was released, and reduced."""
    for events in warm_ranks.run(programs.gathers, "dynamic", world_size=2):
        middle = events.index("forward done")
        forward, backward = events[:middle], events[middle + 1 :]
        units = [f"layers.{n}.{name}" for n in range(2) for name in ("gate_up", "down")]
        assert forward == [f"gather {unit}" for unit in units]
        # In the first pass nothing is known yet of which unit ends the forward: all are released.
        assert sorted(e for e in backward if e.startswith("gather")) == sorted(
            f"gather {unit}" for unit in units
        )
        assert sorted(e for e in backward if e.startswith("reduce")) == sorted(
            f"reduce {unit}" for unit in units
        )


def test_a_unit_that_casts_is_told_so(warm_ranks: RankPool) -> None:
    """Inputs that FSDP would cast for one layer are refused, with what to do."""
    for said in warm_ranks.run(programs.refuse_cast, world_size=2):
        assert "cast_forward_inputs=False" in said
