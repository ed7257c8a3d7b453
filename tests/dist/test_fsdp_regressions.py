"""Bugs that sharded training is known for, one test each: it fails when the bug is put back."""

from typing import Any

import pytest
import torch

from fsdp_core.fsdp import MixedPrecisionPolicy
from tests.dist import fsdp_regression_programs as programs
from tests.dist.fsdp_sides import differences, same_bits, within
from tests.dist.rank_pool import RankPool

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
TIMEOUT_S = 30.0


def on_ranks(ranks: RankPool, program: Any, *args: Any, world_size: int = 2) -> list[Any]:
    """What each rank answered."""
    return ranks.run(program, *args, world_size=world_size, timeout_s=TIMEOUT_S)


def assert_equal(expected: Any, got: Any) -> None:
    """Every bit, with the differences in the message."""
    wrong = differences(expected, got)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("gathered", ["at_rest", "by_hand", "after_backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stale_gather(warm_ranks: RankPool, strategy: str, gathered: str) -> None:
    """A forward computes with the weights of now, whoever wrote them, though gathered before."""
    for rank in on_ranks(warm_ranks, programs.fresh_weights, strategy, gathered):
        for plain, ours in rank:
            assert_equal(plain, ours)


@pytest.mark.parametrize(
    "what", ["plain", "accumulated", "evaluated", "checkpointed", "zeroed", "elsewhere"]
)
@pytest.mark.parametrize("pool", ["dynamic", "double", "traced"])
def test_streams_wait(warm_ranks: RankPool, pool: str, what: str) -> None:
    """No operator touches memory that another stream may still use, nor does the allocator.

    A gather launched before the shard is written, a gradient buffer released or taken again before
    its reduction has ended, and a wait the wrong way round are all such a touch.
    """
    for rank in on_ranks(warm_ranks, programs.races, {"pool": pool}, what):
        assert rank["races"] == []
        assert rank["streams"] == ["gather", "reduce"]  # the clocks had something to order
        assert rank["kinds"] == ["gather", "scatter"]


@pytest.mark.parametrize("what", ["accumulated", "not_last"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_streams_wait_for_each_strategy(warm_ranks: RankPool, strategy: str, what: str) -> None:
    """The same where weights, gradients, or both stay whole.

    And where a backward pass begins before the reductions of the one before have ended.
    """
    options = {"strategy": strategy}
    for rank in on_ranks(warm_ranks, programs.races, options, what):
        assert rank["races"] == []
        assert rank["streams"]


TWO_AXES = ("optim", "optim_grads_params")
BF16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("strategy", "shape"),
    [("optim", (2,)), ("optim_grads_params", (2,)), (TWO_AXES, (2, 2)), (TWO_AXES[1], (2, 2))],
    ids=str,
)
def test_reduction_output_is_other_memory(
    warm_ranks: RankPool, policy: MixedPrecisionPolicy, strategy: Any, shape: tuple[int, ...]
) -> None:
    """A reduce-scatter never writes into its input, which other ranks may still read.

    Whether it writes into the gradient itself (float32) or into memory of its own, on one axis or
    two, where nothing races either.
    """
    options = {"strategy": strategy, "mp_policy": policy}
    world_size = 2 ** len(shape)
    for rank in on_ranks(
        warm_ranks, programs.races, options, "accumulated", shape, world_size=world_size
    ):
        assert rank["aliased"] == []
        assert rank["races"] == []
        assert "scatter" in rank["kinds"]


def test_empty_pieces_have_gradients(warm_ranks: RankPool) -> None:
    """A rank without rows of a parameter has its gradient and states, so that collectives meet."""
    ranks = on_ranks(warm_ranks, programs.empty_pieces, world_size=4)
    for *pieces, last in ranks:
        assert [p["grad"] for p in pieces] == [p["rows"] for p in pieces]
        assert all(p["whole"] for p in pieces)
        assert last["states"] == [3] * 5
    held = [p["rows"] for *pieces, _ in ranks for p in pieces[:5] if p["name"] == "extra"]
    assert sorted(held) == [0, 0, 0, 1]


@pytest.mark.parametrize(("streams", "most"), [(2, 2), (1, 1), (0, 1)])
@pytest.mark.parametrize("kind", ["dynamic", "double", "traced"])
def test_gradient_buffers(warm_ranks: RankPool, kind: str, streams: int, most: int) -> None:
    """At most two gradient buffers are out with two streams, one with fewer; none at the end."""
    args = (kind, streams, "optim_grads_params")
    for rank in on_ranks(warm_ranks, programs.poisoned, *args):
        assert rank["most"]["grad"] == most
        assert rank["out"] == 0
        assert_equal(rank["plain"], rank["ours"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_padding_leaks_nothing(warm_ranks: RankPool, strategy: str) -> None:
    """What the last user left in a buffer reaches no gradient, nor the memory between them."""
    for rank in on_ranks(warm_ranks, programs.poisoned, "double", 2, strategy):
        assert_equal(rank["plain"], rank["ours"])
        assert all(rank["finite"]), rank["finite"]


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize(("times", "marked"), [(1, False), (1, True), (2, False), (2, True)])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("own_unit", [True, False])
def test_fused_accumulation(
    warm_ranks: RankPool, sync: bool, times: int, marked: bool, poison: bool, own_unit: bool
) -> None:
    """A module that adds its weight gradient to `main_grad` itself has it counted once."""
    # Two uses add up in another order: the kernel's sum, then the next one's.
    bound = 8 * 4 * torch.finfo(torch.float32).eps if times == 2 else 0.0
    for rank in on_ranks(warm_ranks, programs.fused, sync, times, poison, own_unit, marked):
        assert not differences(rank["plain"], rank["ours"], same=within(bound))


@pytest.mark.parametrize(("sync", "marked"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("own_unit", [True, False])
def test_fused_accumulation_of_forwards_ahead(
    warm_ranks: RankPool, sync: bool, marked: bool, own_unit: bool
) -> None:
    """Each backward pass adds what its own forward used, however many forwards are ahead of it."""
    for rank in on_ranks(warm_ranks, programs.fused, sync, 1, True, own_unit, marked, 3):
        assert_equal(rank["plain"], rank["ours"])


def test_attributes_are_carried(warm_ranks: RankPool) -> None:
    """Marks on a parameter are there at rest, gathered, and after a step; others get none."""
    marks = {"sequence_parallel": True, "allreduce": False, "tag": ("a", 1)}
    for rank in on_ranks(warm_ranks, programs.attributes):
        assert rank["rest"] == rank["gathered"] == rank["after"] == marks
        assert not any(rank["others"].values())


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_meta_initialisation(warm_ranks: RankPool, strategy: str) -> None:
    """Made on the meta device and initialised sharded, a model has the bits of one made whole."""
    for rank in on_ranks(warm_ranks, programs.meta_init, strategy, world_size=3):
        assert_equal(*rank["initial"])
    rank = on_ranks(warm_ranks, programs.meta_init, strategy)[0]
    assert_equal(*rank["steps"])


@pytest.mark.parametrize("what", ["gathered", "accumulating", "forward"])
def test_wrapping_in_flight(warm_ranks: RankPool, what: str) -> None:
    """Wrapping around a unit that is gathered or has gradients to reduce raises."""
    for rank in on_ranks(warm_ranks, programs.in_flight, what):
        assert "Expected inner units at rest" in rank


def test_wrapping_at_rest(warm_ranks: RankPool) -> None:
    """Wrapping around a unit at rest does not."""
    assert on_ranks(warm_ranks, programs.in_flight, "nothing") == ["wrapped"] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("keep_grads", [True, False])
def test_stale_gradients(warm_ranks: RankPool, set_to_none: bool, keep_grads: bool) -> None:
    """After `zero_grad`, an optimizer step without a backward changes nothing."""
    for rank in on_ranks(warm_ranks, programs.stale_grads, set_to_none, keep_grads):
        assert rank
        assert all(rank)


def test_each_parameter_is_held_once(warm_ranks: RankPool) -> None:
    """Nested and listed units hold each parameter once; wrapping outside in raises."""
    for rank in on_ranks(warm_ranks, programs.ownership):
        assert rank["held"] == rank["names"]
        assert rank["units"] == ["root", "blocks.0", "blocks.0.up", "blocks.1"] or sorted(
            rank["units"]
        ) == ["blocks.0", "blocks.0.up", "blocks.1", "root"]
        assert len(rank["raised"]) == 3


def test_the_comparison_sees_one_bit() -> None:
    """What these tests compare by tells zeros apart and takes NaN for itself."""
    nan = torch.tensor([torch.nan])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert differences({"a": [nan]}, {"a": [nan.clone(), nan]})
