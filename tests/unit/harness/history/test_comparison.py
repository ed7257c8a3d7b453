"""Contracts of a comparison: what is worse is named, and what cannot be compared is not."""

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from harness.history import Comparison, compare
from harness.history.comparison import FALSE_ALARMS, noise_of
from harness.history.entries import FolderEntry, RunEntry, name_of
from tests.unit.harness.history.nights import ENVIRONMENT, FAILED, night

CASES = 6
SKIPPED: dict[str, Any] = {
    "outcome": "skipped", "what": "unsupported", "reference": "", "control": "", "candidate": "",
}  # fmt: skip
INCOMPARABLE: dict[str, Any] = {"outcome": "incomparable", "what": "nondeterministic_reference"}


def only(leg: str, **changes: Any) -> Callable[[RunEntry, str], dict[str, Any]]:
    """Changes of one leg's runs."""
    return lambda run, of: changes if of == leg else {}


def against(**changes: Any) -> Comparison:
    """A night compared with a changed one."""
    return compare(night(0, cases=CASES), night(1, **({"cases": CASES} | changes)))


def worse(done: Comparison) -> dict[str, tuple[str, ...]]:
    return {case.case_id: case.worse for case in done.cases if case.worse}


def test_the_same_is_the_same() -> None:
    """Two nights of equal bits and values at two commits: nothing differs, exit 0."""
    done = against()
    assert done.exit_code == 0
    assert {case.state for case in done.cases} == {"alike"}
    assert [change.name for change in done.environment] == ["commit"]
    assert compare(done.before, done.before).environment == ()


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
    fewer = against(cases=CASES - 1)
    assert worse(fewer) == {"dp32-attn": ("it is gone",)}
    more = {CASES: {}, CASES + 1: FAILED, CASES + 2: SKIPPED}
    done = against(cases=CASES + 3, answers=more)
    assert worse(done) == {"dp128-attn": ("it is new and failed diverged",)}
    assert [case.state for case in done.cases[CASES:]] == ["added", "worse", "added"]
    assert against(cases=CASES + 1).exit_code == 0


@pytest.mark.parametrize("leg", ["reference", "candidate"])
@pytest.mark.parametrize(
    ("name", "said"), [("loss_bits", "loss bits"), ("state_bits", "state bits")]
)
def test_bits_that_changed_are_worse(leg: str, name: str, said: str) -> None:
    """Equal work in an equal environment gives equal bits, in loss and in state."""
    done = against(values=only(leg, **{name: "other"}))
    assert worse(done)["dp1-attn"] == (f"{leg}: {said} changed",)
    assert done.exit_code == 1
    assert against(values=only(leg, state_bits="")).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "why", "named"),
    [
        ({"environment": {**ENVIRONMENT, "gpu_driver": "590"}}, "the environments differ",
         "gpu_driver"),
        ({"environment": {}}, "the environment was not recorded", "gpu_driver"),
        ({"values": only("reference", work="x")}, "reference: settings of the run ", ""),
        ({"values": only("candidate", fingerprint="")},
         "not every rank of the candidate recorded its environment", ""),
        ({"values": only("candidate", fingerprint="f"),
          "fingerprints": {name_of({}): {}, "f": {"ranks": [{"torch": "2.13.0"}]}}},
         "candidate: ranks.0.torch 2.12.0 became 2.13.0; ", ""),
        ({"runs": ()}, "there is no run of the reference", ""),
    ],
)  # fmt: skip
def test_other_environments_and_settings_are_incomparable(
    changes: dict[str, Any], why: str, named: str
) -> None:
    """Nothing but verdicts is compared, exit 6, the reason is said and what differs is named."""
    spoiled = {"loss_bits": "other", "step_s": 9.0}
    other = night(1, cases=CASES, values=lambda run, leg: spoiled)
    values = changes.pop("values", None)
    if values is not None:
        other = dataclasses.replace(
            other,
            runs=tuple(
                dataclasses.replace(run, **values(run, "reference" if "eager-r0" in run.key else
                                                  "control" if "eager" in run.key else "candidate"))
                for run in other.runs
            ),
        )  # fmt: skip
    done = compare(night(0, cases=CASES), dataclasses.replace(other, **changes))
    assert all(case.incomparable.startswith(why) for case in done.cases)
    assert worse(done) == {}
    assert done.exit_code == 6
    assert not named or named in [change.name for change in done.environment]


def test_worse_outranks_incomparable() -> None:
    """A verdict that got worse is exit 1 even where nothing else can be compared."""
    done = against(environment={**ENVIRONMENT, "cores": 1}, answers={2: FAILED})
    assert done.exit_code == 1
    assert done.cases[2].incomparable


def test_runs_that_share_no_case_are_no_verdict() -> None:
    """Two folders with nothing in common are not the same: exit 6, or 1 for what is gone."""
    empty = night(0, cases=0)
    assert compare(empty, empty).exit_code == 6
    assert compare(empty, night(1)).exit_code == 6
    assert compare(night(1), empty).exit_code == 1


def scaled(**by: float) -> Callable[[RunEntry, str], dict[str, Any]]:
    """Values of all legs scaled, with a spread of 1 % between reference and control."""

    def change(run: RunEntry, leg: str) -> dict[str, Any]:
        spread = {"step_s": 1.01 if leg == "control" else 1.0}
        plain = {"step_s": 0.02, "peak_bytes": 40 << 20}
        factors = {name: by.get(name, 1.0) * spread.get(name, 1.0) for name in plain}
        scaled_up = {name: plain[name] * factor for name, factor in factors.items()}
        return {"step_s": scaled_up["step_s"], "peak_bytes": int(scaled_up["peak_bytes"])}

    return change


def nights_with(**by: float) -> tuple[FolderEntry, FolderEntry]:
    return night(0, cases=CASES, values=scaled()), night(1, cases=CASES, values=scaled(**by))


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
    done = compare(*nights_with(**by))
    assert done.exit_code == exit_code
    assert done.noise["step_s"] == pytest.approx(math.log(1.01))
    (metric,) = by
    for case in done.cases:
        (delta,) = [delta for delta in case.deltas if delta.metric == metric]
        assert delta.change == change
        assert delta.ratio == pytest.approx(by[metric] - 1, abs=1e-6)
        assert delta.threshold >= delta.noise * 2.9


def test_few_pairs_say_little() -> None:
    """One case has two pairs: what changed must stand out from both, and from the runs' steps."""
    noisy: dict[str, Any] = {"step_spread_s": 0.02, "timed_steps": 4}
    first = night(0, values=lambda run, leg: noisy)
    second = night(1, values=lambda run, leg: {**noisy, "step_s": 0.03})
    done = compare(first, second)
    (delta, _) = done.cases[0].deltas
    assert delta.change == "noisy"
    assert delta.threshold > 0.5
    assert done.exit_code == 0
    wide = {"step_s": 0.024}
    apart = compare(
        night(0, values=only("control", **wide)),
        night(1, values=lambda run, leg: {"step_s": 0.022} if leg == "candidate" else wide),
    )
    assert apart.cases[0].deltas[0].noise == pytest.approx(math.log(1.2) / math.sqrt(2))
    assert worse(apart) == {}
    calm = compare(night(0), night(1, values=lambda run, leg: {"step_s": 0.03}))
    assert worse(calm) == {"dp1-attn": ("step time rose by 50.0%",)}


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


def test_one_odd_pair_is_a_reason_for_doubt() -> None:
    """If one run of 40 took twice as long as its equal, twice as long is no change."""
    odd = noise_of([0.01] * 39 + [math.log(2)], FALSE_ALARMS / 20)
    assert odd.least > math.log(2)
    assert noise_of([], 0.01).deviation is None


def test_bits_that_were_not_recorded_are_no_equal_bits() -> None:
    """A pass without bits beside one with bits is incomparable, not alike."""
    for leg in ("reference", "candidate"):
        done = compare(night(0), night(1, values=only(leg, loss_bits="", state_bits="")))
        assert done.cases[0].incomparable == f"the bits of the {leg} were not recorded"
        assert done.exit_code == 6


def test_a_run_that_has_open_cases_is_no_verdict() -> None:
    """What is alike so far may not be in the end: exit 6."""
    assert compare(night(0), night(1, num_cases=2)).exit_code == 6
    assert compare(night(0, num_cases=2), night(1)).exit_code == 0


def test_step_times_on_other_numbers_of_slots_are_not_compared() -> None:
    """Ranks that had more room ran faster: that is no improvement, and peaks are still compared."""
    done = against(slots=2, values=lambda run, leg: {"step_s": 9.0})
    assert [delta.metric for delta in done.cases[0].deltas] == ["peak_bytes"]
    assert done.exit_code == 0
    assert "slots" in [change.name for change in done.environment]
    done = against(slots=2, values=only("reference", work="x"))
    assert "slots" not in done.cases[0].incomparable
