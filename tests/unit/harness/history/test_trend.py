"""Contracts of trends: what a case did, since when, lasting changes, and verdicts that change."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pytest

from harness.history.ledger import FolderEntry, History, name_of
from harness.history.trend import (
    MIN_HISTORY,
    CaseTrend,
    Comparison,
    compare,
    find_change,
    flaky_cases,
    trends,
)
from tests.unit.harness.history.nights import ENVIRONMENT, FAILED, Values, case, night, only, run

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
    return {found.case_id: found for found in trends(history, "nightly")}["dp1-attn"]


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
def test_first_bad_and_last_good(answers: str, bad: Any, good: Any, history: History) -> None:
    """The first failure after the last pass in its environment, over runs without a verdict."""
    found = trend_of(history, [answered(letter, n) for n, letter in enumerate(answers)])
    ends = [each.commit if each else None for each in (found.first_bad, found.last_good)]
    assert ends == [None if n is None else name_of([n, "commit"]) for n in (bad, good)]
    assert found.num_runs == len(answers)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_shard_and_what_was_merged_of_it_answer_once(order: Any, history: History) -> None:
    """Whichever was recorded first; a merge of several scenarios is a scenario of its own."""
    shards = [answered("p", 0), answered("f", 1)]
    ids = tuple(shard.id for shard in shards)
    merged = answered("f", 2, merged=ids)
    found = trend_of(history, [[*shards, merged][n] for n in order])
    assert [answer.folder for answer in found.answers] == [merged.id]
    history.record(answered("p", 3, scenario="other", merged=(merged.id,)))
    assert found in trends(history)


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
def test_another_environment_is_another_series(changes: Any, names: str, history: History) -> None:
    """Values are not compared across environments, and what changed is named."""
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
    ("levels", "starts"),
    [((40, 20, 22), [20, 40]), ((20, 21, 42), [20, 40]), ((20, 26, 20, 22), [60])],
)
def test_no_change_hides_another(levels: Any, starts: list[int], history: History) -> None:
    """Whichever is the larger, and whether it was for the better; but for what went away."""
    nights = [only("candidate", step_s=level / 1000) for level in levels for _ in range(20)]
    found = trend_of(history, [night(n, values=values) for n, values in enumerate(nights)])
    assert [shift.first for shift in found.shifts] == [found.answers[at] for at in starts]
    assert [round(1000 * each.after) for each in found.shifts] == list(levels[-len(starts) :])


@pytest.mark.parametrize(
    ("values", "at"),
    [
        ([1.0] * 20, None),
        ([0.0] * 20, None),
        ([1.0] * (MIN_HISTORY - 4) + [2.0] * 3, None),
        ([1.0] * (MIN_HISTORY - 3) + [2.0] * 3, MIN_HISTORY - 3),
        ([1.0] * 20 + [2.0] * 2, None),
        ([2.0] * 20 + [1.0] * 5, 20),
        ([1.0, 1.0, 2.0] * 9 + [2.0] * 3, None),
        ([1.0, 1.0, 1.0, 2.0, 2.0] * 3 + [2.0, 2.0, 2.0, 1.0, 1.0] * 3, None),
    ],
    ids=["equal", "zeros", "too short", "just long enough", "two are odd ones", "fell",
         "three in a row by chance", "either of two levels"],
)  # fmt: skip
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


# --- contracts of a comparison: what is worse is named, and what cannot be compared is not ---


SKIPPED: dict[str, Any] = {
    "outcome": "skipped", "what": "unsupported", "reference": "", "control": "", "candidate": "",
}  # fmt: skip
INCOMPARABLE: dict[str, Any] = {"outcome": "incomparable", "what": "nondeterministic_reference"}


def pair(changes: dict[str, Any]) -> Comparison:
    """Two nights, of which the second has these changes, and the first those under `before`."""
    before = changes.pop("before", {})
    return compare(night(0, **before), night(1, **changes))


def test_the_same_is_the_same() -> None:
    """Two nights of equal bits and values at two commits: nothing differs, exit 0."""
    done = compare(night(0, cases=3), night(1, cases=3))
    assert (done.exit_code, {case.state for case in done.cases}) == (0, {"alike"})
    assert list(done.environment) == ["commit"]
    assert compare(done.before, done.before).environment == {}


BITS = {
    f"{leg}: {name} bits changed": only(leg, **{f"{name}_bits": "other"})
    for leg in ("reference", "candidate") for name in ("loss", "state")
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *((({"answers": {0: after}, "before": {"answers": {0: before}}}), words)
          for before, after, words in (
            ({}, FAILED, "passed became failed diverged"),
            ({}, SKIPPED, "passed became skipped unsupported"),
            ({}, INCOMPARABLE, "passed became incomparable nondeterministic_reference"),
            (INCOMPARABLE, FAILED,
             "incomparable nondeterministic_reference became failed diverged"),
            (FAILED, {}, ""), (FAILED, INCOMPARABLE, ""), (FAILED, {**FAILED, "what": "hang"}, ""),
          )),
        *(({"values": values}, words) for words, values in BITS.items()),
        ({"answers": {0: FAILED}, **ELSEWHERE}, "passed became failed diverged"),
    ],
)  # fmt: skip
def test_what_is_worse_is_said(changes: Any, words: str) -> None:
    """A verdict further from passed, or other bits of equal work, is exit 1; a better is not."""
    done = pair(dict(changes))
    (case,) = done.cases
    assert case.worse == ((words,) if words else ())
    assert (done.exit_code, case.state) == ((1, "worse") if words else (0, "changed"))


@pytest.mark.parametrize(
    ("changes", "why", "named"),
    [
        (ELSEWHERE, "the environments differ", {"cores": ("8", "4")}),
        ({"environment": {}}, "the environment was not recorded", {}),
        ({"values": only("reference", work="x", loss_bits="y")},
         "the settings of the reference differ", {}),
        ({"values": only("candidate", fingerprint="", step_s=9.0)},
         "not every rank of the candidate recorded its environment", {}),
        ({"values": only("candidate", fingerprint="f", state_bits="y")},
         "the environments of the candidate's ranks differ", {}),
        ({"values": only("candidate", loss_bits="", state_bits="")},
         "the bits of the candidate were not recorded", {}),
        ({"runs": ()}, "there is no run of the reference", {}),
        ({"before": {"answers": {0: SKIPPED}}}, "it was skipped in one of the two", {}),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_not(changes: Any, why: str, named: Any) -> None:
    """Only verdicts are compared, exit 6, the reason is said and what differs is named."""
    done = pair(dict(changes))
    assert (done.cases[0].incomparable, done.cases[0].worse, done.exit_code) == (why, (), 6)
    assert named.items() <= done.environment.items()


def test_nothing_in_common_or_open_cases_are_no_verdict() -> None:
    """Exit 6 where nothing was compared or cases have no answer yet; 1 for what is gone."""
    empty, whole = night(0, cases=0), night(1)
    pairs = [(empty, empty), (empty, whole), (whole, empty), (night(0), night(1, num_cases=2)),
             (night(0, num_cases=2), whole)]  # fmt: skip
    assert [compare(*pair).exit_code for pair in pairs] == [6, 6, 1, 6, 0]


def scaled(**by: float) -> Values:
    """Values of all legs scaled; the control's steps take 1 % longer."""
    return lambda run, leg: {
        "step_s": 0.02 * by.get("step_s", 1.0) * (1.01 if leg == "control" else 1.0),
        "peak_bytes": int((40 << 20) * by.get("peak_bytes", 1.0)),
    }


@pytest.mark.parametrize(
    ("metric", "by", "change"),
    [("step_s", 1.2, "worse"), ("step_s", 0.8, "better"), ("step_s", 1.02, "same"),
     ("peak_bytes", 1.01, "worse"), ("peak_bytes", 1.004, "same")],
)  # fmt: skip
def test_times_and_peaks_are_held_against_the_noise(metric: str, by: float, change: str) -> None:
    """The noise between reference and control is measured and said, and decides what counts."""
    after = night(1, cases=6, values=scaled(**{metric: by}))
    done = compare(night(0, cases=6, values=scaled()), after)
    assert int(done.exit_code) == (1 if change == "worse" else 0)
    assert done.noise["step_s"] == pytest.approx(math.log(1.01))
    for found in done.cases:
        (delta,) = [delta for delta in found.deltas if delta.metric == metric]
        assert delta.change == change
        assert delta.ratio == pytest.approx(by - 1, abs=1e-6)
        assert delta.threshold >= delta.noise * 2.9


def test_few_pairs_say_little_and_none_nothing() -> None:
    """One case has two pairs: a change must stand out from both; without a pair none is claimed."""
    before = night(0, values=only("control", step_s=0.024))
    apart = compare(before, night(1, values=scaled(step_s=1.5)))
    assert next((d.metric, d.change) for d in apart.cases[0].deltas) == ("step_s", "noisy")
    assert apart.exit_code == 0
    calm = compare(night(0), night(1, values=lambda run, leg: {"step_s": 0.03}))
    assert calm.cases[0].worse == ("step time rose by 50.0%",)
    dead = only("control", what="oom")
    assert compare(night(0, values=dead), night(1, values=dead)).cases[0].deltas == ()
