"""Contracts of the cost model: medians of the same machine, then of like runs, then nothing."""

from typing import Any

import pytest

from harness.history import History, cost_model
from harness.history.entries import RunEntry, work_of
from harness.records import CaseSpec, RunSpec
from harness.samples import SLOWDOWN
from tests.unit.harness.history.nights import MACHINE, night


def spec(seed: int = 0, **changes: Any) -> RunSpec:
    config: dict[str, Any] = {
        "model": {"preset": "dense_tiny"}, "steps": 20, "seed": seed, "graph": [],
    }  # fmt: skip
    facts: dict[str, Any] = {
        "config": config, "device": "cuda", "world_size": 2, "timeout_s": 60.0,
    }  # fmt: skip
    return RunSpec(**(facts | changes))


def taking(*seconds: float, **changes: Any) -> Any:
    """Nights on which the run of `spec()` took so long."""
    made = spec()

    def values(wall_s: float) -> Any:
        own = {"key": made.key, "work": work_of(made), "wall_s": wall_s}
        return lambda run, leg: {**own, **changes} if leg == "reference" else {"wall_s": 500.0}

    return [night(number, values=values(wall_s)) for number, wall_s in enumerate(seconds)]


def test_the_median_of_the_same_run(history: History) -> None:
    """One slow night does not move it; the run is known by key, specification and as a replica."""
    for entry in taking(4.0, 5.0, 90.0):
        history.record(entry)
    model = cost_model(history, MACHINE)
    assert model.expected_seconds(spec().key) == 5.0
    assert model.expected_seconds(spec()) == 5.0
    assert model.expected_seconds(spec(replica=1, timeout_s=7.0)) == 5.0
    assert model.expected_seconds("unknown") is None
    assert cost_model(history, "another machine").expected_seconds(spec()) is None


def test_like_runs_stand_in_for_unknown_ones(history: History) -> None:
    """Same preset, ranks and device: start-up and step time apart, for the run's own steps."""
    history.record(night(values=lambda run, leg: {"wall_s": 4.0, "step_s": 0.1, "steps": 20}))
    model = cost_model(history, MACHINE)
    fresh = spec(seed=7)
    assert model.expected_seconds(fresh) == pytest.approx(2.0 + 20 * 0.1)
    longer = spec(config=fresh.config | {"steps": 100})
    assert model.expected_seconds(longer) == pytest.approx(2.0 + 100 * 0.1)
    for other in (
        spec(world_size=4), spec(device="cpu"),
        spec(config=fresh.config | {"model": {"preset": "moe_tiny"}}),
    ):  # fmt: skip
        assert model.expected_seconds(other) is None
    with_case = CaseSpec(
        id="a", scenario="s", labels={}, reference=fresh, control=fresh, candidate=longer,
        expect="bitwise", checks={},
    )  # fmt: skip
    assert model.expected_seconds(with_case) == pytest.approx(4.0 + 4.0 + 12.0)


def test_runs_that_round_at_random_are_work_of_their_own(history: History) -> None:
    """They take longer: neither they nor the runs they are samples of stand in for the other."""
    assert work_of(spec(rounding=1)) not in {work_of(spec()), work_of(spec(rounding=2))}
    history.record(night(values=lambda run, leg: {"wall_s": 4.0, "step_s": 0.1, "steps": 20}))
    expected = cost_model(history, MACHINE).expected_seconds(spec(seed=7, rounding=1))
    assert expected == pytest.approx(2.0 + 20 * 0.1 * SLOWDOWN)


def test_runs_that_did_not_end_well_count_only_alone(history: History) -> None:
    """A hang says how long a run takes only if it always hangs; an interruption says nothing."""
    hung, cut = taking(60.0, what="hang"), taking(1.0, what="interrupted")
    history.record(cut[0])
    assert cost_model(history, MACHINE).by_key.get(spec().key) is None
    for entry in (hung[0], *taking(0.0, 60.0, what="hang")[1:]):
        history.record(entry)
    assert cost_model(history, MACHINE).expected_seconds(spec().key) == 60.0
    history.record(taking(0.0, 0.0, 3.0)[2])
    assert cost_model(history, MACHINE).expected_seconds(spec().key) == 3.0


def test_ten_thousand_keys_are_looked_up_at_once(history: History) -> None:
    """The model is made once: asking it touches no database."""
    history.record(night(values=lambda run, leg: {}))
    model = cost_model(history, MACHINE)
    history.connection.close()
    known = RunEntry.from_json(night().runs[0].to_json()).key
    assert {model.expected_seconds(known) for _ in range(10_000)} == {4.0}
