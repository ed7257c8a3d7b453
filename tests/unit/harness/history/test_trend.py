"""Contracts of trends: what a case did, since when, lasting changes, and verdicts that change."""

import dataclasses
import random
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import pytest

from harness.history import CaseTrend, History, flaky_cases, trends
from harness.history.entries import FolderEntry, RunEntry, name_of
from harness.history.trend import MIN_HISTORY, MIN_VALUES, deviation, find_changes, wilson
from harness.history_commands import shift_text, turning_point
from tests.unit.harness.history.nights import ENVIRONMENT, FAILED, case, night, run

SAME: dict[str, Any] = {"commit": "abc"}
ERROR: dict[str, Any] = {"outcome": "error", "what": "interrupted"}
DIVERGED_SELF: dict[str, Any] = {"outcome": "incomparable", "what": "nondeterministic_reference"}


def trend_of(history: History, entries: Iterable[FolderEntry]) -> CaseTrend:
    for entry in entries:
        history.record(entry)
    (found,) = trends(history, "nightly", "dp1-attn")
    assert not history.damaged
    return found


def answers(*changes: dict[str, Any]) -> list[FolderEntry]:
    return [night(n, answers={0: change}) for n, change in enumerate(changes)]


@pytest.mark.parametrize(
    ("outcomes", "bad", "good"),
    [
        ([{}, {}, FAILED, FAILED], 2, 1),
        ([{}, FAILED, {}, ERROR, FAILED, DIVERGED_SELF, FAILED, ERROR], 4, 2),
        ([FAILED, FAILED], 0, None),
        ([FAILED, {}], None, 1),
        ([{}, ERROR, ERROR], None, 0),
        ([{}, {**FAILED, "what": "interrupted"}], None, 0),
    ],
)  # fmt: skip
def test_first_bad_night_and_last_good_commit(
    outcomes: list[dict[str, Any]], bad: int | None, good: int | None, history: History
) -> None:
    """The first failure after the last pass, over nights without a verdict; none if it passes."""
    found = trend_of(history, answers(*outcomes))
    first, last = found.first_bad, found.last_good
    assert (first.commit if first else None) == (
        name_of([bad, "commit"]) if bad is not None else None
    )
    assert (last.commit if last else None) == (
        name_of([good, "commit"]) if good is not None else None
    )
    assert found.num_runs == len(outcomes)


ELSEWHERE: dict[str, Any] = {"environment": {**ENVIRONMENT, "cores": 4}}


@pytest.mark.parametrize(
    ("bad", "elsewhere", "first", "good"),
    [
        # A pass on another machine, between two failures of this one, is no repair.
        ((2, 4), (1, 3), 2, 0),
        # The environment changed when it began to fail: the last pass is the other one's.
        ((2, 3, 4), (0, 1), 2, 1),
        # It failed there all along, here only since the last night.
        ((0, 2, 4), (0, 2), 4, 3),
        # The last answer is a pass, wherever: it does not fail now.
        ((2, 3), (4,), None, 4),
    ],
)  # fmt: skip
def test_the_turning_point_is_that_of_the_environment_that_fails(
    bad: tuple[int, ...], elsewhere: tuple[int, ...], first: int | None, good: int,
    history: History,
) -> None:  # fmt: skip
    """Of five nights, some bad and some elsewhere: first failure and last pass of where it fails
    now, of all if it never passed there."""
    entries = [
        night(n, answers={0: FAILED if n in bad else {}}, **(ELSEWHERE if n in elsewhere else {}))
        for n in range(5)
    ]
    found = trend_of(history, entries)
    assert (found.first_bad.commit if found.first_bad else None) == (
        name_of([first, "commit"]) if first is not None else None
    )
    assert found.last_good is not None
    assert found.last_good.commit == name_of([good, "commit"])


def test_a_commit_that_was_run_twice_can_be_both(history: History) -> None:
    """Nights count, not commits: what passed and then failed at one commit says so."""
    found = trend_of(history, [night(0, **SAME), night(1, answers={0: FAILED}, **SAME)])
    assert found.first_bad is not None
    assert found.last_good is not None
    assert found.first_bad.commit == found.last_good.commit == "abc"
    assert "the same commit, so see --flaky" in turning_point(found).plain


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        ([{}, {}], "it does not fail now"),
        ([{}, ERROR], "no verdict since it passed, "),
        ([ERROR, DIVERGED_SELF], "no verdict in these runs"),
        ([FAILED, ERROR], "or earlier: no pass in these runs"),
    ],
)  # fmt: skip
def test_no_verdict_is_not_told_as_a_pass(
    outcomes: list[dict[str, Any]], words: str, history: History
) -> None:
    """Of a case that has had no verdict lately it is not said that it does not fail."""
    assert words in turning_point(trend_of(history, answers(*outcomes))).plain


def test_nights_are_in_their_own_order_and_days_limit_them(history: History) -> None:
    """The order is that of the runs, not of recording; shards of a day count as one day."""
    for number in (2, 0, 3, 1):
        history.record(night(number))
    history.record(night(3, id="other shard", answers={0: {"case_id": "dp1-attn"}}))
    (found,) = trends(history, "nightly", "dp1-attn")
    days = [entry.created[:10] for entry in found.answers]
    assert days == sorted(days)
    (late,) = trends(history, "nightly", "dp1-attn", days=2)
    assert [entry.created[:10] for entry in late.answers] == days[2:]
    assert trends(history, "nothing") == ()


def test_values_are_those_of_the_candidate_and_only_of_a_run_that_ended_well(
    history: History,
) -> None:
    """Step time, peak and start-up are the candidate's; a run that crashed measured nothing."""

    def values(run: RunEntry, leg: str) -> dict[str, Any]:
        return {"step_s": 0.5 if leg == "candidate" else 9.0}

    def crashed(run: RunEntry, leg: str) -> dict[str, Any]:
        return {"what": "crashed"} if leg == "candidate" else {}

    found = trend_of(history, [night(0, values=values), night(1, values=crashed)])
    first, second = found.answers
    assert (first.step_s, first.peak_bytes, first.startup_s) == (0.5, 40 << 20, 1.0)
    assert (second.step_s, second.peak_bytes, second.series) == (None, None, "")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"environment": {**ENVIRONMENT, "gpu_driver": "590"}}, "gpu_driver 580 became 590"),
        ({"slots": 2}, "slots 8 became 2"),
        (
            {"environment": {**ENVIRONMENT, "variables": {"NCCL_ALGO": "Ring"}}},
            "variables {} became absent; variables.NCCL_ALGO absent became Ring",
        ),
    ],
)  # fmt: skip
def test_another_environment_is_another_series(
    changes: dict[str, Any], told: str, history: History
) -> None:
    """Values are not compared across environments, and what changed is said; coming back is the
    old series again."""
    jump = [
        night(n, values=lambda run, leg: {"step_s": 0.03}, **changes) if 20 <= n < 40 else night(n)
        for n in range(60)
    ]
    found = trend_of(history, jump)
    assert "".join(entry.series for entry in found.answers) == "A" * 20 + "B" * 20 + "A" * 20
    assert found.series["B"] == told
    assert found.shifts == ()


def test_an_unknown_environment_is_in_no_series(history: History) -> None:
    """Where the environment or a rank's fingerprint was not recorded nothing is compared."""
    found = trend_of(
        history,
        [night(0, environment={}), night(1, values=lambda run, leg: {"fingerprint": ""})],
    )
    assert [entry.series for entry in found.answers] == ["", ""]
    assert found.answers[0].step_s is not None


def test_a_lasting_change_is_told_with_its_nights(history: History) -> None:
    """A step in time within one series names the first night of it and the night before."""

    def slower(run: RunEntry, leg: str) -> dict[str, Any]:
        return {"step_s": 0.022, "peak_bytes": 50 << 20}

    found = trend_of(history, [night(n, values=slower if n >= 30 else None) for n in range(40)])
    assert [shift.metric for shift in found.shifts] == ["step_s", "peak_bytes"]
    shift = found.shifts[0]
    assert shift.first.commit == name_of([30, "commit"])
    assert shift.last_before.commit == name_of([29, "commit"])
    assert shift.change.ratio == pytest.approx(0.1)


def moody(number: int, since: int) -> Callable[[RunEntry, str], dict[str, Any]]:
    """A night whose machine has a mood of 3 %, its runs of 0.3 %; 3 % slower graphs since then."""
    draw = random.Random(number)
    mood = 0.02 * draw.lognormvariate(0, 0.03)

    def values(run: RunEntry, leg: str) -> dict[str, Any]:
        slower = 1.03 if leg == "candidate" and number >= since else 1.0
        return {"step_s": mood * slower * draw.lognormvariate(0, 0.003)}

    return values


def test_what_the_machine_does_to_both_legs_hides_no_change(history: History) -> None:
    """A step of 3 % in moods of 3 % shows over the reference on its third night, nowhere else."""
    nights = [night(n, values=moody(n, since=20)) for n in range(23)]
    assert trend_of(history, nights[:22]).shifts == ()
    (shift,) = trend_of(history, nights[22:]).shifts
    assert (shift.metric, shift.first.commit) == ("step_ratio", name_of([20, "commit"]))
    assert shift.change.ratio == pytest.approx(0.03, abs=0.01)
    assert "step time over the reference's +" in shift_text(shift).plain


def test_a_reference_that_does_other_work_is_no_measure(history: History) -> None:
    """Ratios are those over what the reference does now; other nights have none."""

    def slower(run: RunEntry, leg: str) -> dict[str, Any]:
        return {} if leg == "candidate" else {"work": "other", "step_s": 0.04}

    nights = [night(n, values=slower if n < 20 else None) for n in range(23)]
    found = trend_of(history, nights)
    assert [entry.step_ratio for entry in found.answers] == [None] * 20 + [1.0] * 3
    assert {entry.series for entry in found.answers} == {"A"}
    assert found.shifts == ()


def test_the_reference_and_its_control_are_one_measure(history: History) -> None:
    """Their geometric mean, or the one of them that there is; without both there is no ratio."""

    def values(**legs: float | None) -> Any:
        return lambda run, leg: {"step_s": {"candidate": 0.06, **legs}[leg]}

    nights = [night(0, values=values(reference=0.02, control=0.045)),
              night(1, values=values(reference=0.02, control=None)),
              night(2, values=values(reference=None, control=None))]  # fmt: skip
    ratios = [entry.step_ratio for entry in trend_of(history, nights).answers]
    assert ratios == [pytest.approx(2.0), pytest.approx(3.0), None]


def test_attempts_are_all_shown(history: History) -> None:
    """Answers of one folder are shown one by one; values belong to its last answer."""
    entry = night()
    second = case(0, attempt=1)
    first = dataclasses.replace(entry.cases[0], **FAILED)
    repeated = run(0, attempt=1, step_s=0.7)
    whole = dataclasses.replace(entry, cases=(first, second), runs=(*entry.runs, repeated))
    found = trend_of(history, [whole])
    assert [(n.attempt, n.outcome, n.step_s) for n in found.answers] == [
        (0, "failed", None), (1, "passed", 0.7),
    ]  # fmt: skip
    assert found.num_runs == 1


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([night(0, **SAME), night(1, answers={0: FAILED}, **SAME)], (1, 1)),
        ([night(n, **SAME) for n in range(4)]
         + [night(n, answers={0: FAILED}, **SAME) for n in range(4, 6)], (1, 5)),
        ([night(0, **SAME), night(1, answers={0: {**FAILED, "what": "hang"}}, **SAME),
          night(2, answers={0: FAILED}, **SAME)], (2, 2)),
        ([night(0), night(1, answers={0: FAILED})], None),
        ([night(0, **SAME), night(1, answers={0: FAILED}, slots=8, commit="abc+1")], None),
        ([night(0, commit=""), night(1, answers={0: FAILED}, commit="")], None),
        ([night(0, **SAME), night(1, answers={0: FAILED}, environment={"cores": 9}, **SAME)],
         None),
        ([night(0, **SAME, environment={}),
          night(1, answers={0: FAILED}, environment={}, **SAME)], None),
        ([night(0, **SAME), night(1, answers={0: ERROR}, **SAME), night(2, **SAME)], None),
        ([night(0, **SAME),
          night(1, answers={0: FAILED}, values=lambda run, leg: {"fingerprint": ""}, **SAME)],
         (1, 1)),
        ([night(0, **SAME),
          night(1, answers={0: FAILED}, values=lambda run, leg: {"work": "other"}, **SAME)],
         None),
        ([night(0, **SAME),
          night(1, answers={0: FAILED}, values=lambda run, leg: {"fingerprint": ""},
                environment={"cores": 9}, **SAME)],
         None),
    ],
    ids=["changed", "once in five", "each cause", "other commit", "changes on top",
         "unknown commit", "other environment", "unknown environment", "interrupted",
         "died early", "other settings", "died early elsewhere"],
)  # fmt: skip
def test_flaky_is_what_changes_by_itself(
    entries: list[FolderEntry], expected: tuple[int, int] | None, history: History
) -> None:
    """Only a verdict that changed at the same commit, environment and settings is flaky."""
    found = flaky_cases([trend_of(history, entries)])
    assert [(entry.changes, entry.repeats) for entry in found] == ([expected] if expected else [])


def test_the_interval_is_wilsons() -> None:
    """Known intervals, and the ends at which a share is 0 or 1."""
    assert wilson(5, 50) == pytest.approx((0.0434, 0.2136), abs=1e-4)
    assert wilson(1, 1)[1] == 1.0
    assert wilson(0, 10)[0] == 0.0
    assert wilson(0, 10)[1] == pytest.approx(0.2775, abs=1e-4)


# --- lasting changes --------------------------------------------------------------------------

LENGTH = 60
SERIES = 200
Noise = Callable[[random.Random], float]


def gauss(source: random.Random) -> float:
    return source.gauss(0, 1)


def heavy(source: random.Random) -> float:
    """Normal, but one night in twenty is six times as far out."""
    return source.gauss(0, 6 if source.random() < 0.05 else 1)


def series(seed: int, count: int = LENGTH, noise: Noise = gauss) -> list[float]:
    """Values around 100 with a deviation of 1 %."""
    source = random.Random(seed)
    return [100 + noise(source) for _ in range(count)]


def test_noise_alone_is_no_change() -> None:
    """In 200 clean series of 60 nights, noise of 1 %, there is no false alarm at the last night."""
    assert [seed for seed in range(SERIES) if find_changes(series(seed))] == []


def test_outliers_do_not_make_the_rest_look_steady() -> None:
    """If one value in five is eight deviations out, at most 8 of 200 series give an alarm."""

    def far_out(source: random.Random) -> float:
        return source.gauss(0, 1) + 8 * source.choice((-1, 1)) * (source.random() < 1 / 5)

    assert sum(bool(find_changes(series(seed, noise=far_out))) for seed in range(SERIES)) <= 8


def test_looking_every_time_seldom_finds_noise() -> None:
    """Of 60 clean series at most one gives a false alarm at any of 49 nights that are looked at."""
    alarms = 0
    for seed in range(SERIES, SERIES + 60):
        values = series(seed)
        alarms += any(find_changes(values[:end]) for end in range(MIN_HISTORY, LENGTH + 1))
    assert alarms <= 1


@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_of_three_deviations_is_found_within_five_runs(sign: int) -> None:
    """A step of 3 % in noise of 1 %: 85 of 100 are placed within two nights by the fifth night,
    98 by the tenth."""
    found_at = []
    for seed in range(100):
        values = series(seed, 65)
        values[55:] = [value + 3 * sign for value in values[55:]]
        ends = (
            end
            for end in range(55 + MIN_VALUES, 66)
            if any(abs(change.at - 55) <= 2 and change.ratio * sign > 0
                   for change in find_changes(values[:end]))
        )  # fmt: skip
        found_at.append(next(ends, 99) - 55)
    assert sum(delay <= 5 for delay in found_at) >= 85
    assert sum(delay <= 10 for delay in found_at) >= 98


def test_a_change_says_where_how_much_and_how_sure() -> None:
    """Place, levels and noise are those that were planted."""
    values = series(1)
    values[40:] = [value * 1.1 for value in values[40:]]
    (change,) = find_changes(values)
    assert change.at == 40
    assert (change.before, change.after) == (median(values[:40]), median(values[40:]))
    assert change.ratio == pytest.approx(0.1, abs=0.01)
    assert change.noise == pytest.approx(0.01, rel=0.5)
    assert change.z > 5


def test_nights_that_resemble_each_other_are_less_evidence() -> None:
    """Of 60 series in which noise lasts (correlation 0.5), with no step, at most 1 in 12 alarms."""
    alarms = 0
    for seed in range(60):
        source, value, values = random.Random(seed), 0.0, list[float]()
        for _ in range(LENGTH):
            value = 0.5 * value + source.gauss(0, 1)
            values.append(100 + value)
        alarms += bool(find_changes(values))
    assert alarms <= 5


def test_up_and_down_again_are_two_changes() -> None:
    """A regression that was mended stays visible."""
    values = series(2)
    values[20:30] = [value + 6 for value in values[20:30]]
    assert [(c.at, round(c.ratio, 1)) for c in find_changes(values)] == [(20, 0.1), (30, -0.1)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("place", [0, 25, 58])
def test_odd_nights_are_no_change(place: int, count: int) -> None:
    """One or two nights that are far out are noise, wherever they are."""
    for seed in range(10):
        values = series(seed)
        values[place : place + count] = [180.0] * count
        assert find_changes(values) == ()


def test_equal_values_have_no_noise_and_still_change() -> None:
    """Memory that is the same every night changes on the third night of a new size, not before."""
    values = [float(40 << 20)] * 20
    assert find_changes(values) == ()
    for more in range(1, 5):
        grown = [*values, *[(40 << 20) * 1.01] * more]
        assert [change.at for change in find_changes(grown)] == ([20] if more >= 3 else [])
    slightly = [*values, *[(40 << 20) * 1.0001] * 30]
    assert find_changes(slightly) == ()


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * (MIN_HISTORY - 1), [0.0] * 20])
def test_too_little_says_nothing(values: list[float]) -> None:
    """Before twelve nights nothing is told; zeros are no change."""
    assert find_changes(values) == ()


def test_the_deviation_is_blind_to_steps_and_outliers() -> None:
    """A step and a few odd nights leave the measured deviation within a third of the truth."""
    values = series(3, 200, heavy)
    values[100:] = [value + 50 for value in values[100:]]
    assert deviation(values) == pytest.approx(1.0, rel=1 / 3)
