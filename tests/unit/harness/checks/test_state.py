"""The state check names the first tensor whose digest differs, on any rank."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checks import exact
from harness.checks.complete import find_flaw
from harness.records import COPIES, DIGEST_GROUPS, RunResult


def test_equal_runs_pass(lab: Any) -> None:
    """Equal digests pass, and the answer says how many were compared."""
    reference, _, candidate = lab.legs()
    answer = exact.state(reference, candidate)
    assert answer.outcome == "passed"
    assert answer.figures["digests"] == (5 + 9 * lab.steps) * lab.world_size


@pytest.mark.parametrize(("group", "tensor"), [("weights", "embed.weight"), ("rng", "cpu")])
def test_another_initialisation_is_before_step_0(
    lab: Any, edit: Any, group: str, tensor: str
) -> None:
    """What differs before the first step is said to, whatever differs later."""
    reference, _, candidate = lab.legs()
    for step in range(lab.steps):
        candidate = edit.digest(candidate, 0, step, "weights", 0)
    initial = candidate.ranks[1].initial
    digests = initial.digests | {group: "0" + initial.digests[group][1:]}
    assert digests != initial.digests
    other = dataclasses.replace(initial, digests=digests)
    answer = exact.state(reference, edit.rank(candidate, 1, initial=other))
    where = answer.difference
    assert (answer.outcome, answer.what) == ("failed", "diverged")
    assert where is not None
    assert (where.step, where.rank, where.quantity, where.tensor) == (-1, 1, group, tensor)
    assert "before step 0" in answer.message


@pytest.mark.parametrize("strategies", [("optim", "optim"), ("optim", "no_shard")])
def test_copies_are_compared_where_strategies_keep_the_same(
    lab: Any, edit: Any, strategies: tuple[str, str]
) -> None:
    """A stale copy fails though all else is equal; another strategy keeps other copies, or none."""
    runs: list[RunResult] = []
    for run, strategy, copy in zip(lab.legs()[::2], strategies, "ab", strict=True):
        config = run.spec.config | {"fsdp": {"strategy": strategy}}
        made = dataclasses.replace(run, spec=dataclasses.replace(run.spec, config=config))
        for records in run.ranks:
            start, steps = records.start, list(records.steps)
            last = steps[-1].digests | {COPIES: copy * 32}
            steps[-1] = dataclasses.replace(steps[-1], digests=last)
            tensors = start.tensors | {COPIES: ("embed.weight",)}
            made = edit.rank(
                made, records.rank, steps=tuple(steps),
                start=dataclasses.replace(start, tensors=tensors),
            )  # fmt: skip
        runs.append(made)
    answer = exact.state(runs[0], runs[1])
    if len(set(strategies)) > 1:
        assert answer.outcome == "passed"
        return
    where = answer.difference
    assert (answer.outcome, answer.what) == ("failed", "diverged")
    assert where is not None
    assert (where.step, where.rank, where.quantity) == (lab.steps - 1, 0, COPIES)


def test_an_initial_state_of_one_run_alone_is_damage(lab: Any, edit: Any) -> None:
    """It is not passed over: there is no pass without it, of a rank or of a run."""
    reference, _, candidate = lab.legs()
    lost = edit.rank(candidate, 1, initial=None)
    for pair in ((reference, lost), (lost, reference)):
        answer = exact.state(*pair)
        assert (answer.outcome, answer.what) == ("error", "corrupt_record")
    flaw = find_flaw(lost)
    assert flaw is not None
    assert (flaw.what, flaw.rank) == ("corrupt_record", 1)


@pytest.mark.parametrize("rank", [0, 7, 8, 15])
@pytest.mark.parametrize("step", [-1, 0, 3])
def test_each_of_16_ranks_is_compared(make_lab: Any, edit: Any, rank: int, step: int) -> None:
    """A difference on any rank of many fails, on that rank, and all pairs are counted."""
    lab = make_lab(world_size=16)
    reference, _, candidate = lab.legs()
    pairs = 16 * (1 + lab.steps)
    assert f"{pairs} (step, rank) pairs" in exact.state(reference, candidate).message
    if step < 0:
        initial = candidate.ranks[rank].initial
        digests = initial.digests | {"weights": "f" + initial.digests["weights"][1:]}
        changed = edit.rank(candidate, rank, initial=dataclasses.replace(initial, digests=digests))
    else:
        changed = edit.digest(candidate, rank, step, "optim", 40)
    answer = exact.state(reference, changed)
    where = answer.difference
    assert answer.outcome == "failed"
    assert where is not None
    assert (where.step, where.rank) == (step, rank)
    assert (answer.figures["differing_ranks"], answer.figures["differing_pairs"]) == (1, 1)


def test_order_is_step_group_tensor_rank(lab: Any, edit: Any) -> None:
    """The first difference is by step, then group, then tensor, and only then by rank."""
    reference, _, candidate = lab.legs()
    for rank, step, group, bit in ((0, 3, "grads", 0), (0, 2, "weights", 0), (0, 2, "grads", 200)):
        candidate = edit.digest(candidate, rank, step, group, bit)
    candidate = edit.digest(candidate, 1, 2, "grads", 5)
    answer = exact.state(reference, candidate)
    where = answer.difference
    assert where is not None
    assert (where.step, where.rank, where.quantity, where.tensor) == (2, 1, "grads", "embed.weight")
    assert "3 tensors on ranks 0 and 1 differ" in answer.message
    assert answer.figures["differing_pairs"] == 3


def test_other_tensor_names_fail(lab: Any, edit: Any) -> None:
    """Equal digests of differently named, ordered or counted tensors do not pass."""
    reference, _, candidate = lab.legs()
    start = candidate.ranks[1].start
    names = start.tensors["weights"]
    for other in (names[::-1], names[:1], (*names, "extra"), ("embed.weight", "tail.weight")):
        tensors = start.tensors | {"weights": other}
        broken = edit.rank(candidate, 1, start=dataclasses.replace(start, tensors=tensors))
        for left, right in ((reference, broken), (broken, reference)):
            answer = exact.state(left, right)
            assert answer.outcome == "failed"
            assert answer.difference is not None
            assert answer.difference.rank == 1
            assert "different tensors" in answer.message


def test_exchanged_shards_are_seen(lab: Any, edit: Any) -> None:
    """Two ranks whose digests are exchanged differ on both."""
    reference, _, candidate = lab.legs()
    left, right = candidate.ranks[0].steps[1].digests, candidate.ranks[1].steps[1].digests
    candidate = edit.step(edit.step(candidate, 0, 1, digests=right), 1, 1, digests=left)
    answer = exact.state(reference, candidate)
    assert answer.outcome == "failed"
    assert answer.figures["differing_ranks"] == 2


def test_malformed_input(lab: Any, edit: Any) -> None:
    """Odd lengths, lost groups, no digests at all and parameters never pass and never raise."""
    reference, _, candidate = lab.legs()
    digests = candidate.ranks[0].steps[1].digests
    for changed in (
        digests | {"grads": digests["grads"][:-3]},
        digests | {"grads": digests["grads"] + "ab"},
        {"grads": digests["grads"]},
        {},
        digests | {"novel": "00" * 16},
    ):
        answer = exact.state(reference, edit.step(candidate, 0, 1, digests=changed))
        assert answer.outcome == "failed"
        assert answer.difference is not None
        assert (answer.difference.step, answer.difference.rank) == (1, 0)
    empty = edit.rank(edit.rank(candidate, 0, steps=()), 1, steps=())
    assert exact.state(reference, empty).what == "not_run"
    nameless = edit.rank(edit.rank(reference, 0, start=None), 1, start=None)
    assert exact.state(nameless, candidate).what == "not_run"


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found_where_it_is(lab: Any, edit: Any, data: st.DataObject) -> None:
    """Flipping any bit of any digest fails with exactly that step, rank, group and tensor."""
    reference, _, candidate = lab.legs()
    rank = data.draw(st.integers(0, lab.world_size - 1))
    step = data.draw(st.integers(0, lab.steps - 1))
    group = data.draw(st.sampled_from(DIGEST_GROUPS))
    names = reference.ranks[rank].start.tensors[group]
    bit = data.draw(st.integers(0, 128 * len(names) - 1))
    answer = exact.state(reference, edit.digest(candidate, rank, step, group, bit))
    assert answer.outcome == "failed"
    where = answer.difference
    assert where is not None
    found = (where.step, where.rank, where.quantity, where.tensor)
    assert found == (step, rank, group, names[bit // 128])
    assert answer.figures["differing_tensors"] == 1
