"""The memory check judges the worst rank, and never passes on a peak that was not measured."""

import dataclasses
from typing import Any

import pytest

from harness.checks import memory


def with_peak(run: Any, edit: Any, rank: int, peak: int) -> Any:
    for step in range(len(run.ranks[rank].steps)):
        run = edit.step(run, rank, step, peak_bytes=peak)
    end = run.ranks[rank].end
    return edit.rank(run, rank, end=end and dataclasses.replace(end, peak_bytes=peak))


def test_equal_peaks_pass_at_ratio_one(lab: Any) -> None:
    """Equal peaks pass at a limit of exactly 1."""
    reference, _, candidate = lab.legs()
    answer = memory.peak_memory(reference, candidate, {"max_ratio": 1})
    assert answer.outcome == "passed"
    assert answer.figures["ratio"] == 1.0


def test_worst_rank_decides(lab: Any, edit: Any) -> None:
    """One rank past its own counterpart fails, although another rank uses more memory."""
    reference, _, candidate = lab.legs()
    reference = with_peak(reference, edit, 0, 10_000)
    candidate = with_peak(with_peak(candidate, edit, 0, 10_000), edit, 1, 4003)
    answer = memory.peak_memory(reference, candidate, {"max_ratio": 2.0})
    assert (answer.outcome, answer.what) == ("failed", "memory_regression")
    assert answer.figures["rank"] == 1
    assert answer.figures["ratio"] == pytest.approx(4003 / 2001)
    assert answer.figures["reference_peak_bytes"] == 2001
    assert answer.figures["candidate_peak_bytes"] == 4003
    candidate = with_peak(candidate, edit, 1, 4002)
    assert memory.peak_memory(reference, candidate, {"max_ratio": 2.0}).outcome == "passed"


def test_peak_is_the_highest_of_steps_and_end(lab: Any, edit: Any) -> None:
    """A peak that only one step or only the end record shows is not lost."""
    reference, _, candidate = lab.legs()
    one_step = edit.step(candidate, 0, 1, peak_bytes=9999)
    at_end = edit.rank(
        candidate, 0, end=dataclasses.replace(candidate.ranks[0].end, peak_bytes=9999)
    )
    for run in (one_step, at_end):
        assert memory.peak_memory(reference, run, {"max_ratio": 2.0}).outcome == "failed"


def test_absolute_limit(lab: Any) -> None:
    """`max_bytes` is inclusive, and both limits together must both hold."""
    reference, _, candidate = lab.legs()
    assert memory.peak_memory(reference, candidate, {"max_bytes": 2001}).outcome == "passed"
    assert memory.peak_memory(reference, candidate, {"max_bytes": 2000}).what == "memory_regression"
    both = {"max_bytes": 2000, "max_ratio": 2.0}
    assert memory.peak_memory(reference, candidate, both).outcome == "failed"
    passed = memory.peak_memory(reference, candidate, {"max_bytes": 2001, "max_ratio": 2.0})
    assert passed.outcome == "passed"
    assert "limit 2;" in passed.message


def test_unmeasured_peaks_never_pass(lab: Any, edit: Any) -> None:
    """A zero or missing peak is no verdict for the reference and a failure for the candidate."""
    reference, _, candidate = lab.legs()
    zero = with_peak(reference, edit, 1, 0)
    absent = dataclasses.replace(reference, ranks=reference.ranks[:1])
    bare = edit.rank(reference, 1, steps=(), end=None)
    for broken in (zero, absent, bare):
        assert memory.peak_memory(broken, candidate, {"max_ratio": 2.0}).outcome == "error"
    for limits in ({"max_ratio": 2.0}, {"max_bytes": 10**9}):
        answer = memory.peak_memory(reference, with_peak(candidate, edit, 1, 0), limits)
        assert (answer.outcome, answer.what) == ("failed", "corrupt_record")
    nobody = dataclasses.replace(candidate, ranks=())
    assert memory.peak_memory(reference, nobody, {"max_ratio": 2.0}).outcome == "error"


def with_live(run: Any, edit: Any, rank: int, live: list[int]) -> Any:
    """The run with what lives after each step."""
    for step, nbytes in enumerate(live):
        run = edit.step(run, rank, step, live_bytes=nbytes)
    return run


@pytest.mark.parametrize(
    ("live", "growth"),
    {
        "a leak of 10 a step": ([100 + 10 * step for step in range(16)], 80),
        "warm-up and capture": ([10, 20, 50, 90] + [90] * 12, 0),
        "single steps that hold more": ([50] * 5 + [90] + [50] * 8 + [90, 50], 0),
        "a step that keeps": ([50] * 8 + [57] * 8, 7),
        "less": ([50] * 8 + [40] * 8, -10),
    }.values(),
)
def test_growth_is_what_stays(lab: Any, edit: Any, live: list[int], growth: int) -> None:
    """What is kept from the second quarter of the run to the last counts, on the worst rank."""
    reference, _, candidate = type(lab)(steps=len(live)).legs()
    candidate = with_live(with_live(candidate, edit, 0, [30] * 16), edit, 1, live)
    limits = {"max_growth_bytes": max(growth, 1)}
    assert memory.growth_bytes(candidate.ranks[1]) == growth
    assert memory.peak_memory(reference, candidate, limits).outcome == "passed"
    if growth > 1:
        answer = memory.peak_memory(reference, candidate, {"max_growth_bytes": growth - 1})
        assert (answer.outcome, answer.what) == ("failed", "memory_regression")
        assert (answer.figures["growth_rank"], answer.figures["growth_bytes"]) == (1, growth)


def test_growth_of_a_short_run_is_no_verdict(lab: Any) -> None:
    """Seven steps have no quarters to compare."""
    reference, _, candidate = type(lab)(steps=7).legs()
    answer = memory.peak_memory(reference, candidate, {"max_growth_bytes": 10})
    assert (answer.outcome, answer.what) == ("error", "not_run")
