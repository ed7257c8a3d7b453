"""The check of a program's graphs: replays that were asked for, and static memory in use."""

import dataclasses
from typing import Any

import pytest

from harness.checks import complete
from harness.records import EventRecord

LEAST = {"min_replays": 3}


def event(rank: int, name: str, step: int = 2, **detail: Any) -> EventRecord:
    about = {"graph": 1, "maker": "torch.cuda.graph", "place": "train.py:7", "replay": 5}
    return EventRecord(rank=rank, step=step, name=name, detail={**about, **detail})


def captured(rank: int, number: int) -> EventRecord:
    """What a rank says of its graphs as it ends."""
    return EventRecord(rank=rank, step=4, name="cuda_graphs", detail={"graphs": [{}] * number})


def replayed(lab: Any, edit: Any, replays: dict[int, int]) -> Any:
    """A candidate whose ranks have replayed that often; 4 times where nothing is said."""
    run = lab.run(lab.spec(graph=("attn",)))
    for rank, number in replays.items():
        end = run.ranks[rank].end
        run = edit.rank(run, rank, end=dataclasses.replace(end, replays=number))
    return run


def answer(lab: Any, candidate: Any, least: dict[str, int] = LEAST) -> Any:
    return complete.graphs(candidate, least)


@pytest.mark.parametrize("least", [LEAST, {"min_replays": 4}, {"min_replays": 0}, {}])
def test_enough_replays_pass(lab: Any, edit: Any, least: dict[str, int]) -> None:
    """At the minimum and above it, with all of them counted; a capture is no finding."""
    candidate = edit.rank(
        replayed(lab, edit, {}), 1, events=(event(1, "graph_captured"), captured(1, 2))
    )
    found = answer(lab, candidate, least)
    assert (found.outcome, found.what, found.difference) == ("passed", "", None)
    assert found.figures["replays"] == 2 * 16


def test_a_program_that_nobody_asks_for_replays_has_none(lab: Any) -> None:
    """Eager runs pass; the number is 0."""
    found = answer(lab, lab.run(lab.spec()), {})
    assert (found.outcome, found.figures["replays"]) == ("passed", 0)


@pytest.mark.parametrize(
    ("replays", "rank", "number"),
    [({0: 0, 1: 0}, 0, 0), ({0: 2, 1: 2}, 0, 2), ({1: 2}, 1, 2), ({0: 900, 1: 0}, 1, 0)],
)
def test_too_few_replays(
    lab: Any, edit: Any, replays: dict[int, int], rank: int, number: int
) -> None:
    """The first rank below the minimum is named with its number: no rank stands in for another."""
    found = answer(lab, replayed(lab, edit, replays))
    assert (found.outcome, found.what) == ("failed", "not_replayed")
    difference = found.difference
    assert (difference.rank, difference.quantity) == (rank, "replays")
    assert (difference.reference, difference.candidate) == ("3", str(number))


def test_the_last_of_many_ranks(make_lab: Any, edit: Any) -> None:
    """Of 11 ranks, 10 is looked at as well; the first is named in whatever order they are read."""
    lab = make_lab(world_size=11)
    found = answer(lab, replayed(lab, edit, {10: 0}))
    assert (found.what, found.difference.rank) == ("not_replayed", 10)
    candidate = replayed(lab, edit, {10: 0, 9: 1})
    candidate = dataclasses.replace(candidate, ranks=candidate.ranks[::-1])
    found = answer(lab, candidate)
    assert (found.difference.rank, found.difference.candidate) == (9, "1")


def test_a_rank_that_did_not_end_has_replayed_nothing(lab: Any, edit: Any) -> None:
    """Its replays are not known, so they prove nothing."""
    found = answer(lab, edit.rank(replayed(lab, edit, {}), 1, end=None))
    assert (found.what, found.difference.rank) == ("not_replayed", 1)
    assert found.difference.candidate == "0"


@pytest.mark.parametrize(("events", "says"), [(1, "it captured 2 graphs"), (0, "captured none")])
def test_what_a_rank_without_replays_captured(lab: Any, edit: Any, events: int, says: str) -> None:
    """Captured and never replayed is another mistake than not captured."""
    candidate = edit.rank(
        replayed(lab, edit, {0: 0}), 0, events=(event(0, "other"), captured(0, 2))[: 2 * events]
    )
    assert says in answer(lab, candidate).message


def test_nothing_recorded_is_no_pass(lab: Any) -> None:
    """Without a record there is nothing to look at, asked for replays or not."""
    run = lab.run(lab.spec())
    empty = dataclasses.replace(run, ranks=())
    for least in (LEAST, {}):
        found = answer(lab, empty, least)
        assert (found.outcome, found.what) == ("error", "not_run")


@pytest.mark.parametrize("least", [LEAST, {}])
@pytest.mark.parametrize(
    ("name", "detail", "tensor", "says"),
    [
        ("static_gradient", {"parameter": "0.weight"}, "0.weight", "replay 5 overwrites it"),
        ("static_activation", {"forward": 0}, "", "forward graph was replayed again"),
    ],
)
def test_static_memory_in_use(
    lab: Any, edit: Any, name: str, detail: dict[str, Any], tensor: str, says: str,
    least: dict[str, int],
) -> None:  # fmt: skip
    """A failure with step, rank, tensor and graph, asked for replays or not."""
    candidate = edit.rank(
        replayed(lab, edit, {}), 1, events=(event(1, "graph_captured"), event(1, name, **detail))
    )
    found = answer(lab, candidate, least)
    assert (found.outcome, found.what) == ("failed", "static_buffer")
    difference = found.difference
    assert (difference.step, difference.rank) == (2, 1)
    assert (difference.quantity, difference.tensor) == (name, tensor)
    assert says in found.message
    assert "graph 1 of torch.cuda.graph, train.py:7" in found.message


def test_static_memory_comes_before_missing_replays(lab: Any, edit: Any) -> None:
    """What is wrong says more than what is missing."""
    candidate = edit.rank(
        replayed(lab, edit, {0: 0}), 1, events=(event(1, "static_gradient", parameter="w"),)
    )
    assert answer(lab, candidate).what == "static_buffer"
