"""Contracts of trends: what a case did, since when, lasting changes, and verdicts that change."""

import dataclasses
import random
from collections.abc import Iterable
from typing import Any

import pytest

from harness.history import CaseTrend, History, flaky_cases, trends
from harness.history.entries import FolderEntry, name_of
from harness.history.trend import MIN_HISTORY, find_change
from tests.unit.harness.history.nights import ENVIRONMENT, FAILED, case, night, only, run

ANSWERS: dict[str, dict[str, Any]] = {
    "p": {}, "f": FAILED, "h": {**FAILED, "what": "hang"}, "k": {**FAILED, "what": "interrupted"},
    "e": {"outcome": "error", "what": "interrupted"},
    "i": {"outcome": "incomparable", "what": "nondeterministic_reference"},
}  # fmt: skip
ELSEWHERE: dict[str, Any] = {"environment": {**ENVIRONMENT, "cores": 4}}


def answered(letter: str, number: int, **changes: Any) -> FolderEntry:
    """A night with this answer, a capital for one on another machine."""
    place = ELSEWHERE if letter.isupper() else {}
    return night(number, answers={0: ANSWERS[letter.lower()]}, **(place | changes))


def trend_of(history: History, entries: Iterable[FolderEntry]) -> CaseTrend:
    for entry in entries:
        history.record(entry)
    (found,) = trends(history, "nightly", "dp1-attn")
    return found


@pytest.mark.parametrize(
    ("answers", "bad", "good"),
    [
        ("ppff", 2, 1), ("pfpefifeh", 4, 2), ("ff", 0, None), ("fp", None, 1), ("pee", None, 0),
        ("ei", None, None), ("pk", None, 0),
        # A pass on another machine, between two failures of this one, is no repair.
        ("pPfPf", 2, 0),
        # The environment changed when it began to fail: the last pass is the other one's.
        ("PPfff", 2, 1),
        # It failed there all along, here only since the last run.
        ("FpFpf", 4, 3),
        # The last answer is a pass, wherever: it does not fail now.
        ("ppffP", None, 4),
    ],
)  # fmt: skip
def test_first_bad_and_last_good(
    answers: str, bad: int | None, good: int | None, history: History
) -> None:
    """The first failure after the last pass in its environment, over runs without a verdict."""
    found = trend_of(history, [answered(letter, n) for n, letter in enumerate(answers)])
    ends = [each.commit if each else None for each in (found.first_bad, found.last_good)]
    assert ends == [None if n is None else name_of([n, "commit"]) for n in (bad, good)]
    assert found.num_runs == len(answers)


def test_runs_are_in_order_of_time_and_days_limit_them(history: History) -> None:
    """The order is that of the runs, not of recording; shards of a day count as one day."""
    for number in (2, 0, 3, 1):
        history.record(night(number))
    history.record(night(3, id="other shard"))
    (found,) = trends(history, "nightly", "dp1-attn")
    days = [entry.created[:10] for entry in found.answers]
    assert days == sorted(days)
    (late,) = trends(history, "nightly", days=2)
    assert [entry.created[:10] for entry in late.answers] == days[2:]
    (early,) = trends(history, "nightly", until=found.answers[1].created)
    assert early.answers == found.answers[:2]
    assert trends(history, "nothing") == ()


def test_values_are_those_of_the_last_candidate_if_it_ended_well(history: History) -> None:
    """Step time, peak and start-up; a crashed run measured nothing; each answer is shown."""
    entry = night(2)
    again = dataclasses.replace(
        entry, runs=(*entry.runs, run(0, attempt=1, step_s=0.7)),
        cases=(dataclasses.replace(entry.cases[0], **FAILED), case(0, attempt=1)),
    )  # fmt: skip
    found = trend_of(history, [
        night(0, values=only("candidate", step_s=0.5)),
        night(1, values=only("candidate", what="crashed")), again,
    ])  # fmt: skip
    assert [(a.attempt, a.outcome, a.step_s, a.series) for a in found.answers] == [
        (0, "passed", 0.5, "A"), (0, "passed", None, ""), (0, "failed", None, ""),
        (1, "passed", 0.7, "A"),
    ]  # fmt: skip
    assert (found.answers[0].peak_bytes, found.answers[0].startup_s) == (40 << 20, 1.0)
    assert (found.answers[1].peak_bytes, found.num_runs) == (None, 3)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"environment": {**ENVIRONMENT, "gpu_driver": "590"}}, "gpu_driver"),
        ({"slots": 2}, "slots"),
        ({"environment": {**ENVIRONMENT, "variables": {"NCCL_ALGO": "Ring"}}}, "NCCL_ALGO"),
        ({"environment": {}}, ""),
        ({"values": only("candidate", step_s=0.03, fingerprint="")}, ""),
    ],
)
def test_another_environment_is_another_series(
    changes: dict[str, Any], names: str, history: History
) -> None:
    """Values are not compared across environments, and what changed is named; an unknown one is in
    no series; coming back is the old series again."""
    other = {"values": only("candidate", step_s=0.03)} | changes
    found = trend_of(history, [night(n, **(other if 5 <= n < 20 else {})) for n in range(25)])
    letter = "B" if names else ""
    assert [entry.series for entry in found.answers] == ["A"] * 5 + [letter] * 15 + ["A"] * 5
    assert names in found.series.get(letter, "")
    assert found.shifts == ()


def test_a_lasting_change_is_found_with_its_runs(history: History) -> None:
    """A step in time within one series names the first run of it and the one before."""
    slower = only("candidate", step_s=0.022, peak_bytes=50 << 20)
    found = trend_of(history, [night(n, values=slower if n >= 30 else None) for n in range(40)])
    assert [shift.metric for shift in found.shifts] == ["step_s", "peak_bytes"]
    shift = found.shifts[0]
    assert (shift.last_before, shift.first) == found.answers[29:31]
    assert shift.ratio == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("odd", "alarms", "seen"), [(0.0, 0, 180), (0.05, 1, 150), (0.2, 8, 0)],
    ids=["normal", "one in 20 out", "one in 5 out"],
)  # fmt: skip
def test_noise_is_seldom_a_change_and_a_step_is_found(odd: float, alarms: int, seen: int) -> None:
    """Of 200 series of 60 runs: false alarms at the last run at most; steps of three deviations 15
    runs before it that are found within three runs of their place at least."""

    def series(seed: int) -> list[float]:
        source = random.Random(seed)
        return [100 + source.gauss(0, 8 if source.random() < odd else 1) for _ in range(60)]

    noisy = [series(seed) for seed in range(200)]
    assert sum(find_change(values) is not None for values in noisy) <= alarms
    stepped = [values[:45] + [value + 3 for value in values[45:]] for values in noisy]
    found = [find_change(values) for values in stepped]
    assert sum(at is not None and abs(at - 45) <= 3 for at in found) >= seen


@pytest.mark.parametrize(
    ("values", "at"),
    [
        ([1.0] * 20, None),
        ([0.0] * 20, None),
        ([1.0] * (MIN_HISTORY - 4) + [2.0] * 3, None),
        ([1.0] * (MIN_HISTORY - 3) + [2.0] * 3, MIN_HISTORY - 3),
        ([1.0] * 20 + [2.0] * 2, None),
        ([2.0] * 20 + [1.0] * 5, 20),
    ],
    ids=["equal", "zeros", "too short", "just long enough", "two are odd ones", "fell"],
)
def test_the_smallest_change(values: list[float], at: int | None) -> None:
    """From the third value on, in twelve or more."""
    assert find_change(values) == at


@pytest.mark.parametrize(
    ("answers", "last", "expected"),
    [
        ("pf", {}, (1, 1)), ("ppppff", {}, (1, 5)), ("phf", {}, (2, 2)),
        ("pf", {"values": only("candidate", fingerprint="")}, (1, 1)),
        ("pf", {"commit": "def"}, None), ("pf", {"commit": "abc+1"}, None), ("pF", {}, None),
        ("pep", {}, None), ("pf", {"values": only("candidate", work="other")}, None),
    ],
    ids=["changed", "once in five", "each cause", "died early", "other commit", "changes on top",
         "other environment", "interrupted", "other settings"],
)  # fmt: skip
def test_flaky_is_what_changes_by_itself(
    answers: str, last: dict[str, Any], expected: tuple[int, int] | None, history: History
) -> None:
    """Only a verdict that changed at the same commit, environment and settings is flaky."""
    changes = [{"commit": "abc"} for _ in answers]
    changes[-1] |= last
    found = flaky_cases([trend_of(
        history, [answered(a, n, **changes[n]) for n, a in enumerate(answers)]
    )])  # fmt: skip
    assert [(entry.changes, entry.repeats) for entry in found] == ([expected] if expected else [])


def test_unknown_equals_nothing_and_failures_of_the_machine_count(history: History) -> None:
    """Answers of an unknown commit or environment repeat none; attempts are told by failure."""
    retried = ("candidate: port in use", "control: port in use")
    (found,) = flaky_cases([trend_of(history, [
        *(answered(a, n, commit="") for n, a in enumerate("pf")),
        *(answered(a, n + 2, commit="abc", environment={}) for n, a in enumerate("pf")),
        night(4, answers={0: {"retried": retried}}),
    ])])  # fmt: skip
    assert (found.changes, found.retried) == (0, {"port in use": 2})
