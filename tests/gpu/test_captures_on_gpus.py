"""Captures on a GPU leave nothing: neither those that CUDA refuses, nor those that are dropped."""

import pytest

from tests.dist.rank_pool import RankPool
from tests.gpu import captures_on_gpus as programs

NOT_PERMITTED = "not permitted when stream is capturing"


@pytest.mark.gpu(1)
def test_a_refused_capture_leaves_torch_as_it_was(gpu_ranks: RankPool) -> None:
    """Eager dropout, other generators, freeing memory and the next capture, as without it."""
    ((said, changed),) = gpu_ranks.run(programs.drawn_with_and_without, world_size=1)
    assert NOT_PERMITTED in said
    assert not changed


@pytest.mark.gpu(1)
@pytest.mark.parametrize("scope", ["attn", "full_iteration"])
def test_a_trainer_captures_after_a_refusal(gpu_ranks: RankPool, scope: str) -> None:
    """It names the cause, and goes on with the bits of an eager run."""
    ((said, different),) = gpu_ranks.run(programs.refused_then_captured, scope, world_size=1)
    assert NOT_PERMITTED in said
    assert different == ""


@pytest.mark.gpu(1)
def test_graphs_give_their_memory_back(gpu_ranks: RankPool) -> None:
    """All but a MiB, of every kind of scope."""
    scopes = ("attn+moe_router+moe_preprocess", "layer", "full_iteration")
    (left,) = gpu_ranks.run(programs.memory_left, scopes, world_size=1)
    assert {scope: nbytes for scope, nbytes in left.items() if abs(nbytes) > 2**20} == {}
