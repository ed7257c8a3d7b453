"""The section `soak`: what it means for each run, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from harness.errors import ScenarioError
from harness.records import CaseSpec, RunSpec
from harness.runner.estimates import estimate_s
from harness.soaking import SoakSpec, turn_of
from tests.unit.harness.scenario.small_scenario import cases

CHECKS: dict[str, Any] = {"state": {}, "soak": {}}
BASE = {"steps": 64}


def soaked(folder: Path, soak: dict[str, Any], **sections: Any) -> tuple[CaseSpec, ...]:
    return cases(folder, **{"base": BASE, "soak": soak, "checks": CHECKS} | sections)


def test_graphed_runs_soak_and_eager_references_stop(tmp_path: Path) -> None:
    """By replays and by duration the reference has the steps that are compared, and no more."""
    for soak, by in (({"replays": 500}, "replays"), ({"duration_s": 9}, "duration")):
        for case in soaked(tmp_path, soak):
            spec = case.candidate.soak
            assert spec is not None
            assert (spec.by, spec.amount) == (by, next(iter(soak.values())))
            assert case.reference.soak is None
            assert case.control.soak is None
            assert case.candidate.config["steps"] == 64


def test_by_steps_every_run_has_them(tmp_path: Path) -> None:
    """All steps are compared, turns are taken in every run."""
    (case, *_) = soaked(tmp_path, {"steps": 300, "period": 50}, base={})
    for spec in (case.reference, case.control, case.candidate):
        assert spec.config["steps"] == 300
        assert spec.soak == SoakSpec(by="steps", amount=300, turn_steps=50)


def test_without_graphs_all_soak(tmp_path: Path) -> None:
    """A comparison of stress with none, eager, by duration."""
    sections = {
        "axes": {"stress": ["none", ["poison"]]},
        "compare": {"axis": "stress", "reference": "none", "expect": "bitwise"},
    }
    (case,) = soaked(tmp_path, {"duration_s": 5}, **sections)
    assert case.reference.soak == case.candidate.soak == SoakSpec(by="duration", amount=5)
    with pytest.raises(ScenarioError, match=r"soak\.replays: expected a graph in every candidate"):
        soaked(tmp_path, {"replays": 5}, **sections)


def test_who_rotates_is_under_stress(tmp_path: Path) -> None:
    """`rotate` is short for stress in base, in the order of the stressors."""
    (case, *_) = soaked(tmp_path, {"replays": 9, "rotate": ["scramble", "jitter"], "period": 8})
    assert case.candidate.config["stress"] == ["jitter", "scramble"]
    assert case.reference.config["stress"] == ["jitter", "scramble"]


def test_a_soak_changes_the_key_and_no_soak_does_not(tmp_path: Path) -> None:
    """Runs of another length are other runs; a plain run is the same whoever asks for it."""
    (plain, *_) = cases(tmp_path, base=BASE)
    (short, *_), (long, *_) = (soaked(tmp_path, {"replays": n}) for n in (70, 71))
    assert plain.reference.key == short.reference.key == long.reference.key
    assert len({plain.candidate.key, short.candidate.key, long.candidate.key}) == 3
    assert RunSpec.from_json(short.candidate.to_json()).key == short.candidate.key


@pytest.mark.parametrize(
    ("soak", "told"),
    [
        ({}, "soak: expected one of steps, replays, duration_s, got none"),
        ({"replays": 5, "duration_s": 5}, "got replays and duration_s"),
        ({"replays": 0}, "soak.replays: expected an integer >= 1"),
        ({"duration_s": 300}, "soak.duration_s: expected less than launch.timeout_s, 300"),
        ({"replays": 5, "rotate": ["jitter"]}, "soak.period: expected the steps of a stressor's"),
        ({"replays": 5, "rotate": ["races"], "period": 5}, "legal values: jitter, poison, scram"),
        (
            {"steps": 96, "rotate": ["jitter", "poison", "scramble"], "period": 48},
            "soak.period: expected less, as 3 stressors are to have a turn in 96 steps",
        ),
        ({"replays": 5, "rotate": ["jitter"] * 2, "period": 5}, "expected each stressor once"),
        ({"replays": 5, "perod": 5}, "soak.perod: expected a known key"),
        ({"steps": 100}, "soak.steps: expected steps in one place, got steps in base, too"),
        ({"replays": 5, "stall_s": 0}, "soak.stall_s: expected a number > 0"),
        ({"replays": 5, "stall_s": 1e300}, "soak.stall_s: expected a number > 0 and at most"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, soak: dict[str, Any], told: str) -> None:
    """In one line that says what was expected."""
    with pytest.raises(ScenarioError) as error:
        soaked(tmp_path, soak)
    assert told in str(error.value)


def test_section_and_check_go_together(tmp_path: Path) -> None:
    """A soak that nobody judges, and a bound without a soak, are both mistakes."""
    with pytest.raises(ScenarioError, match="got the section alone"):
        soaked(tmp_path, {"replays": 5}, checks={"state": {}})
    with pytest.raises(ScenarioError, match="got the check alone"):
        cases(tmp_path, base=BASE, checks=CHECKS)


def test_too_few_steps_to_see_memory_grow_are_refused(tmp_path: Path) -> None:
    """Before a run is made, not after it."""
    with pytest.raises(ScenarioError, match=r"expected 64 steps at least, .* got steps 63"):
        soaked(tmp_path, {"replays": 5}, base={"steps": 63})


def test_each_stressor_has_one_turn_a_cycle() -> None:
    """The order is another each cycle, by the seed alone; races are always on."""
    names = ("jitter", "poison", "scramble", "races")
    turns = [turn_of(names, 5, number) for number in range(30)]
    assert turns == [turn_of(names, 5, number) for number in range(30)]
    assert turns != [turn_of(names, 6, number) for number in range(30)]
    for cycle in range(0, 30, 3):
        assert {turn[0] for turn in turns[cycle : cycle + 3]} == {"jitter", "poison", "scramble"}
    assert len({tuple(turns[cycle : cycle + 3]) for cycle in range(0, 30, 3)}) > 1
    assert {turn[1:] for turn in turns} == {("races",)}
    assert turn_of(("races",), 0, 3) == ("races",)
    assert turn_of((), 0, 3) == ()


def test_a_soak_is_expected_to_take_what_it_asks_for(tmp_path: Path) -> None:
    """Seconds are seconds, beside the start; replays are steps of that many."""
    seconds = []
    for soak in ({"duration_s": 200}, {"replays": 10_000}, {"replays": 1}):
        (case, *_) = soaked(tmp_path, soak)
        seconds.append(estimate_s(case.candidate, 8))
    assert 200 < seconds[0] < 210
    (plain, *_) = cases(tmp_path, base=BASE)
    assert seconds[2] == estimate_s(plain.candidate, 8)
    assert seconds[1] > 100 * seconds[2]
