"""Limits on peak memory: ratios, bytes, formulas, growth, owners."""

import dataclasses
from typing import Any

import pytest

from harness.checks import memory
from harness.checks.evidence import Runs
from harness.checks.memory import evaluate, names_in
from harness.records import EventRecord, RunResult


def peak(reference: Any, candidate: Any, options: Any) -> Any:
    case = type('C', (), {})()
    return memory.peak_memory(Runs(case=case, reference=reference, control=reference, candidate=candidate), options)


def with_peak(run: Any, edit: Any, rank: int, peak: int) -> Any:
    for step in range(len(run.ranks[rank].steps)):
        run = edit.step(run, rank, step, peak_bytes=peak)
    end = run.ranks[rank].end
    return edit.rank(run, rank, end=end and dataclasses.replace(end, peak_bytes=peak))


def test_equal_peaks_pass_at_ratio_one(lab: Any) -> None:
    """Equal peaks pass at a limit of exactly 1."""
    reference, _, candidate = lab.legs()
    answer = peak(reference, candidate, {"max_ratio": 1})
    assert answer.outcome == "passed"
    assert answer.figures["ratio"] == 1.0


def test_worst_rank_decides(lab: Any, edit: Any) -> None:
    """One rank past its own counterpart fails, although another rank uses more memory."""
    reference, _, candidate = lab.legs()
    reference = with_peak(reference, edit, 0, 10_000)
    candidate = with_peak(with_peak(candidate, edit, 0, 10_000), edit, 1, 4003)
    answer = peak(reference, candidate, {"max_ratio": 2.0})
    assert (answer.outcome, answer.what) == ("failed", "memory_regression")
    assert answer.figures["rank"] == 1
    assert answer.figures["ratio"] == pytest.approx(4003 / 2001)
    assert answer.figures["reference_peak_bytes"] == 2001
    assert answer.figures["candidate_peak_bytes"] == 4003
    candidate = with_peak(candidate, edit, 1, 4002)
    assert peak(reference, candidate, {"max_ratio": 2.0}).outcome == "passed"


def test_peak_is_the_highest_of_steps_and_end(lab: Any, edit: Any) -> None:
    """A peak that only one step or only the end record shows is not lost."""
    reference, _, candidate = lab.legs()
    one_step = edit.step(candidate, 0, 1, peak_bytes=9999)
    at_end = edit.rank(
        candidate, 0, end=dataclasses.replace(candidate.ranks[0].end, peak_bytes=9999)
    )
    for run in (one_step, at_end):
        assert peak(reference, run, {"max_ratio": 2.0}).outcome == "failed"


def test_absolute_limit(lab: Any) -> None:
    """`max_bytes` is inclusive, and both limits together must both hold."""
    reference, _, candidate = lab.legs()
    assert peak(reference, candidate, {"max_bytes": 2001}).outcome == "passed"
    assert peak(reference, candidate, {"max_bytes": 2000}).what == "memory_regression"
    both = {"max_bytes": 2000, "max_ratio": 2.0}
    assert peak(reference, candidate, both).outcome == "failed"
    passed = peak(reference, candidate, {"max_bytes": 2001, "max_ratio": 2.0})
    assert passed.outcome == "passed"
    assert "limit 2;" in passed.message


def test_unmeasured_peaks_never_pass(lab: Any, edit: Any) -> None:
    """A zero or missing peak is no verdict for the reference and a failure for the candidate."""
    reference, _, candidate = lab.legs()
    zero = with_peak(reference, edit, 1, 0)
    absent = dataclasses.replace(reference, ranks=reference.ranks[:1])
    bare = edit.rank(reference, 1, steps=(), end=None)
    for broken in (zero, absent, bare):
        assert peak(broken, candidate, {"max_ratio": 2.0}).outcome == "error"
    for limits in ({"max_ratio": 2.0}, {"max_bytes": 10**9}):
        answer = peak(reference, with_peak(candidate, edit, 1, 0), limits)
        assert (answer.outcome, answer.what) == ("failed", "corrupt_record")
    nobody = dataclasses.replace(candidate, ranks=())
    assert peak(reference, nobody, {"max_ratio": 2.0}).outcome == "error"


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
    assert peak(reference, candidate, limits).outcome == "passed"
    if growth > 1:
        answer = peak(reference, candidate, {"max_growth_bytes": growth - 1})
        assert (answer.outcome, answer.what) == ("failed", "memory_regression")
        assert (answer.figures["growth_rank"], answer.figures["growth_bytes"]) == (1, growth)


def test_growth_of_a_short_run_is_no_verdict(lab: Any) -> None:
    """Seven steps have no quarters to compare."""
    reference, _, candidate = type(lab)(steps=7).legs()
    answer = peak(reference, candidate, {"max_growth_bytes": 10})
    assert (answer.outcome, answer.what) == ("error", "not_run")


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
    assert peak(reference, fits, {"max_bytes": formula}).outcome == "passed"
    answer = peak(reference, past, {"max_bytes": formula})
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
    answer = peak(reference, candidate, {"max_bytes": formula})
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
    answer = peak(reference, candidate, {"max_unexplained": 0.01})
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
    assert peak(reference, candidate, {"max_unexplained": 0.01}).outcome == "error"


def test_the_rank_with_the_largest_part_unexplained_decides(lab: Any) -> None:
    """A rank of a small peak fails though another has more bytes without an owner."""
    reference, _, candidate = lab.legs()
    large = noted(candidate, peak=100_000 * MIB, explained=told(100_000 * MIB, 900 * MIB))
    small = noted(candidate, peak=5_000 * MIB, explained=told(5_000 * MIB, 500 * MIB))
    candidate = dataclasses.replace(candidate, ranks=(large.ranks[0], small.ranks[1]))
    answer = peak(reference, candidate, {"max_unexplained": 0.01})
    assert (answer.outcome, answer.what) == ("failed", "memory_regression")
    assert "peak of rank 1" in answer.message


def test_what_was_not_seen_as_it_came_has_no_owner(lab: Any) -> None:
    """An explanation of less than the rank's recorded peak leaves the difference unexplained."""
    reference, _, candidate = lab.legs()
    candidate = noted(candidate, peak=10_000 * MIB, explained=told(2_000 * MIB, 0))
    answer = peak(reference, candidate, {"max_unexplained": 0.01})
    assert (answer.outcome, answer.what) == ("failed", "memory_regression")
    assert answer.figures["unexplained_bytes"] == 8_000 * MIB


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * a + b / 4", 7.0), ("-(a - 5) * 2", 4.0), ("1.5 * MiB + KiB", 1.5 * 2**20 + 1024),
        ("max(a, b, 1) - min(a, b)", 9.0), (" 1e3 ", 1000.0),
    ],
)  # fmt: skip
def test_arithmetic(text: str, value: float) -> None:
    """Formulas come to what they say."""
    assert evaluate(text, {"a": 3.0, "b": 12.0 if "min" in text else 4.0}) == value


def test_names_that_need_values() -> None:
    """Units and functions need none."""
    assert names_in("2 * parameters + max(optimizer, MiB)") == {"parameters", "optimizer"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("64 * MiB / (world_size - 1)", {"world_size"}), ("a - b", {"a", "b"}),
        ("1 / (a - b)", {"a", "b"}), ("a - GiB", {"a"}), ("1 / (2 - min(a, 2))", {"a"}),
        ("1e12 / a - MiB", {"a"}),
    ],
)  # fmt: skip
def test_what_has_no_value_for_some_runs_may_have_one_for_others(
    text: str, names: set[str]
) -> None:
    """A formula is not refused because it would divide by zero, or be negative, for some sizes."""
    assert names_in(text) == names


@pytest.mark.parametrize(
    "text", ["0", "-5", "1e999", "a - a", "a / (b - b)", "-a", "1e308 * 10 * a"]
)
def test_what_is_never_a_limit_is_refused_as_it_is_read(text: str) -> None:
    """No value of any name makes a number > 0 of it."""
    with pytest.raises(ValueError, match="Expected a number"):
        names_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "1 +", "a.b", "a[0]", "__import__('os')", "f(1)", "max(1)", "max(*a)", "max(1, key=2)",
        "'x' * 3", "True", "2 ** 9 ** 9", "a if a else b", "lambda: 1", "[1]", "1; 2", "1 / 0",
        "(" * 600, "1e308 * 10", "9" * 400 + " * 9" * 10, "unknown",
    ],
)  # fmt: skip
def test_what_is_no_formula_is_refused(text: str) -> None:
    """Anything but arithmetic, and arithmetic without a finite result."""
    with pytest.raises(ValueError, match="Expected"):
        evaluate(text, {"a": 1.0, "b": 1.0})
