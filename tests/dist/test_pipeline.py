"""Pipelines over ranks: the bits of one process, and failures that name themselves."""

import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_core.parallel.pipeline_schedule import Transfer, peak_live
from tests.dist.pipeline_failures import TIMEOUT_S, disagree, fail, lose, without_tokens
from tests.dist.pipeline_features import (
    chain_process,
    evaluate,
    frozen_slots,
    halves_tied,
    loss_of_wrong_kind,
    sum_without_gradient,
    tied_process,
    train_around_identity,
    train_bundles,
    train_captured,
    train_frozen,
    train_static,
    train_tied,
    train_tied_sharded,
    train_tied_wrongly,
)
from tests.dist.pipeline_models import raw
from tests.dist.pipeline_programs import (
    Seen,
    one_process,
    train,
    train_sharded,
    train_sharded_by_torch,
    two_parts,
)
from tests.dist.rank_pool import RankError, RankPool

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
    assert [seen.losses for seen in ranks] == [None] * (pp - 1) + [losses]
    assert joined(ranks) == grads
    for rank, seen in enumerate(ranks):
        assert seen.peak_live == peak_live(pp, chunks, microbatches, rank)
        assert seen.slots == [list(range(microbatches))] * chunks
        assert seen.graphs == seen.peak_live
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
    (1, 3, "last", {"strategy": CUT, "pool": "dynamic"}),
    (1, 3, "every", {"strategy": CUT, "pool": "dynamic"}),
    (1, 8, "last", {"strategy": "optim_grads", "pool": "double"}),
    (1, 8, "every", {"strategy": CUT, "pool": "double"}),
    (2, 4, "last", {"strategy": CUT, "pool": "traced"}),
    (2, 4, "every", {"strategy": CUT, "pool": "traced"}),
    (2, 2, "last", {"strategy": "no_shard", "pool": "double"}),
    (2, 4, "every", {"strategy": "optim_grads", "keep_grads": True}),
]


@pytest.mark.parametrize(("chunks", "microbatches", "sync", "options"), SHARDED)
def test_sharded_stages_equal_one_process(
    warm_ranks: RankPool, chunks: int, microbatches: int, sync: str, options: dict[str, Any]
) -> None:
    """Over 2 x 2 ranks: the bits of two halves in one process, reduced as often as asked."""
    expected = warm_ranks.run(two_parts, microbatches, sync, world_size=1)[0]
    ranks = warm_ranks.run(train_sharded, chunks, microbatches, sync, options, world_size=4)
    for dp in range(2):
        assert ranks[dp][0] | ranks[2 + dp][0] == expected
    for _, groups, reductions in ranks:
        assert reductions == groups * (microbatches if sync == "every" else 1)


@pytest.mark.parametrize("sync", ["last", "every"])
def test_stages_sharded_by_torch(warm_ranks: RankPool, sync: str) -> None:
    """torch's FSDP2 modules are told when to reduce by the same methods."""
    expected = warm_ranks.run(two_parts, 4, sync, world_size=1)[0]
    ranks = warm_ranks.run(train_sharded_by_torch, 2, 4, sync, world_size=4)
    for dp in range(2):
        assert ranks[dp] | ranks[2 + dp] == expected


# ---- tied weights


@pytest.mark.parametrize(("pp", "chunks", "microbatches"), [(1, 1, 3), (1, 2, 2), (2, 1, 1),
                                                            (2, 2, 2), (4, 1, 3)])  # fmt: skip
def test_tied_weights(warm_ranks: RankPool, pp: int, chunks: int, microbatches: int) -> None:
    """Both ends get the sum of both, the bits of the ends of one process added.

    One process with one parameter adds the same 2 M numbers in another order. Each order is off by
    at most gamma_(2M-1) times the sum of their absolute values (Higham, 2002, section 3.1 and
    problem 4.2), u = 2^-24.
    """
    one = warm_ranks.run(tied_process, microbatches, world_size=1)[0]
    ranks = warm_ranks.run(train_tied, chunks, microbatches, world_size=pp)
    assert [len(ends) for ends in ranks] == [
        2 if pp == 1 else rank in (0, pp - 1) for rank in range(pp)
    ]
    for end in (end for ends in ranks for end in ends):
        assert raw(end) == raw(one["apart"])
        terms, u = 2 * microbatches - 1, 2.0**-24
        error = (end.double() - one["tied"].double()).abs()
        bound = 2 * terms * u / (1 - terms * u) * one["magnitude"]
        assert (error <= bound).all()
        if microbatches == 1:
            assert raw(end) == raw(one["tied"])


def test_tied_weights_of_sharded_stages(warm_ranks: RankPool) -> None:
    """Ends that are units of their own are summed row by row."""
    expected = warm_ranks.run(halves_tied, 3, world_size=1)[0]
    ranks = warm_ranks.run(train_tied_sharded, 3, True, world_size=4)
    assert [list(found.values()) for found in ranks] == [[expected]] * 4


def test_tied_weights_with_other_rows_are_refused(warm_ranks: RankPool) -> None:
    """A head that shares its unit with the norm has its rows elsewhere."""
    with pytest.raises(RankError, match="same at both ends, and rows of it on the same ranks"):
        warm_ranks.run(train_tied_sharded, 1, False, world_size=4)


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("values", "same at both ends.*checksum"),
        ("missing", "same at both ends.*first stage: None"),
        ("frozen", "same at both ends.*first stage: frozen.*last stage: trained"),
        ("many", "Expected tied weights on the first and last rank of pp, one on each, got 2"),
    ],
)
def test_wrong_ties_are_refused(warm_ranks: RankPool, case: str, rule: str) -> None:
    """Ends that start apart, lack a partner or are frozen alone are named on every rank."""
    for said in warm_ranks.run(train_tied_wrongly, case, world_size=2):
        assert re.search(rule, said)


def test_a_tied_end_without_a_gradient_is_refused(warm_ranks: RankPool) -> None:
    """An end that the loss does not depend on is a mistake."""
    (said,) = warm_ranks.run(sum_without_gradient, world_size=1)
    assert said.startswith("RuntimeError: Expected a gradient of the tied weight at both ends")


# ---- other activations


@pytest.mark.parametrize(
    ("pp", "microbatches", "scale"), [(1, 2, 0.5), (3, 1, 0.5), (3, 5, 0.5), (3, 2, 0.0)]
)
def test_several_tensors_and_weights(
    warm_ranks: RankPool, pp: int, microbatches: int, scale: float
) -> None:
    """An activation may be several tensors, some without gradient; microbatches have weights.

    At scale 0 the loss leaves one of them out, which then gets zeros for a gradient.
    """
    losses, parts = warm_ranks.run(chain_process, pp, microbatches, scale, world_size=1)[0]
    ranks = warm_ranks.run(train_bundles, microbatches, scale, world_size=pp)
    assert [grads for _, grads in ranks] == parts
    assert ranks[-1][0] == losses


def test_no_gradient_goes_to_a_frozen_stage(warm_ranks: RankPool) -> None:
    """What stages declare to need no gradient gets none, and nobody waits for it."""
    _, grads = warm_ranks.run(one_process, 3, world_size=1)[0]
    first, *others = warm_ranks.run(train_frozen, 3, world_size=3)
    assert first == {}
    for found in others:
        assert found
        assert found.items() <= grads.items()


def test_an_empty_stage(warm_ranks: RankPool) -> None:
    """A stage that returns its input passes gradients on."""
    _, grads = warm_ranks.run(one_process, 2, world_size=1)[0]
    first, middle, last = warm_ranks.run(train_around_identity, 2, world_size=3)
    assert (first | last, middle) == (grads, {})


# ---- forwards alone, slots, static memory


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 2), (4, 1)])
def test_forward_only(warm_ranks: RankPool, pp: int, chunks: int) -> None:
    """Forwards alone give the same losses, keep nothing and leave gradients as they are."""
    losses, _ = warm_ranks.run(one_process, 4, world_size=1)[0]
    for rank, seen in enumerate(warm_ranks.run(evaluate, chunks, world_size=pp)):
        assert (seen["trained"], seen["told"]) == (losses, losses)
        assert seen["quiet"] == (rank == pp - 1)
        assert seen["peaks"] == [peak_live(pp, chunks, 4, rank), 0]
        assert seen["kept"]
        assert not seen["needs grad"]


def test_passes_of_different_numbers(warm_ranks: RankPool) -> None:
    """Unless slots are frozen, each pass may have its own number of microbatches."""
    expected = [warm_ranks.run(one_process, number, world_size=1)[0] for number in (3, 8, 1, 3)]
    ranks = warm_ranks.run(train, 1, [3, 8, 1, 3], world_size=2)
    for passed, (losses, grads) in zip(zip(*ranks, strict=True), expected, strict=True):
        assert passed[-1].losses == losses
        assert joined(list(passed)) == grads


def test_slots_are_used_in_turn(warm_ranks: RankPool) -> None:
    """With as many slots as live at once, microbatches take them in turn."""
    ranks = [seen for (seen,) in warm_ranks.run(train, 1, [8], 2, world_size=2)]
    assert [seen.slots for seen in ranks] == [[[0, 1] * 4]] * 2


def test_too_few_slots_are_refused(warm_ranks: RankPool) -> None:
    """A slot that would be taken before its backward is an error on every rank, not a wrong bit."""
    with pytest.raises(RankError, match="Expected num_slots >= 2 for 8 microbatches over 2 ranks"):
        warm_ranks.run(train, 1, [8], 1, world_size=2)


def test_frozen_slots(warm_ranks: RankPool) -> None:
    """Once graphs are captured, another number of microbatches raises and harms nothing."""
    for said in warm_ranks.run(frozen_slots, world_size=2):
        assert "Expected a training pass before" in said["early"]
        assert "Expected 4 microbatches, as when slots were frozen, got 3" in said["fewer"]
        assert "Expected 4 microbatches, as when slots were frozen, got 5" in said["more"]
        assert "Expected at most 4 microbatches, got 5" in said["more forwards"]
        assert (said["fewer forwards"], said["same"]) == ("", "")


def test_static_outputs_are_copied(warm_ranks: RankPool, tmp_path: Path) -> None:
    """With `copy_sent` a stage may overwrite what it returned while it is on its way."""
    losses, _ = warm_ranks.run(one_process, 3, world_size=1)[0]
    ranks = warm_ranks.run(train_static, str(tmp_path / "copied"), True, world_size=2)
    assert ranks == [None, losses]
    # Without, the second microbatch is what arrives for the first: the hazard is real.
    ranks = warm_ranks.run(train_static, str(tmp_path / "not"), False, world_size=2)
    assert ranks[1] not in (None, losses)


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


def test_the_shape_that_was_agreed(warm_ranks: RankPool) -> None:
    """The message has both shapes."""
    said = warm_ranks.run(fail, 0, "shape", world_size=2)[0][0]
    assert "the output of stage 0 to be float32 [2, 5, 12] with gradient" in said
    assert "got float32 [2, 2, 12] with gradient" in said


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
        (
            "microbatches",
            "Expected equal microbatches on all ranks of pp, got rank 0: 4, rank 1: 3",
        ),
        ("chunks", "Expected equal chunks on all ranks of pp, got rank 0: 1, rank 1: 2"),
        ("boundaries", "Expected equal output of stage 0 on all ranks of pp, .* rank 1: bfloat16"),
        ("kind", "Expected equal kind of pass on all ranks of pp, got rank 0: training"),
        ("loss", "equal kind of pass .* loss on the last rank, rank 1: forward only, loss to all"),
        ("later", "TransferFailed: Expected"),
    ],
)
def test_ranks_that_disagree(warm_ranks: RankPool, case: str, rule: str) -> None:
    """Ranks that run different things say so on every rank, or time out, before any wrong bit."""
    for said in warm_ranks.run(disagree, case, world_size=2):
        assert re.search(rule, said)


def test_tokens_are_needed_on_the_first_rank(warm_ranks: RankPool) -> None:
    """Other ranks do without."""
    said = warm_ranks.run(without_tokens, world_size=2)
    assert "Expected tokens on the first rank of the pipeline, got None" in said[0]


@pytest.mark.parametrize(
    ("kind", "got"),
    [("vector", r"\[3, 3\] torch.float32"), ("number", "float"), ("int", r"\[\] torch.int64")],
)
def test_a_loss_is_a_scalar(warm_ranks: RankPool, kind: str, got: str) -> None:
    """What is no scalar of floating point is refused."""
    (said,) = warm_ranks.run(loss_of_wrong_kind, kind, world_size=1)
    assert re.search(f"Expected a scalar loss of the last stage, got {got}", said)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_captured_pass(warm_ranks: RankPool, chunks: int) -> None:
    """One graph of a whole pass, messages included, replays to the bits of eager passes.

    Capturing blocks on each message in program order, which the programs allow.
    """
    for eager, replayed in warm_ranks.run(train_captured, chunks, world_size=2):
        assert replayed == eager
        assert len(set(eager)) == 3
