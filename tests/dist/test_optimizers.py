"""Optimizers over sharded parameters: the bits of one process, or a refusal that says why."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fsdp_core.fsdp.row_sharded import RowSharded
from tests.dist import optimizer_programs as programs
from tests.dist.rank_pool import RankPool

# --- parameters that modules do not hold at rest ---------------------------------------------

WRONG = {
    "in forward": "got gathered ones of up.weight, up.bias:",
    "while gathered": "got gathered ones of gain, down.weight, down.bias:",
    "before sharding": "got the ones from before fully_shard of gain, up.weight, up.bias,",
    "on meta": "got the ones from before to_empty() or to() of gain, up.weight, up.bias,",
}


@pytest.mark.parametrize("built", list(WRONG))
def test_an_optimizer_that_would_train_nothing_is_refused(warm_ranks: RankPool, built: str) -> None:
    """One that holds other parameters than modules hold at rest names them at its first step."""
    for said in warm_ranks.run(programs.what_a_step_says, built, world_size=2):
        assert "Expected an optimizer of the parameters at rest" in said
        assert WRONG[built] in said
        assert "call reshard() first" in said


def test_a_right_optimizer_steps_whatever_is_gathered(warm_ranks: RankPool) -> None:
    """Built at rest it trains, with plain parameters beside, also while units are gathered."""
    warm_ranks.run(programs.steps_rightly, world_size=2)


def test_a_copy_of_what_was_sharded_may_be_trained(warm_ranks: RankPool) -> None:
    """Parameters from before sharding that have gradients of their own are nobody's mistake."""
    warm_ranks.run(programs.trains_a_copy_of_what_was_sharded, world_size=2)


def test_parameters_that_were_given_memory_can_be_trained(warm_ranks: RankPool) -> None:
    """After to_empty an optimizer of the parameters that modules hold now steps."""
    warm_ranks.run(programs.replaces_parameters_and_steps, world_size=2)


# --- compiled --------------------------------------------------------------------------------

COMPILING_S = 240.0
"""The first program in a rank imports the compiler, which takes seconds on an idle machine."""


@pytest.mark.parametrize(
    ("cls", "options"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"fused": True})],
    ids=["SGD", "fused AdamW"],
)
def test_a_compiled_step_compiles_nothing_of_ours(
    warm_ranks: RankPool, cls: Any, options: dict[str, Any]
) -> None:
    """It gives the bits of the uncompiled step, and sharded operators stay as they are."""
    args = (programs.compiles_steps, cls, options)
    assert warm_ranks.run(*args, world_size=1, timeout_s=COMPILING_S) == [[]]


@pytest.mark.parametrize("kind", list(programs.PENALTIES))
def test_a_compiled_penalty_has_its_gradient(warm_ranks: RankPool, kind: str) -> None:
    """What a compiled function computes from parameters at rest is as differentiable as before."""
    if kind == "norm" and not issubclass(RowSharded, DTensor):
        pytest.skip("there torch cannot differentiate DTensor results")
    args = (programs.compiles_penalties, kind)
    assert warm_ranks.run(*args, world_size=1, timeout_s=COMPILING_S) == [[]]
