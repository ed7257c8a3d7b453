"""Contracts of expected seconds: medians of equal work, then of like runs, then the estimate."""

from typing import Any

import pytest

from harness.history import History
from harness.history.entries import work_of
from harness.records import RunSpec
from harness.repeats import SLOWDOWN
from harness.runner.expectations import expected
from harness.runner.schedule import Seconds
from tests.unit.harness.history.nights import MACHINE, night

ESTIMATE = -7.0


@pytest.fixture(autouse=True)
def estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is expected where the history says nothing."""
    monkeypatch.setattr(
        "harness.runner.expectations.estimate_s", lambda spec, cores: ESTIMATE * cores
    )


def spec(seed: int = 0, **changes: Any) -> RunSpec:
    config: dict[str, Any] = {
        "model": {"preset": "dense_tiny"}, "steps": 20, "seed": seed, "graph": [],
    }  # fmt: skip
    facts: dict[str, Any] = {
        "config": config, "device": "cuda", "world_size": 2, "timeout_s": 60.0,
    }  # fmt: skip
    return RunSpec(**(facts | changes))


def took(history: History, number: int, wall_s: float, **changes: Any) -> Seconds:
    """Record that the work of `spec()` took so long; what is expected now."""
    own = {"work": work_of(spec()), "wall_s": wall_s, **changes}
    other = {"wall_s": 500.0}
    history.record(night(number, values=lambda run, leg: own if leg == "reference" else other))
    return expected(history, MACHINE, 1)


def test_the_median_of_equal_work(history: History) -> None:
    """One slow run does not move it; replica and time limit do not matter, the machine does."""
    took(history, 0, 4.0)
    took(history, 1, 90.0)
    seconds = took(history, 2, 5.0)
    history.connection.execute("UPDATE runs SET wall_s = 'soon' WHERE wall_s = 4.0")
    assert seconds(spec()) == seconds(spec(replica=1, timeout_s=7.0)) == 5.0
    assert expected(history, "another machine", 1)(spec()) == ESTIMATE
    assert expected(history, MACHINE, 1)(spec()) == pytest.approx((5.0 + 90.0) / 2)
    history.connection.close()
    assert seconds(spec()) == 5.0  # read once


def test_like_runs_stand_in_for_unknown_ones(history: History) -> None:
    """Same preset, ranks and device: start-up and step time apart, for the run's own steps."""
    history.record(night(values=lambda run, leg: {"wall_s": 4.0, "step_s": 0.1, "steps": 20}))
    seconds = expected(history, MACHINE, 1)
    fresh = spec(seed=7)
    assert seconds(fresh) == pytest.approx(2.0 + 20 * 0.1)
    assert seconds(spec(config=fresh.config | {"steps": 100})) == pytest.approx(2.0 + 100 * 0.1)
    moe = spec(config=fresh.config | {"model": {"preset": "moe_tiny"}})
    for other in (spec(world_size=4), spec(device="cpu"), moe):
        assert seconds(other) == ESTIMATE
    # Runs that round at random take longer: neither they nor what they sample is the other's work.
    assert work_of(spec(rounding=1)) not in {work_of(spec()), work_of(spec(rounding=2))}
    assert seconds(spec(seed=7, rounding=1)) == pytest.approx(2.0 + 20 * 0.1 * SLOWDOWN)


def test_runs_that_did_not_end_well_count_only_alone(history: History) -> None:
    """A hang says how long a run takes only if it always hangs; an interruption says nothing."""
    history.record(night(9, values=lambda run, leg: {"what": "hang", "wall_s": 4.0, "step_s": 0.1}))
    assert expected(history, MACHINE, 1)(spec(seed=7)) == ESTIMATE
    unknown = spec(config=spec().config | {"model": {"preset": "none"}})
    own = {"work": work_of(unknown)}
    seconds = took(history, 0, 1.0, what="interrupted", **own)
    assert seconds(unknown) == ESTIMATE
    for number in (1, 2):
        seconds = took(history, number, 60.0, what="hang", **own)
    assert seconds(unknown) == 60.0
    assert took(history, 3, 3.0, **own)(unknown) == 3.0
