"""Contracts of a comparison: what is worse is named, and what cannot be compared is not."""

import math
import random
from typing import Any

import pytest

from harness.history import Comparison, compare
from harness.history.trend import FALSE_ALARMS, noise_of
from tests.unit.harness.history.nights import ENVIRONMENT, FAILED, Values, night, only

SKIPPED: dict[str, Any] = {
    "outcome": "skipped", "what": "unsupported", "reference": "", "control": "", "candidate": "",
}  # fmt: skip
INCOMPARABLE: dict[str, Any] = {"outcome": "incomparable", "what": "nondeterministic_reference"}
ELSEWHERE: dict[str, Any] = {"environment": {**ENVIRONMENT, "gpu_driver": "590"}}


def worse(done: Comparison) -> dict[str, tuple[str, ...]]:
    return {case.case_id: case.worse for case in done.cases if case.worse}


def test_the_same_is_the_same() -> None:
    """Two nights of equal bits and values at two commits: nothing differs, exit 0."""
    done = compare(night(0, cases=3), night(1, cases=3))
    assert done.exit_code == 0
    assert {case.state for case in done.cases} == {"alike"}
    assert list(done.environment) == ["commit"]
    assert compare(done.before, done.before).environment == {}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({}, FAILED, "passed became failed diverged"),
        ({}, SKIPPED, "passed became skipped unsupported"),
        ({}, INCOMPARABLE, "passed became incomparable nondeterministic_reference"),
        (INCOMPARABLE, FAILED, "incomparable nondeterministic_reference became failed diverged"),
        (FAILED, {}, None),
        (FAILED, INCOMPARABLE, None),
        (FAILED, {**FAILED, "what": "hang"}, None),
    ],
)  # fmt: skip
def test_a_verdict_further_from_passed_is_worse(
    before: dict[str, Any], after: dict[str, Any], words: str | None
) -> None:
    """A verdict that got worse is exit 1 and said; one that got better is said and not worse."""
    done = compare(night(0, answers={0: before}), night(1, answers={0: after}))
    assert worse(done) == ({"dp1-attn": (words,)} if words else {})
    assert done.exit_code == (1 if words else 0)
    assert done.cases[0].state == ("worse" if words else "changed")


def test_cases_that_came_and_went() -> None:
    """A case that is gone is worse; a new one is worse unless it passes or is skipped."""
    assert worse(compare(night(0, cases=2), night(1))) == {"dp2-attn": ("it is gone",)}
    done = compare(night(0), night(1, cases=4, answers={1: {}, 2: FAILED, 3: SKIPPED}))
    assert worse(done) == {"dp4-attn": ("it is new and failed diverged",)}
    assert [case.state for case in done.cases] == ["alike", "added", "worse", "added"]
    assert compare(night(0), night(1, cases=2)).exit_code == 0


@pytest.mark.parametrize("leg", ["reference", "candidate"])
@pytest.mark.parametrize("name", ["loss", "state"])
def test_bits_that_changed_are_worse(leg: str, name: str) -> None:
    """Equal work in an equal environment gives equal bits, in loss and in state."""
    done = compare(night(0), night(1, values=only(leg, **{f"{name}_bits": "other"})))
    assert worse(done) == {"dp1-attn": (f"{leg}: {name} bits changed",)}
    assert done.exit_code == 1
    assert compare(night(0), night(1, values=only(leg, state_bits=""))).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "why", "named"),
    [
        (ELSEWHERE, "the environments differ", {"gpu_driver": ("580", "590")}),
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
        ({"answers": {0: SKIPPED}}, "it was skipped in one of the two", {}),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_not(
    changes: dict[str, Any], why: str, named: dict[str, tuple[str, str]]
) -> None:
    """Only verdicts are compared, exit 6, the reason is said and what differs is named."""
    before = night(0, answers=changes.get("answers"))
    done = compare(before, night(1, **(changes | {"answers": {}})))
    assert done.cases[0].incomparable == why
    assert worse(done) == {}
    assert done.exit_code == 6
    assert named.items() <= done.environment.items()
    assert compare(night(0), night(1, answers={0: FAILED}, **ELSEWHERE)).exit_code == 1


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
    ("by", "exit_code", "change"),
    [
        ({"step_s": 1.2}, 1, "worse"), ({"step_s": 0.8}, 0, "better"),
        ({"step_s": 1.02}, 0, "same"),
        ({"peak_bytes": 1.01}, 1, "worse"), ({"peak_bytes": 1.004}, 0, "same"),
    ],
)  # fmt: skip
def test_times_and_peaks_are_held_against_the_noise(
    by: dict[str, float], exit_code: int, change: str
) -> None:
    """The noise between reference and control is measured and said, and decides what counts."""
    done = compare(night(0, cases=6, values=scaled()), night(1, cases=6, values=scaled(**by)))
    assert done.exit_code == exit_code
    assert done.noise["step_s"] == pytest.approx(math.log(1.01))
    (metric,) = by
    for case in done.cases:
        (delta,) = [delta for delta in case.deltas if delta.metric == metric]
        assert delta.change == change
        assert delta.ratio == pytest.approx(by[metric] - 1, abs=1e-6)
        assert delta.threshold >= delta.noise * 2.9


def test_few_pairs_say_little_and_none_nothing() -> None:
    """One case has two pairs: a change must stand out from both; without a pair none is claimed."""
    slower = scaled(step_s=1.5)
    before = night(0, values=only("control", step_s=0.024))
    apart = compare(before, night(1, values=slower))
    assert next((d.metric, d.change) for d in apart.cases[0].deltas) == ("step_s", "noisy")
    assert apart.exit_code == 0
    calm = compare(night(0), night(1, values=lambda run, leg: {"step_s": 0.03}))
    assert worse(calm) == {"dp1-attn": ("step time rose by 50.0%",)}
    dead = only("control", what="oom")
    assert compare(night(0, values=dead), night(1, values=dead)).cases[0].deltas == ()


@pytest.mark.parametrize("cases", [1, 3, 20])
def test_equal_runs_are_seldom_told_apart(cases: int) -> None:
    """Of 20,000 comparisons of equal normal runs about 1 in 100 raises a false alarm."""
    draw, alarms, trials = random.Random(5), 0, 20_000 // cases
    for _ in range(trials):
        far = [abs(draw.gauss(0, 0.1)) for _ in range(2 * cases)]
        noise = noise_of(far, FALSE_ALARMS / cases)
        limit = max(noise.factor * (noise.deviation or 0), noise.least)
        alarms += max(draw.gauss(0, 0.1) for _ in range(cases)) > limit
    assert alarms / trials <= 0.01 + 3 * math.sqrt(0.01 / trials)
    # If one run of 40 took twice as long as its equal, twice as long is no change.
    assert noise_of([0.01] * 39 + [math.log(2)], FALSE_ALARMS / 20).least > math.log(2)


def test_step_times_on_other_numbers_of_slots_are_not_compared() -> None:
    """Ranks that had more room ran faster: that is no improvement, and peaks are still compared."""
    done = compare(night(0), night(1, slots=2, values=lambda run, leg: {"step_s": 9.0}))
    assert [delta.metric for delta in done.cases[0].deltas] == ["peak_bytes"]
    assert (done.exit_code, "slots" in done.environment) == (0, True)
