"""Who brought what is wrong into a collective: told by what each rank gave to it."""

import dataclasses
from collections.abc import Collection

import pytest

from harness.bisect.found import Location
from harness.bisect.locate import between
from harness.records import GIVEN, EventRecord, GivenCall, RunResult
from tests.unit.harness.bisect.small_model import (
    WEIGHTS,
    WORLD,
    Edit,
    calls_from,
    digests,
    edited,
    run_of,
)

NORM = "layers.0.attn.norm.weight"
OF_ONE_MODULE, OF_ONE_UNIT = digests(grads=(NORM,)), digests(grads=WEIGHTS[2:5])
GATHER, SCATTER, SUM = "allgather_base", "reduce_scatter_base", "allreduce"


def _with_given(
    run: RunResult, wrong: Collection[tuple[int, str, str]], *, without: str = ""
) -> RunResult:
    """The run, in whose step 2 ranks gave something else to a collective of a unit."""
    ranks = []
    for rank in run.ranks:
        calls = [
            GivenCall(
                operator=operator, label=label, group=(0, 1),
                digest="other" if (rank.rank, operator, label) in wrong else "same",
            )
            for label in ("root", "layers.0", "layers.1")
            for operator in (GATHER, SCATTER, SUM)
            if operator != without
        ]  # fmt: skip
        event = EventRecord(
            name=GIVEN, rank=rank.rank, step=2, detail={"calls": [c.to_json() for c in calls]}
        )
        ranks.append(dataclasses.replace(rank, events=(*rank.events, event)))
    return dataclasses.replace(run, ranks=tuple(ranks))


def _place(edit: Edit, *wrong: tuple[int, str, str], without: str = "") -> Location:
    candidate = edited(run_of(graph=("attn",)), dict.fromkeys(range(WORLD), edit))
    return between(_with_given(run_of(), ()), _with_given(candidate, wrong, without=without))


@pytest.mark.parametrize("edit", [OF_ONE_MODULE, OF_ONE_UNIT], ids=["one module", "a whole unit"])
def test_the_rank_that_gave_other_gradients_is_the_origin(edit: Edit) -> None:
    """Rows of the sum are wrong on every rank that holds some; one of them brought it along."""
    found = _place(edit, (1, SCATTER, "layers.0"))
    assert (found.rank, found.ranks, found.near) == (1, (1,), "before")
    assert not any(each.startswith("rank: ") for each in found.unknown)


def test_another_units_gradients_are_no_matter() -> None:
    """What a rank gave for another layer, or to a gather, says nothing of this one's sum."""
    found = _place(OF_ONE_MODULE, (1, SCATTER, "layers.1"), (1, GATHER, "layers.0"))
    assert (found.phase, found.near) == ("reduce", "after")


def test_equal_gifts_mean_that_the_sum_went_wrong() -> None:
    """Nobody computed another gradient: it is no matter of the backward pass."""
    found = _place(OF_ONE_MODULE)
    assert (found.phase, found.near, found.tensor) == ("reduce", "after", NORM)


def test_what_every_rank_gave_otherwise_came_before_on_all() -> None:
    """The phase stays: the ranks have computed it."""
    found = _place(OF_ONE_MODULE, (0, SCATTER, "layers.0"), (1, SCATTER, "layers.0"))
    assert (found.phase, found.near, found.ranks) == ("backward", "before", (0, 1))


def test_only_the_first_of_several_reductions_is_asked() -> None:
    """What the second gets is the sum that came out of the first."""
    found = _place(OF_ONE_UNIT, (0, SUM, "layers.0"), (1, SCATTER, "layers.0"))
    assert found.ranks == (1,)


def test_a_reduction_that_one_leg_left_out_is_told() -> None:
    """Nothing is said of what was given; the ranks stay unknown."""
    found = _place(OF_ONE_UNIT, (1, SCATTER, "layers.0"), without=SUM)
    assert found.evidence[-1] == (
        "rank 0 entered 1 reduce_scatter_base of ranks 0,1 for layers.0 where the reference "
        "entered 1 reduce_scatter_base of ranks 0,1, 1 allreduce of ranks 0,1"
    )
    assert any(each.startswith("rank: ") for each in found.unknown)


def test_the_rank_that_gave_other_weights_is_the_origin() -> None:
    """A gather brings one rank's stale rows to all of them."""
    edit = calls_from("layers.0.attn.norm:output")
    found = _place(edit, (1, GATHER, "layers.0"))
    assert (found.phase, found.rank, found.near) == ("forward", 1, "before")
    assert found.collective == "all-gather of the weights of layers.0"


def test_a_gather_of_equal_weights_is_not_blamed() -> None:
    """A module that is wrong on every rank may have computed otherwise: no collective is named."""
    found = _place(calls_from("layers.0.attn.norm:output"))
    assert (found.phase, found.near, found.collective) == ("forward", "", "")


def test_gradients_that_every_rank_gave_otherwise_are_of_the_backward_pass() -> None:
    """Also where every tensor of every unit is wrong, as one microbatch that counts twice."""
    units = ("root", "layers.0", "layers.1")
    wrong = [(rank, SCATTER, unit) for rank in range(WORLD) for unit in units]
    found = _place(digests(grads=WEIGHTS), *wrong)
    assert (found.phase, found.near, found.ranks) == ("backward", "before", (0, 1))
    assert _place(digests(grads=WEIGHTS)).phase == "reduce"


def test_without_notes_of_what_was_given_nothing_is_claimed() -> None:
    """As on a GPU: the sum does not show who added what is wrong, and that is said."""
    candidate = edited(run_of(graph=("attn",)), dict.fromkeys(range(WORLD), OF_ONE_MODULE))
    found = between(_with_given(run_of(), ()), candidate)
    assert found.phase == "backward"
    assert not any("entered" in each for each in found.evidence)
    assert any(each.startswith("rank: ") for each in found.unknown)
