"""Pipelines over ranks: the bits of one process, and failures that name themselves."""

import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_core.parallel.pipeline_schedule import Transfer
from tests.dist.pipeline_programs import (
    TIMEOUT_S,
    Seen,
    disagree,
    evaluate,
    fail,
    lose,
    misused,
    one_process,
    train,
    train_sharded,
    train_static,
    two_parts,
)
from tests.dist.rank_pool import RankPool
from tests.unit.fsdp_core.parallel.pipeline_simulator import peak_live

SHAPES = [
    (pp, chunks, microbatches)
    for pp in (1, 2, 4)
    for chunks in (1, 2)
    for microbatches in (1, 2, 3, 8)
    if chunks == 1 or microbatches % pp == 0
]


@pytest.mark.parametrize(("pp", "chunks", "microbatches"), SHAPES)
def test_equals_one_process(warm_ranks: RankPool, pp: int, chunks: int, microbatches: int) -> None:
    """Losses and every gradient have the bits of a loop in one process; peaks are the theory's."""
    (losses, grads) = warm_ranks.run(one_process, microbatches, world_size=1)[0]
    ranks = [seen for (seen,) in warm_ranks.run(train, chunks, [microbatches], world_size=pp)]
    assert [seen.losses for seen in ranks] == [losses] * pp
    assert joined(ranks) == grads
    for rank, seen in enumerate(ranks):
        assert seen.slots == [list(range(microbatches))] * chunks
        assert seen.graphs == peak_live(pp, chunks, microbatches, rank)
        # What was sent is gone by the next exchange, but for the last stage's, which it saves.
        assert rank == pp - 1 or seen.outputs <= 2


def joined(ranks: list[Seen]) -> dict[str, bytes]:
    """Gradients of all ranks; no parameter is on two."""
    found: dict[str, bytes] = {}
    for seen in ranks:
        assert not found.keys() & seen.grads.keys()
        found |= seen.grads
    return found


CUT = "optim_grads_params"
SHARDED = [
    (1, 3, False, {"strategy": CUT, "pool": "dynamic"}),
    (1, 8, False, {"strategy": CUT, "pool": "double"}),
    (2, 4, False, {"strategy": CUT, "pool": "traced"}),
    (2, 2, False, {"strategy": "no_shard", "pool": "double"}),
    (2, 4, False, {"strategy": "optim_grads", "keep_grads": True}),
    (2, 4, True, {}),
]


@pytest.mark.parametrize(("chunks", "microbatches", "by_torch", "options"), SHARDED)
def test_sharded_stages_equal_one_process(
    warm_ranks: RankPool, chunks: int, microbatches: int, by_torch: bool, options: dict[str, Any]
) -> None:
    """2 x 2 ranks, our sharding or torch's: the bits of two halves, averaged each microbatch.

    Unsharded gradients are averaged with the last one.
    """
    each = microbatches if options.get("strategy") == "no_shard" else 1
    expected = warm_ranks.run(two_parts, microbatches, each, world_size=1)[0]
    ranks = warm_ranks.run(train_sharded, chunks, microbatches, by_torch, options, world_size=4)
    for dp in range(2):
        assert ranks[dp][0] | ranks[2 + dp][0] == expected
    last_alone = [False] * (microbatches - 1) + [True]
    assert all(flags == [[*last_alone, True]] * chunks for _, flags in ranks)


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 2), (4, 1)])
def test_forward_only(warm_ranks: RankPool, pp: int, chunks: int) -> None:
    """Forwards alone give the same losses, keep nothing and leave gradients as they are."""
    losses, _ = warm_ranks.run(one_process, 4, world_size=1)[0]
    expected = {
        "trained": losses, "losses": losses, "kept": True, "needs grad": False, "graphs": 0,
    }  # fmt: skip
    assert warm_ranks.run(evaluate, chunks, world_size=pp) == [expected] * pp


def test_passes_of_different_numbers(warm_ranks: RankPool) -> None:
    """Each pass may have its own number of microbatches."""
    expected = [warm_ranks.run(one_process, number, world_size=1)[0] for number in (3, 8, 1, 3)]
    ranks = warm_ranks.run(train, 1, [3, 8, 1, 3], world_size=2)
    for passed, (losses, grads) in zip(zip(*ranks, strict=True), expected, strict=True):
        assert passed[-1].losses == losses
        assert joined(list(passed)) == grads


def test_slots_are_used_in_turn(warm_ranks: RankPool) -> None:
    """With as many slots as live at once, microbatches take them in turn."""
    ranks = [seen for (seen,) in warm_ranks.run(train, 1, [8], 2, world_size=2)]
    assert [seen.slots for seen in ranks] == [[[0, 1] * 4]] * 2


def test_static_outputs_are_copied(warm_ranks: RankPool, tmp_path: Path) -> None:
    """With `copy_sent` a stage may overwrite what it returned while it is on its way."""
    losses, _ = warm_ranks.run(one_process, 3, world_size=1)[0]
    ranks = warm_ranks.run(train_static, str(tmp_path / "copied"), True, world_size=2)
    assert ranks == [losses, losses]
    # Without, the second microbatch is what arrives for the first: the hazard is real.
    assert losses not in warm_ranks.run(train_static, str(tmp_path / "not"), False, world_size=2)


# ---- failures


@pytest.mark.parametrize("where", ["forward", "backward", "shape"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_stage_fails(warm_ranks: RankPool, rank: int, where: str) -> None:
    """A stage that raises says where; the others end soon, and say whom they waited for."""
    ranks = warm_ranks.run(fail, rank, where, world_size=3)
    action = "backward" if where == "backward" else "forward"
    for other, (said, took, again) in enumerate(ranks):
        if other == rank:
            raised = "ValueError: Expected" if where == "shape" else "ArithmeticError: planted"
            assert raised in said
            assert said.endswith(f"in the {action} of microbatch 1, stage {rank} of 3")
        else:
            assert re.match(r"TransferFailed: Expected stage \d to (send|take) the", said)
        assert took < 10 * TIMEOUT_S
        assert "Expected every pass so far to end, but one failed" in again
        assert said.splitlines()[0] in again


@pytest.mark.parametrize(
    ("where", "got"),
    [
        ("shape", "float32 [2, 2, 12] with gradient"),
        ("dtype", "float64 [2, 5, 12] with gradient"),
        ("gradient", "float32 [2, 5, 12] without gradient"),
        ("number", "float"),
    ],
)
def test_the_activation_that_was_agreed(warm_ranks: RankPool, where: str, got: str) -> None:
    """Another shape, dtype or need of a gradient is refused; the message has both."""
    said = warm_ranks.run(fail, 0, where, world_size=2)[0][0]
    assert "the output of stage 0 to be float32 [2, 5, 12] with gradient, got " + got in said


@pytest.mark.parametrize(
    "lost", [Transfer(0, 1, 0), Transfer(0, 1, 3), Transfer(1, 0, 0), Transfer(1, 0, 3)]
)
def test_a_message_that_is_never_sent(warm_ranks: RankPool, lost: Transfer) -> None:
    """Who waits for it, or for the one after it, ends with an error and not with wrong bits."""
    said = warm_ranks.run(lose, lost, 4, "send", world_size=2)[lost.target]
    assert said.startswith(f"TransferFailed: Expected stage {lost.source} to send the ")
    if lost.microbatch == 3:
        assert str(lost) in said


def test_a_message_that_is_never_received(warm_ranks: RankPool) -> None:
    """Its sender does not end as if all were well."""
    said = warm_ranks.run(lose, Transfer(1, 0, 3), 4, "receive", world_size=2)[1]
    assert said.startswith("TransferFailed: Expected stage 0 to take the gradient of microbatch 3")


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("microbatches", "equal microbatches on all ranks of pp, got rank 0: 4, rank 1: 3"),
        ("chunks", "Expected equal chunks on all ranks of pp, got rank 0: 1, rank 1: 2"),
        ("activation", "Expected equal activation on all ranks of pp, .* rank 1: bfloat16"),
        ("kind", "kind of pass on all ranks of pp, got rank 0: training, rank 1: forward only"),
        ("later", "TransferFailed: Expected"),
    ],
)
def test_ranks_that_disagree(warm_ranks: RankPool, case: str, rule: str) -> None:
    """Ranks that run different things say so on every rank, or time out, before any wrong bit."""
    for said in warm_ranks.run(disagree, case, world_size=2):
        assert re.search(rule, said)


@pytest.mark.parametrize(
    ("case", "ranks", "rule"),
    [
        ("nothing", (0, 1), "a multiple of 1, got 0"),
        ("groups", (0, 1), "a multiple of 2, got 3"),
        ("slots", (0, 1), "num_slots >= 2 for 4 microbatches over 2 ranks, got 1"),
        ("tokens", (0,), "tokens on the first rank of the pipeline, got None"),
        ("vector", (1,), r"a scalar loss, got float32 \[1\]"),
        ("number", (1,), "a scalar loss, got float"),
        ("int", (1,), r"a scalar loss, got int64 \[\]"),
    ],
)
def test_what_a_pipeline_cannot_take(
    warm_ranks: RankPool, case: str, ranks: tuple[int, ...], rule: str
) -> None:
    """Is refused by name, where it would be an empty step, a rounded loss or another's error."""
    said = warm_ranks.run(misused, case, world_size=2)
    for rank in ranks:
        assert re.search(f"ValueError: Expected .*{rule}", said[rank])
