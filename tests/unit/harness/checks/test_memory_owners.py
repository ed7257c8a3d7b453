"""Contracts of harness.checks.memory, through the check of peak memory."""

import dataclasses
from typing import Any

import pytest

from harness.checks import memory
from harness.records import EventRecord, RunResult

MIB = 1 << 20
KEPT = {"parameters": 700, "gradients": 200, "optimizer": 400, "largest_unit": 50}


def noted(run: RunResult, *, peak: int = 2000, **detail: Any) -> RunResult:
    """The run, each of whose ranks says so at its end and recorded such a peak."""
    ranks = []
    for records in run.ranks:
        event = EventRecord(name="memory", rank=records.rank, step=3, detail=detail)
        steps = tuple(dataclasses.replace(step, peak_bytes=peak) for step in records.steps)
        end = dataclasses.replace(records.end, peak_bytes=peak)  # type: ignore[type-var]
        ranks.append(dataclasses.replace(records, events=(event,), steps=steps, end=end))
    return dataclasses.replace(run, ranks=tuple(ranks))


@pytest.mark.parametrize(
    ("formula", "limit"),
    [
        ("parameters + gradients + 2 * optimizer", 1700.0),
        ("max(reference, 10 * largest_unit) + world_size", 1902.0),
        ("2 * KiB - microbatches", 2046.0),
    ],
)  # fmt: skip
def test_a_formula_is_a_limit(lab: Any, formula: str, limit: float) -> None:
    """To the byte, with what the same rank of the reference keeps."""
    reference, _, candidate = lab.legs()
    reference = noted(reference, peak=1900, at_rest=KEPT)
    # What the candidate says of itself does not count.
    fits = noted(candidate, peak=int(limit), at_rest=dict.fromkeys(KEPT, 10**9))
    past = noted(candidate, peak=int(limit) + 1, at_rest=dict.fromkeys(KEPT, 10**9))
    assert memory.peak_memory(reference, fits, {"max_bytes": formula}).outcome == "passed"
    answer = memory.peak_memory(reference, past, {"max_bytes": formula})
    assert (answer.outcome, answer.what) == ("failed", "memory_regression")
    assert f"limit {limit:.0f}" in answer.message


@pytest.mark.parametrize(
    ("formula", "kept"),
    [
        ("parameters", None), ("parameters", {"parameters": 1}), ("parameters / 0", KEPT),
        ("parameters - GiB", KEPT), ("weights", KEPT), ("parameters", KEPT | {"optimizer": True}),
    ],
)  # fmt: skip
def test_a_formula_without_a_value_gives_no_verdict(lab: Any, formula: str, kept: Any) -> None:
    """The reference did not say what it keeps, or the formula comes to nothing."""
    reference, _, candidate = lab.legs()
    reference = noted(reference, at_rest=kept)
    answer = memory.peak_memory(reference, candidate, {"max_bytes": formula})
    assert (answer.outcome, answer.what) == ("error", "not_run")


def told(peak: int, rest: int, **owners: int) -> dict[str, Any]:
    """A peak with that much unexplained."""
    known = peak - rest - sum(owners.values())
    return {"peak_bytes": peak, "owners": {"activations": known, "rest": rest} | owners,
            "largest_rest": [["a.py:f", rest]]}  # fmt: skip


@pytest.mark.parametrize(
    ("peak", "rest", "outcome"),
    [
        (100 * MIB, 16 * MIB, "passed"), (100 * MIB, 16 * MIB + 1, "failed"),
        (10_000 * MIB, 100 * MIB, "passed"), (10_000 * MIB, 100 * MIB + 1, "failed"),
        (10_000 * MIB, -100 * MIB - 1, "failed"), (5, 5, "passed"),
    ],
)  # fmt: skip
def test_a_peak_is_explained_to_a_part_or_16_mib(
    lab: Any, peak: int, rest: int, outcome: str
) -> None:
    """1 %, or 16 MiB of a small peak; too much explained is as wrong as too little."""
    reference, _, candidate = lab.legs()
    candidate = noted(candidate, peak=peak, explained=told(peak, rest))
    answer = memory.peak_memory(reference, candidate, {"max_unexplained": 0.01})
    assert answer.outcome == outcome
    assert answer.figures["rest_bytes"] == rest
    assert ("a.py:f" in answer.message) == (outcome == "failed")


@pytest.mark.parametrize(
    "explained",
    [None, {}, {"peak_bytes": 3, "owners": {"activations": 3}},
     {"peak_bytes": 4, "owners": {"activations": 3, "rest": 0}},
     {"peak_bytes": 3, "owners": {"activations": "3", "rest": 0}},
     {"peak_bytes": 3, "owners": {"activations": 3, "rest": True}}],
)  # fmt: skip
def test_a_rank_that_does_not_tell_gives_no_verdict(lab: Any, explained: Any) -> None:
    """No explanation, or one that does not add up, is not a small rest."""
    reference, _, candidate = lab.legs()
    candidate = noted(candidate, explained=explained)
    assert memory.peak_memory(reference, candidate, {"max_unexplained": 0.01}).outcome == "error"


def test_the_rank_with_the_largest_part_unexplained_decides(lab: Any) -> None:
    """A rank of a small peak fails though another has more bytes without an owner."""
    reference, _, candidate = lab.legs()
    large = noted(candidate, peak=100_000 * MIB, explained=told(100_000 * MIB, 900 * MIB))
    small = noted(candidate, peak=5_000 * MIB, explained=told(5_000 * MIB, 500 * MIB))
    candidate = dataclasses.replace(candidate, ranks=(large.ranks[0], small.ranks[1]))
    answer = memory.peak_memory(reference, candidate, {"max_unexplained": 0.01})
    assert (answer.outcome, answer.what) == ("failed", "memory_regression")
    assert "peak of rank 1" in answer.message


def test_what_was_not_seen_as_it_came_has_no_owner(lab: Any) -> None:
    """An explanation of less than the rank's recorded peak leaves the difference unexplained."""
    reference, _, candidate = lab.legs()
    candidate = noted(candidate, peak=10_000 * MIB, explained=told(2_000 * MIB, 0))
    answer = memory.peak_memory(reference, candidate, {"max_unexplained": 0.01})
    assert (answer.outcome, answer.what) == ("failed", "memory_regression")
    assert answer.figures["unexplained_bytes"] == 8_000 * MIB
