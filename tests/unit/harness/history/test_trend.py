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

SAME: dict[str, Any] = {"commit": "abc"}
ERROR: dict[str, Any] = {"outcome": "error", "what": "interrupted"}
DIVERGED_SELF: dict[str, Any] = {"outcome": "incomparable", "what": "nondeterministic_reference"}
ELSEWHERE: dict[str, Any] = {"environment": {**ENVIRONMENT, "cores": 4}}


def trend_of(history: History, entries: Iterable[FolderEntry]) -> CaseTrend:
    for entry in entries:
        history.record(entry)
    (found,) = trends(history, "nightly", "dp1-attn")
    return found


def commits(found: CaseTrend) -> list[str | None]:
    return [each.commit if each else None for each in (found.first_bad, found.last_good)]


def named(*numbers: int | None) -> list[str | None]:
    return [None if number is None else name_of([number, "commit"]) for number in numbers]


@pytest.mark.parametrize(
    ("outcomes", "bad", "good"),
    [
        ([{}, {}, FAILED, FAILED], 2, 1),
        ([{}, FAILED, {}, ERROR, FAILED, DIVERGED_SELF, FAILED, ERROR], 4, 2),
        ([FAILED, FAILED], 0, None),
        ([FAILED, {}], None, 1),
        ([{}, ERROR, ERROR], None, 0),
        ([ERROR, DIVERGED_SELF], None, None),
        ([{}, {**FAILED, "what": "interrupted"}], None, 0),
    ],
)
def test_first_bad_and_last_good(
    outcomes: list[dict[str, Any]], bad: int | None, good: int | None, history: History
) -> None:
    """The first failure after the last pass, over runs without a verdict; none if it passes."""
    found = trend_of(history, [night(n, answers={0: change}) for n, change in enumerate(outcomes)])
    assert commits(found) == named(bad, good)
    assert found.num_runs == len(outcomes)


@pytest.mark.parametrize(
    ("bad", "elsewhere", "first", "good"),
    [
        # A pass on another machine, between two failures of this one, is no repair.
        ((2, 4), (1, 3), 2, 0),
        # The environment changed when it began to fail: the last pass is the other one's.
        ((2, 3, 4), (0, 1), 2, 1),
        # It failed there all along, here only since the last run.
        ((0, 2, 4), (0, 2), 4, 3),
        # The last answer is a pass, wherever: it does not fail now.
        ((2, 3), (4,), None, 4),
    ],
)
def test_the_turning_point_is_that_of_the_environment_that_fails(
    bad: tuple[int, ...], elsewhere: tuple[int, ...], first: int | None, good: int,
    history: History,
) -> None:  # fmt: skip
    """Five runs, some bad and some elsewhere."""
    found = trend_of(history, [
        night(n, answers={0: FAILED if n in bad else {}}, **(ELSEWHERE if n in elsewhere else {}))
        for n in range(5)
    ])  # fmt: skip
    assert commits(found) == named(first, good)


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


def test_values_are_those_of_a_candidate_that_ended_well(history: History) -> None:
    """Step time, peak and start-up; a run that crashed measured nothing."""

    entries = [night(0, values=only("candidate", step_s=0.5)),
               night(1, values=only("candidate", what="crashed"))]  # fmt: skip
    first, second = trend_of(history, entries).answers
    assert (first.step_s, first.peak_bytes, first.startup_s) == (0.5, 40 << 20, 1.0)
    assert (second.step_s, second.peak_bytes, second.series) == (None, None, "")


def test_answers_of_one_folder_are_all_shown(history: History) -> None:
    """Values belong to its last answer."""
    entry = night()
    whole = dataclasses.replace(
        entry, runs=(*entry.runs, run(0, attempt=1, step_s=0.7)),
        cases=(dataclasses.replace(entry.cases[0], **FAILED), case(0, attempt=1)),
    )  # fmt: skip
    found = trend_of(history, [whole])
    assert [(n.attempt, n.outcome, n.step_s) for n in found.answers] == [
        (0, "failed", None), (1, "passed", 0.7),
    ]  # fmt: skip
    assert found.num_runs == 1


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
    other = {"values": lambda run, leg: {"step_s": 0.03}} | changes
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
    assert [shift.first.commit, shift.last_before.commit] == named(30, 29)
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


NO_PRINT = only("candidate", fingerprint="")
HANG = {**FAILED, "what": "hang"}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([night(0, **SAME), night(1, answers={0: FAILED}, **SAME)], (1, 1)),
        ([night(n, **SAME) for n in range(4)]
         + [night(n, answers={0: FAILED}, **SAME) for n in range(4, 6)], (1, 5)),
        ([night(0, **SAME), night(1, answers={0: HANG}, **SAME),
          night(2, answers={0: FAILED}, **SAME)], (2, 2)),
        ([night(0, **SAME), night(1, answers={0: FAILED}, values=NO_PRINT, **SAME)], (1, 1)),
        ([night(0), night(1, answers={0: FAILED})], None),
        ([night(0, **SAME), night(1, answers={0: FAILED}, commit="abc+1")], None),
        ([night(0, commit=""), night(1, answers={0: FAILED}, commit="")], None),
        ([night(0, **SAME), night(1, answers={0: FAILED}, **ELSEWHERE, **SAME)], None),
        ([night(0, **SAME, environment={}),
          night(1, answers={0: FAILED}, environment={}, **SAME)], None),
        ([night(0, **SAME), night(1, answers={0: ERROR}, **SAME), night(2, **SAME)], None),
        ([night(0, **SAME), night(1, answers={0: FAILED}, values=only("candidate", work="other"),
          **SAME)], None),
    ],
    ids=["changed", "once in five", "each cause", "died early", "other commit", "changes on top",
         "unknown commit", "other environment", "unknown environment", "interrupted",
         "other settings"],
)  # fmt: skip
def test_flaky_is_what_changes_by_itself(
    entries: list[FolderEntry], expected: tuple[int, int] | None, history: History
) -> None:
    """Only a verdict that changed at the same commit, environment and settings is flaky. A commit
    that was run twice can be the last good and the first bad one."""
    trend = trend_of(history, entries)
    found = flaky_cases([trend])
    assert [(entry.changes, entry.repeats) for entry in found] == ([expected] if expected else [])
    if found and trend.answers[-1].series:
        assert commits(trend) == ["abc", "abc"]


def test_what_the_machine_failed_is_counted(history: History) -> None:
    """Attempts that the machine failed, by failure; they change no verdict."""
    retried = ("candidate: port in use", "control: port in use")
    (found,) = flaky_cases([trend_of(history, [night(0, answers={0: {"retried": retried}})])])
    assert (found.changes, found.retried) == (0, {"port in use": 2})
